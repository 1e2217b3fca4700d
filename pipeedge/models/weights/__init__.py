"""Weights: files read and written, names mapped, models fetched."""

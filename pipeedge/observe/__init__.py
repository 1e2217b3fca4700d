"""Observe a run: records, timelines, traces, metrics, energy, the live display."""

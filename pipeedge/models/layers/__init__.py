"""Layers of all families as modules of torch, one module for each family, and their catalogue."""

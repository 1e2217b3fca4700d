"""PipeEdge: one transformer, cut into shards, streamed through several unequal machines."""

__version__ = "0.1.0"

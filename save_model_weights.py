#!/usr/bin/env python3
"""Fetch the weights of the known models, or write random ones, under their default file names."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.cli.fetch")

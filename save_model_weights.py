#!/usr/bin/env python3
"""Fetch the weights of the known models, or write random ones, under their default file names."""

from pipeedge.cli.fetch import main

if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Run one rank of a pipeline: ``python runtime.py RANK WORLD -pt ...`` on each device."""

from pipeedge.runtime import main

if __name__ == "__main__":
    main()

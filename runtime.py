#!/usr/bin/env python3
"""Run one rank of a pipeline: ``python runtime.py RANK WORLD -pt ...`` on each device."""

from pipeedge.run.main import main

if __name__ == "__main__":
    main()

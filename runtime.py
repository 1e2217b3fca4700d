#!/usr/bin/env python3
"""Run one rank of a pipeline: ``python runtime.py RANK WORLD -pt ...`` on each device."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.run.main")

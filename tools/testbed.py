#!/usr/bin/env python3
"""Emulate a cluster on one machine: ``testbed.py up CLUSTER.yml``. See docs/testbed.md."""

from pipeedge.testbed.main import main

if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure the layers of a model on this kind of device, for the scheduler."""

from pipeedge.profile.main import main

if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure the layers of a model on this kind of device, for the scheduler."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.profile.main")

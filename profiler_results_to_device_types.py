#!/usr/bin/env python3
"""Add the profile in profiler_results.yml to a device type of device_types.yml."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.profile.main", "main_device_types")

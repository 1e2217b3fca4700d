#!/usr/bin/env python3
"""Add the profile in profiler_results.yml to a device type of device_types.yml."""

from pipeedge.profile.main import main_device_types

if __name__ == "__main__":
    main_device_types()

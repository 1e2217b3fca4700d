#!/usr/bin/env python3
"""Add the model in profiler_results.yml to models.yml."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.profile.main", "main_models")

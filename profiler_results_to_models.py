#!/usr/bin/env python3
"""Add the model in profiler_results.yml to models.yml."""

from pipeedge.profile.main import main_models

if __name__ == "__main__":
    main_models()

"""Cluster files of a test bed."""

from __future__ import annotations

from pathlib import Path

TYPES = """
fast: {bw_Mbps: 400, mem_MB: 512, cpu_fraction: 0.5, model_profiles: {}}
slow: {bw_Mbps: 20, mem_MB: 256, model_profiles: {}}
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "cluster.yml"
    path.write_text(text)
    return path


def inline(devices: str, more: str = "") -> str:
    types = "".join(f"  {line}\n" for line in TYPES.strip().splitlines())
    return f"device_types:\n{types}devices: {devices}\n{more}"

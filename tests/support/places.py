"""Locate the checkout, whose programs and files the tests use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "pipeedge" / "assets"
RUNTIME = ROOT / "runtime.py"

"""The programs that are installed under names of their own. Imports none of them before it is started."""

from __future__ import annotations

from pipeedge.base.interrupt import start

__all__ = ["doctor", "key", "launch", "report", "simulate"]


def doctor() -> None:
    """Run ``pipeedge-doctor``."""
    start("pipeedge.doctor.main")


def key() -> None:
    """Run ``pipeedge-key``."""
    start("pipeedge.cli.key")


def launch() -> None:
    """Run ``pipeedge-launch``."""
    start("pipeedge.launch.main")


def report() -> None:
    """Run ``pipeedge-report``."""
    start("pipeedge.report.main")


def simulate() -> None:
    """Run ``pipeedge-simulate``."""
    start("pipeedge.simulate.main")

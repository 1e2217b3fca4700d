"""What a test may do in its tier, enforced while it runs (tests/README.md says what the tiers are for)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pipeedge.decoding import template_program
from pipeedge.decoding.template import TemplateRenderer

CONTRACT_PROGRAMS = frozenset({"sched-pipeline", "fc-list"})
"""Programs that a contract test may start, as they need milliseconds and talk to nobody: the scheduler, and
what lists the fonts of a machine for the first plot of matplotlib there.
"""
_PROCESSES = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_FORBIDDEN = {"unit": _PROCESSES | {"socket.__new__"}, "contract": _PROCESSES, "ranks": set()}
"""Audit events of the interpreter, by tier."""

_tier: str | None = None


def offence(tier: str, event: str, arguments: tuple[Any, ...]) -> str | None:
    """Return what is wrong with an audit event in a tier, None if nothing is."""
    if event not in _FORBIDDEN[tier]:
        return None
    if event.startswith("socket."):
        return f"a test in tests/{tier} opens a socket; it belongs to tests/contract"
    program = os.fsdecode(arguments[0]) if arguments else ""
    lowest = "contract" if Path(program).name in CONTRACT_PROGRAMS else "ranks"
    if tier == lowest:
        return None
    return f"a test in tests/{tier} starts a process ({program or event}); it belongs to tests/{lowest}"


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _tier is not None:
        wrong = offence(_tier, event, arguments)
        if wrong is not None:
            pytest.fail(wrong)


def install() -> None:
    """Watch this process from now on; an audit hook cannot be removed."""
    sys.addaudithook(_audit)


@contextlib.contextmanager
def watched(path: Path) -> Iterator[None]:
    """Fail what the tier of the test file ``path`` must not do. Chat templates get a process in ``ranks``."""
    global _tier
    _tier = next((part for part in reversed(path.parts) if part in _FORBIDDEN), None)
    in_process = _tier in ("unit", "contract")
    try:
        with (
            mock.patch.object(TemplateRenderer, "_ask", _render_here)
            if in_process
            else contextlib.nullcontext()
        ):
            yield
    finally:
        _tier = None


def _render_here(renderer: TemplateRenderer, line: bytes) -> Any:
    request = json.loads(line)
    return json.loads(json.dumps(template_program.render(request["template"], request["variables"])))

"""Name of the program that the user started: ``pipeedge run``, or the script ``runtime.py``.

Each program can be started in two ways, by its own script and as a command of ``pipeedge``. Whoever uses one
of them may not have the other, so messages and usage name programs in the way that the user chose.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["COMMAND", "COMMANDS", "is_verbose", "module_words", "program_name"]

COMMAND = "pipeedge"
COMMANDS = {
    "runtime.py": "run",
    "profiler.py": "profile",
    "profiler_results_to_models.py": "profile-to-models",
    "profiler_results_to_device_types.py": "profile-to-device-types",
    "train.py": "train",
    "revauct.py": "auction",
    "save_model_weights.py": "fetch",
    "sched-pipeline": "schedule",
    "pipeedge-launch": "launch",
    "pipeedge-doctor": "doctor",
    "pipeedge-key": "key",
    "pipeedge-simulate": "simulate",
    "pipeedge-report": "report",
}
"""Command of ``pipeedge`` for each script."""


def program_name(script: str) -> str:
    """Return how this user starts the program of ``script``.

    Args:
        script: Name of a program's own script, which need not be the one that runs.
    """
    return f"{COMMAND} {COMMANDS[script]}" if script in COMMANDS and _is_command() else script


def module_words(script: str, module: str) -> tuple[str, ...]:
    """Return what follows ``python -m`` to start a program under the name that this user knows.

    Args:
        script: Name of the program's own script.
        module: Module of the program, which runs under the script's name.
    """
    return (COMMAND, COMMANDS[script]) if _is_command() else (module,)


def is_verbose(words: Sequence[str]) -> bool:
    """Return whether a command line asks for the traceback of a failure."""
    before = words[: words.index("--")] if "--" in words else words
    return not {"-v", "--verbose"}.isdisjoint(before)


def _is_command() -> bool:
    # pipeedge.cli.main leaves the two words here, as scripts leave their path.
    return bool(sys.argv) and sys.argv[0].startswith(f"{COMMAND} ")

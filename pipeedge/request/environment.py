"""The environment of this process: where a launcher put it, and variables that stand for options.

This module alone reads the environment (``torchrun`` sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeedge.base.errors import RequestError

__all__ = [
    "BEGINS",
    "LAUNCHED",
    "LAUNCHER",
    "Environment",
    "inherited_environment",
    "is_set",
    "log_level",
    "onednn_limit",
]

LAUNCHER = "PIPEEDGE_LAUNCHER"
"""Environment variable in which ``pipeedge-launch`` and ``train.py`` tell the processes that they start on
this machine which process that was."""
LAUNCHED = "PIPEEDGE_LAUNCHED"
"""Environment variable with which ``pipeedge-launch`` asks rank 0 to say ``BEGINS``."""
_LOG = "PIPEEDGE_LOG"
_LEVELS = ("error", "warning", "info", "debug")
BEGINS = "the run begins"
"""Line that rank 0 prints on standard error once there is a plan, for the launcher alone."""


@dataclass(frozen=True)
class Environment:
    """Defaults from the environment, for options that the command line leaves out."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    """Rank among the processes of this machine."""
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    """Whether ``torchrun``'s agent serves a store at the master's port, which is therefore taken."""
    agent_run: str = ""
    """Identifier of this run among those that share one agent's store."""
    launcher: int | None = None
    """Process ID of the launcher of this process, which must not outlive it."""
    launched: bool = False
    """Whether ``pipeedge-launch`` has started this rank, and waits for word that the run begins."""
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)
    """All variables, for options that name one."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Read the environment variables.

        Raises:
            RequestError: A variable that should be a number is not.
        """

        def number(name: str) -> int | None:
            text = environ.get(name)
            if text is None:
                return None
            try:
                return int(text)
            except ValueError:
                raise RequestError(f"the environment's {name}={text!r} is not a whole number") from None

        run_id = environ.get("TORCHELASTIC_RUN_ID", "")
        restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(
            rank=number("RANK"),
            world_size=number("WORLD_SIZE"),
            local_rank=number("LOCAL_RANK"),
            local_world_size=number("LOCAL_WORLD_SIZE"),
            master_addr=environ.get("MASTER_ADDR"),
            master_port=number("MASTER_PORT"),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            agent_run=f"{run_id}/{restarts}",
            launcher=number(LAUNCHER),
            launched=environ.get(LAUNCHED) == "1",
            variables=dict(environ),
        )


def log_level(environ: Mapping[str, str] = os.environ) -> str:
    """Return the least level of what programs log.

    Raises:
        RequestError: The variable names none.
    """
    level = environ.get(_LOG) or "warning"
    if level.lower() not in _LEVELS:
        raise RequestError(f"the environment's {_LOG}={level!r} is no level: use one of {', '.join(_LEVELS)}")
    return level.lower()


def is_set(name: str) -> bool:
    """Return whether an environment variable is set, and not empty."""
    return bool(os.environ.get(name))


def inherited_environment() -> dict[str, str]:
    """Return the environment of this process, for a process that it starts."""
    return dict(os.environ)


def onednn_limit(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the last instruction set that oneDNN may use, in lower case; None if the environment sets none.

    Of two variables, oneDNN reads the second, older one only if the first is not set.
    """
    limit = environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA")
    return limit.lower() if limit else None

"""Changing the plan of a run while it runs: what rank 0 sees, asks for and hears. Pure.

    snapshot() ──> what the hub knows of the run ──observed, decided──> change_to(announcement, snapshot)
                                                                           │ prepare e + 1 beside e
                                     Switched: e + 1 computes from microbatch N on <──┤ commit at N
                                     Dropped: e goes on as if nothing had been asked <┘ or something newer

A change is dropped if the members are no longer those of the snapshot, if a rank or link fails before the
commit, or if the results are complete; failover then goes on as it would without the change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Raw

from pipeedge.control.liveness import RankStatus
from pipeedge.control.roster import Members

__all__ = ["Dropped", "RunSnapshot", "Switched"]


@dataclass(frozen=True)
class RunSnapshot:
    """Snapshot of what the hub knows of a run."""

    epoch: int
    """Number of the epoch that runs."""
    running: bool
    """Whether all participants of the plan are ready and none is lost."""
    members: Members
    """Members of the run."""
    facts: Mapping[int, Raw]
    """Facts of the ranks that may have a part, by rank; those of a rank that has joined are there once they
    agree with those of the others."""
    statuses: Mapping[int, RankStatus]
    """Latest status of each participant, by rank."""


@dataclass(frozen=True)
class Switched:
    """The run computes with the new plan."""

    epoch: int
    """Number of the new epoch."""
    microbatch: int
    """Number of the first microbatch of the new plan."""
    seconds: float
    """Seconds from asking for the change until the new plan took over."""


@dataclass(frozen=True)
class Dropped:
    """The run goes on with the plan that it has, or the run is over."""

    why: str
    """Reason in a few words, for the user."""

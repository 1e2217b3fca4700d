"""Put into words what a diagnosis of the ranks has found. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pipeedge.base.wording import figure
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import Loading, Silent, Slow, Stalled, Stuck
from pipeedge.control.load_deadline import HungLoad, SlowLoad
from pipeedge.control.roster import Roster

__all__ = [
    "hears_nobody",
    "is_hung",
    "is_loading_slowly",
    "is_silent",
    "is_slow",
    "is_stalled",
    "is_stuck",
]

_BYTES_PER_MB = 1_000_000


def hears_nobody(roster: Roster, finding: Silent, others: int) -> Failure:
    """Return the failure of rank 0, which hears none of the ``others``."""
    cause = (
        f"has not heard from any of the {others} other ranks for {finding.seconds:.1f} s: its own network is "
        "disconnected, or that of all others"
    )
    return Failure(FailureKind.SILENT, cause, 0, roster.name(0))


def is_silent(roster: Roster, finding: Silent) -> Failure:
    """Return the failure of a rank that sends no heartbeats."""
    cause = (
        f"has been silent for {finding.seconds:.1f} s: its process is suspended or its network is "
        "disconnected"
    )
    return Failure(FailureKind.SILENT, cause, finding.rank, roster.name(finding.rank))


def is_stuck(roster: Roster, finding: Stuck) -> Failure:
    """Return the failure of a link that carries nothing, for which the receiving rank stands."""
    cause = (
        f"has waited {finding.seconds:.1f} s for microbatch {finding.microbatch} from "
        f"{roster.name(finding.source)}: the link between them is dead, or so slow that it needs a longer "
        "--timeout"
    )
    return Failure(FailureKind.STUCK, cause, finding.destination, roster.name(finding.destination))


def is_stalled(roster: Roster, finding: Stalled, watched: Iterable[int]) -> Failure:
    """Return the failure of a run in which nothing moves, and of which the ``watched`` ranks have a part."""
    who = ", ".join(roster.name(rank) for rank in watched)
    return Failure(
        FailureKind.STALLED, f"nothing has moved for {finding.seconds:.1f} s: {who} did not finish"
    )


def is_slow(roster: Roster, finding: Slow) -> str:
    """Return the notice about a rank that is busy with one thing for long."""
    name = roster.name(finding.rank)
    return f"{name} has been {finding.what} for {finding.seconds:.0f} s; still alive"


def is_loading_slowly(roster: Roster, finding: SlowLoad) -> str:
    """Return the notice about a rank that takes long to load."""
    name, loading = roster.name(finding.rank), finding.loading
    return f"{name} has been {loading.what} for {finding.seconds:.0f} s{_progress(loading)}; still alive"


def is_hung(roster: Roster, finding: HungLoad) -> Failure:
    """Return the failure of a rank whose loading is not worth waiting for."""
    loading = finding.loading
    cause = f"has been {loading.what} for {finding.seconds:.0f} s{_progress(loading)}, "
    if finding.still_s is None:
        cause += "which is too slow to wait for: copy its weights to a faster disk"
    else:
        cause += f"the last {finding.still_s:.0f} s without a byte: check its disk, or use a longer --timeout"
    return Failure(FailureKind.HUNG, cause, finding.rank, roster.name(finding.rank))


def _progress(loading: Loading) -> str:
    """Return `` (40 of 330 MB)``, or nothing if there is little to load, or an unknown amount."""
    if not loading.total:
        return ""
    done, total = (size / _BYTES_PER_MB for size in (min(loading.loaded, loading.total), loading.total))
    digits = 3 if total < 1 else 1 if total < 10 else 0
    return f" ({figure(round(done, digits))} of {figure(round(total, digits))} MB)"

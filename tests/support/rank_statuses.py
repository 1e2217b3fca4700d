"""Statuses of ranks that wait or compute."""

from pipeedge.control.liveness import RankStatus

WAITING = RankStatus()


def busy(seconds: float, what: str = "computing microbatch 3") -> RankStatus:
    return RankStatus(busy=(what, seconds))

"""The plan of a session, with what the hub has to know about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

from msgspec import Raw

from pipeedge.base.fields import encode

__all__ = ["Announcement"]

_Plan = TypeVar("_Plan")


@dataclass(frozen=True)
class Announcement(Generic[_Plan]):
    """A plan for all ranks. The hub knows it as JSON."""

    plan: _Plan
    participants: tuple[int, ...]
    """Ranks with a part in the plan; only these are monitored from now on. Empty if it ends the session."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Description of each rank for messages, such as ``stage 0, layers 1-8``."""
    data_rank: int | None = None
    """Rank that receives the records of all others; None if nothing is recorded."""
    goes_on: bool = False
    """Whether the session goes on, with other plans, when a rank but 0 and the data rank is lost."""
    line: str = ""
    """Notice for the user of what has happened and what is done, with another plan."""
    token: bytes = b""
    """Random bytes by which the participants know one another when they link."""

    def encoded(self, token: bytes) -> Announcement[Raw]:
        """Return the same with the plan as JSON, and with a token."""
        encoded: Announcement[Raw] = replace(cast(Any, self), plan=Raw(encode(self.plan)), token=token)
        return encoded

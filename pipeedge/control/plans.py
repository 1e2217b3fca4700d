"""The plans of a session: for whom one is wanted, and whether one that was made still fits. Pure.

A plan is dropped if one of its participants has left since the members were counted for whom it was made.
The table of ``epochs`` says what follows from one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Raw

from pipeedge.control.announcement import Announcement
from pipeedge.control.changing import Dropped, RunSnapshot
from pipeedge.control.epochs import Epochs, Event, Step
from pipeedge.control.failures import Failure
from pipeedge.control.roster import Members, Outgoing, Roster

__all__ = ["Plans", "Wanted"]


@dataclass(frozen=True)
class Wanted:
    """The members for which rank 0 has to make a plan."""

    members: Members
    facts: Mapping[int, Raw]
    """Facts of the members that may take part, by rank."""
    cause: str
    """Reason why the last epoch ended, for the user."""
    lost: tuple[int, ...]
    """Ranks that were lost since the last plan, those without a part in it too."""
    copied: Mapping[int, Raw] = field(default_factory=dict)
    """What each rank has copied of the state of others when it stopped, as it has said."""


class Plans:
    """Plans of a session.

    Args:
        roster: Ranks of the session.
        epochs: Epochs of the session.
    """

    def __init__(self, roster: Roster, epochs: Epochs) -> None:
        self.roster = roster
        self.epochs = epochs
        self._unfit: tuple[Members, frozenset[int]] | None = None  # those for whom there is no plan

    @property
    def can_change(self) -> bool:
        """Whether another plan may be prepared beside the one that runs."""
        return self.epochs.goes_on and self.epochs.step is Step.RUNNING

    def wanted(self) -> Wanted | None:
        """Return the members that need a plan, or None."""
        if self.epochs.step is not Step.PLANNING or self._unfit == self._may_take_part():
            return None
        causes = self.epochs.causes
        return Wanted(
            self.roster.members,
            self.roster.agreed_facts(),
            causes.line,
            tuple(causes.ranks),
            dict(causes.copied),
        )

    def snapshot(self) -> RunSnapshot | None:
        """Return what is known of the run; None before its plan and after its end."""
        roster, step = self.roster, self.epochs.step
        if step in (Step.GATHERING, Step.COMPLETE, Step.ENDED):
            return None
        statuses = {rank: roster.seats[rank].status for rank in roster.present()}
        is_running = step is Step.RUNNING
        return RunSnapshot(self.epochs.epoch, is_running, roster.members, roster.agreed_facts(), statuses)

    def made(self, members: Members, announcement: Announcement[Raw], now: float) -> Outgoing:
        """Prepare an epoch with a plan for ``members``; it is dropped if a participant has left meanwhile."""
        if not self.epochs.takes(Event.PLAN):
            return []
        if not self.has_all(announcement, members):
            return self.epochs.happen(Event.OVERTAKEN, announcement, now)
        self._unfit = None
        return self.epochs.happen(Event.PLAN, announcement, now)

    def none_fits(self, members: Members, failure: Failure, now: float) -> Outgoing:
        """End the run because no plan fits ``members``, unless they have changed.

        If there are some whose facts are still to be compared, the run waits for them.
        """
        if self.epochs.step is not Step.PLANNING or members != self.roster.members:
            return []
        here, agreed = self._may_take_part()
        if len(here) == len(agreed):
            return self.epochs.happen(Event.END, failure, now)
        self._unfit = here, agreed
        return []

    def better(self, since: RunSnapshot, announcement: Announcement[Raw], now: float) -> Outgoing:
        """Prepare a better plan beside the one that runs, unless the run has changed.

        ``Epochs.outcome`` says what has become of it.
        """
        if since.epoch != self.epochs.epoch or not self.can_change:
            self.epochs.outcome = Dropped("the run has another plan meanwhile")
        elif not self.has_all(announcement, since.members):
            self.epochs.outcome = Dropped("a rank has left or come again meanwhile")
        else:
            return self.epochs.happen(Event.CHANGE, announcement, now)
        return []

    def has_all(self, announcement: Announcement[Raw], members: Members) -> bool:
        """Return whether the participants of a plan are the members still that it was made for."""
        here = self.roster.members
        return all(rank in here and here[rank] == members.get(rank) for rank in announcement.participants)

    def _may_take_part(self) -> tuple[Members, frozenset[int]]:
        """Return the members, and the ranks of those that may have a part in a plan."""
        return self.roster.members, frozenset(self.roster.agreed_facts())

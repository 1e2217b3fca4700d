"""A hub's rules under a clock that the test moves, without sockets."""

from __future__ import annotations

from typing import Any

from msgspec import Raw
from wire_messages import plain, received

from pipeedge.base.errors import (
    PeerFailedError,
    one_line,
)
from pipeedge.control.admission import Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.failures import Failure
from pipeedge.control.liveness import (
    RankStatus,
)
from pipeedge.control.messages import (
    TO_HUB,
    Message,
    frame,
)
from pipeedge.control.rules import HubState


class Play:
    """A hub's state with a clock that the test advances; connection n belongs to rank n."""

    def __init__(self, world: int = 2, timeout: float = 10.0, terms: Terms | None = None) -> None:
        self.now = 100.0
        self.state = HubState(world_size=world, timeout_s=timeout, now=self.now, terms=terms)
        self.world = world
        self.told: dict[int, list[Message]] = {}

    def say(self, connection: int, kind: str, **body: Any) -> None:
        try:
            message = received(TO_HUB, kind, **body)
        except PeerFailedError as error:
            self._note(self.state.closed(connection, self.now, one_line(error)))
            return
        self._note(self.state.received(connection, message, self.now))

    def hello(self, *ranks: int) -> Play:
        for rank in ranks:
            self.say(rank, "hello", rank=rank, world=self.world, host=f"pi{rank}")
        return self

    def known(self) -> Play:
        self.hello(*range(self.world))
        for rank in range(self.world):
            self.say(rank, "facts", facts={"model": "m"})
        return self

    def planned(self, *participants: int, data_rank: int | None = None) -> Play:
        participants = participants or tuple(range(self.world))
        names = {rank: f"stage {stage}" for stage, rank in enumerate(participants)}
        plan = Announcement(Raw(b'{"items":3}'), participants, names, data_rank)
        self._note(self.state.plan(plan, self.now))
        return self

    def started(self, data_rank: int | None = None) -> Play:
        self.known().planned(data_rank=data_rank)
        for rank in range(self.world):
            self.say(rank, "ready", epoch=1)
        return self

    def at(self, stage: str) -> Play:
        """Play until all ranks have reached a stage: hello, known, planned or started."""
        if stage == "hello":
            return self.hello(*range(self.world))
        if stage == "known":
            return self.known()
        return self.known().planned() if stage == "planned" else self.started()

    def close(self, connection: int) -> None:
        self._note(self.state.closed(connection, self.now))

    def pass_time(self, seconds: float, *, beats: dict[int, RankStatus] | None = None) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for rank, status in (beats or {}).items():
                self.say(rank, "beat", status=plain(status))
            self._note(self.state.tick(self.now))

    def heard(self, connection: int, kind: str) -> list[Any]:
        return [message for message in self.told.get(connection, []) if message.kind == kind]

    @property
    def verdict(self) -> Failure | None:
        return self.state.verdict

    def line(self) -> str:
        assert self.state.verdict is not None
        return self.state.verdict.line

    def _note(self, outgoing: list[tuple[int, Message]]) -> None:
        for connection, message in outgoing:
            self.told.setdefault(connection, []).append(message)
            frame(message)  # whatever is to be sent can be

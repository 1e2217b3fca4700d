"""What cases of test_troubleshooting.py share: their registry, runs in this process, a hub that is played."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from msgspec import Raw
from rich.console import Console

from pipeedge.base.errors import PipeEdgeError, one_line
from pipeedge.control.announcement import Announcement
from pipeedge.control.liveness import RankStatus
from pipeedge.control.messages import TO_HUB, Beat, Decoder, Message, Notice, Verdict, Waiting
from pipeedge.control.rules import HubState
from pipeedge.models import find_model
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run import pipeline
from pipeedge.run.preview import show_schedule
from pipeedge.transport.new_key import make_key

MIB = 1 << 20
MBPS = MIB / 8

Patch = pytest.MonkeyPatch
Provoke = Callable[[Patch], str]
"""Makes the mistake, in a directory in which much is wrong; what is said of it."""


class Cases(dict[str, Provoke]):
    """Functions that provoke messages, by quote."""

    def says(self, *quotes: str) -> Callable[[Provoke], Provoke]:
        """Register the function that provokes the quoted messages."""

        def register(provoke: Provoke) -> Provoke:
            for quote in quotes:
                assert quote not in self, quote
                self[quote] = provoke
            return provoke

        return register


def refused(mistake: Callable[[], object]) -> str:
    """Return the line of the error that ``mistake`` raises."""
    with pytest.raises(PipeEdgeError) as caught:
        mistake()
    return one_line(caught.value)


DIGITS = find_model("vit-digits")


KEY, OTHER_KEY = make_key(), make_key()


def start(line: str) -> str:
    """Return the output of ``runtime.py``, run in this process."""
    shown, notices = io.StringIO(), []
    try:
        command = parse_runtime(line.split(), Environment())
        console = Console(file=shown, width=200)
        if command.dry_run:
            show_schedule(command.request, notices.append)
        else:
            pipeline.run(command.request, lambda: console, notices.append)
    except PipeEdgeError as error:
        return one_line(error)
    return "\n".join((*notices, shown.getvalue()))


@contextlib.contextmanager
def beside(line: str) -> Iterator[None]:
    """Run another rank in a thread."""
    other = threading.Thread(target=start, args=(line,), daemon=True)
    other.start()
    yield
    other.join(30)


class Play:
    """A hub's state with a clock that the test advances; connection n belongs to rank n."""

    def __init__(self, world: int = 3, timeout_s: float = 60.0) -> None:
        self.state = HubState(world_size=world, timeout_s=timeout_s, now=0.0)
        self.world = world
        self.lines: list[str] = []

    def hear(self, connection: int, kind: str, now: float = 0.0, **body: Any) -> Play:
        text = json.dumps({"kind": kind, **body}).encode()
        (message,) = Decoder(TO_HUB).feed(struct.pack(">I", len(text)) + text)
        self.note(self.state.received(connection, message, now))
        return self

    def hello(self, *ranks: int, world: int | None = None, host: str = "pi") -> Play:
        for rank in ranks:
            place = f"{host}{rank + 1}" if host == "pi" else host
            self.hear(rank, "hello", rank=rank, world=world or self.world, host=place)
        return self

    def planned(self) -> Play:
        self.hello(*range(self.world))
        for rank in range(self.world):
            self.hear(rank, "facts", facts={})
        names = {rank: f"stage {rank}" for rank in range(self.world)}
        self.state.plan(Announcement(Raw(b"{}"), tuple(range(self.world)), names, data_rank=0), 0.0)
        return self

    def started(self) -> Play:
        self.planned()
        for rank in range(self.world):
            self.hear(rank, "ready", epoch=1)
        return self

    def beat(self, now: float, statuses: Mapping[int, RankStatus]) -> Play:
        for rank, status in statuses.items():
            self.note(self.state.received(rank, Beat(status), now))
        self.note(self.state.tick(now))
        return self

    def note(self, outgoing: list[tuple[int, Message]]) -> None:
        for _, message in outgoing:
            if isinstance(message, Verdict):
                self.lines.append(message.failure.line)
            elif isinstance(message, Notice | Waiting):
                self.lines.append(message.line)

    @property
    def said(self) -> str:
        return "\n".join(self.lines)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


MODEL = {"layers": 4, "mem_MB": [1, 2, 1, 2], "parameters_in": 1000, "parameters_out": [1000, 2000]}


PROFILE = {"batch_size": 8, "dtype": "torch.float32", "time_s": [1, 2, 1, 2]}


KIND = {"bw_Mbps": 80, "mem_MB": 100, "model_profiles": {"m": [PROFILE]}}

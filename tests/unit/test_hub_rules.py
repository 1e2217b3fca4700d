"""Rules of the hub for who is admitted and what may be said, on a clock that the test moves."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hub_play import Play
from msgspec.structs import replace
from mutations import mutate_message, rounds
from rank_statuses import WAITING
from wire_messages import plain

from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import RankStatus
from pipeedge.control.messages import (
    Hello,
    Verdict,
    Waiting,
)
from pipeedge.control.rules import HubState
from pipeedge.observe.metrics import StageWork


def test_a_run_from_hello_to_summary() -> None:
    play = Play()
    play.hello(0)
    assert play.state.roster.absent() == [1]
    play.hello(1)
    assert play.state.roster.absent() == []
    play.say(0, "facts", facts={"items": 5})
    assert play.state.roster.facts() is None
    play.say(1, "facts", facts={"items": None})
    assert plain(play.state.roster.facts()) == {"0": {"items": 5}, "1": {"items": None}}
    play.planned()
    assert plain(play.heard(1, "plan")) == [{"kind": "plan", "plan": {"items": 3}}]
    play.say(1, "ready", epoch=1)
    assert not play.heard(0, "run")
    play.say(0, "ready", epoch=1)
    assert len(play.heard(0, "run")) == len(play.heard(1, "run")) == 1
    play.say(0, "done", stats={"busy": 0.5})
    play.close(0)  # it has done its part
    assert not play.heard(1, "summary")
    play.say(1, "done", stats={})
    assert plain(play.heard(1, "summary")[0].stats) == {"0": {"busy": 0.5}, "1": {}}
    assert play.verdict is None


def test_a_rank_that_never_appears_is_named_at_the_deadline() -> None:
    play = Play(world=4, timeout=10)
    play.hello(0, 2)
    play.pass_time(9.9, beats={0: WAITING, 2: WAITING})
    assert play.verdict is None
    play.pass_time(0.5, beats={0: WAITING, 2: WAITING})
    assert play.line().startswith("ranks 1, 3 of 4 never appeared within 10 s")
    assert play.verdict is not None
    assert (play.verdict.rank, play.verdict.exit_code) == (1, 4)
    assert play.heard(0, "verdict") == play.heard(2, "verdict") == [Verdict(play.verdict)]


def test_many_ranks_that_never_appear_are_counted() -> None:
    play = Play(world=1000, timeout=10)
    play.hello(0)
    play.pass_time(11, beats={0: WAITING})
    assert play.line().startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 989 more of 1000 never appeared")
    assert len(play.line()) < 200


def test_a_late_rank_gets_the_verdict() -> None:
    play = Play(timeout=10)
    play.hello(0)
    play.pass_time(11, beats={0: WAITING})
    play.hello(1)
    assert play.heard(1, "verdict") == play.heard(0, "verdict")


def test_all_ranks_learn_of_a_disagreement_on_the_world() -> None:
    play = Play(world=2)
    play.hello(0)
    play.say(1, "hello", rank=1, world=3, host="pi1")
    for connection in (0, 1):
        (verdict,) = play.heard(connection, "verdict")
        assert verdict.failure.cause.startswith("rank 1 on pi1 says the world has 3 ranks, rank 0 says 2")
        assert verdict.failure.exit_code == 2


def test_a_second_process_of_a_rank_is_refused() -> None:
    play = Play(world=2)
    play.hello(0, 1)
    play.say(7, "hello", rank=1, world=2, host="pi9")
    (refusal,) = play.heard(7, "verdict")
    taken = "rank 1 has already joined, from pi1: start each rank once"
    assert refusal.failure == Failure(FailureKind.REFUSED, taken, exit_code=2)
    play.close(7)
    assert play.verdict is None
    play.say(1, "facts", facts={})
    play.say(0, "facts", facts={})
    assert plain(play.state.roster.facts()) == {"0": {}, "1": {}}


@pytest.mark.parametrize("stage", ["hello", "known", "planned", "started"])
@pytest.mark.parametrize(("rank", "world"), [(1, 2), (0, 1), (2, 3), (1, 4), (3, 4), (7, 9), (3, 3)])
def test_a_start_at_the_address_of_another_run_ends_only_itself(stage: str, rank: int, world: int) -> None:
    play = Play(world=3).at(stage)
    play.say(7, "hello", rank=rank, world=world, host="pi9")
    (refusal,) = play.heard(7, "verdict")
    line, taken = refusal.failure.cause, rank < 3
    assert (f"rank {rank} has already joined, from pi{rank}" in line) == taken
    assert (f"rank {rank} is outside the world of 3" in line) == (not taken)
    assert ("rank 0 says 3" in line) == (world != 3)
    assert refusal.failure.exit_code == 2
    play.say(7, "failed", line="x")
    play.close(7)
    assert play.verdict is None
    assert play.state.roster.connections() == (0, 1, 2)


def test_a_rank_outside_the_world_is_refused() -> None:
    play = Play(world=2)
    play.say(7, "hello", rank=2, world=2, host="pi9")
    assert play.heard(7, "verdict")[0].failure.cause == "rank 2 is outside the world of 2"
    assert play.state.roster.connections() == ()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"rank": 0},
        {"rank": "0", "world": 2, "host": "a"},
        {"rank": 0.0, "world": 2, "host": "a"},
        {"rank": True, "world": 2, "host": "a"},
        {"rank": -1, "world": 2, "host": "a"},
        {"rank": 10**30, "world": 2, "host": "a"},
        {"rank": 0, "world": None, "host": "a"},
        {"rank": 0, "world": 2, "host": None},
        {"rank": [0], "world": {}, "host": []},
    ],
)
def test_a_malformed_hello_is_refused_once(body: dict[str, Any]) -> None:
    play = Play()
    for _ in range(1000):
        play.say(5, "hello", **body)
    (refusal,) = play.heard(5, "verdict")
    assert "malformed" in refusal.failure.cause
    assert (play.verdict, play.state.roster.connections()) == (None, ())


def test_a_connection_cannot_change_its_rank() -> None:
    play = Play(world=3)
    play.hello(0)
    play.say(0, "hello", rank=1, world=3, host="pi1")
    assert "rank 0 (on pi0) sent a malformed 'hello'" in play.line()


def test_messages_before_hello_are_ignored() -> None:
    play = Play().hello(0)
    for kind in ("facts", "ready", "failed", "linklost", "done", "beat", "anything"):
        play.say(9, kind, line="x", rank=0, stats={}, facts={})
    assert (play.verdict, play.told.get(9)) == (None, None)


HARMFUL: list[Any] = [
    None,
    True,
    -1,
    2,
    1.5,
    1e308,
    10**30,
    "",
    "a",
    "9" * 5000,
    [],
    {},
    [1],
    ["a", "b"],
    [1, 2],
    ["computing", -1e308],
    ["x" * 5000, 1],
    ["a", 1, 2],
    {"a": 1},
    {"-1": 1},
    {"1": -1},
    {"1": "2"},
    {"1": None},
    {"1": 1e9},
    {"x": {"y": []}},
]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("beat", ("status",)),
        ("facts", ("facts",)),
        ("failed", ("line",)),
        ("linklost", ("epoch", "peer", "line")),
        ("ready", ("epoch",)),
        ("done", ("stats",)),
        ("hello", ("rank", "world", "host")),
        ("start", ()),
        ("verdict", ("failure", "rank", "name", "cause", "exit_code")),
        ("\x1b[2J", ()),
    ],
)
@pytest.mark.parametrize("stage", ["hello", "known", "planned", "started"])
def test_a_peer_that_breaks_the_protocol_ends_the_run_and_nothing_else(
    kind: str, keys: tuple[str, ...], stage: str
) -> None:
    chance = random.Random(f"{kind} {stage}")
    for round_number in range(60):
        play = Play()
        play.hello(0, 1)
        if stage != "hello":
            play = Play().known()
        if stage == "planned":
            play.planned()
        if stage == "started":
            play = Play().started()
        body = {key: chance.choice(HARMFUL) for key in keys if round_number % 7 or chance.random() < 0.5}
        play.say(1, kind, **body)
        play.say(1, kind, **body)
        play.pass_time(2, beats={0: WAITING})
        if play.verdict is not None:
            assert play.verdict.line.startswith("rank 1 (") or kind == "linklost"
            assert play.verdict.line.isprintable()
            assert play.heard(0, "verdict") == [Verdict(play.verdict)]
            assert len(play.verdict.line) < 2200


def test_early_ready_and_done_do_not_affect_the_others() -> None:
    for kind, body in (("ready", {"epoch": 1}), ("done", {"stats": {}})):
        play = Play().known()
        play.say(1, kind, **body)
        assert not play.heard(0, "run")
        assert not play.heard(0, "summary")
        assert "malformed" in play.line()
    play = Play().known().planned()
    play.say(1, "done", stats={})
    assert "malformed 'done'" in play.line()


def test_the_hub_survives_any_mutation_of_any_message() -> None:
    chance = random.Random(1)
    beat = RankStatus(busy=("computing", 1.0), sent={0: 3}, received={0: 1}, awaiting=frozenset({0}))
    beat = replace(beat, stage_s=0.5, work=StageWork(1.0, 2.0, 3.0, 8), finished=4)
    said: dict[str, dict[str, Any]] = {
        "hello": {"rank": 1, "world": 2, "host": "pi1"},
        "facts": {"facts": {"model": "m", "items": 3, "x": None}},
        "beat": {"status": plain(beat)},
        "clock": {"sent": 1.5},
        "failed": {"line": "x"},
        "linklost": {"epoch": 1, "peer": 0, "line": "x"},
        "record": {"text": "x"},
        "ready": {"epoch": 1},
        "complete": {},
        "done": {"stats": {"busy": 0.5, "threads": 1}},
    }
    for _ in range(rounds(400)):
        kind = chance.choice(list(said))
        play = Play() if kind == "hello" else Play().started() if kind != "facts" else Play().hello(0, 1)
        play.say(1, kind, **mutate_message(said[kind], chance))
        play.say(1, "beat", status=plain(beat))
        play.pass_time(12, beats={0: WAITING})
        assert play.verdict is None or play.verdict.line.isprintable()


def test_missing_ranks_are_named_after_a_while_and_on_change() -> None:
    state = HubState(world_size=3, timeout_s=30.0, now=0.0)

    def waiting(now: float) -> list[str]:
        return [message.line for _, message in state.tick(now) if isinstance(message, Waiting)]

    def hello(rank: int, now: float) -> None:
        state.received(rank, Hello(rank, 3, "pi"), now)

    hello(0, 0.1)
    assert waiting(1.9) == []
    assert waiting(2.1) == ["waiting for ranks 1, 2 of 3 to start"]
    assert waiting(5.0) == []
    hello(2, 6.0)
    assert waiting(6.1) == ["waiting for rank 1 of 3 to start"] * 2
    late = [message for _, message in state.received(1, Hello(1, 3, "pi"), 7.0)]
    assert late == [Waiting("all 3 ranks are here", over=True)] * 3
    assert waiting(7.1) == []

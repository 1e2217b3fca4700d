"""Rules of the hub for ranks that a session can do without."""

from __future__ import annotations

import random

import pytest
from hub_play import Play
from msgspec import Raw
from mutations import rounds
from rank_statuses import WAITING
from wire_messages import plain

from pipeedge.control.admission import Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.failures import FailureKind

OPTIONAL = Terms(appear_s=10.0, required=frozenset({0}), brief=Raw(b'{"layers":4}'))


def test_each_rank_is_briefed_as_soon_as_it_is_admitted() -> None:
    play = Play(world=2, terms=OPTIONAL).hello(1)
    assert [plain(message.brief) for message in play.heard(1, "brief")] == [{"layers": 4}]
    assert not play.heard(0, "brief")
    assert not Play().hello(1).heard(1, "brief")


def test_a_session_goes_on_without_ranks_that_are_not_required() -> None:
    play = Play(world=4, timeout=30, terms=OPTIONAL).hello(0, 1, 2)
    for rank in (0, 1):
        play.say(rank, "facts", facts={"seconds": [[1.5, None], []], "links": {"pi1": [1, 2.5]}})
    play.pass_time(9.75, beats={0: WAITING, 1: WAITING, 2: WAITING})
    assert play.state.roster.facts() is None
    play.pass_time(0.5, beats={0: WAITING, 1: WAITING, 2: WAITING})
    facts = play.state.roster.facts()
    assert facts is not None
    assert (list(facts), plain(facts[1])["seconds"], play.verdict) == ([0, 1], [[1.5, None], []], None)
    left_out = play.state.roster.left_out
    assert [(rank, failure.kind) for rank, failure in sorted(left_out.items())] == [
        (2, FailureKind.LATE),
        (3, FailureKind.ABSENT),
    ]
    (told,) = play.heard(2, "verdict")
    assert told.failure.line == (
        "rank 2 (on pi2) is too late, and the others go on without it: start all ranks within 10 s"
    )
    assert told.failure.exit_code == 2
    # What it sends now, and who comes only now, changes nothing.
    play.say(2, "facts", facts={})
    play.hello(3)
    assert play.heard(3, "verdict")[0].failure.kind is FailureKind.LATE
    play._note(play.state.plan(Announcement(Raw(b"{}"), ()), play.now))
    assert [len(play.heard(rank, "plan")) for rank in range(4)] == [1, 1, 0, 0]
    # With no part in the plan, nobody is missed who leaves at once.
    play.close(1)
    play.pass_time(60)
    assert play.verdict is None
    assert set(play.state.roster.facts() or {}) == {0, 1}


@pytest.mark.parametrize(
    ("end", "kind"),
    [("close", FailureKind.GONE), ("failed", FailureKind.FAILED), ("silent", FailureKind.SILENT)],
)
def test_a_rank_that_is_not_required_may_be_lost_and_come_again(end: str, kind: FailureKind) -> None:
    play = Play(world=3, timeout=5, terms=OPTIONAL).hello(0, 1, 2)
    play.say(2, "facts", facts={"x": 1})
    if end == "close":
        play.close(2)
    elif end == "failed":
        play.say(2, "failed", line="it was interrupted")
    else:
        play.pass_time(4, beats={0: WAITING, 1: WAITING})
    assert play.state.roster.left_out[2].kind is kind
    assert play.state.roster.left_out[2].name == "rank 2 (on pi2)"
    play.say(7, "hello", rank=2, world=3, host="pi7")
    assert play.state.roster.left_out == {}
    for connection, rank in ((0, 0), (1, 1), (7, 2)):
        play.say(connection, "facts", facts={"rank": rank})
    assert plain(play.state.roster.facts()) == {str(rank): {"rank": rank} for rank in range(3)}
    # From now on nobody is admitted.
    play.close(7)
    play.say(8, "hello", rank=2, world=3, host="pi8")
    assert play.heard(8, "verdict")[0].failure.kind is FailureKind.LATE
    assert play.verdict is None


def test_required_ranks_and_participants_are_never_left_out() -> None:
    play = Play(world=3, timeout=5, terms=OPTIONAL).hello(1, 2)
    play.pass_time(11, beats={1: WAITING, 2: WAITING})
    assert play.line().startswith("rank 0 of 3 never appeared within 10 s")
    play = Play(world=3, timeout=5, terms=OPTIONAL).known()
    play.close(0)
    assert play.line() == "rank 0 (on pi0) is gone: it was killed or lost its network"
    play = Play(world=3, timeout=5, terms=OPTIONAL).known()
    play.close(2)  # while the plan is made, which gives it a part
    play.planned(0, 2)
    assert play.line() == "rank 2 (on pi2) is gone: it was killed or lost its network"
    play = Play(world=3, timeout=5, terms=OPTIONAL).known().planned(0, 2)
    play.close(2)
    assert play.line() == "rank 2 (stage 1, on pi2) is gone: it was killed or lost its network"


def test_a_hub_that_can_do_without_ranks_survives_any_order_of_events() -> None:
    chance = random.Random(4)
    for _ in range(rounds(200)):
        play = Play(world=3, timeout=5, terms=OPTIONAL).hello(0)
        decided = False
        for connection in range(1, 25):
            kind = chance.choice(["hello", "facts", "failed", "linklost", "close", "ready", "done", "time"])
            rank, other = chance.randrange(3), chance.randrange(connection)
            if kind == "time":
                play.pass_time(chance.choice([0.5, 4.0]), beats={0: WAITING})
            elif kind == "close":
                play.close(other)
            elif kind == "hello":
                play.say(connection, "hello", rank=rank, world=3, host=f"pi{rank}")
            else:
                play.say(other, kind, facts={}, line="x", epoch=1, peer=rank, stats={})
            roster = play.state.roster
            assert not roster.seats.keys() & roster.left_out.keys()
            assert {roster.seats[rank].connection for rank in roster.rank_of.values()} == set(roster.rank_of)
            if not decided and roster.facts() is not None and play.verdict is None:
                decided = True
                play.planned(*chance.choice([(0,), (0, 1), (1, 2)]))
        assert play.verdict is None or play.verdict.line.isprintable()

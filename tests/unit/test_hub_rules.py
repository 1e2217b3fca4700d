"""Rules of the hub, without sockets, on a clock that the test moves."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace
from mutations import mutate_message, rounds
from rank_statuses import WAITING, busy
from wire_messages import plain, received

from pipeedge.base.errors import (
    Account,
    PeerFailedError,
    RequestError,
    one_line,
)
from pipeedge.control.announcement import Announcement
from pipeedge.control.attendance import Terms
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import (
    RankStatus,
    StageWork,
)
from pipeedge.control.messages import (
    TO_HUB,
    Beat,
    Hello,
    Message,
    Verdict,
    Waiting,
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

    def planned(self, *participants: int) -> Play:
        participants = participants or tuple(range(self.world))
        names = {rank: f"stage {stage}" for stage, rank in enumerate(participants)}
        self._note(self.state.plan(Announcement(Raw(b'{"items":3}'), participants, names), self.now))
        return self

    def started(self) -> Play:
        self.known().planned()
        for rank in range(self.world):
            self.say(rank, "ready")
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
    play.say(1, "ready")
    assert not play.heard(0, "start")
    play.say(0, "ready")
    assert len(play.heard(0, "start")) == len(play.heard(1, "start")) == 1
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
    for kind in ("facts", "ready", "failed", "lost", "done", "beat", "anything"):
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
        ("lost", ("rank", "line")),
        ("ready", ("x",)),
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
            assert play.verdict.line.startswith("rank 1 (") or kind == "lost"
            assert play.verdict.line.isprintable()
            assert play.heard(0, "verdict") == [Verdict(play.verdict)]
            assert len(play.verdict.line) < 2200


def test_early_ready_and_done_do_not_affect_the_others() -> None:
    for kind, body in (("ready", {}), ("done", {"stats": {}})):
        play = Play().known()
        play.say(1, kind, **body)
        assert not play.heard(0, "start")
        assert not play.heard(0, "summary")
        assert "malformed" in play.line()
    play = Play().known().planned()
    play.say(1, "done", stats={})
    assert "malformed 'done'" in play.line()


@pytest.mark.parametrize("stage", ["hello", "known", "planned", "started"])
def test_a_closed_connection_means_a_lost_rank(stage: str) -> None:
    play = Play().at(stage)
    play.close(1)
    name = "rank 1 (on pi1)" if stage in ("hello", "known") else "rank 1 (stage 1, on pi1)"
    assert play.line() == f"{name} is gone: it was killed or lost its network"
    assert play.verdict is not None
    assert (play.verdict.rank, play.verdict.exit_code) == (1, 4)


def test_a_process_that_leaves_before_its_hello_is_reported() -> None:
    play = Play(world=3, timeout=10).hello(0)
    for connection in (7, 8):
        play._note(play.state.closed(connection, play.now, left="10.0.0.9"))
    play._note(play.state.closed(9, play.now, "not this protocol", left="10.0.0.66"))
    early = "a process at 10.0.0.9 connected and left before it introduced itself"
    assert [notice.line for notice in play.heard(0, "notice")] == [f"{early}; ranks still missing: 1, 2"]
    play.pass_time(11, beats={0: WAITING})
    assert f"ranks 1, 2 of 3 never appeared within 10 s ({early}): start each rank" in play.line()


def test_rank_0_hears_of_a_stranger_that_came_before_it() -> None:
    play = Play(world=3)
    play._note(play.state.refused("10.0.0.9", "has another key", play.now))
    play.hello(0)
    line = "a process at 10.0.0.9 has another key; ranks still missing: 1, 2"
    assert [notice.line for notice in play.heard(0, "notice")] == [line]
    play.hello(1).hello(2)
    play._note(play.state.refused("10.0.0.9", "has another key", play.now + 60))
    assert len(play.heard(0, "notice")) == 1


def test_an_unknown_connection_that_closes_is_ignored() -> None:
    play = Play().hello(0)
    play.close(55)
    assert play.verdict is None


def test_a_rank_without_work_may_leave_and_is_not_missed() -> None:
    play = Play(world=3).known().planned(0, 2)
    assert play.heard(1, "plan")
    play.say(1, "failed", line="it was interrupted on its way out")
    play.close(1)
    play.say(0, "ready")
    play.say(2, "ready")
    play.pass_time(30, beats={0: busy(1), 2: busy(1)})
    assert play.verdict is None
    play.say(0, "done", stats={})
    play.say(2, "done", stats={})
    assert sorted(play.heard(0, "summary")[0].stats) == [0, 2]


def test_the_first_cause_wins() -> None:
    play = Play(world=3).started()
    play.say(2, "failed", line="the disk\nis full\x1b[0m")
    play.say(0, "failed", line="connection lost")
    play.close(1)
    assert play.line() == "rank 2 (stage 2, on pi2) failed: the disk\\nis full\\x1b[0m"
    for rank in (0, 1, 2):
        assert len(play.heard(rank, "verdict")) == 1


def test_a_lost_rank_gets_a_moment_to_report() -> None:
    play = Play(world=3).started()
    play.say(0, "lost", rank=1, line="connection reset")
    play.pass_time(0.5)
    assert play.verdict is None
    play.say(1, "failed", line="bad weights")
    assert play.line() == "rank 1 (stage 1, on pi1) failed: bad weights"


def test_a_lost_rank_that_reports_nothing_is_the_cause() -> None:
    play = Play(world=3).started()
    play.say(0, "lost", rank=1, line="connection reset")
    play.say(2, "lost", rank=0, line="connection reset by 0")
    play.pass_time(1.5, beats=dict.fromkeys(range(3), WAITING))
    assert play.line() == "rank 1 (stage 1, on pi1) is gone: connection reset"
    assert play.verdict is not None
    assert play.verdict.rank == 1


@pytest.mark.parametrize("stage", ["hello", "planned", "started"])
def test_a_silent_rank_is_named_in_time(stage: str) -> None:
    play = Play(world=3, timeout=10)
    play.hello(0, 1, 2)
    if stage == "planned":
        play = Play(world=3, timeout=10).known().planned()
    if stage == "started":
        play = Play(world=3, timeout=10).started()
    began = play.now
    moving = 0
    while play.verdict is None and play.now < began + 10:
        moving += 1
        play.pass_time(0.25, beats={0: RankStatus(sent={1: moving}), 2: busy(1)})
    assert play.line().startswith("rank 1 (")
    assert "has been silent for" in play.line()
    assert play.now - began < 10
    assert play.state.expected_to_leave() == (0, 2)


def test_a_dead_link_is_named_by_both_its_ends() -> None:
    play = Play(world=3, timeout=10).started()
    play.pass_time(
        10,
        beats={
            0: RankStatus(sent={1: 11}, received={2: 6}, awaiting=frozenset({2})),
            1: RankStatus(sent={2: 8}, received={0: 9}),
            2: RankStatus(sent={0: 6}, received={1: 6}, awaiting=frozenset({1})),
        },
    )
    assert "rank 2 (stage 2, on pi2) has waited" in play.line()
    assert "for microbatch 6 from rank 1 (stage 1, on pi1)" in play.line()


def test_a_rank_that_has_finished_is_not_blamed_for_what_follows() -> None:
    play = Play(world=2, timeout=10).started()
    play.say(1, "beat", status=plain(RankStatus(received={0: 5})))
    play.say(1, "done", stats={})
    play.pass_time(10, beats={0: RankStatus(sent={1: 5})})
    assert "rank 0 (stage 0, on pi0) did not finish" in play.line()
    assert "rank 1" not in play.line()


def complete(play: Play) -> Play:
    play.started()
    play._note(play.state.plan(Announcement(Raw(b'{"items":3}'), (0, 1), data_rank=0), play.now))
    play.say(0, "complete")
    return play


@pytest.mark.parametrize("end", ["closed", "failed", "lost", "silent", "malformed"])
def test_nothing_ends_a_run_whose_results_are_complete(end: str) -> None:
    play = complete(Play())
    assert play.heard(1, "complete")
    if end == "closed":
        play.close(1)
    elif end == "failed":
        play.say(1, "failed", line="links")
    elif end == "lost":
        play.say(0, "lost", rank=1, line="links")
    elif end == "malformed":
        play.say(1, "record", text=3)
    if end in ("lost", "silent"):
        play.pass_time(7.5, beats={0: WAITING})
    play.say(1, "done", stats={"late": 1})
    assert play.verdict is None
    (notice,) = play.heard(0, "notice")
    assert "rank 1" in notice.line
    assert notice.line.endswith("; the results are complete")
    assert not play.heard(0, "summary")
    play.say(0, "done", stats={"busy": 0.5})
    assert [plain(message.stats) for message in play.heard(0, "summary")] == [{"0": {"busy": 0.5}}]
    assert play.state.expected_to_leave() == (0,)


def test_only_the_data_rank_completes_a_run() -> None:
    play = Play().started()
    play.say(1, "complete")
    assert "malformed 'complete'" in play.line()


def test_a_rank_that_finishes_work_is_not_stuck_though_it_sends_nothing() -> None:
    play = Play(world=2, timeout=10).started()
    for second in range(30):
        play.pass_time(1, beats={0: WAITING, 1: RankStatus(finished=second // 5)})
    assert play.verdict is None
    play.pass_time(10, beats={0: WAITING, 1: RankStatus(finished=6)})
    assert play.verdict is not None


def test_slow_work_is_reported_but_not_ended() -> None:
    play = Play(world=2, timeout=10).started()
    for second in range(60):
        play.pass_time(1, beats={0: WAITING, 1: busy(second)})
    assert play.verdict is None
    notices = [message.line for message in play.heard(0, "notice")]
    assert 2 <= len(notices) <= 8
    assert notices[0].startswith("rank 1 (stage 1, on pi1) has been computing microbatch 3 for")


def test_loading_for_long_is_not_a_stall() -> None:
    play = Play(world=2, timeout=10).known().planned()
    play.say(0, "ready")
    play.pass_time(100, beats={0: WAITING, 1: busy(50, "loading")})
    assert play.verdict is None
    play.say(1, "ready")
    play.pass_time(5, beats={0: WAITING, 1: WAITING})
    assert play.verdict is None  # the clock of progress starts with the run


def test_a_disagreement_is_an_invalid_request() -> None:
    play = Play().known()
    play._note(play.state.refuse("ranks 0 and 1 disagree", 2, play.now))
    assert play.verdict == Failure(FailureKind.REFUSED, "ranks 0 and 1 disagree", exit_code=2)
    error = play.heard(1, "verdict")[0].failure.error()
    assert isinstance(error, RequestError)


def test_a_failure_travels_as_data_and_becomes_one_line() -> None:
    play = Play().started()
    play.say(1, "failed", line="it failed: (disk) failed: full")
    (message,) = play.heard(0, "verdict")
    failure = message.failure
    assert (failure.kind, failure.rank) == (FailureKind.FAILED, 1)
    assert failure.cause == "it failed: (disk) failed: full"
    assert failure == play.verdict
    assert failure.line == f"{failure.name} failed: it failed: (disk) failed: full"
    error = failure.error()
    assert isinstance(error, PeerFailedError)
    assert error.account == Account(1, "it failed: (disk) failed: full")


# --- numbers and texts of any size ------------------------------------------------------------------


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
        "lost": {"rank": 0, "line": "x"},
        "record": {"text": "x"},
        "ready": {},
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
    hello(1, 7.0)
    assert waiting(7.1) == []


@pytest.mark.parametrize(("last_beats", "blamed"), [((3.0, 3.5), 0), ((3.0, 25.0), 1)])
def test_ranks_that_fall_silent_together_are_not_blamed(last_beats: tuple[float, float], blamed: int) -> None:
    state = HubState(world_size=3, timeout_s=30.0, now=0.0)
    for rank in range(3):
        state.received(rank, Hello(rank, 3, "pi"), 0.1)
    beat = Beat(RankStatus())
    for rank, at in ((1, last_beats[0]), (2, last_beats[1]), (0, 31.0)):
        state.received(rank, beat, at)
    state.plan(Announcement(Raw(b"{}"), (0, 1, 2)), 31.0)
    state.tick(31.5)
    assert state.verdict is not None
    assert state.verdict.rank == blamed
    assert ("its own network is disconnected" in state.verdict.line) == (blamed == 0)


# --- ranks that a session can do without ----------------------------------------------------------------

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
            kind = chance.choice(["hello", "facts", "failed", "lost", "close", "ready", "done", "time"])
            rank, other = chance.randrange(3), chance.randrange(connection)
            if kind == "time":
                play.pass_time(chance.choice([0.5, 4.0]), beats={0: WAITING})
            elif kind == "close":
                play.close(other)
            elif kind == "hello":
                play.say(connection, "hello", rank=rank, world=3, host=f"pi{rank}")
            else:
                play.say(other, kind, facts={}, line="x", rank=rank, stats={})
            roster = play.state.roster
            assert not roster.seats.keys() & roster.left_out.keys()
            assert {roster.seats[rank].connection for rank in roster.rank_of.values()} == set(roster.rank_of)
            if not decided and roster.facts() is not None and play.verdict is None:
                decided = True
                play.planned(*chance.choice([(0,), (0, 1), (1, 2)]))
        assert play.verdict is None or play.verdict.line.isprintable()

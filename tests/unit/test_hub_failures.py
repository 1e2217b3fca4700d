"""Rules of the hub for ranks that are lost, silent or stuck, and for runs that are complete."""

from __future__ import annotations

import pytest
from hub_play import Play
from msgspec import Raw
from rank_statuses import WAITING, busy
from wire_messages import plain

from pipeedge.base.errors import (
    Account,
    PeerFailedError,
    RequestError,
)
from pipeedge.control.announcement import Announcement
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import (
    RankStatus,
)
from pipeedge.control.messages import (
    Beat,
    Hello,
)
from pipeedge.control.rules import HubState


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
    play.say(0, "ready", epoch=1)
    play.say(2, "ready", epoch=1)
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
    play.say(0, "linklost", epoch=1, peer=1, line="connection reset")
    play.pass_time(0.5)
    assert play.verdict is None
    play.say(1, "failed", line="bad weights")
    assert play.line() == "rank 1 (stage 1, on pi1) failed: bad weights"


def test_a_lost_rank_that_reports_nothing_is_the_cause() -> None:
    play = Play(world=3).started()
    play.say(0, "linklost", epoch=1, peer=1, line="connection reset")
    play.say(2, "linklost", epoch=1, peer=0, line="connection reset by 0")
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
    play.started(data_rank=0).say(0, "complete")
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
        play.say(0, "linklost", epoch=1, peer=1, line="links")
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
    play.say(0, "ready", epoch=1)
    play.pass_time(100, beats={0: WAITING, 1: busy(50, "loading")})
    assert play.verdict is None
    play.say(1, "ready", epoch=1)
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

"""The hub in a run that goes on after failures: epochs, spares, ranks that come back, and why it ends."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Raw

from pipeedge.base.errors import EXIT_INFEASIBLE, EXIT_PEER
from pipeedge.control.admission import Newcomer, Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.changing import Dropped, Switched
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import Loading, RankStatus
from pipeedge.control.messages import (
    Beat,
    Complete,
    Declined,
    Done,
    Facts,
    Failed,
    Hello,
    LinkLost,
    Message,
    Passed,
    Ready,
    Record,
    Stopped,
    frame,
)
from pipeedge.control.plans import Wanted
from pipeedge.control.rules import HubState

TIMEOUT_S = 10.0
KILLED = "it was killed or lost its network"


def stages(*ranks: int) -> dict[int, str]:
    return {rank: f"stage {rank}" for rank in ranks}


class Run:
    """A hub's state in a run whose first plan is announced. Connection ``10 + n`` belongs to rank n at first.

    Args:
        world: Number of ranks.
        participants: Ranks with a part in the first plan; without any, it is still to be made.
        late: Ranks that do not come in time.
        waits: Whether they still may come.
        data_rank: Rank that reads the input.
        ends_if_refused: Whether an absent rank ends the run if a process was refused.
    """

    def __init__(
        self,
        world: int,
        *participants: int,
        late: tuple[int, ...] = (),
        waits: bool = False,
        data_rank: int = 0,
        ends_if_refused: bool = False,
    ) -> None:
        self.now = 100.0
        self.world = world
        self.data_rank = data_rank
        terms = Terms(
            TIMEOUT_S,
            required=frozenset({0, data_rank}),
            joins_later=True,
            ends_if_refused=ends_if_refused,
        )
        self.state = HubState(world_size=world, timeout_s=TIMEOUT_S, now=self.now, terms=terms)
        self.told: dict[int, list[Message]] = {}
        for rank in set(range(world)) - set(late):
            self.come(rank, 10 + rank)
        if waits:
            return
        if late:
            assert self.state.roster.facts() is None  # they may still come
            self.pass_time(TIMEOUT_S + 0.5)
        facts = self.state.roster.facts()
        assert facts is not None
        assert facts.keys() == set(range(world)) - set(late)
        if participants:
            self.first_plan(*participants)

    def first_plan(self, *participants: int) -> None:
        names, data_rank = stages(*participants), self.data_rank
        first = Announcement(Raw(b'{"epoch":1}'), participants, names, data_rank=data_rank, goes_on=True)
        self.note(self.state.plan(first, self.now))

    def note(self, outgoing: list[tuple[int, Message]]) -> None:
        for connection, message in outgoing:
            self.told.setdefault(connection, []).append(message)
            frame(message)  # whatever is to be sent can be

    def come(self, rank: int, connection: int) -> None:
        self.say(connection, Hello(rank, self.world, f"pi{rank}"))
        self.say(connection, Facts(Raw(b"{}")))

    def say(self, connection: int, *messages: Message) -> None:
        for message in messages:
            self.note(self.state.received(connection, message, self.now))

    def close(self, connection: int) -> None:
        self.note(self.state.closed(connection, self.now))

    def start(self, epoch: int, *connections: int) -> Run:
        for connection in connections:
            self.say(connection, Ready(epoch))
        return self

    def stop(self, epoch: int, *connections: int, written: int | None = None) -> None:
        for connection in connections:
            self.say(connection, Stopped(epoch, written if connection == 10 else None))

    def plan(self, *participants: int, line: str = "") -> Wanted:
        wanted = self.state.task()
        assert isinstance(wanted, Wanted)
        again = Announcement(Raw(b"{}"), participants, stages(*participants), line=line)
        self.note(self.state.plan_again(wanted.members, again, self.now))
        return wanted

    def heard(self, connection: int, kind: str) -> list[Any]:
        return [message for message in self.told.get(connection, []) if message.kind == kind]

    def pass_time(self, seconds: float, *silent: int, status: RankStatus | None = None) -> None:
        """Let time pass, in which all connections but some beat."""
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for connection in tuple(self.state.roster.rank_of):
                if connection not in silent:
                    self.say(connection, Beat(status or RankStatus(busy=("computing", 0.1))))
            self.note(self.state.tick(self.now))


def running(world: int, *participants: int) -> Run:
    run = Run(world, *participants).start(1, *(10 + rank for rank in participants))
    assert [len(run.heard(10 + rank, "run")) for rank in participants] == [1] * len(participants)
    return run


def test_rank_that_comes_after_the_beginning_is_a_spare() -> None:
    run = Run(3, 0, 1, late=(2,)).start(1, 10, 11)
    run.come(2, 12)
    newcomer = run.state.task()
    assert isinstance(newcomer, Newcomer)
    assert (newcomer.rank, newcomer.connection) == (2, 12)
    run.note(run.state.judge_newcomer(12, None, run.now))
    assert [message.line for message in run.heard(10, "notice")] == [
        "rank 2 (on pi2) has joined, and is there to take the place of another"
    ]
    run.close(11)
    run.stop(1, 10, written=3)
    assert sorted(run.plan(0, 2).facts) == [0, 2]
    run.start(2, 10, 12)
    assert [message.epoch for message in run.heard(12, "run")] == [2]


def test_rank_that_comes_while_the_plan_is_made_without_it_is_told_so() -> None:
    run = Run(3, late=(2,))
    run.come(2, 12)
    (verdict,) = run.heard(12, "verdict")
    assert verdict.failure.line.startswith("rank 2 (on pi2) is too late, and the others go on without it")
    assert run.state.verdict is None


def test_run_does_not_begin_without_a_rank_that_failed_or_that_it_needs() -> None:
    terms = Terms(TIMEOUT_S, required=frozenset({0, 2}), joins_later=True)
    failed = HubState(world_size=3, timeout_s=TIMEOUT_S, now=0.0, terms=terms)
    failed.received(11, Hello(1, 3, "pi1"), 1.0)
    failed.received(11, Failed("no such device"), 1.0)
    assert failed.verdict is not None
    assert failed.verdict.line == "rank 1 (on pi1) failed: no such device"
    alone = HubState(world_size=3, timeout_s=TIMEOUT_S, now=0.0, terms=terms)
    alone.received(10, Hello(0, 3, "pi0"), 0.0)
    alone.tick(TIMEOUT_S + 0.5)
    assert alone.verdict is not None
    assert alone.verdict.line.startswith("rank 2 of 3 never appeared within 10 s")


def test_spare_takes_the_place_of_a_killed_rank_and_the_summary_is_that_of_the_last_epoch() -> None:
    run = running(4, 0, 1, 2)
    assert [message.epoch for message in run.heard(11, "prepare")] == [1]
    assert not run.heard(13, "prepare")
    run.close(11)
    assert [run.heard(connection, "abort")[0].line for connection in (10, 12)] == [
        f"rank 1 (stage 1, on pi1) is gone: {KILLED}"
    ] * 2
    assert run.state.task() is None  # nobody has stopped
    run.stop(1, 10, 12, written=7)
    wanted = run.plan(0, 2, 3, line="now with rank 3")
    assert sorted(wanted.facts) == [0, 2, 3]
    assert wanted.cause == f"rank 1 (stage 1, on pi1) is gone: {KILLED}"
    assert wanted.lost == (1,)
    assert [message.line for message in run.heard(13, "notice")] == ["now with rank 3"]
    run.start(2, 10, 12, 13)
    assert [message.epoch for message in run.heard(13, "run")] == [2]
    run.say(10, Complete())
    assert run.heard(13, "complete")
    run.say(10, Record("r"), Done(Raw(b"0")))
    run.say(12, Done(Raw(b"2")))
    assert not run.heard(10, "summary")
    run.say(13, Done(Raw(b"3")))
    assert sorted(run.heard(10, "summary")[0].stats) == [0, 2, 3]
    assert run.state.verdict is None


def test_rank_that_comes_back_is_reviewed_and_then_a_spare() -> None:
    run = running(3, 0, 1, 2)
    run.close(11)
    run.come(1, 21)
    assert run.state.task() == Newcomer(1, 21, Raw(b"{}"))
    assert not run.heard(21, "plan")
    run.note(run.state.judge_newcomer(21, None, run.now))
    assert run.heard(21, "plan")
    run.stop(1, 10, 12)
    assert sorted(run.plan(0, 1, 2).facts) == [0, 1, 2]
    assert [message.epoch for message in run.heard(21, "prepare")] == [2]


def test_run_waits_for_the_facts_of_a_rank_that_has_come_before_it_gives_up() -> None:
    run = running(2, 0, 1)
    run.close(11)
    run.stop(1, 10)
    run.say(21, Hello(1, 2, "pi1"))
    wanted = run.state.task()
    assert isinstance(wanted, Wanted)
    failure = Failure(FailureKind.REFUSED, "nothing fits", exit_code=EXIT_INFEASIBLE)
    run.note(run.state.give_up(wanted.members, failure, run.now))
    assert (run.state.verdict, run.state.task()) == (None, None)
    run.say(21, Facts(Raw(b"{}")))
    assert isinstance(run.state.task(), Newcomer)
    run.note(run.state.judge_newcomer(21, None, run.now))
    assert sorted(run.plan(0, 1).facts) == [0, 1]


def test_run_gives_up_when_a_rank_that_has_come_leaves_again() -> None:
    run = running(2, 0, 1)
    run.close(11)
    run.stop(1, 10)
    run.say(21, Hello(1, 2, "pi1"))
    failure = Failure(FailureKind.REFUSED, "nothing fits", exit_code=EXIT_INFEASIBLE)
    for connection in (21, 10):
        wanted = run.state.task()
        assert isinstance(wanted, Wanted)
        run.note(run.state.give_up(wanted.members, failure, run.now))
        assert (run.state.verdict is None) == (connection == 21)
        run.close(connection)


def test_process_whose_facts_differ_is_sent_away_alone() -> None:
    run = running(3, 0, 1)
    run.close(12)
    run.come(2, 22)
    run.note(run.state.judge_newcomer(22, "ranks 0 and 2 disagree on -u", run.now))
    assert [message.failure.line for message in run.heard(22, "verdict")] == ["ranks 0 and 2 disagree on -u"]
    assert run.state.verdict is None
    run.close(22)
    run.come(2, 32)
    assert isinstance(run.state.task(), Newcomer)


@pytest.mark.parametrize("lives", [False, True])
def test_process_whose_number_is_taken_waits_until_the_other_is_heard_or_lost(lives: bool) -> None:
    run = running(3, 0, 1, 2)
    run.come(1, 21)
    assert run.state.task() is None
    if lives:
        run.pass_time(1)
        (verdict,) = run.heard(21, "verdict")
        assert verdict.failure.line == "rank 1 has already joined: start each rank once"
        assert run.state.roster.seats[1].connection == 11
    else:
        run.pass_time(TIMEOUT_S, 11)
        assert run.state.roster.seats[1].connection == 21
        assert isinstance(run.state.task(), Newcomer)
        assert run.heard(11, "verdict")  # should it wake up, it ends


def test_silent_rank_is_lost_and_all_others_may_be() -> None:
    run = running(3, 0, 1, 2)
    run.pass_time(TIMEOUT_S, 11, 12)
    assert run.state.verdict is None
    run.stop(1, 10)
    wanted = run.plan(0)
    assert sorted(wanted.facts) == [0]
    assert wanted.cause.count("has been silent for") == 2


def test_loss_of_a_spare_stops_nothing() -> None:
    run = running(3, 0, 1)
    run.close(12)
    assert not run.heard(10, "abort")
    (notice,) = run.heard(10, "notice")
    assert notice.line == f"rank 2 (on pi2) is gone: {KILLED}; it had no part in the pipeline"


@pytest.mark.parametrize("comes_back", [False, True])
def test_microbatch_that_fails_twice_ends_the_run(comes_back: bool) -> None:
    run = running(4, 0, 1)
    run.say(11, Failed("microbatch 5 could not be computed: Oops", 5))
    run.stop(1, 10)
    second, connection = (1, 21) if comes_back else (2, 12)
    if comes_back:
        run.close(11)
        run.come(1, 21)
        run.note(run.state.judge_newcomer(21, None, run.now))
    run.plan(0, second)
    run.start(2, 10, connection)
    run.say(
        connection,
        Failed("microbatch 4 could not be computed: Oops", 4) if not comes_back else Beat(RankStatus()),
    )
    assert run.state.verdict is None
    if not comes_back:
        run.stop(2, 10)
        run.plan(0, 3)
        run.start(3, 10, 13)
        connection = 13
    run.say(connection, Failed("microbatch 5 could not be computed: Oops", 5))
    assert run.state.verdict is not None
    assert run.state.verdict.line.startswith("microbatch 5 cannot be computed, as it failed on rank 1")
    assert run.heard(10, "verdict")


def test_member_that_does_not_stop_is_lost() -> None:
    run = running(4, 0, 1, 2)
    run.close(12)
    run.stop(1, 10)
    run.pass_time(7)
    assert run.state.task() is None
    assert not run.heard(11, "verdict")
    run.pass_time(2)
    assert "has not stopped within 8 s" in run.heard(11, "verdict")[0].failure.line
    assert sorted(run.plan(0, 3).facts) == [0, 3]


def test_link_that_breaks_again_costs_the_rank_at_its_other_end() -> None:
    run = running(3, 0, 1, 2)
    run.say(12, LinkLost(1, 1, "the connection to rank 1 was lost"))
    run.stop(1, 10, 11, 12)
    wanted = run.plan(0, 1, 2)
    assert wanted.cause == "rank 2 (stage 2, on pi2): the connection to rank 1 was lost"
    run.start(2, 10, 11, 12)
    run.say(12, LinkLost(2, 1, "the connection to rank 1 was lost"))
    assert run.heard(11, "verdict")
    run.stop(2, 10, 12)
    assert sorted(run.plan(0, 2).facts) == [0, 2]


def test_dead_link_is_tried_again_and_a_standstill_too() -> None:
    run = running(3, 0, 1, 2)
    waits = RankStatus(awaiting=frozenset({1}), sent={2: 4})
    run.pass_time(TIMEOUT_S, status=waits)
    assert "the link between them is dead" in run.heard(10, "abort")[0].line
    run.stop(1, 10, 11, 12)
    run.plan(0, 1, 2)
    run.start(2, 10, 11, 12)
    run.pass_time(TIMEOUT_S, status=RankStatus())
    assert "nothing has moved" in run.heard(10, "abort")[1].line


@pytest.mark.parametrize(("loses", "fits"), [(10, True), (11, False)])
def test_run_ends_without_rank_0_or_where_nothing_fits(loses: int, fits: bool) -> None:
    run = running(2, 0, 1)
    run.close(loses)
    if not fits:
        run.stop(1, 10)
        wanted = run.state.task()
        assert isinstance(wanted, Wanted)
        failure = Failure(FailureKind.REFUSED, "nothing fits", exit_code=EXIT_INFEASIBLE)
        run.note(run.state.give_up(wanted.members, failure, run.now))
        assert [message.failure.exit_code for message in run.heard(10, "verdict")] == [EXIT_INFEASIBLE]
    assert run.state.verdict is not None
    run.come(1, 21)
    assert run.heard(21, "verdict")


def test_rank_lost_after_the_end_is_only_noticed_and_one_that_comes_then_may_leave() -> None:
    run = running(3, 0, 1, 2)
    run.say(10, Complete())
    run.close(12)
    assert run.heard(10, "notice")[0].line.endswith("; the results are complete")
    run.come(2, 22)
    assert [run.heard(22, kind) != [] for kind in ("plan", "complete")] == [True, True]
    run.say(10, Done(Raw(b"0")))
    run.say(11, Done(Raw(b"1")))
    assert sorted(run.heard(11, "summary")[0].stats) == [0, 1]


def test_record_of_an_epoch_that_has_ended_reaches_the_data_rank() -> None:
    run = running(3, 0, 1, 2)
    run.close(1 + 10)
    run.stop(1, 10, 12, written=2)
    run.say(12, Record("of epoch 1"))
    assert [(told.rank, told.text) for told in run.heard(10, "rankrecord")] == [(2, "of epoch 1")]


@pytest.mark.parametrize("message", [Done(Raw(b"1")), Stopped(1), Complete()])
def test_member_that_breaks_the_protocol_is_lost(message: Message) -> None:
    run = running(3, 0, 1)
    run.say(11, message)
    assert "sent a malformed" in run.heard(11, "verdict")[0].failure.line
    assert run.heard(10, "abort")
    assert run.state.verdict is None


def changing() -> Run:
    """A run of epoch 1 on ranks 0 and 1, which prepares epoch 2 on ranks 0 and 2."""
    run = running(3, 0, 1)
    since = run.state.snapshot()
    assert since is not None
    assert (since.epoch, since.running, sorted(since.facts), sorted(since.statuses)) == (
        1,
        True,
        [0, 1, 2],
        [0, 1],
    )
    names = {0: "stage 1", 2: "stage 0"}
    better = Announcement(Raw(b'{"epoch":2}'), (0, 2), names, line="rank 2 is faster")
    run.note(run.state.change(since, better, run.now))
    assert [message.line for message in run.heard(11, "notice")] == ["rank 2 is faster"]
    assert run.state.change_outcome() is None
    return run


def test_better_plan_takes_over_and_the_summary_has_the_figures_of_both() -> None:
    run = changing()
    run.pass_time(1.0)
    run.start(2, 10, 12)
    run.pass_time(TIMEOUT_S, status=RankStatus(busy=("computing", 0.1), finished=1))
    run.say(11, Passed(1))
    run.say(10, Passed(1, 7))
    outcome = run.state.change_outcome()
    assert outcome == Switched(2, 7, 11.0)
    run.close(11)
    assert run.heard(10, "notice")[-1].line.endswith("; it had no part in the pipeline")
    run.say(10, Complete())
    run.say(10, Done(Raw(b"null")))
    run.say(12, Done(Raw(b"{}")))
    assert [sorted(message.stats) for message in run.heard(12, "summary")] == [[0, 2]]


def test_plan_that_a_rank_cannot_prepare_is_dropped() -> None:
    run = changing()
    run.say(12, Declined(2, "no memory"))
    assert run.state.change_outcome() == Dropped("no memory")
    run.stop(2, 10, 12)
    since = run.state.snapshot()
    assert since is not None
    assert since.running
    run.close(12)
    assert run.state.task() is None
    # The rank has left since the decision was made.
    run.note(run.state.change(since, Announcement(Raw(b"{}"), (0, 2)), run.now))
    assert run.state.change_outcome() == Dropped("a rank has left or come again meanwhile")


def test_loss_during_a_change_is_one_as_any_other() -> None:
    run = changing()
    run.close(11)
    assert run.state.change_outcome() == Dropped(f"rank 1 (stage 1, on pi1) is gone: {KILLED}")
    run.stop(1, 10)
    run.stop(2, 10, 12)
    assert sorted(run.plan(0, 2).facts) == [0, 2]


def test_rank_that_does_not_drop_a_plan_in_time_is_lost() -> None:
    run = changing()
    run.say(10, Declined(2, "no memory"))
    run.stop(2, 10)
    run.pass_time(TIMEOUT_S)
    assert "has not stopped within" in run.heard(12, "verdict")[0].failure.line
    since = run.state.snapshot()
    assert since is not None
    assert since.running


HANGS = RankStatus(loading=Loading("loading layers 9-12", 40_000_000, 330_000_000))


def hang(run: Run, connection: int) -> None:
    """Let time pass in which one rank loads nothing, although it sends heartbeats."""
    for _ in range(40):
        run.say(connection, Beat(HANGS))
        run.pass_time(0.25, connection)


def test_rank_that_hangs_while_it_loads_its_part_is_lost() -> None:
    run = Run(4, 0, 1, 2).start(1, 10, 12)
    hang(run, 11)
    name = "rank 1 (stage 1, on pi1)"
    assert run.heard(10, "notice")[0].line == (
        f"{name} has been loading layers 9-12 for 4 s (40 of 330 MB); still alive"
    )
    (verdict,) = run.heard(11, "verdict")
    assert verdict.failure.line.startswith(f"{name} has been loading layers 9-12 for 8 s (40 of 330 MB), ")
    run.stop(1, 10, 12)
    assert sorted(run.plan(0, 2, 3).facts) == [0, 2, 3]
    # The spare that takes over hangs, too.
    run.start(2, 10, 12)
    hang(run, 13)
    assert len(run.heard(13, "verdict")) == 1
    run.stop(2, 10, 12)
    assert sorted(run.plan(0, 2).facts) == [0, 2]
    run.start(3, 10, 12)
    assert [message.epoch for message in run.heard(12, "run")] == [3]


def test_data_rank_that_hangs_while_it_loads_ends_the_run() -> None:
    run = Run(2, 0, 1).start(1, 11)
    hang(run, 10)
    assert run.state.verdict is not None
    assert run.state.verdict.exit_code == 4


def test_better_plan_is_dropped_if_its_load_hangs_and_the_rank_is_kept() -> None:
    run = changing()
    hang(run, 12)
    outcome = run.state.change_outcome()
    assert isinstance(outcome, Dropped)
    assert "has been loading layers 9-12 for 8 s (40 of 330 MB)" in outcome.why
    run.stop(2, 10, 12)
    assert not run.heard(12, "verdict")
    assert not any("still alive" in message.line for message in run.heard(10, "notice"))
    hang(run, 12)  # the thread is left behind, and tells of itself; nobody waits for it
    assert not run.heard(12, "verdict")
    run.close(11)
    run.stop(1, 10)
    run.plan(0, 2)
    run.start(3, 10)
    hang(run, 12)
    assert run.heard(12, "verdict")


def test_newcomer_that_hangs_before_it_states_its_facts_is_sent_away() -> None:
    run = running(3, 0, 1)
    run.close(12)
    run.say(22, Hello(2, 3, "pi2"))
    hang(run, 22)
    assert run.heard(22, "verdict")
    assert run.state.verdict is None
    assert not run.heard(10, "abort")
    run.come(2, 32)
    assert isinstance(run.state.task(), Newcomer)


# --- losses before the start ------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["closed", "silent", "hung"])
@pytest.mark.parametrize("knows", [False, True], ids=["before its facts", "after its facts"])
def test_rank_that_is_lost_before_the_plan_is_left_out(end: str, knows: bool) -> None:
    run = Run(4, late=(1, 2), waits=True)
    run.say(11, Hello(1, 4, "pi1"))
    if knows:
        run.say(11, Facts(Raw(b"{}")))
    if end == "closed":
        run.close(11)
    elif end == "silent":
        run.pass_time(7.5, 11)
    else:
        hang(run, 11)
    assert run.state.verdict is None
    assert "rank 1 (on pi1) " in run.state.roster.left_out[1].line
    assert run.state.roster.facts() is None  # rank 2 may still come
    run.come(2, 12)
    facts = run.state.roster.facts()
    assert facts is not None
    assert sorted(facts) == [0, 2, 3]
    run.first_plan(0, 2)
    run.start(1, 10, 12)
    assert [message.epoch for message in run.heard(12, "run")] == [1]
    run.come(1, 21)  # started again, it is a spare
    assert isinstance(run.state.task(), Newcomer)


def test_rank_that_is_lost_before_the_plan_may_come_again_in_time() -> None:
    run = Run(3, late=(1, 2), waits=True)
    run.come(1, 11)
    run.close(11)
    run.come(1, 21)
    run.come(2, 12)
    facts = run.state.roster.facts()
    assert facts is not None
    assert sorted(facts) == [0, 1, 2]


@pytest.mark.parametrize("rank", [0, 2])
def test_loss_before_the_plan_of_a_rank_without_which_nothing_goes_ends_the_run(rank: int) -> None:
    run = Run(3, data_rank=2)
    run.close(10 + rank)
    assert run.state.verdict is not None
    assert run.state.verdict.line == f"rank {rank} (on pi{rank}) is gone: {KILLED}"


def test_loss_while_the_first_plan_is_made_leads_to_another_one() -> None:
    run = Run(4)
    run.close(11)
    run.first_plan(0, 1, 2)
    assert run.state.verdict is None
    assert run.heard(12, "plan")
    assert not run.heard(12, "prepare")
    wanted = run.plan(0, 2, 3)
    assert (sorted(wanted.facts), wanted.cause) == ([0, 2, 3], f"rank 1 (on pi1) is gone: {KILLED}")
    assert wanted.lost == (1,)
    run.start(1, 10, 12, 13)
    assert [message.epoch for message in run.heard(13, "run")] == [1]


def test_loss_of_a_rank_without_a_part_while_the_first_plan_is_made_is_none() -> None:
    run = Run(4)
    run.close(13)
    run.first_plan(0, 1, 2)
    assert [message.epoch for message in run.heard(12, "prepare")] == [1]


@pytest.mark.parametrize("said", [True, False], ids=["continue was given", "by default"])
def test_absent_rank_that_may_have_been_refused_ends_the_run_unless_the_user_excused_it(said: bool) -> None:
    run = Run(3, late=(2,), waits=True, ends_if_refused=not said)
    run.note(run.state.refused("10.0.0.9", "has another key", run.now))
    run.note(run.state.closed(77, run.now, left="10.0.0.8"))
    run.pass_time(TIMEOUT_S + 0.5)
    if said:
        assert run.state.verdict is None
        assert run.state.roster.left_out.keys() == {2}
        return
    assert run.state.verdict is not None
    assert run.state.verdict.exit_code == EXIT_PEER
    assert run.state.verdict.line == (
        "rank 2 of 3 never appeared within 10 s (a process at 10.0.0.9 has another key): "
        "give every rank the same --key"
    )


@pytest.mark.parametrize("comes", [True, False], ids=["all came", "a scanner"])
def test_refused_process_does_not_matter_if_it_was_none_of_the_ranks(comes: bool) -> None:
    run = Run(3, late=(2,), waits=True, ends_if_refused=True)
    why = "has another key" if comes else "does not speak TLS 1.3"
    run.note(run.state.refused("10.0.0.9", why, run.now))
    if comes:
        run.come(2, 12)
    run.pass_time(TIMEOUT_S + 0.5)
    assert run.state.verdict is None
    assert run.state.roster.facts() is not None

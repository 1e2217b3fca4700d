"""The rules of failover: single cases, and a simulated world in which everything goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from effort import cases
from failover_bugs import BUGS
from failover_shells import Rules, ViolationError
from failover_world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from pipeedge.base.errors import PipeEdgeError
from pipeedge.control.admission import Attendance, Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.attempts import Faults
from pipeedge.control.changing import Dropped
from pipeedge.control.epoch_member import EpochMember, MemberStep
from pipeedge.control.epochs import Epochs, Step
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.losses import Losses
from pipeedge.control.messages import (
    Abort,
    Complete,
    Declined,
    LinkLost,
    Message,
    Notice,
    Passed,
    Prepare,
    Ready,
    Retire,
    Run,
    Stopped,
    Verdict,
)
from pipeedge.control.plans import Plans
from pipeedge.control.rank_messages import RankMessages
from pipeedge.control.rank_watch import RankWatch
from pipeedge.control.roster import Claim, Outgoing, Roster
from pipeedge.data import Microbatch
from pipeedge.run.ledger import Arrival, Ledger

PLAN = Raw(b"{}")
MOST_SEEDS = 10_000
"""Number of seeds within which each planted bug must be found."""


def gone(rank: int) -> Failure:
    return Failure(FailureKind.GONE, "was killed", rank)


class Hub:
    """The epochs of a session in which connection ``10 + n`` belongs to rank n."""

    def __init__(self, ranks: int, data_rank: int = 0, *, goes_on: bool = True) -> None:
        self.roster = Roster(ranks)
        self.roster.data_rank = data_rank
        for rank in range(ranks):
            self.come(rank, 10 + rank)
        self.epochs = Epochs(self.roster)
        self.epochs.goes_on = goes_on
        self.plans = Plans(self.roster, self.epochs)
        attendance = Attendance(self.roster, Terms(8.0), 0.0)
        self.losses = Losses(self.roster, self.epochs, attendance, Faults(), 8.0)
        watch = RankWatch(self.roster, 8.0, 0.0)
        self.messages = RankMessages(self.roster, self.epochs, self.losses, watch, 0.0)

    def come(self, rank: int, connection: int) -> None:
        seat = self.roster.seat(rank, connection, "pi", 0.0)
        seat.facts, seat.agrees = Raw(b"{}"), True

    def prepare(self, *ranks: int) -> Outgoing:
        """Let the hub have a plan for ``ranks``."""
        return self.plans.made(self.roster.members, Announcement(PLAN, ranks), 0.0)

    def running(self, *ranks: int) -> Hub:
        self.prepare(*ranks)
        self.answer(Ready, *ranks)
        assert self.epochs.step is Step.RUNNING
        return self

    def answer(self, kind: Callable[[int], Message], *ranks: int) -> Outgoing:
        """Let members answer, and return what the hub says to the last one."""
        outgoing: Outgoing = []
        for rank in ranks:
            outgoing = self.say(rank, kind(self.epochs.epoch))
        return outgoing

    def say(self, rank: int, message: Message) -> Outgoing:
        return self.messages.take_of_epoch(rank, message, 0.0)

    def lose(self, rank: int) -> Outgoing:
        """Lose a rank; return what the others hear that is not a notice."""
        heard = self.losses.lost(rank, gone(rank), 0.0)
        own = [one for one in heard if one[0] == 10 + rank]
        return [one for one in heard if one not in own and not isinstance(one[1], Notice)]

    @property
    def needs_plan(self) -> bool:
        return self.plans.wanted() is not None


def to(message: Message, *ranks: int) -> Outgoing:
    return [(10 + rank, message) for rank in ranks]


class TestHub:
    def test_all_participants_prepare_before_any_runs(self) -> None:
        hub = Hub(4)
        assert hub.prepare(0, 1, 2) == to(Prepare(1, PLAN), 0, 1, 2)
        assert hub.answer(Ready, 0, 2) == []
        assert hub.answer(Ready, 1) == to(Run(1), 0, 1, 2)

    def test_survivors_stop_before_the_next_epoch_is_planned(self) -> None:
        hub = Hub(4).running(0, 1, 2)
        assert hub.lose(1) == to(Abort(1, "was killed"), 0, 2)
        assert not hub.needs_plan
        hub.answer(Stopped, 0, 2)
        assert hub.needs_plan
        assert hub.roster.members == {0: 10, 2: 12, 3: 13}
        assert hub.prepare(0, 2, 3) == to(Prepare(2, PLAN), 0, 2, 3)

    def test_second_loss_during_recovery_is_a_newer_epoch(self) -> None:
        hub = Hub(4).running(0, 1, 2)
        hub.lose(1)
        hub.answer(Stopped, 0, 2)
        hub.prepare(0, 2, 3)
        assert hub.lose(2) == to(Abort(2, "was killed"), 0, 3)
        assert hub.lose(3) == []  # it will not answer any more
        hub.answer(Stopped, 0)
        assert hub.prepare(0) == to(Prepare(3, PLAN), 0)

    def test_first_loss_is_the_last_event_where_the_session_does_not_go_on(self) -> None:
        for step in (Step.PREPARING, Step.RUNNING):
            hub = Hub(3, goes_on=False)
            hub.prepare(0, 1)
            if step is Step.RUNNING:
                hub.answer(Ready, 0, 1)
            assert hub.losses.lost(1, gone(1), 0.0) == to(Verdict(gone(1)), 0, 1, 2)
            assert hub.epochs.step is Step.ENDED
        for fault in (Losses.stalled, lambda losses, *args: losses.link_lost(1, 0, *args)):
            hub = Hub(3, goes_on=False).running(0, 1)
            fault(hub.losses, Failure(FailureKind.STALLED, "nothing moves"), 0.0)
            assert hub.epochs.step is Step.ENDED

    def test_plan_with_a_lost_participant_is_dropped(self) -> None:
        hub = Hub(3).running(0, 1)
        hub.lose(1)
        hub.answer(Stopped, 0)
        asked = hub.roster.members
        hub.lose(2)
        hub.come(2, 20)
        assert hub.plans.made(asked, Announcement(PLAN, (0, 2)), 0.0) == []
        assert hub.needs_plan
        # One that was meant for other members than those of now does not end the run either.
        refusal = Failure(FailureKind.REFUSED, "nothing fits")
        assert hub.plans.none_fits(asked, refusal, 0.0) == []
        ended = hub.plans.none_fits(hub.roster.members, refusal, 0.0)
        assert ended == [(number, Verdict(refusal)) for number in (10, 20)]
        assert hub.epochs.verdict == refusal

    @pytest.mark.parametrize("rank", [0, 2])
    def test_loss_of_the_hub_or_the_data_rank_ends_the_run(self, rank: int) -> None:
        hub = Hub(3, data_rank=2).running(0, 1, 2)
        hub.roster.claims[1] = Claim(20, "pi")
        assert len(hub.lose(rank)) == 3
        assert hub.epochs.verdict == gone(rank)

    def test_claimant_takes_the_seat_of_a_lost_rank_and_no_part_in_what_fails(self) -> None:
        hub = Hub(3).running(0, 1)
        hub.roster.claims[1] = Claim(20, "pi")
        assert hub.lose(1) == to(Abort(1, "was killed"), 0)
        assert hub.roster.members == {0: 10, 1: 20, 2: 12}
        hub.answer(Stopped, 0)
        assert hub.needs_plan

    def test_link_that_breaks_twice_costs_the_rank_at_its_other_end(self) -> None:
        hub = Hub(3).running(0, 1, 2)
        assert hub.say(2, LinkLost(1, 1, "broken")) == to(Abort(1, "broken"), 0, 1, 2)
        hub.answer(Stopped, 0, 1, 2)
        hub.prepare(0, 1, 2)
        (dismissed, verdict), *aborts = hub.say(1, LinkLost(2, 2, "broken"))
        assert dismissed == 12
        assert isinstance(verdict, Verdict)
        assert aborts == to(Abort(2, "broken"), 0, 1)

    def test_link_is_forgiven_when_results_came_in_between(self) -> None:
        hub = Hub(3).running(0, 1, 2)
        for written, peer in ((5, 1), (9, 0), (12, 1)):
            hub.say(2, LinkLost(hub.epochs.epoch, peer, "broken"))
            hub.say(0, Stopped(hub.epochs.epoch, written))
            hub.answer(Stopped, 1, 2)
            hub.running(0, 1, 2)
        assert hub.epochs.epoch == 4
        assert set(hub.roster.members) == {0, 1, 2}

    def test_second_standstill_without_a_result_ends_the_run(self) -> None:
        hub = Hub(2).running(0, 1)
        stalled = Failure(FailureKind.STALLED, "nothing moves")
        assert hub.losses.stalled(stalled, 0.0) == to(Abort(1, "nothing moves"), 0, 1)
        hub.answer(Stopped, 0, 1)
        hub.prepare(0, 1)
        hub.losses.stalled(stalled, 0.0)
        assert hub.epochs.verdict == stalled

    @pytest.mark.parametrize(
        "message", [Ready(1), Stopped(1), LinkLost(2, 1, ""), LinkLost(1, 0, ""), LinkLost(1, 5, "")]
    )
    def test_member_that_breaks_the_protocol_is_noticed(self, message: Message) -> None:
        with pytest.raises(ValueError, match=r".+"):
            Hub(2).running(0, 1).say(0, message)

    def test_only_the_data_rank_completes(self) -> None:
        with pytest.raises(ValueError, match="not from the data rank"):
            Hub(2).running(0, 1).say(1, Complete())

    def test_session_without_participants_has_nothing_to_wait_for(self) -> None:
        hub = Hub(2, goes_on=False)
        assert hub.prepare() == []
        assert hub.epochs.step is Step.RUNNING


class TestChange:
    """Epoch 1 runs on ranks 0 and 1; epoch 2, on ranks 0 and 2, is to follow."""

    def change(self, hub: Hub, *ranks: int) -> Outgoing:
        since = hub.plans.snapshot()
        assert since is not None
        return hub.plans.better(since, Announcement(PLAN, ranks), 0.0)

    def changing(self) -> Hub:
        hub = Hub(4).running(0, 1)
        assert self.change(hub, 0, 2) == to(Prepare(2, PLAN), 0, 2)
        assert hub.epochs.step is Step.CHANGING
        return hub

    def switching(self) -> Hub:
        hub = self.changing()
        assert hub.say(0, Ready(2)) == []
        assert hub.say(2, Ready(2)) == to(Run(2), 0, 2)
        return hub

    def test_next_epoch_runs_once_all_are_prepared_and_the_former_retires_once_all_has_passed(self) -> None:
        hub = self.switching()
        assert (hub.epochs.epoch, hub.epochs.participants) == (1, {0, 1, 2})
        assert hub.say(1, Passed(1)) == []
        assert hub.say(0, Passed(1, 7)) == to(Retire(1), 0, 1)
        assert (hub.epochs.step, hub.epochs.epoch, hub.epochs.participants) == (Step.RUNNING, 2, {0, 2})
        assert hub.lose(1) == []

    def test_end_of_the_input_may_come_before_the_switch(self) -> None:
        hub = self.changing()
        hub.say(1, Passed(1))
        hub.say(0, Ready(2))
        hub.say(2, Ready(2))
        assert hub.say(0, Passed(1, 5)) == to(Retire(1), 0, 1)

    @pytest.mark.parametrize(
        "fault",
        [
            lambda hub: hub.lose(2),
            lambda hub: hub.say(2, Declined(2, "was killed")),
            lambda hub: hub.say(2, LinkLost(2, 0, "was killed")),
        ],
        ids=["loss", "declined", "link"],
    )
    def test_fault_of_what_is_prepared_drops_it_alone(self, fault: Callable[[Hub], Outgoing]) -> None:
        hub = self.changing()
        aborts = fault(hub)
        assert hub.epochs.step is Step.DROPPING
        assert hub.epochs.outcome == Dropped("was killed")
        assert not hub.plans.can_change
        here = [rank for rank in (0, 2) if rank in hub.roster.members]
        assert aborts == to(Abort(2, "was killed"), *here)
        hub.say(0, LinkLost(2, 2, "reset"))  # of a rank that is gone, perhaps
        for rank in here:
            hub.say(rank, Stopped(2))
        assert (hub.epochs.step, hub.epochs.epoch, hub.epochs.participants) == (Step.RUNNING, 1, {0, 1})
        self.change(hub, 0, 3)
        assert hub.say(3, Ready(3)) == []

    def test_loss_of_a_rank_of_what_runs_stops_both(self) -> None:
        aborts = to(Abort(1, "was killed"), 0) + to(Abort(2, "was killed"), 0, 2)
        for hub in (self.changing(), self.switching()):
            assert hub.lose(1) == aborts
            for connection, abort in aborts:
                assert not hub.needs_plan
                assert isinstance(abort, Abort)
                hub.say(connection - 10, Stopped(abort.epoch))
            assert hub.needs_plan

    def test_loss_of_a_rank_of_the_next_epoch_stops_both_once_it_runs(self) -> None:
        aborts = to(Abort(1, "was killed"), 0, 1) + to(Abort(2, "was killed"), 0)
        assert self.switching().lose(2) == aborts

    def test_loss_while_a_change_is_dropped_waits_for_what_stops_already(self) -> None:
        hub = self.changing()
        hub.say(2, Declined(2, "no memory"))
        assert hub.lose(1) == to(Abort(1, "was killed"), 0)
        for rank, epoch in ((0, 2), (0, 1), (2, 2)):
            assert not hub.needs_plan
            hub.say(rank, Stopped(epoch))
        assert hub.needs_plan

    def test_change_for_members_that_have_left_is_none(self) -> None:
        hub = Hub(4).running(0, 1)
        since = hub.plans.snapshot()
        assert since is not None
        hub.lose(2)
        hub.come(2, 20)
        assert hub.plans.better(since, Announcement(PLAN, (0, 2)), 0.0) == []
        assert hub.plans.can_change

    def test_member_prepares_one_epoch_beside_one_that_runs(self) -> None:
        member = EpochMember()
        member.heard(Prepare(1, PLAN))
        with pytest.raises(ValueError, match="prepare 2 while preparing 1"):
            member.heard(Prepare(2, PLAN))
        assert member.says(Ready(1))
        member.heard(Run(1))
        member.heard(Prepare(2, PLAN))
        assert member.says(Declined(2, "no memory"))
        assert member.says(Ready(2))
        assert not member.says(Declined(2, "no memory"))
        assert member.says(Passed(1, 7))
        assert not member.says(LinkLost(1, 1, "reset"))
        member.heard(Run(2))
        member.heard(Retire(1))
        assert member.epochs == (2,)


class TestMember:
    def test_one_epoch_after_the_other(self) -> None:
        member = EpochMember()
        member.heard(Prepare(3, PLAN))
        assert not member.says(Ready(2))
        assert member.says(Ready(3))
        member.heard(Run(3))
        assert member.says(LinkLost(3, 1, "reset"))
        assert not member.says(LinkLost(3, 2, "reset"))
        member.heard(Abort(3, "lost"))
        assert not member.says(LinkLost(3, 2, "reset"))
        assert member.says(Stopped(3, 7))
        assert (member.step(3), member.latest) == (MemberStep.SPARE, 3)

    def test_abort_crosses_the_report_that_all_is_prepared(self) -> None:
        member = EpochMember()
        member.heard(Prepare(1, PLAN))
        member.heard(Abort(1, "lost"))
        assert not member.says(Ready(1))
        assert member.says(Stopped(1))
        assert not member.says(Stopped(1))

    @pytest.mark.parametrize("message", [Run(1), Abort(1, ""), Prepare(2, PLAN), Run(3)])
    def test_hub_that_breaks_the_protocol_is_noticed(self, message: Prepare | Run | Abort) -> None:
        member = EpochMember()
        member.heard(Prepare(2, PLAN))
        with pytest.raises(ValueError, match=f"{message.kind} {message.epoch} while preparing 2"):
            member.heard(message)


def batch(number: int) -> Microbatch:
    return Microbatch((), (None,), ("",), (number,))


def feed(ledger: Ledger, *numbers: int) -> None:
    for number in numbers:
        ledger.feed(number, batch(number), 0.0)


def cut(ledger: Ledger, epoch: int, window: int) -> int | None:
    """Let a feeder hand over to that of ``epoch``; return the lowest number that this one feeds."""
    ledger.change(epoch, window)
    ledger.hand_over()
    return ledger.first_of_next


class TestLedger:
    def test_new_epoch_feeds_again_what_is_not_written(self) -> None:
        ledger = Ledger()
        ledger.restart(1, 3)
        feed(ledger, 0, 1, 2)
        assert ledger.next_number() is None
        assert ledger.judge(1, 0) is Arrival.WRITE
        ledger.wrote(0)
        ledger.restart(2, 2)
        assert (ledger.next_number(), ledger.position) == (1, 1)
        feed(ledger, 1)
        assert ledger.judge(1, 1) is Arrival.DROP
        assert ledger.judge(2, 0) is Arrival.DROP
        assert ledger.judge(2, 1) is Arrival.WRITE

    @given(st.integers(0, 12), st.integers(1, 4), st.integers(0, 1 << 32))
    @settings(max_examples=100)
    def test_everything_is_written_once_in_order(self, count: int, window: int, seed: int) -> None:
        """Results come back in order; at any moment a new epoch begins, and those on their way are lost."""
        chance, ledger, epoch, rows = random.Random(seed), Ledger(), 1, list[int]()
        ledger.restart(epoch, window)
        on_their_way: list[tuple[int, int]] = []
        while not ledger.complete:
            step = chance.choice(("feed", "feed", "collect", "collect", "fail"))
            number = ledger.next_number()
            if step == "feed" and number == count:
                ledger.input_ended()
            elif step == "feed" and number is not None:
                feed(ledger, number)
                on_their_way.append((epoch, number))
            elif step == "collect" and on_their_way:
                came = on_their_way.pop(0)
                if ledger.judge(*came) is Arrival.WRITE:
                    ledger.wrote(came[1])
                    rows.append(came[1])
            elif step == "fail":
                epoch += 1
                ledger.restart(epoch, window)
            assert ledger.under_way <= window
        assert rows == list(range(count))

    def test_change_cuts_the_line_in_two(self) -> None:
        ledger = Ledger()
        ledger.restart(1, 2)
        feed(ledger, 0, 1)
        assert ledger.next_number() is None
        assert cut(ledger, 2, 1) == 2
        feed(ledger, 2)
        assert ledger.next_number() is None
        assert ledger.judge(2, 2) is Arrival.HOLD
        for number in range(2):
            with pytest.raises(ValueError, match="from an epoch that was not fed it"):
                ledger.judge(2, number)
            assert ledger.judge(1, number) is Arrival.WRITE
            ledger.wrote(number)
        assert ledger.judge(2, 2) is Arrival.WRITE
        ledger.restart(3, 2)
        assert ledger.next_number() == 2
        assert [ledger.judge(epoch, 2) for epoch in (1, 2)] == [Arrival.DROP] * 2

    @given(st.integers(0, 8), st.integers(0, 8), st.integers(1, 6), st.integers(0, 1 << 32))
    @settings(max_examples=100)
    def test_results_let_microbatches_into_a_new_plan(
        self, fed: int, written: int, window: int, seed: int
    ) -> None:
        """Three for two results of either plan, after a first one, until the window is full."""
        chance, ledger = random.Random(seed), Ledger()
        ledger.restart(1, 8)
        feed(ledger, *range(fed))
        for number in range(min(fed, written)):
            ledger.wrote(number)
        assert cut(ledger, 2, window) == fed
        before, new = ledger.written, 0
        while ledger.written < before + 30:
            came, done = ledger.written - before, max(0, ledger.written - fed)
            number = ledger.next_number()
            assert (number is None) == (new - done == window or new >= (2 + 3 * came) // 2)
            if number is not None and (ledger.under_way == 0 or chance.random() < 0.7):
                assert number == fed + new
                feed(ledger, number)
                new += 1
            else:
                ledger.wrote(ledger.written)
        while (number := ledger.next_number()) is not None:
            feed(ledger, number)
        assert ledger.under_way == window

    def test_result_that_skips_another_is_a_fault(self) -> None:
        ledger = Ledger()
        ledger.restart(1, 3)
        feed(ledger, 0, 1)
        for number in (1, 2):
            with pytest.raises(PipeEdgeError, match=f"the result of microbatch {number} instead of 0"):
                ledger.take(number, 1)

    def test_number_out_of_turn_is_a_fault(self) -> None:
        ledger = Ledger()
        ledger.restart(1, 3)
        with pytest.raises(ValueError, match="microbatch 1 is not the one to feed"):
            feed(ledger, 1)
        with pytest.raises(ValueError, match="epoch 1 with a window of 3 cannot follow epoch 1"):
            ledger.restart(1, 3)


# --- the simulated world ----------------------------------------------------------------------------


def trace_of(seed: int, rules: Rules = Rules()) -> tuple[tuple[str, ...], str]:  # noqa: B008 - it is frozen
    """Return what happens in a world, and how an invariant was violated, if one was."""
    world = World(seed, rules)
    try:
        world.run()
    except ViolationError as error:
        return tuple(world.trace), str(error)
    return tuple(world.trace), ""


def failing_trace(rules: Rules, most: int = MOST_SEEDS) -> tuple[int, tuple[tuple[object, ...], str]]:
    """Return the first seed that finds the bug, and what happens in its world."""
    for seed in range(rules.from_seed, most):
        found = trace_of(seed, rules)
        if found[1]:
            return seed, found
    raise AssertionError(f"no seed below {most} finds the bug of {rules}")


class TestWorld:
    def test_every_disturbed_run_ends_as_it_should(self) -> None:
        outcomes = [World(seed).run() for seed in range(cases(5_000, 20))]
        complete = sum(outcome.complete for outcome in outcomes)
        failovers = sum(outcome.failovers for outcome in outcomes)
        # Most runs survive, some cannot, and some fail over several times: the world shows all of it.
        assert 0.4 < complete / len(outcomes) < 0.99
        assert failovers > len(outcomes) / 3
        assert any(outcome.failovers > 2 for outcome in outcomes)
        assert sum(outcome.switches for outcome in outcomes) > len(outcomes) / 12
        assert sum(outcome.drops for outcome in outcomes) > len(outcomes) / 50

    def test_disturbed_texts_have_every_token_once(self) -> None:
        worlds = [World(seed, Rules(text=True)) for seed in range(cases(2_000, 40))]
        outcomes = [world.run() for world in worlds]
        assert sum(outcome.complete for outcome in outcomes) > 0.4 * len(outcomes)
        assert sum(outcome.failovers for outcome in outcomes) > len(outcomes) / 4
        assert any(outcome.switches for outcome in outcomes)
        told = [world.data.texts.state() for world in worlds]
        assert sum(one.repeated_tokens for one in told) > 10 * len(worlds)
        assert any(one.partly_repeated_tokens for one in told)
        assert any(one.kept_tokens for one in told)

    @pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
    def test_planted_bug_is_found_and_replays(self, bug: Rules) -> None:
        seed, first = failing_trace(bug)
        assert all(trace_of(seed, bug) == first for _ in range(cases(20, 20)))

"""The rules of failover: single cases, and a simulated world in which everything goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

import pytest
from effort import cases
from failover_bugs import BUGS
from failover_shells import Rules, ViolationError
from failover_world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from pipeedge.control.announcement import Announcement
from pipeedge.control.epoch_member import Admission, EpochMember, MemberStep
from pipeedge.control.epoch_messages import (
    Abort,
    Declined,
    EpochReady,
    LinkLost,
    Passed,
    Prepare,
    Retire,
    Run,
    Stopped,
)
from pipeedge.control.epochs import Epochs, EpochStep
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.ledger import Arrival, Ledger
from pipeedge.control.members import Members
from pipeedge.control.messages import Complete, Message, Verdict

PLAN = Raw(b"{}")
MOST_SEEDS = 10_000
"""Number of seeds within which each planted bug must be found."""


def gone(rank: int) -> Failure:
    return Failure(FailureKind.GONE, "was killed", rank)


def prepare(epochs: Epochs, *ranks: int) -> list[tuple[int, Message]]:
    """Let the hub have a plan for ``ranks``."""
    assert epochs.wanted_plan is not None
    return epochs.planned(epochs.wanted_plan, Announcement(PLAN, ranks))


def answer(epochs: Epochs, kind: Callable[[int], Message], *incarnations: int) -> list[tuple[int, Message]]:
    """Let members answer, and return what the hub says to the last one."""
    outgoing: list[tuple[int, Message]] = []
    for incarnation in incarnations:
        outgoing = epochs.received(incarnation, kind(epochs.epoch))
    return outgoing


def running(members: dict[int, int], *ranks: int, data_rank: int = 0) -> Epochs:
    epochs = Epochs(members, data_rank)
    prepare(epochs, *ranks)
    answer(epochs, EpochReady, *(members[rank] for rank in ranks))
    assert epochs.step is EpochStep.RUNNING
    return epochs


class TestHub:
    def test_all_participants_prepare_before_any_runs(self) -> None:
        epochs = Epochs({0: 10, 1: 11, 2: 12, 3: 13}, data_rank=0)
        assert prepare(epochs, 0, 1, 2) == [(number, Prepare(1, PLAN)) for number in (10, 11, 12)]
        assert answer(epochs, EpochReady, 10, 12) == []
        assert answer(epochs, EpochReady, 11) == [(number, Run(1)) for number in (10, 11, 12)]

    def test_survivors_stop_before_the_next_epoch_is_planned(self) -> None:
        epochs = running({0: 10, 1: 11, 2: 12, 3: 13}, 0, 1, 2)
        assert epochs.lost(11, gone(1)) == [(number, Abort(1, "was killed")) for number in (10, 12)]
        assert epochs.wanted_plan is None
        answer(epochs, Stopped, 10, 12)
        assert epochs.wanted_plan == Members(2, {0: 10, 2: 12, 3: 13})
        assert prepare(epochs, 0, 2, 3) == [(number, Prepare(2, PLAN)) for number in (10, 12, 13)]

    def test_second_loss_during_recovery_is_a_newer_epoch(self) -> None:
        epochs = running({0: 10, 1: 11, 2: 12, 3: 13}, 0, 1, 2)
        epochs.lost(11, gone(1))
        answer(epochs, Stopped, 10, 12)
        prepare(epochs, 0, 2, 3)
        assert epochs.lost(12, gone(2)) == [(number, Abort(2, "was killed")) for number in (10, 13)]
        assert epochs.lost(13, gone(3)) == []  # it will not answer any more
        answer(epochs, Stopped, 10)
        assert prepare(epochs, 0) == [(10, Prepare(3, PLAN))]

    def test_plan_with_a_lost_participant_is_dropped(self) -> None:
        epochs = Epochs({0: 10, 1: 11, 2: 12}, data_rank=0)
        asked = epochs.wanted_plan
        assert asked is not None
        epochs.lost(12, gone(2))
        epochs.joined(2, 20)
        assert epochs.planned(asked, Announcement(PLAN, (0, 2))) == []
        assert epochs.wanted_plan == Members(3, {0: 10, 1: 11, 2: 20})
        # One that was meant for other members than those of now does not end the run either.
        assert epochs.planned(asked, Failure(FailureKind.REFUSED, "nothing fits")) == []
        refusal = Failure(FailureKind.REFUSED, "nothing fits")
        ended = epochs.planned(epochs.wanted_plan, refusal)
        assert ended == [(number, Verdict(refusal)) for number in (10, 11, 20)]
        assert epochs.verdict == refusal

    def test_rank_that_comes_back_is_a_spare_and_its_old_words_count_no_longer(self) -> None:
        epochs = running({0: 10, 1: 11, 2: 12}, 0, 1)
        assert epochs.lost(12, gone(2)) == []
        assert epochs.joined(2, 20) == []
        assert epochs.step is EpochStep.RUNNING
        assert epochs.lost(12, gone(2)) == []
        assert epochs.received(12, LinkLost(1, 1, "broken")) == []
        assert epochs.membership.incarnations == {0: 10, 1: 11, 2: 20}

    @pytest.mark.parametrize("lives", [False, True])
    def test_second_process_of_a_rank_waits_for_word_of_the_first(self, lives: bool) -> None:
        epochs = running({0: 10, 1: 11}, 0)
        assert epochs.joined(1, 20) == []
        if lives:
            ((incarnation, message),) = epochs.heard(11)
            assert incarnation == 20
            assert isinstance(message, Verdict)
            assert message.failure.line == "rank 1 has already joined: start each rank once"
        else:
            epochs.lost(11, gone(1))
        assert epochs.membership.incarnations == {0: 10, 1: 11 if lives else 20}

    @pytest.mark.parametrize("rank", [0, 2])
    def test_loss_of_the_hub_or_the_data_rank_ends_the_run(self, rank: int) -> None:
        epochs = running({0: 10, 1: 11, 2: 12}, 0, 1, 2, data_rank=2)
        assert len(epochs.lost(10 + rank, gone(rank))) == 2
        assert epochs.verdict == gone(rank)
        assert epochs.joined(rank, 20) == [(20, Verdict(gone(rank)))]

    def test_no_loss_counts_once_the_results_are_complete(self) -> None:
        epochs = running({0: 10, 1: 11, 2: 12}, 0, 1)
        assert epochs.received(10, Complete()) == [(number, Complete()) for number in (10, 11, 12)]
        assert epochs.lost(11, gone(1)) == []
        assert epochs.lost(10, gone(0)) == []
        assert epochs.verdict is None
        assert epochs.joined(1, 20) == [(20, Complete())]

    def test_link_that_breaks_twice_costs_the_rank_at_its_other_end(self) -> None:
        epochs = running({0: 10, 1: 11, 2: 12}, 0, 1, 2)
        broken = epochs.received(12, LinkLost(1, 1, "broken"))
        assert broken == [(number, Abort(1, "broken")) for number in (10, 11, 12)]
        answer(epochs, Stopped, 10, 11, 12)
        prepare(epochs, 0, 1, 2)
        (dismissed, verdict), *aborts = epochs.received(11, LinkLost(2, 2, "broken"))
        assert dismissed == 12
        assert isinstance(verdict, Verdict)
        assert aborts == [(number, Abort(2, "broken")) for number in (10, 11)]

    def test_link_is_forgiven_when_results_came_in_between(self) -> None:
        epochs = running({0: 10, 1: 11, 2: 12}, 0, 1, 2)
        for written, peer in ((5, 1), (9, 0), (12, 1)):
            epochs.received(12, LinkLost(epochs.epoch, peer, "broken"))
            epochs.received(10, Stopped(epochs.epoch, written))
            answer(epochs, Stopped, 11, 12)
            prepare(epochs, 0, 1, 2)
            answer(epochs, EpochReady, 10, 11, 12)
        assert epochs.epoch == 4
        assert set(epochs.membership.incarnations) == {0, 1, 2}

    def test_second_standstill_without_a_result_ends_the_run(self) -> None:
        epochs = running({0: 10, 1: 11}, 0, 1)
        stalled = Failure(FailureKind.STALLED, "nothing moves")
        assert epochs.stalled(stalled) == [(number, Abort(1, "nothing moves")) for number in (10, 11)]
        answer(epochs, Stopped, 10, 11)
        prepare(epochs, 0, 1)
        epochs.stalled(stalled)
        assert epochs.verdict == stalled

    @pytest.mark.parametrize(
        "message", [EpochReady(1), Stopped(1), LinkLost(2, 1, ""), LinkLost(1, 0, ""), LinkLost(1, 5, "")]
    )
    def test_member_that_breaks_the_protocol_is_noticed(self, message: Message) -> None:
        with pytest.raises(ValueError, match=r".+"):
            running({0: 10, 1: 11}, 0, 1).received(10, message)

    def test_only_the_data_rank_completes(self) -> None:
        with pytest.raises(ValueError, match="not from the data rank"):
            running({0: 10, 1: 11}, 0, 1).received(11, Complete())


class TestChange:
    """Epoch 1 runs on ranks 0 and 1; epoch 2, on ranks 0 and 2, is to follow."""

    MEMBERS: ClassVar[dict[int, int]] = {0: 10, 1: 11, 2: 12, 3: 13}

    def changing(self) -> Epochs:
        epochs = running(self.MEMBERS, 0, 1)
        prepares = epochs.changed(epochs.membership, Announcement(PLAN, (0, 2)))
        assert prepares == [(number, Prepare(2, PLAN)) for number in (10, 12)]
        assert epochs.step is EpochStep.CHANGING
        return epochs

    def switching(self) -> Epochs:
        epochs = self.changing()
        assert epochs.received(10, EpochReady(2)) == []
        assert epochs.received(12, EpochReady(2)) == [(number, Run(2)) for number in (10, 12)]
        return epochs

    def test_next_epoch_runs_once_all_are_prepared_and_the_former_retires_once_all_has_passed(self) -> None:
        epochs = self.switching()
        assert (epochs.epoch, epochs.participants) == (1, {0, 1, 2})
        assert epochs.received(11, Passed(1)) == []
        assert epochs.received(10, Passed(1, 7)) == [(number, Retire(1)) for number in (10, 11)]
        assert (epochs.step, epochs.epoch, epochs.participants) == (EpochStep.RUNNING, 2, {0, 2})
        assert epochs.lost(11, gone(1)) == []

    def test_end_of_the_input_may_come_before_the_switch(self) -> None:
        epochs = self.changing()
        epochs.received(11, Passed(1))
        epochs.received(10, EpochReady(2))
        epochs.received(12, EpochReady(2))
        assert epochs.received(10, Passed(1, 5)) == [(number, Retire(1)) for number in (10, 11)]

    @pytest.mark.parametrize(
        "fault",
        [
            lambda epochs: epochs.lost(12, gone(2)),
            lambda epochs: epochs.received(12, Declined(2, "was killed")),
            lambda epochs: epochs.received(12, LinkLost(2, 0, "was killed")),
        ],
        ids=["loss", "declined", "link"],
    )
    def test_fault_of_what_is_prepared_drops_it_alone(
        self, fault: Callable[[Epochs], list[tuple[int, Message]]]
    ) -> None:
        epochs = self.changing()
        aborts = fault(epochs)
        assert epochs.step is EpochStep.DROPPING
        assert not epochs.can_change
        here = [number for number in (10, 12) if number in epochs.membership.incarnations.values()]
        assert aborts == [(number, Abort(2, "was killed")) for number in here]
        for number in here:
            epochs.received(number, Stopped(2))
        assert (epochs.step, epochs.epoch, epochs.participants) == (EpochStep.RUNNING, 1, {0, 1})
        epochs.changed(epochs.membership, Announcement(PLAN, (0, 3)))
        assert epochs.received(13, EpochReady(3)) == []

    def test_loss_of_a_rank_of_what_runs_stops_both(self) -> None:
        aborts = [(10, Abort(1, "was killed")), (10, Abort(2, "was killed")), (12, Abort(2, "was killed"))]
        for epochs in (self.changing(), self.switching()):
            assert epochs.lost(11, gone(1)) == aborts
            for number, abort in aborts:
                assert epochs.wanted_plan is None
                epochs.received(number, Stopped(abort.epoch))
            assert epochs.wanted_plan == Members(2, {0: 10, 2: 12, 3: 13})

    def test_loss_of_a_rank_of_the_next_epoch_stops_both_once_it_runs(self) -> None:
        assert self.switching().lost(12, gone(2)) == [
            (10, Abort(1, "was killed")),
            (11, Abort(1, "was killed")),
            (10, Abort(2, "was killed")),
        ]

    def test_loss_while_a_change_is_dropped_waits_for_what_stops_already(self) -> None:
        epochs = self.changing()
        epochs.received(12, Declined(2, "no memory"))
        assert epochs.lost(11, gone(1)) == [(10, Abort(1, "was killed"))]
        for number, epoch in ((10, 2), (10, 1), (12, 2)):
            assert epochs.wanted_plan is None
            epochs.received(number, Stopped(epoch))
        assert epochs.wanted_plan is not None

    def test_change_for_members_that_have_left_is_none(self) -> None:
        epochs = running(self.MEMBERS, 0, 1)
        asked = epochs.membership
        epochs.lost(12, gone(2))
        epochs.joined(2, 20)
        assert epochs.changed(asked, Announcement(PLAN, (0, 2))) == []
        assert epochs.can_change

    def test_member_prepares_one_epoch_beside_one_that_runs(self) -> None:
        member = EpochMember()
        member.heard(Prepare(1, PLAN))
        with pytest.raises(ValueError, match="prepare 2 while preparing 1"):
            member.heard(Prepare(2, PLAN))
        member.prepared(1)
        member.heard(Run(1))
        member.heard(Prepare(2, PLAN))
        assert member.declined(2, "no memory") == Declined(2, "no memory")
        assert member.prepared(2) == EpochReady(2)
        assert member.declined(2, "no memory") is None
        assert member.passed(1, 7) == Passed(1, 7)
        assert member.link_lost(1, 1, "reset") is None
        assert [member.judge(epoch) for epoch in (1, 2, 3)] == [
            Admission.REFUSE,
            Admission.TAKE,
            Admission.KEEP,
        ]
        member.heard(Run(2))
        member.heard(Retire(1))
        assert member.epochs == (2,)


class TestMember:
    def test_one_epoch_after_the_other(self) -> None:
        member = EpochMember()
        member.heard(Prepare(3, PLAN))
        assert member.prepared(2) is None
        assert member.prepared(3) == EpochReady(3)
        member.heard(Run(3))
        assert member.link_lost(3, 1, "reset") == LinkLost(3, 1, "reset")
        assert member.link_lost(3, 2, "reset") is None
        member.heard(Abort(3, "lost"))
        assert member.link_lost(3, 2, "reset") is None
        assert member.stopped(3, 7) == Stopped(3, 7)
        assert member.step(3) is MemberStep.SPARE

    def test_abort_crosses_the_report_that_all_is_prepared(self) -> None:
        member = EpochMember()
        member.heard(Prepare(1, PLAN))
        member.heard(Abort(1, "lost"))
        assert member.prepared(1) is None
        assert member.stopped(1) == Stopped(1)
        assert member.stopped(1) is None

    def test_frames_of_old_epochs_are_refused_and_early_ones_wait(self) -> None:
        member = EpochMember()
        assert member.judge(4) is Admission.KEEP
        member.heard(Prepare(4, PLAN))
        assert [member.judge(epoch) for epoch in (3, 4, 5)] == [
            Admission.REFUSE,
            Admission.TAKE,
            Admission.KEEP,
        ]
        member.heard(Abort(4, "lost"))
        assert member.judge(4) is Admission.REFUSE
        member.heard(Complete())
        assert member.judge(5) is Admission.REFUSE

    @pytest.mark.parametrize("message", [Run(1), Abort(1, ""), Prepare(2, PLAN), Run(3)])
    def test_hub_that_breaks_the_protocol_is_noticed(self, message: Prepare | Run | Abort) -> None:
        member = EpochMember()
        member.heard(Prepare(2, PLAN))
        with pytest.raises(ValueError, match=f"{message.kind} {message.epoch} while preparing 2"):
            member.heard(message)


class TestLedger:
    def test_new_epoch_feeds_again_what_is_not_written(self) -> None:
        ledger = Ledger[str](window=3)
        ledger.restart(1, 3)
        for number in range(3):
            ledger.fed(number, f"items {number}")
        assert ledger.next_number() is None
        assert ledger.judge(1, 0) is Arrival.WRITE
        assert ledger.wrote(0) == "items 0"
        ledger.restart(2, 2)
        assert (ledger.next_number(), ledger.entry(1), ledger.entry(3)) == (1, "items 1", None)
        ledger.fed(1, "items 1")
        assert ledger.judge(1, 1) is Arrival.DROP
        assert ledger.judge(2, 0) is Arrival.DROP
        assert ledger.judge(2, 1) is Arrival.WRITE

    @given(st.integers(0, 12), st.integers(1, 4), st.integers(0, 1 << 32))
    @settings(max_examples=100)
    def test_everything_is_written_once_in_order(self, count: int, window: int, seed: int) -> None:
        """Results come back in order; at any moment a new epoch begins, and those on their way are lost."""
        chance, ledger, epoch, rows = random.Random(seed), Ledger[int](window), 1, list[int]()
        ledger.restart(epoch, window)
        on_their_way: list[tuple[int, int]] = []
        while not ledger.complete:
            step = chance.choice(("feed", "feed", "collect", "collect", "fail"))
            number = ledger.next_number()
            if step == "feed" and number == count:
                ledger.input_ended()
            elif step == "feed" and number is not None:
                ledger.fed(number, number)
                on_their_way.append((epoch, number))
            elif step == "collect" and on_their_way:
                came = on_their_way.pop(0)
                if ledger.judge(*came) is Arrival.WRITE:
                    rows.append(ledger.wrote(came[1]))
            elif step == "fail":
                epoch += 1
                ledger.restart(epoch, window)
            assert ledger.under_way <= window
        assert rows == list(range(count))

    def test_change_cuts_the_line_in_two(self) -> None:
        ledger = Ledger[str](window=2)
        ledger.restart(1, 2)
        for number in range(2):
            ledger.fed(number, "")
        assert ledger.next_number() is None
        assert ledger.change(2, 1) == 2
        ledger.fed(2, "")
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
        chance, ledger = random.Random(seed), Ledger[int](window=8)
        ledger.restart(1, 8)
        for number in range(fed):
            ledger.fed(number, number)
        for number in range(min(fed, written)):
            ledger.wrote(number)
        assert ledger.change(2, window) == fed
        before, new = ledger.written, 0
        while ledger.written < before + 30:
            came, done = ledger.written - before, max(0, ledger.written - fed)
            number = ledger.next_number()
            assert (number is None) == (new - done == window or new >= (2 + 3 * came) // 2)
            if number is not None and (ledger.under_way == 0 or chance.random() < 0.7):
                assert number == fed + new
                ledger.fed(number, number)
                new += 1
            else:
                ledger.wrote(ledger.written)
        while (number := ledger.next_number()) is not None:
            ledger.fed(number, number)
        assert ledger.under_way == window

    def test_result_that_skips_another_is_a_fault(self) -> None:
        ledger = Ledger[str](window=3, written=4)
        ledger.restart(1, 3)
        ledger.fed(4, "")
        ledger.fed(5, "")
        for number in (5, 6):
            with pytest.raises(ValueError, match=f"the result of microbatch {number} instead of 4"):
                ledger.judge(1, number)


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
        assert 0.5 < complete / len(outcomes) < 0.99
        assert failovers > len(outcomes) / 3
        assert any(outcome.failovers > 2 for outcome in outcomes)
        assert sum(outcome.switches for outcome in outcomes) > len(outcomes) / 12
        assert sum(outcome.drops for outcome in outcomes) > len(outcomes) / 50

    @pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
    def test_planted_bug_is_found_and_replays(self, bug: Rules) -> None:
        seed, first = failing_trace(bug)
        assert all(trace_of(seed, bug) == first for _ in range(cases(20, 20)))

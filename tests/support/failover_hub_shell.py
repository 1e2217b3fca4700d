"""The hub of a simulated run: the product's ``HubState``, with connections of the world and a planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from failover_shells import BEAT_S, LAYERS, TIMEOUT_S, ViolationError, read_plan
from failover_text import MOST_PAGES, PAGES
from msgspec import Raw

from pipeedge.base.fields import encode, reader
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.control.admission import Newcomer, Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.changing import RunSnapshot, Switched
from pipeedge.control.epoch_member import MemberStep
from pipeedge.control.epochs import Step
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.messages import TO_HUB, Abort, Beat, Facts, Message, Verdict
from pipeedge.control.plans import Wanted
from pipeedge.control.roster import Members
from pipeedge.plan.after_loss import Survivor, smallest_change
from pipeedge.plan.cache_owners import CopiedPages, KeptOutput, Standby

if TYPE_CHECKING:
    from failover_rank_shell import RankShell
    from failover_world import World

_READ_TO_HUB = reader(TO_HUB)
_READ_COPIES = reader(tuple[CopiedPages, ...])
_RUNS = (Step.RUNNING, Step.CHANGING, Step.DROPPING, Step.SWITCHING)
_STOPS = (Step.STOPPING, Step.DROPPING)
_CHANGES = (Step.CHANGING, Step.SWITCHING)
_STANDSTILL = ("the link between them is dead", "nothing has moved")


class HubShell:
    """The hub of a simulated run."""

    def __init__(self, world: World) -> None:
        limits = world.limits
        required = frozenset({0, limits.data_rank}) if limits.goes_on else None
        terms = Terms(TIMEOUT_S, required, joins_later=limits.goes_on)
        self.world = world
        self.state = world.rules.hub(
            world_size=limits.ranks, timeout_s=TIMEOUT_S, now=0.0, terms=terms, parts=world.rules.parts
        )
        self._deciding = False
        self._schedule: Schedule | None = None
        self._standbys: list[Standby] = []
        self._outputs: tuple[KeptOutput, ...] = ()
        self._seen = self.step
        self._stops_since: float | None = None
        self._reviewed: set[int] = set()
        self._planned = False
        self._held = world.rules.held()
        self._number = self._announced = 0  # of the latest plan, and of the latest that was announced
        self._changing: tuple[Schedule, int, int, list[Standby]] | None = None
        self._waits_for_note = False
        self.changes = 0
        """Number of changes that were asked for."""

    @property
    def step(self) -> Step:
        return self.state.epochs.step

    @property
    def members(self) -> Members:
        return self.state.roster.members

    @property
    def is_over(self) -> bool:
        return self.step in (Step.COMPLETE, Step.ENDED)

    def begin(self) -> None:
        self.world.after(BEAT_S / 2, self._tick)

    # -- connections ------------------------------------------------------------------------------

    def hear(self, process: RankShell, text: bytes) -> None:
        """Hear a message of a process."""
        message = _READ_TO_HUB(text)
        if not isinstance(message, Beat):
            self.world.note("hub hears", process.name, text.decode())
        if isinstance(message, Facts) and not self._planned:
            self._reviewed.add(process.number)
        self._follow(self.state.received(process.number, message, self.world.now))

    def closed(self, process: RankShell) -> None:
        """Notice that a connection has closed."""
        epochs, before = self.state.epochs, self.step
        is_member = self.members.get(process.rank) == process.number
        had_part = is_member and process.rank in epochs.participants
        self._follow(self.state.closed(process.number, self.world.now))
        if before in (Step.COMPLETE, Step.ENDED) or not self._planned:
            return
        goes_on, stops = self.world.limits.goes_on, self.step not in (*_RUNS, Step.PREPARING)
        if had_part and before in (*_RUNS, Step.PREPARING) and not (stops or epochs.has_passed(process.rank)):
            raise ViolationError(f"the loss of {process.name}, which has a part, changes nothing")
        is_essential = process.rank in (0, self.world.limits.data_rank)
        if goes_on and not had_part and not is_essential and before in _RUNS and stops:
            raise ViolationError("the loss of a spare, or of a former member, stops the run")

    def _tick(self) -> None:
        world = self.world
        if world.is_over:
            return
        world.after(BEAT_S / 2, self._tick)
        self._follow(self.state.tick(world.now))
        if self._stops_since is not None and world.now - self._stops_since > TIMEOUT_S:
            raise ViolationError(f"{self.step.value} takes {world.now - self._stops_since:.1f} s")

    def _follow(self, outgoing: list[tuple[int, Message]]) -> None:
        """Send what the rules say, and decide what they want to have decided."""
        world = self.world
        if self.step is Step.ENDED and self._seen is not Step.ENDED:
            self._check_verdict()
        for number, message in outgoing:
            process = world.processes[number]
            self._check(process, message)
            if isinstance(message, Verdict):
                process.dismissed = True
            text = encode(message)
            world.network.carry((0, process.rank), ("from hub", number), process.hear, text)
        self._note_step()
        if not self._deciding:
            self._decide_next()

    # -- what must not happen ---------------------------------------------------------------------

    def _check(self, process: RankShell, message: Message) -> None:
        """Check what the hub says to a process."""
        world = self.world
        undisturbed = not any(one.disturbed for one in world.processes.values())
        if isinstance(message, Abort) and not world.limits.goes_on:
            raise ViolationError("a run that ends with the first loss goes on")
        line = message.line if isinstance(message, Abort) else ""
        if isinstance(message, Verdict):
            line = message.failure.line
            if "malformed" in line:
                raise ViolationError(f"{process.name} breaks the protocol: {line}")
            if message.failure.kind is FailureKind.HUNG and self._seen in _RUNS:
                raise ViolationError(f"{process.name} is lost for a plan without which the run goes on")
            is_sound = process.alive and not process.disturbed
            is_refusal = message.failure.kind in (FailureKind.REFUSED, FailureKind.LATE)
            if self.state.verdict is None and is_sound and not is_refusal:
                raise ViolationError(f"{process.name} is taken for lost without a reason: {line}")
        if undisturbed and any(what in line for what in _STANDSTILL):
            raise ViolationError(f"a run with a sound network stands still: {line}")

    def _note_step(self) -> None:
        world, step, before = self.world, self.step, self._seen
        if step is before:
            return
        world.note("hub is", step.value, self.state.epochs.epoch)
        if before is Step.COMPLETE:
            raise ViolationError("a loss after the end changes it")
        if self.changes and step not in _CHANGES and self.state.change_outcome() is None:
            raise ViolationError("nobody says what has become of a change of the plan")
        if step is Step.RUNNING:
            world.failovers += before is Step.PREPARING and self.state.epochs.epoch > 1
            world.switches += before is Step.SWITCHING
            world.drops += before in (Step.CHANGING, Step.DROPPING)
        if step not in _STOPS:
            self._stops_since = None
        elif self._stops_since is None:
            self._stops_since = world.now
        self._seen = step
        self._note_change()
        world.ambush()

    def _note_change(self) -> None:
        """Note what ranks have loaded for a change, unless another plan was announced meanwhile."""
        outcome = self.state.change_outcome()
        if self._changing is None or outcome is None:
            return
        loads, self._changing = self._changing, None
        if isinstance(outcome, Switched):
            self._waits_for_note = True
            self.world.after(self.world.chance.choice((0.0, 0.3)), self._note_loads, *loads)

    def _note_loads(
        self,
        schedule: Schedule,
        number: int,
        announced: int,
        standbys: list[Standby],
        outputs: tuple[KeptOutput, ...],
    ) -> None:
        self._waits_for_note = False
        if announced == self._announced:
            self._announced = number
            self._held.loads(schedule, number, standbys, outputs)

    def _check_verdict(self) -> None:
        """Check that the run ended for a reason."""
        verdict, world = self.state.verdict, self.world
        if verdict is None:
            raise ViolationError("the run ended without a verdict")
        limits, essential = world.limits, (0, world.limits.data_rank)
        members = [world.processes[number] for number in self.members.values()]
        here = {process.rank for process in members if not process.dismissed}
        capacity = sum(limits.capacity[rank] for rank in here)
        if verdict.kind is FailureKind.REFUSED and capacity >= LAYERS:
            raise ViolationError(f"the run ended although ranks {sorted(here)} can go on")
        disturbed = any(process.disturbed for process in world.processes.values())
        if verdict.kind in (FailureKind.STUCK, FailureKind.STALLED) and not disturbed:
            raise ViolationError(f"the run ended because it was {verdict.kind.value}, with a sound network")
        if not limits.goes_on or not self._planned:
            return
        is_link = verdict.kind is FailureKind.STUCK and "has not stopped" not in verdict.line
        if is_link and limits.data_rank == 0:
            raise ViolationError("the run ended because of a link, of which one end could be left out")
        is_loss = verdict.kind in (FailureKind.GONE, FailureKind.SILENT, FailureKind.HUNG) or (
            verdict.kind is FailureKind.FAILED and "cannot be computed" not in verdict.line
        )
        if is_loss and verdict.rank not in essential:
            raise ViolationError(f"the loss of rank {verdict.rank} ended the run")

    # -- rank 0 -----------------------------------------------------------------------------------

    def _decide_next(self) -> None:
        """Decide on what the hub asks for, after a while, as the planner's thread does."""
        world, roster = self.world, self.state.roster
        if not self._planned:
            if roster.facts() is None or self.is_over:
                return
            decision = self._announce(roster.members)
            self._deciding = True
            world.after(world.chance.choice((0.0, 0.1)), self._plan_first, decision)
            return
        task = self.state.task()
        if task is None:
            return
        self._deciding = True
        if isinstance(task, Newcomer):
            world.after(world.chance.choice((0.0, 0.1)), self._review, task)
        else:
            self._check_wanted(task)
            world.after(world.chance.choice((0.0, 0.1, 0.6)), self._plan_again, task, self._plan_for(task))

    def _check_wanted(self, wanted: Wanted) -> None:
        self._check_facts(wanted)
        for rank, number in wanted.members.items():
            process = self.world.processes[number]
            steps = map(process.rules.step, process.turns_by_epoch)
            works = any(step is not MemberStep.PASSED for step in steps)
            if works and process.alive and not process.paused:
                raise ViolationError(f"a plan is wanted while rank {rank} works")

    def _check_facts(self, known: Wanted | RunSnapshot) -> None:
        strangers = {rank for rank in known.facts if known.members[rank] not in self._reviewed}
        if strangers:
            raise ViolationError(f"the facts of ranks {sorted(strangers)} were not compared")

    def _plan_first(self, decision: Announcement[Raw] | Failure) -> None:
        self._deciding, self._planned = False, True
        now = self.world.now
        if isinstance(decision, Failure):
            self._follow(self.state.refuse(decision.cause, 2, now))
        else:
            self.world.note("plan", read_plan(decision.plan))
            self._follow(self.state.plan(decision, now))

    def _review(self, newcomer: Newcomer) -> None:
        self._deciding = False
        self._reviewed.add(newcomer.connection)
        self._held.forget(newcomer.rank)
        self._follow(self.state.judge_newcomer(newcomer.connection, None, self.world.now))

    def _plan_again(self, wanted: Wanted, decision: Announcement[Raw] | Failure) -> None:
        self._deciding = False
        now = self.world.now
        if isinstance(decision, Failure):
            self._follow(self.state.give_up(wanted.members, decision, now))
            return
        before = self.state.epochs.epoch
        outgoing = self.state.plan_again(wanted.members, decision, now)
        if self.state.epochs.epoch != before:
            self.world.note("plan", self.state.epochs.epoch, read_plan(decision.plan))
        self._follow(outgoing)

    def change(self) -> None:
        """Ask for another plan, though nothing is lost."""
        since = self.state.snapshot()
        if since is None or not since.running:
            return
        self._check_facts(since)
        decision = self._plan({rank: since.members[rank] for rank in since.facts})
        if isinstance(decision, Announcement) and self._schedule is not None:
            loads = (self._schedule, self._number, self._announced, self._standbys, self._outputs)
            self.world.after(self.world.chance.choice((0.0, 0.2)), self._changed, since, decision, loads)

    def _changed(
        self,
        since: RunSnapshot,
        decision: Announcement[Raw],
        loads: tuple[Schedule, int, int, list[Standby], tuple[KeptOutput, ...]],
    ) -> None:
        if (self.changes and self.state.change_outcome() is None) or self._waits_for_note:
            return  # one change at a time
        if self.state.plans.can_change:
            self.world.note("change", read_plan(decision.plan))
        self.changes += 1
        self._changing = loads
        self._follow(self.state.change(since, decision, self.world.now))

    # -- plans ------------------------------------------------------------------------------------

    def _plan_for(self, wanted: Wanted) -> Announcement[Raw] | Failure:
        for rank, copied in wanted.copied.items():
            self._held.copied(rank, _READ_COPIES(copied))
        for rank in wanted.lost:
            self._held.forget(rank)
        return self._announce({rank: wanted.members[rank] for rank in wanted.facts})

    def _announce(self, here: Members) -> Announcement[Raw] | Failure:
        """Return the next plan, which ranks are to load in place of what they have."""
        decision = self._plan(here)
        if isinstance(decision, Announcement) and self._schedule is not None:
            self._announced = self._number
            self._held.loads(self._schedule, self._number, self._standbys, self._outputs)
        return decision

    def _plan(self, here: Members) -> Announcement[Raw] | Failure:
        """Return stages that cover all layers."""
        limits = self.world.limits
        if limits.data_rank not in here:
            return Failure(FailureKind.GONE, "the data rank is lost", limits.data_rank)
        taken = self._take_over(sorted(here)) if self._standbys and self.world.chance.random() < 0.6 else None
        if taken is not None:
            found: Schedule | str = taken
        elif limits.changes_little and self._schedule is not None:
            found = self._change_little(self._schedule, sorted(here))
        else:
            found = self._draw(sorted(here))
        if isinstance(found, str):
            return Failure(FailureKind.REFUSED, found)
        self._schedule = found
        stages = [(one.rank, here[one.rank], one.layers.start, one.layers.stop) for one in found.stages]
        data = (limits.data_rank, here[limits.data_rank])
        self._standbys = [] if self.world.text is None else self._draw_standbys(found, sorted(here))
        standing = [one.rank for one in self._standbys]
        participants = tuple(sorted({limits.data_rank, *found.ranks, *standing}))
        pages = {} if self.world.text is None else {"pages": self.world.chance.randint(PAGES, MOST_PAGES)}
        self._number += 1
        since = self._held.since(found, self._number)
        kept = () if self.world.text is None else self._held.outputs(found, self._number)
        self._outputs = tuple(one for one in kept if self.world.chance.random() < 0.8)
        body = {
            "stages": stages,
            "data": data,
            **pages,
            "number": self._number,
            "since": since,
            "standbys": [
                (one.rank, here[one.rank], one.layers.start, one.layers.stop) for one in self._standbys
            ],
            "copies": self._held.copies(found),
            "outputs": self._outputs,
        }
        plan = Raw(encode(body))
        return Announcement(plan, participants, data_rank=limits.data_rank, goes_on=limits.goes_on)

    def _draw_standbys(self, schedule: Schedule, ranks: list[int]) -> list[Standby]:
        """Return ranks that stand by for others: for a whole stage, or for some of its layers."""
        chance, found = self.world.chance, list[Standby]()
        for stage in schedule.stages:
            others = [rank for rank in ranks if rank != stage.rank]
            if not others or chance.random() < 0.3:
                continue
            layers = stage.layers
            if chance.random() < 0.3:
                first = chance.randrange(layers.start, layers.stop)
                layers = LayerRange(first, chance.randint(first + 1, layers.stop))
            found.append(Standby(chance.choice(others), layers, stage.dtype))
        return found

    def _take_over(self, ranks: list[int]) -> Schedule | None:
        """Return the schedule in which standbys have taken what lost ranks had; None if they cannot."""
        assert self._schedule is not None
        standbys = {one.layers: one.rank for one in self._standbys if one.rank in ranks}
        stages = list[StagePlan]()
        for stage in self._schedule.stages:
            rank = stage.rank if stage.rank in ranks else standbys.get(stage.layers)
            if rank is None:
                return None
            if stages and stages[-1].rank == rank:
                layers = LayerRange(stages.pop().layers.start, stage.layers.stop)
            else:
                layers = stage.layers
            stages.append(StagePlan(layers, rank))
        fits = all(len(one.layers) <= self.world.limits.capacity[one.rank] for one in stages)
        is_new = len({one.rank for one in stages}) == len(stages) and stages != [*self._schedule.stages]
        return Schedule(tuple(stages)) if fits and is_new else None

    def _change_little(self, schedule: Schedule, ranks: list[int]) -> Schedule | str:
        """Return what the product's planner makes of the ranks that are left."""
        held = {stage.rank: stage.layers for stage in schedule.stages}
        survivors = [Survivor(rank, self.world.limits.capacity[rank], holds=held.get(rank)) for rank in ranks]
        return smallest_change(schedule, survivors, [1.0] * LAYERS)

    def _draw(self, ranks: list[int]) -> Schedule | str:
        """Return stages of any size, on ranks in any order or in that of this world."""
        chance, limits = self.world.chance, self.world.limits
        order = [rank for rank in limits.order or () if rank in ranks]
        if not order:
            order = chance.sample(ranks, len(ranks))
        left, done, stages = sum(limits.capacity[rank] for rank in order), 0, list[StagePlan]()
        if left < LAYERS:
            return "nothing fits"
        for rank in order:
            left -= limits.capacity[rank]
            least = max(0, LAYERS - done - left)
            most = min(limits.capacity[rank], LAYERS - done)
            taken = chance.randint(max(least, min(1, most)), most) if most else 0
            if taken:
                stages.append(StagePlan(LayerRange(done, done + taken), rank))
                done += taken
        return Schedule(tuple(stages))

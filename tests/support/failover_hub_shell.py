"""The hub of a simulated run: a shell around ``Epochs``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from failover_shells import BEAT_S, LAYERS, LIMITS, ViolationError, read_plan
from msgspec import Raw

from pipeedge.base.fields import encode, reader
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.control.announcement import Announcement
from pipeedge.control.epoch_messages import EPOCH_TO_HUB
from pipeedge.control.epochs import Epochs, EpochStep
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import RankStatus, Silent, Stalled, Stuck, diagnose
from pipeedge.control.load_deadline import HungLoad
from pipeedge.control.members import Members
from pipeedge.control.messages import Message, Verdict
from pipeedge.plan.after_loss import Survivor, smallest_change

if TYPE_CHECKING:
    from failover_rank_shell import RankShell
    from failover_world import World

_READ_TO_HUB = reader(EPOCH_TO_HUB)
_RUNS = (EpochStep.RUNNING, EpochStep.CHANGING, EpochStep.DROPPING, EpochStep.SWITCHING)


class HubShell:
    """The hub of a simulated run."""

    def __init__(self, world: World, epochs: Epochs) -> None:
        self.world = world
        self.epochs = epochs
        self._heard_at = dict.fromkeys(world.processes, 0.0)
        self._statuses: dict[int, RankStatus] = {}
        self._loads = world.rules.loads(LIMITS.stall_s)
        self._progress = (0, 0)
        self._progress_at = 0.0
        self._planning = False
        self._schedule: Schedule | None = None
        self._seen = epochs.step

    def begin(self) -> None:
        self._follow([])
        self.world.after(BEAT_S / 2, self._tick)

    def greet(self, process: RankShell) -> None:
        """Hear of a process that wants to join."""
        way = (process.rank, 0)
        self.world.network.carry(way, ("to hub", process.number), self._hello, process)

    def _hello(self, process: RankShell) -> None:
        if process.left:
            return  # it closed its connection before the hub accepted it
        self._heard_at[process.number] = self.world.now
        self._follow(self.epochs.joined(process.rank, process.number))

    def hear(self, process: RankShell, text: bytes) -> None:
        """Hear a message of a process. The rules ignore what former members say."""
        if process.number in self._heard_at:
            self._heard_at[process.number] = self.world.now
        message = _READ_TO_HUB(text)
        self.world.note("hub hears", process.name, text.decode())
        try:
            self._follow(self.epochs.received(process.number, message))
        except ValueError as error:
            raise ViolationError(f"{process.name} breaks the protocol: {message}: {error}") from error

    def beat(self, process: RankShell, status: RankStatus) -> None:
        if process.number in self._heard_at:
            self._heard_at[process.number] = self.world.now
            self._statuses[process.number] = status
            self._follow(self.epochs.heard(process.number))

    def closed(self, process: RankShell, line: str = "gone") -> None:
        """Notice that a connection has closed."""
        self._lose(process.number, Failure(FailureKind.GONE, line, process.rank))

    def _lose(self, number: int, failure: Failure) -> None:
        process = self.world.processes[number]
        if process.alive and not process.disturbed and not process.dismissed and not process.ended:
            raise ViolationError(f"{process.name} is taken for lost without a reason")
        self._heard_at.pop(number, None)
        before = self.epochs.step
        is_member = self.epochs.membership.incarnations.get(process.rank) == number
        spare = before in _RUNS and process.rank not in self.epochs.participants
        self._follow(self.epochs.lost(number, failure))
        stops = self.epochs.step not in _RUNS if spare else self.epochs.step is not before
        if (spare or not is_member) and stops:
            raise ViolationError("the loss of a spare, or of a former member, stops the run")
        if before is EpochStep.COMPLETE and self.epochs.step is not before:
            raise ViolationError("a loss after the end changes it")

    def _tick(self) -> None:
        world = self.world
        if self.epochs.step in (EpochStep.COMPLETE, EpochStep.ENDED):
            return
        world.after(BEAT_S / 2, self._tick)
        for number in self._heard_at:
            self._send(number, None)
        members = self.epochs.membership.incarnations
        watched = {rank: number for rank, number in members.items() if number in self._heard_at}
        silence = {rank: world.now - self._heard_at[number] for rank, number in watched.items()}
        self._look_at_loads(watched)
        running = self.epochs.step in _RUNS
        statuses = {
            rank: self._statuses.get(number, RankStatus())
            for rank, number in members.items()
            if running and rank in self.epochs.participants
        }
        progress = (self.epochs.epoch, sum(status.progress for status in statuses.values()))
        if progress != self._progress or not running:
            self._progress, self._progress_at = progress, world.now
        finding = diagnose(statuses, silence, world.now - self._progress_at, LIMITS)
        undisturbed = not any(process.disturbed for process in world.processes.values())
        if isinstance(finding, Stuck | Stalled) and undisturbed:
            raise ViolationError(f"a run with a sound network is taken for {finding}")
        if isinstance(finding, Silent):
            self._lose(members[finding.rank], Failure(FailureKind.SILENT, "silent", finding.rank))
        elif isinstance(finding, Stuck):
            self._follow(self.epochs.link_lost(finding.destination, finding.source, "stuck"))
        elif isinstance(finding, Stalled):
            self._follow(self.epochs.stalled(Failure(FailureKind.STALLED, "stalled")))

    def _look_at_loads(self, watched: dict[int, int]) -> None:
        """Do without the ranks whose loading hangs, if others wait for them."""
        told = {(rank, number): self._statuses.get(number) for rank, number in watched.items()}
        loads = {key: load for key, status in told.items() if status and (load := status.loading) is not None}
        for finding in self._loads.look(loads, self.world.now):
            if not isinstance(finding, HungLoad):
                continue
            self.world.note("hub finds", finding)
            failure = Failure(FailureKind.HUNG, "hangs", finding.rank)
            number = watched[finding.rank]
            if not self.epochs.awaits(finding.rank):
                self._follow(self.epochs.postponed(finding.rank, failure.line))
                continue
            if self.epochs.step in _RUNS:
                raise ViolationError(f"{finding.rank} is lost for a plan without which the run goes on")
            self._lose(number, failure)
            self._send(number, Verdict(failure))
            self.world.processes[number].dismissed = True

    def _send(self, number: int, message: Message | None) -> None:
        process = self.world.processes[number]
        text = None if message is None else encode(message)
        self.world.network.carry((0, process.rank), ("from hub", number), process.hear, text)

    def _follow(self, outgoing: list[tuple[int, Message]]) -> None:
        """Send what the rules say, and give them what they want."""
        world, epochs = self.world, self.epochs
        if epochs.step is EpochStep.ENDED and self._seen is not EpochStep.ENDED:
            self._check_verdict()
        for number, message in outgoing:
            self._send(number, message)
            if isinstance(message, Verdict):
                world.processes[number].dismissed = True
        if epochs.step is not self._seen:
            world.note("hub is", epochs.step.value, epochs.epoch)
            if epochs.step is EpochStep.RUNNING:
                world.failovers += self._seen is EpochStep.PREPARING and epochs.epoch > 1
                world.switches += self._seen is EpochStep.SWITCHING
                world.drops += self._seen in (EpochStep.CHANGING, EpochStep.DROPPING)
            self._seen = epochs.step
            world.ambush()
        wanted = epochs.wanted_plan
        if wanted is not None and not self._planning:
            self._planning = True
            decision = self._decide(wanted)
            world.after(world.chance.choice((0.0, 0.1, 0.6)), self._planned, wanted, decision)

    def _planned(self, membership: Members, decision: Announcement[Raw] | Failure) -> None:
        self._planning = False
        before = self.epochs.epoch
        outgoing = self.epochs.planned(membership, decision)
        if self.epochs.epoch != before and isinstance(decision, Announcement):
            self.world.note("plan", self.epochs.epoch, read_plan(decision.plan))
        self._follow(outgoing)

    def change(self) -> None:
        """Ask for another plan, though nothing is lost."""
        members = self.epochs.membership
        decision = self._decide(members)
        if isinstance(decision, Announcement):
            self.world.after(self.world.chance.choice((0.0, 0.2)), self._changed, members, decision)

    def _changed(self, membership: Members, decision: Announcement[Raw]) -> None:
        if self.epochs.can_change:
            self.world.note("change", read_plan(decision.plan))
        self._follow(self.epochs.changed(membership, decision))

    def _decide(self, members: Members) -> Announcement[Raw] | Failure:
        """Return stages that cover all layers."""
        limits, here = self.world.limits, members.incarnations
        if limits.data_rank not in here:
            return Failure(FailureKind.GONE, "the data rank is lost", limits.data_rank)
        if limits.changes_little and self._schedule is not None:
            found = self._change_little(self._schedule, sorted(here))
        else:
            found = self._draw(sorted(here))
        if isinstance(found, str):
            return Failure(FailureKind.REFUSED, found)
        self._schedule = found
        stages = [(one.rank, here[one.rank], one.layers.start, one.layers.stop) for one in found.stages]
        data = (limits.data_rank, here[limits.data_rank])
        participants = tuple(sorted({limits.data_rank, *found.ranks}))
        return Announcement(Raw(encode({"stages": stages, "data": data})), participants)

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

    def _check_verdict(self) -> None:
        """Check that the run ended for a reason."""
        verdict, world = self.epochs.verdict, self.world
        if verdict is None:
            raise ViolationError("the run ended without a verdict")
        present = [world.processes[number] for number in self._heard_at]
        here = {process.rank for process in present if not process.dismissed}
        capacity = sum(world.limits.capacity[rank] for rank in here)
        if verdict.kind is FailureKind.REFUSED and capacity >= LAYERS:
            raise ViolationError(f"the run ended although ranks {sorted(here)} can go on")
        disturbed = any(process.disturbed for process in world.processes.values())
        if verdict.kind in (FailureKind.STUCK, FailureKind.STALLED) and not disturbed:
            raise ViolationError(f"the run ended because it was {verdict.kind.value}, with a sound network")
        losses = (FailureKind.GONE, FailureKind.SILENT, FailureKind.FAILED, FailureKind.HUNG)
        if verdict.kind in losses and verdict.rank not in (0, world.limits.data_rank):
            raise ViolationError(f"the loss of rank {verdict.rank} ended the run")

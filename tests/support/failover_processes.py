"""Shells around the rules of failover, in a simulated world: the hub, and a process of each rank.

    HubShell    Epochs            connections, heartbeats, diagnosis, a planner that takes its time
    RankShell   EpochMember       links, a stage that computes; on the data rank a feeder and a collector,
                Ledger            all of that twice while the plan changes

What a microbatch carries is the list of what was done to it, so a row shows which stages computed it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from pipeedge.base.fields import encode, reader
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.control.announcement import Announcement
from pipeedge.control.epoch_member import Admission, EpochMember, MemberStep
from pipeedge.control.epoch_messages import EPOCH_FROM_HUB, EPOCH_TO_HUB, Abort, Prepare, Retire, Run
from pipeedge.control.epochs import Epochs, EpochStep
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.ledger import Arrival, Ledger
from pipeedge.control.liveness import Limits, RankStatus, Silent, Stalled, Stuck, diagnose
from pipeedge.control.members import Members
from pipeedge.control.messages import Complete, Message, Verdict
from pipeedge.plan.after_loss import Survivor, smallest_change

if TYPE_CHECKING:
    from failover_world import World

LAYERS = 6
_TIMEOUT_S = 10.0
_BEAT_S = 1.0
_LIMITS = Limits.within(_TIMEOUT_S)
_LINK_PATIENCE_S = 4.0
_BUFFERS = 2
_READ_FROM_HUB, _READ_TO_HUB = reader(EPOCH_FROM_HUB), reader(EPOCH_TO_HUB)
_WORKING = (MemberStep.PREPARING, MemberStep.PREPARED, MemberStep.RUNNING)
_ACTIVE = (*_WORKING, MemberStep.STOPPING)
_RUNS = (EpochStep.RUNNING, EpochStep.CHANGING, EpochStep.DROPPING, EpochStep.SWITCHING)
_END = (-1, None)
"""Frame that nothing follows."""


class ViolationError(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Rules:
    """The rules that a world drives."""

    epochs: Callable[..., Epochs] = Epochs
    member: Callable[[], EpochMember] = EpochMember
    ledger: Callable[..., Ledger[int]] = Ledger
    from_seed: int = 0
    """Seed from which to look for one that shows a bug which only few do."""

    @property
    def name(self) -> str:
        """Names of the rules that are not the product's own."""
        parts = (self.epochs, self.member, self.ledger)
        return " ".join(part.__name__ for part in parts if part not in (Epochs, EpochMember, Ledger))


@dataclass(frozen=True)
class Part:
    """One end of a plan: ranks, incarnations and layers of the stages, and the data rank."""

    stages: list[tuple[int, int, int, int]]
    """Rank, incarnation, first layer, layer after the last."""
    data: tuple[int, int]
    """Rank and incarnation of the data rank."""

    @property
    def ends(self) -> list[tuple[int, int]]:
        """Rank and incarnation of the ends of the links: link n leads from ends[n] to ends[n + 1]."""
        return [self.data, *((rank, number) for rank, number, _, _ in self.stages), self.data]

    @property
    def window(self) -> int:
        return 3 * len(self.stages)


class HubShell:
    """The hub of a simulated run."""

    def __init__(self, world: World, epochs: Epochs) -> None:
        self.world = world
        self.epochs = epochs
        self._heard_at = dict.fromkeys(world.processes, 0.0)
        self._statuses: dict[int, RankStatus] = {}
        self._progress = (0, 0)
        self._progress_at = 0.0
        self._planning = False
        self._schedule: Schedule | None = None
        self._seen = epochs.step

    def begin(self) -> None:
        self._follow([])
        self.world.after(_BEAT_S / 2, self._tick)

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
        world.after(_BEAT_S / 2, self._tick)
        for number in self._heard_at:
            self._send(number, None)
        members = self.epochs.membership.incarnations
        watched = {rank: number for rank, number in members.items() if number in self._heard_at}
        silence = {rank: world.now - self._heard_at[number] for rank, number in watched.items()}
        running = self.epochs.step in _RUNS
        statuses = {
            rank: self._statuses.get(number, RankStatus())
            for rank, number in members.items()
            if running and rank in self.epochs.participants
        }
        progress = (self.epochs.epoch, sum(status.progress for status in statuses.values()))
        if progress != self._progress or not running:
            self._progress, self._progress_at = progress, world.now
        finding = diagnose(statuses, silence, world.now - self._progress_at, _LIMITS)
        undisturbed = not any(process.disturbed for process in world.processes.values())
        if isinstance(finding, Stuck | Stalled) and undisturbed:
            raise ViolationError(f"a run with a sound network is taken for {finding}")
        if isinstance(finding, Silent):
            self._lose(members[finding.rank], Failure(FailureKind.SILENT, "silent", finding.rank))
        elif isinstance(finding, Stuck):
            self._follow(self.epochs.link_lost(finding.destination, finding.source, "stuck"))
        elif isinstance(finding, Stalled):
            self._follow(self.epochs.stalled(Failure(FailureKind.STALLED, "stalled")))

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
            self.world.note("plan", self.epochs.epoch, _read_plan(decision.plan))
        self._follow(outgoing)

    def change(self) -> None:
        """Ask for another plan, though nothing is lost."""
        members = self.epochs.membership
        decision = self._decide(members)
        if isinstance(decision, Announcement):
            self.world.after(self.world.chance.choice((0.0, 0.2)), self._changed, members, decision)

    def _changed(self, membership: Members, decision: Announcement[Raw]) -> None:
        if self.epochs.can_change:
            self.world.note("change", _read_plan(decision.plan))
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
        if verdict.kind in (FailureKind.GONE, FailureKind.SILENT, FailureKind.FAILED) and (
            verdict.rank not in (0, world.limits.data_rank)
        ):
            raise ViolationError(f"the loss of rank {verdict.rank} ended the run")


def _read_plan(plan: Raw) -> Part:
    body = json.loads(bytes(plan))
    return Part([tuple(stage) for stage in body["stages"]], tuple(body["data"]))


@dataclass
class Links:
    """State of one process in one epoch."""

    epoch: int
    plan: Part
    loaded: bool = False
    closed: set[int] = field(default_factory=set)
    """Links that are still to open."""
    room: dict[int, int] = field(default_factory=dict)
    """Number of frames that each outgoing link still takes."""
    inbox: dict[int, deque[tuple[int, Any]]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    """Incoming links on which nothing follows."""
    ends: int = 0
    """Number of things whose end is still to come: a stage, feeding and collecting."""
    stage: int | None = None
    stage_ended: bool = False
    busy: bool = False
    result: tuple[int, Any] | None = None
    reading: bool = False
    fed_all: bool = False
    """Whether the data rank feeds nothing more."""
    first_of_next: int | None = None
    held: deque[tuple[int, Any]] = field(default_factory=deque)
    """Results that wait until those of the epoch before are written."""
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)


class RankShell:
    """A process of one rank in a simulated run."""

    def __init__(self, world: World, rank: int, number: int) -> None:
        self.world = world
        self.rank = rank
        self.number = number
        """Its incarnation."""
        self.name = f"{rank}#{number}"
        self.member = world.rules.member()
        self.alive = True
        self.paused = False
        self.left = False
        """Whether it has closed its connection to the hub."""
        self.disturbed = False
        """Whether something happened to it or to its network that may make it look dead."""
        self.dismissed = False
        """Whether the hub has sent it a verdict."""
        self._parts: dict[int, Links] = {}
        """Its links by epoch, oldest first."""
        self._early: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []
        self._missed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._hub_heard_at = self.began_at = world.now
        self._has_completed = False

    @property
    def active(self) -> set[int]:
        """Epochs in which it computes, or may do so at once."""
        return {epoch for epoch in self._parts if self.member.step(epoch) in _ACTIVE}

    @property
    def ended(self) -> bool:
        return self.member.ended

    def check(self) -> None:
        for links in self._parts.values():
            for link, frames in links.inbox.items():
                if len(frames) > _BUFFERS:
                    raise ViolationError(f"{len(frames)} frames wait on link {link} of {self.name}")

    # -- life -------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._hub_heard_at = self.world.now
        self.world.after(self.world.chance.uniform(0.0, _BEAT_S), self._beat)

    def die(self) -> None:
        """End at once; peers notice when the network tells them."""
        self.alive = False
        self._leave()

    def fail(self) -> None:
        """End because of an exception."""
        self.die()

    def _leave(self) -> None:
        self.left = True
        world = self.world
        world.network.carry((self.rank, 0), ("to hub", self.number), world.hub.closed, self)
        for epoch in sorted(self.active):
            for rank, number in sorted({*self._parts[epoch].plan.ends} - {(self.rank, self.number)}):
                peer = world.processes[number]
                world.network.carry(
                    (self.rank, rank), ("reset", self.number, number), peer.lose, epoch, self.rank
                )

    def pause(self) -> None:
        self.paused = self.disturbed = True

    def resume(self) -> None:
        self.paused = False
        missed, self._missed = self._missed, []
        for event, args in missed:
            self._do(event, *args)

    def _do(self, event: Callable[..., None], *args: Any) -> None:
        """Let ``event`` happen to this process, once it runs."""
        if not self.alive:
            return
        if self.paused:
            self._missed.append((event, args))
        else:
            event(*args)

    def _later(self, seconds: float, event: Callable[..., None], *args: Any) -> None:
        self.world.after(seconds, self._do, event, *args)

    def _beat(self) -> None:
        self._do(self._beat_now)
        if self.alive and not self.ended:
            self.world.after(_BEAT_S, self._beat)

    def _beat_now(self) -> None:
        world = self.world
        if self.ended:
            return
        if world.now - self._hub_heard_at > _LIMITS.silence_s:
            world.note(self.name, "does not hear the hub")
            self.die()
            return
        sent, received, awaited = dict[int, int](), dict[int, int](), set[int]()
        for links in self._parts.values():
            for total, counted in ((sent, links.sent), (received, links.received)):
                for peer, count in counted.items():
                    total[peer] = total.get(peer, 0) + count
            awaited |= {
                links.plan.ends[link][0]
                for link, frames in links.inbox.items()
                if not frames and not links.busy and links.plan.ends[link][0] != self.rank
            }
        status = RankStatus(sent=sent, received=received, awaiting=frozenset(awaited))
        world.network.carry((self.rank, 0), ("to hub", self.number), world.hub.beat, self, status)

    # -- the hub ----------------------------------------------------------------------------------

    def _tell(self, message: Message | None) -> None:
        if message is not None and not self.ended:
            world = self.world
            way = (self.rank, 0)
            world.network.carry(way, ("to hub", self.number), world.hub.hear, self, encode(message))

    def hear(self, text: bytes | None) -> None:
        """Hear a message of the hub, or just that it lives."""
        self._do(self._hear, text)

    def _hear(self, text: bytes | None) -> None:
        world = self.world
        self._hub_heard_at = world.now
        if text is None:
            return
        message = _READ_FROM_HUB(text)
        world.note(self.name, "hears", text.decode())
        if self.ended:
            if not isinstance(message, Complete | Verdict):
                raise ViolationError(f"{message} for {self.name}, which has ended")
            return
        try:
            self.member.heard(message)
        except ValueError as error:
            raise ViolationError(f"the hub breaks the protocol with {self.name}: {error}") from error
        if isinstance(message, Prepare):
            self._prepare(message)
        elif isinstance(message, Run):
            self._run(self._parts[message.epoch])
        elif isinstance(message, Retire):
            del self._parts[message.epoch]
        elif isinstance(message, Abort):
            self._stop(self._parts[message.epoch])
        elif isinstance(message, Verdict):
            self.die()

    def _prepare(self, prepare: Prepare) -> None:
        plan = _read_plan(prepare.plan)
        me, ends, epoch = (self.rank, self.number), plan.ends, prepare.epoch
        links = Links(epoch, plan)
        links.stage = next((at for at, stage in enumerate(plan.stages) if stage[:2] == me), None)
        links.ends = (links.stage is not None) + 2 * (plan.data == me)
        for link in range(len(ends) - 1):
            if ends[link] == me:
                links.room[link] = _BUFFERS
            if ends[link + 1] == me:
                links.inbox[link] = deque()
            if me in ends[link : link + 2] and ends[link] != ends[link + 1]:
                links.closed.add(link)
        is_first = not self._parts
        self._parts[epoch] = links
        if plan.data == me and is_first:
            self.world.window = plan.window
            self.world.ledger.restart(epoch, plan.window)
        prepared = self._loaded if is_first or self.world.chance.random() < 0.95 else self._decline
        self._later(self.world.chance.uniform(0.0, 0.5), prepared, links)
        self._later(_LINK_PATIENCE_S, self._lose_closed, links)
        for link in sorted(links.closed):
            if ends[link] == me:
                self._carry(links, link, "open", self.number, epoch, link)
        early, self._early = self._early, []
        for of, event, args in early:
            self._admit(of, event, *args)

    def _has(self, links: Links) -> bool:
        """Return whether a part is one still."""
        return self._parts.get(links.epoch) is links

    def _loaded(self, links: Links) -> None:
        if self._has(links):
            links.loaded = True
            self._report_prepared(links)

    def _decline(self, links: Links) -> None:
        self._tell(self.member.declined(links.epoch, "no memory"))

    def _report_prepared(self, links: Links) -> None:
        if links.loaded and not links.closed:
            self._tell(self.member.prepared(links.epoch))

    def _run(self, links: Links) -> None:
        if links.plan.data != (self.rank, self.number):
            return
        before = next(iter(self._parts.values()))
        if before is links:
            self._feed(links)
        elif not before.reading:
            self._switch(before, links)

    def _switch(self, before: Links, links: Links) -> None:
        """Feed the new epoch from now on."""
        ledger = self.world.ledger
        before.first_of_next = ledger.change(links.epoch, links.plan.window)
        self.world.note("switch", links.epoch, before.first_of_next)
        self.world.window += links.plan.window
        self._end_feeding(before)
        self._feed(links)

    def _lose_closed(self, links: Links) -> None:
        if self._has(links) and links.closed:
            ends = links.plan.ends
            link = min(links.closed)
            peer = ends[link][0] if ends[link][0] != self.rank else ends[link + 1][0]
            self._tell(self.member.link_lost(links.epoch, peer, "does not open"))

    def lose(self, epoch: int, peer: int) -> None:
        """Notice that a peer has closed its links."""
        self._do(lambda: self._tell(self.member.link_lost(epoch, peer, "reset")))

    def notice_reset(self, peer: int) -> None:
        """Notice that the network has reset a link, if there is one."""
        for epoch in sorted(self.active):
            links = self._parts[epoch]
            if any(links.plan.ends[link][0] == peer != self.rank for link in links.inbox):
                self.lose(epoch, peer)
                return

    def _stop(self, links: Links) -> None:
        links.inbox = {link: deque() for link in links.inbox}
        for link in range(len(links.plan.ends) - 1):
            if links.plan.ends[link] == (self.rank, self.number):
                rank, number = links.plan.ends[link + 1]
                peer = self.world.processes[number]
                self._send_to(rank, ("reset", self.number, number), peer.lose, links.epoch)
        if not links.busy:
            self._later(self.world.chance.uniform(0.0, 0.05), self._report_stopped, links)

    def _send_to(self, rank: int, lane: object, deliver: Callable[..., None], epoch: int) -> None:
        if rank != self.rank:
            self.world.network.carry((self.rank, rank), lane, deliver, epoch, self.rank)

    def _report_stopped(self, links: Links) -> None:
        is_data = links.plan.data == (self.rank, self.number)
        self._parts.pop(links.epoch, None)
        self._tell(self.member.stopped(links.epoch, self.world.ledger.written if is_data else None))

    def _has_seen_end(self, links: Links) -> None:
        """Note that the stage, the feeding or the collecting of an epoch has ended."""
        links.ends -= 1
        if not links.ends:
            self._tell(self.member.passed(links.epoch, links.first_of_next))

    # -- links ------------------------------------------------------------------------------------

    def _carry(self, links: Links, link: int, what: str, *args: Any, back: bool = False) -> None:
        """Send something along ``link``, or ``back`` from its end to its beginning."""
        rank, number = links.plan.ends[link if back else link + 1]
        peer = self.world.processes[number]
        lane = (what == "room", self.number, number, link, links.epoch)
        self.world.network.carry((self.rank, rank), lane, peer.get, what, *args)
        if what == "take" and self.world.chance.random() < 0.03:
            self.world.after(self.world.chance.uniform(0.2, 3.0), self._haunt, rank, args)

    def _haunt(self, rank: int, args: tuple[Any, ...]) -> None:
        """Deliver a copy of a frame to whoever has the rank now, if its epoch has ended."""
        if args[0] < self.world.hub.epochs.epoch:
            for process in self.world.processes.values():
                if process.rank == rank:
                    process.get("take", *args)

    def get(self, what: str, *args: Any) -> None:
        """Get something from a link."""
        self._do(self._get, what, args)

    def _get(self, what: str, args: tuple[Any, ...]) -> None:
        if what == "open":
            number, epoch, link = args
            self._admit(epoch, self._accept, number, epoch, link)
        elif what == "take":
            epoch, link, frame = args
            links = self._parts.get(epoch) or next(reversed(self._parts.values()), None)
            if links is not None and link == len(links.plan.stages) and frame != _END:
                self._collect(links, epoch, link, frame)  # the ledger knows which results are old
            else:
                self._admit(epoch, self._take, epoch, link, frame)
        else:
            epoch, link = args
            self._admit(epoch, self._opened if what == "opened" else self._make_room, epoch, link)

    def _admit(self, epoch: int, event: Callable[..., None], *args: Any) -> None:
        admission = self.member.judge(epoch)
        if admission is Admission.TAKE:
            event(*args)
        elif admission is Admission.KEEP:
            self._early.append((epoch, event, args))

    def _accept(self, number: int, epoch: int, link: int) -> None:
        links = self._parts.get(epoch)
        if links is not None and link in links.closed and links.plan.ends[link][1] == number:
            links.closed.discard(link)
            self._carry(links, link, "opened", epoch, link, back=True)
            self._report_prepared(links)

    def _opened(self, epoch: int, link: int) -> None:
        links = self._parts.get(epoch)
        if links is not None:
            links.closed.discard(link)
            self._report_prepared(links)

    def _make_room(self, epoch: int, link: int) -> None:
        links = self._parts.get(epoch)
        if links is not None and link in links.room:
            links.room[link] += 1
            self._move(links)
            self._feed(links)

    def _take(self, epoch: int, link: int, frame: tuple[int, Any]) -> None:
        # A rule that takes frames of any epoch gets them for the part that it has.
        links = self._parts.get(epoch) or next(reversed(self._parts.values()), None)
        if links is None or link not in links.inbox:
            return
        self._count(links, link)
        if frame == _END:
            links.ended.add(link)
            if link == len(links.plan.stages):
                self._has_seen_end(links)
        else:
            links.inbox[link].append(frame)
        self._move(links)

    def _count(self, links: Links, link: int) -> None:
        source = links.plan.ends[link][0]
        if source != self.rank:
            links.received[source] = links.received.get(source, 0) + 1

    def _post(self, links: Links, link: int, frame: tuple[int, Any]) -> None:
        links.room[link] -= frame != _END
        peer = links.plan.ends[link + 1][0]
        if peer != self.rank:
            links.sent[peer] = links.sent.get(peer, 0) + 1
        self._carry(links, link, "take", links.epoch, link, frame)

    # -- a stage ----------------------------------------------------------------------------------

    def _is_working(self, links: Links) -> bool:
        return self._has(links) and self.member.step(links.epoch) in _WORKING

    def _move(self, links: Links) -> None:
        """Send a result if there is room for it; compute the next frame if there is one."""
        at = links.stage
        if at is None or not self._is_working(links):
            return
        if links.result is not None and links.room[at + 1] > 0:
            result, links.result = links.result, None
            self._post(links, at + 1, result)
        before = next(iter(self._parts.values()))
        if before is not links and before.stage is not None and not before.stage_ended:
            return  # what comes first is computed first
        if links.result is None and not links.busy and links.inbox[at]:
            frame = links.inbox[at].popleft()
            self._carry(links, at, "room", links.epoch, at, back=True)
            links.busy = True
            self._later(self.world.chance.uniform(0.02, 0.3), self._computed, links, frame)
        elif links.result is None and not links.busy and at in links.ended and not links.stage_ended:
            links.stage_ended = True
            self._post(links, at + 1, _END)
            self._has_seen_end(links)
            for other in list(self._parts.values()):
                self._move(other)

    def _computed(self, links: Links, frame: tuple[int, Any]) -> None:
        if not self._has(links) or links.stage is None:
            return
        links.busy = False
        if self.member.step(links.epoch) is MemberStep.STOPPING:
            self._report_stopped(links)
            return
        number, done = frame
        _, _, first, stop = links.plan.stages[links.stage]
        links.result = (number, [*done, (first, stop)])
        self._move(links)

    # -- the data rank ----------------------------------------------------------------------------

    def _feed(self, links: Links) -> None:
        ledger = self.world.ledger
        if links.plan.data != (self.rank, self.number) or links.reading or links.fed_all:
            return
        if self.member.step(links.epoch) is not MemberStep.RUNNING or not links.room[0]:
            return
        if next(iter(self._parts.values())) is not links and not self._is_fed(links):
            return  # the epoch before has the input still
        number = ledger.next_number()
        if number is not None:
            links.reading = True
            self._later(self.world.chance.uniform(0.0, 0.05), self._read, links, number)
        elif self.world.input_ended and ledger.written + ledger.under_way == self.world.limits.microbatches:
            self._end_feeding(links)

    def _is_fed(self, links: Links) -> bool:
        """Return whether the input goes to the second of two epochs."""
        return next(iter(self._parts.values())).first_of_next is not None

    def _end_feeding(self, links: Links) -> None:
        if not links.fed_all:
            links.fed_all = True
            self._post(links, 0, _END)
            self._has_seen_end(links)

    def _read(self, links: Links, number: int) -> None:
        ledger, limits = self.world.ledger, self.world.limits
        if not self._has(links) or self.member.step(links.epoch) is not MemberStep.RUNNING:
            return
        links.reading = False
        if number < limits.microbatches:
            if number < len(self.world.rows):
                raise ViolationError(f"microbatch {number} is fed again, though it is written")
            entry = ledger.entry(number)
            if entry is None:
                if number in self.world.read:
                    raise ViolationError(f"nobody knows any longer which items microbatch {number} has")
                entry = self.world.read[number] = self.world.chance.getrandbits(30)
            ledger.fed(number, entry)
            self.world.note("feed", links.epoch, number)
            self._post(links, 0, (number, []))
        else:
            ledger.input_ended()
            self.world.input_ended = True
            self._complete()
            self._end_feeding(links)
        after = next(reversed(self._parts.values()))
        if after is not links and self.member.step(after.epoch) is MemberStep.RUNNING:
            self._switch(links, after)
        else:
            self._feed(links)

    def _collect(self, links: Links, epoch: int, link: int, frame: tuple[int, Any]) -> None:
        if links.plan.data != (self.rank, self.number) or not self._is_working(links):
            return
        arrival = self.world.ledger.judge(epoch, frame[0])
        self._count(links, link)
        if arrival is Arrival.HOLD:
            links.held.append(frame)
            if len(links.held) > _BUFFERS:
                raise ViolationError(f"{len(links.held)} results are held")
            return
        self._carry(links, link, "room", epoch, link, back=True)
        if arrival is Arrival.WRITE:
            self._write(links, epoch, frame)

    def _write(self, links: Links, epoch: int, frame: tuple[int, Any]) -> None:
        world, (number, done) = self.world, frame
        world.note("write", epoch, number)
        if number != len(world.rows):
            raise ViolationError(f"row {number} is written after {len(world.rows)} rows")
        if done != [(first, stop) for _, _, first, stop in links.plan.stages]:
            raise ViolationError(f"row {number} was computed by {done}")
        if world.ledger.wrote(number) != world.read[number]:
            raise ViolationError(f"row {number} has the labels of others")
        world.rows.append(number)
        self._feed(next(reversed(self._parts.values())))
        self._feed(links)
        self._complete()
        for other in list(self._parts.values()):
            self._write_held(other)

    def _write_held(self, links: Links) -> None:
        if links.held and self.world.ledger.judge(links.epoch, links.held[0][0]) is Arrival.WRITE:
            frame, link = links.held.popleft(), len(links.plan.stages)
            self._carry(links, link, "room", links.epoch, link, back=True)
            self._write(links, links.epoch, frame)

    def _complete(self) -> None:
        if self.world.ledger.complete and not self._has_completed:
            self._has_completed = True
            self.world.ambush_the_end()
            self._tell(Complete())

"""A process of one rank in a simulated run: the product's parts, with links and threads of the world.

    main thread    Turns.next ──> begins an epoch ──> ... ──> complete, done
    epoch n        load, open links ──> Turns.ready ──> wait for the threads ──> passed, or stopped
    its threads    a stage that computes; on the data rank ``Feeder.run`` and ``Collector.run``

What a microbatch carries is the list of layers that computed it, so a row shows its way.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from failover_shells import BEAT_S, LIMITS, Part, ViolationError, read_plan
from failover_text import (
    MOST_PAGES,
    Ends,
    Outputs,
    Pages,
    Values,
    bounds,
    compute_step,
    empty_layer,
    empty_pages,
    make_queue,
)
from failover_threads import SimCondition
from msgspec import Raw

from pipeedge.base.crew import Closed
from pipeedge.base.fields import encode, reader
from pipeedge.base.payload import TensorSpec
from pipeedge.base.schedule import LayerRange
from pipeedge.control.epoch_member import MemberStep
from pipeedge.control.messages import (
    FROM_HUB,
    Abort,
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
    Prepare,
    Retire,
    Run,
    Stopped,
    Summary,
    Verdict,
)
from pipeedge.control.turns import EpochOrder, EpochStoppedError, Turns
from pipeedge.data import Microbatch
from pipeedge.data.step_queue import StepStream
from pipeedge.decoding.page_copies import CopiesOfPages, PagesToCopy
from pipeedge.models.layers.decoder import PAGE
from pipeedge.models.step_rows import StepBounds, number_of_step, unpack_rows
from pipeedge.observe.timeline import ThreadState
from pipeedge.plan.cache_owners import CopiedPages, KeptOutput
from pipeedge.run.activity import Activity
from pipeedge.run.feed_collect import Collection, Collector, Feed, Feeder
from pipeedge.transport.base import Packet, Reserved, unbound

if TYPE_CHECKING:
    from failover_world import World

Copy: TypeAlias = tuple[int, int, list[Values]]
"""A page, the step as of which it was copied, and its values in each layer."""
ITEMS = 2
"""Number of items of a microbatch."""
_LINK_PATIENCE_S = 4.0
_PIECE_BYTES = 10_000_000
_SLOW_PIECE_S = 6.0
"""Longest time that a piece of a slow load takes."""
_BUFFERS = 2
_READ_FROM_HUB = reader(FROM_HUB)
_LINKED = (MemberStep.PREPARING, MemberStep.PREPARED, MemberStep.RUNNING)
_ACTIVE = (*_LINKED, MemberStep.STOPPING)


class RunFailedError(Exception):
    """The run has failed, as the hub has said."""


class LinkError(Exception):
    """A link is lost, or does not open."""

    def __init__(self, peer: int, line: str) -> None:
        super().__init__(line)
        self.peer = peer


class CannotPrepareError(Exception):
    """There is no memory for another plan."""


class Turn:
    """One process in one epoch: its links and threads."""

    def __init__(self, process: RankShell, order: EpochOrder, before: Turn | None) -> None:
        self.process = process
        self.world = process.world
        self.epoch = order.prepare.epoch
        self.plan: Part = read_plan(order.prepare.plan)
        self.is_change = order.replaces is not None
        self.before = before
        self.changed = SimCondition(self.world)
        self.activity = process.activity.part()
        self.stopped = False
        self.error: Exception | None = None
        self.running = 0
        """Number of threads that have not ended."""
        self.stage_ended = False
        me, ends = (process.rank, process.number), self.plan.ends
        links = range(len(ends) - 1)
        self.stage = next((at for at, stage in enumerate(self.plan.stages) if stage[:2] == me), None)
        self.is_data = self.plan.data == me
        self.outgoing = {link: _BUFFERS for link in links if ends[link] == me}
        """Number of frames that each outgoing link still takes."""
        self.incoming: dict[int, deque[tuple[int, list[int]] | None]] = {
            link: deque() for link in links if ends[link + 1] == me
        }
        self.closed = {link for link in links if me in ends[link : link + 2] and ends[link] != ends[link + 1]}
        """Links that are still to open."""
        self.input: Input | StepStream | None = None
        self.loaded: LoadedPages | None = None
        """Caches of its stage."""
        self.senders = [
            CopySender(self, number)
            for number, (_, _, first, _) in enumerate(self.plan.standbys)
            if self.stage is not None and self.layers[0] <= first < self.layers[1]
        ]
        self.receivers = {
            number: CopyReceiver(self, standby[2:])
            for number, standby in enumerate(self.plan.standbys)
            if standby[:2] == me
        }

    @property
    def layers(self) -> tuple[int, int]:
        """The layers of its stage."""
        assert self.stage is not None
        return self.plan.stages[self.stage][2:]

    def peers(self) -> list[tuple[int, int]]:
        """Return rank and incarnation of the other ends of its links, in order."""
        ends, me = self.plan.ends, (self.process.rank, self.process.number)
        linked = {end for link in range(len(ends) - 1) for end in ends[link : link + 2]}
        return sorted(linked - {me}) if self.outgoing or self.incoming else []

    # -- threads ----------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Do something that cannot be interrupted."""
        self.changed.wait_for(lambda: False, seconds)

    def wait_for(self, happened: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait for something, unless the epoch is stopped or fails first."""
        found = self.changed.wait_for(lambda: self.stopped or self.error or happened(), timeout)
        if self.stopped or self.error:
            raise Closed
        return found

    def check(self) -> None:
        if self.stopped:
            raise EpochStoppedError
        if self.error is not None:
            raise self.error

    def fail(self, error: Exception) -> None:
        """End the threads because of the first error."""
        if self.error is None:
            self.error = error
        self.wake()

    def wake(self) -> None:
        if self.is_data and self.input is not None:
            self.process.ledger.close()
            self.input.close()
        self.changed.notify_all()
        self.process.disk.notify_all()

    def start(self, work: Callable[[], None]) -> None:
        self.running += 1

        def run() -> None:
            try:
                work()
            except Closed:
                pass
            except LinkError as error:
                self.fail(error)
            self.running -= 1
            self.changed.notify_all()

        self.world.threads.start(self.process, run)

    # -- links ------------------------------------------------------------------------------------

    def carry(self, link: int, what: str, *args: Any, back: bool = False) -> None:
        """Send something along ``link``, or ``back`` from its end to its beginning."""
        world, me = self.world, self.process
        rank, number = self.plan.ends[link if back else link + 1]
        lane = (what == "room", me.number, number, link, self.epoch)
        peer = world.processes[number]
        world.network.carry((me.rank, rank), lane, peer.get, self.epoch, link, what, *args)

    def post(self, link: int, frame: tuple[int, list[int]] | None) -> None:
        self.wait_for(lambda: frame is None or self.outgoing[link] > 0)
        self.outgoing[link] -= frame is not None
        peer = self.plan.ends[link + 1][0]
        if peer != self.process.rank:
            self.activity.sent(peer)
        self.carry(link, "frame", frame)

    def receive(self, link: int) -> tuple[int, list[int]] | None:
        peer = self.plan.ends[link][0]
        if peer == self.process.rank:
            self.wait_for(lambda: self.incoming[link])
            return self.incoming[link].popleft()
        with self.activity.awaiting(peer):
            self.wait_for(lambda: self.incoming[link])
        self.activity.received(peer)
        return self.incoming[link].popleft()

    def give_room(self, link: int) -> None:
        self.carry(link, "room", back=True)

    # -- work -------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the links."""
        ends, me = self.plan.ends, (self.process.rank, self.process.number)
        for link in sorted(self.closed):
            if ends[link] == me:
                self.carry(link, "open", self.process.number)
            elif self.process.early.pop((self.epoch, link), None) == ends[link][1]:
                self.accept(link)
        if self.changed.wait_for(lambda: self.stopped or self.error or not self.closed, _LINK_PATIENCE_S):
            self.check()
            return
        link = min(self.closed)
        peer = ends[link][0] if ends[link][0] != self.process.rank else ends[link + 1][0]
        raise LinkError(peer, "does not open")

    def load(self) -> None:
        """Load the layers, after what is being loaded for another epoch."""
        process, world = self.process, self.world
        if self.is_change and world.chance.random() < 0.05:
            raise CannotPrepareError("no memory")
        process.disk.wait_for(lambda: self.stopped or self.error or not process.loads)
        self.check()
        process.loads = True
        world.threads.start(process, lambda: process.load(self.epoch))
        process.disk.wait_for(lambda: self.stopped or self.error or not process.loads)
        self.check()
        if self.stage is not None:
            self.keep_pages(self.layers)
        elif self.receivers and not self.is_change:
            process.loaded = []
        if not self.is_change:
            standing = {one.layers for one in self.receivers.values()}
            process.copies = {there: own for there, own in process.copies.items() if there in standing}

    def keep_pages(self, layers: tuple[int, int]) -> None:
        """Keep the caches of the layers of this epoch, and of those that compute meanwhile, as ranks do.

        Other layers of this epoch share what was there before.
        """
        process, plan = self.process, self.plan
        copies = [] if self.is_change else [LoadedPages(*one) for one in process.copies.items()]
        loaded = sorted([*process.loaded, *copies], key=lambda one: one.layers != layers)
        taken, sources = LoadedPages(layers, empty_pages(process.number), plan.since), list[LoadedPages]()
        for layer in range(*layers):
            having = [one for one in loaded if layer in range(*one.layers)]
            own = [one for one in having if one.since and one.since[layer] == plan.since[layer]]
            for one in (*own, *(one for one in having if one in copies), *having)[:1]:
                sources.append(one)
                taken.pages[layer] = one.pages[layer]
        is_found = all(one is sources[0] and one.layers == layers for one in sources)
        if not self.is_change:
            process.copies = {
                there: own for there, own in process.copies.items() if is_found and there != layers
            }
        known = {kept: values for one in process.loaded for kept, values in one.outputs.items()}
        for kept in plan.outputs:
            if kept.rank == process.rank:
                taken.outputs[kept] = known[kept] if kept in known else empty_layer(process.number)
        present = None if self.before is None else self.before.loaded
        process.loaded = [taken] if present is None else [present, taken]
        self.loaded = taken

    def accept(self, link: int) -> None:
        self.closed.discard(link)
        self.carry(link, "opened", back=True)
        self.changed.notify_all()

    def begin(self) -> None:
        """Start the threads."""
        feeder = self.feed_and_collect() if self.is_data else None
        if self.stage is not None:
            self.start(lambda: self.compute(feeder if self.stage == 0 else None))
        for one in (*self.senders, *self.receivers.values()):
            self.start(one.run)

    def feed_and_collect(self) -> Feeder:
        """Start the data rank's threads; the first stage, if it is here, takes the input from the feeder."""
        before, ledger = self.before, self.process.ledger
        takes_over = before is not None
        if before is not None and before.input is not None:
            self.input = before.input.following()
        else:
            self.input = self.process.open_input(self, ledger.position)
        feed = Feed(self.input, ITEMS, torch.float32, ledger, takes_over=takes_over)  # type: ignore[arg-type]
        end: Any = None if self.stage == 0 else OutgoingEnd(self, 0)
        feeder = Feeder(feed, self.activity, reserve=unbound if end is None else end.reserve)
        self.activity.feeder(lambda: feeder.is_idle, lambda: None, lambda: None)
        sink: Any = Sink(self) if self.world.text is None else TextSink(self)
        incoming: Any = IncomingEnd(self, len(self.plan.stages))
        collector = Collector(feeder, incoming, Collection(sink, counts_accuracy=False, epoch=self.epoch))
        if end is not None:
            self.start(lambda: feeder.run(end))
        self.start(collector.run)
        return feeder

    def compute(self, feeder: Feeder | None) -> None:
        """Compute as a stage does; what the epoch before was fed comes first."""
        world, at = self.world, self.stage
        assert at is not None
        _, _, first, stop = self.plan.stages[at]
        before = self.before
        if before is not None and before.stage is not None:
            self.wait_for(lambda: before.stage_ended)
        while (frame := self.next_frame(at, feeder)) is not None:
            number, way = frame
            with self.activity.busy(f"computing microbatch {number}"):
                self.sleep(world.compute_s(self.process))
            if number == world.limits.poison:
                world.poisoned += 1
                if world.poisoned > 2:
                    raise ViolationError(f"microbatch {number} costs a third rank")
                self.process.fail(number)
                raise Closed
            if world.text is None:
                self.post(at + 1, (number, [*way, first, stop]))
            else:
                assert self.loaded is not None
                plan, outputs = bounds(self.plan.pages), self.loaded.outputs_by_cut
                done = compute_step(self.loaded.pages, outputs, plan, way, first, stop)
                for one in self.senders:
                    one.executed(way[1], plan)
                self.post(at + 1, (number, done))
        self.stage_ended = True
        for turn in self.process.turns_by_epoch.values():
            turn.changed.notify_all()
        self.post(at + 1, None)

    def next_frame(self, link: int, feeder: Feeder | None) -> tuple[int, list[int]] | None:
        """Return what the stage computes next, of the link or, where it is given, of the feeder."""
        if feeder is None:
            frame = self.receive(link)
            if frame is not None:
                self.give_room(link)
            return frame
        packet = feeder.receive()
        if packet is None:
            return None
        self.note_fed(packet.number)
        return packet.number, packet.payload

    def note_fed(self, number: int) -> None:
        """Check that a microbatch may be fed."""
        self.world.note("feed", self.epoch, number)
        if number < len(self.world.rows):
            raise ViolationError(f"microbatch {number} is fed again, though it is written")


@dataclass(eq=False)
class LoadedPages:
    """What a process has of the layers of a stage, or of those that it stands by for."""

    layers: tuple[int, int]
    pages: Pages
    since: tuple[int, ...] = ()
    """For each layer of the model, number of the plan since which its process has had it."""
    outputs: dict[KeptOutput, Values] = field(default_factory=dict)

    @property
    def outputs_by_cut(self) -> Outputs:
        """What is kept, by the number of layers before the cut."""
        return {kept.cut: values for kept, values in self.outputs.items()}


class CopySender:
    """Copies pages of a stage to a standby, as ``run.copying`` does."""

    def __init__(self, turn: Turn, number: int) -> None:
        self._turn = turn
        self._number = number
        self._pages = PagesToCopy(MOST_PAGES, PAGE)

    def executed(self, table: torch.Tensor, plan: StepBounds) -> None:
        self._pages.executed(unpack_rows(table, plan), number_of_step(table))
        self._turn.changed.notify_all()

    def run(self) -> None:
        turn, found = self._turn, None
        rank, number, first, stop = turn.plan.standbys[self._number]
        peer = turn.world.processes[number]

        def next_page() -> bool:
            nonlocal found
            found = None if turn.stage_ended else self._pages.next()
            return turn.stage_ended or found is not None

        def tell(copy: Copy | None) -> None:
            lane = ("copy", turn.process.number, number, self._number, turn.epoch)
            way = (turn.process.rank, rank)
            turn.world.network.carry(way, lane, peer.take_copy, turn.epoch, self._number, copy)

        while not turn.stage_ended:
            turn.wait_for(next_page)
            if found is not None:
                page, step = found
                turn.sleep(turn.world.chance.uniform(0.0, 0.03))
                own = slice(page * PAGE, (page + 1) * PAGE)
                assert turn.loaded is not None
                values = turn.loaded.pages
                tell((page, step, [values[layer][own].copy() for layer in range(first, stop)]))
        tell(None)


class CopyReceiver:
    """Takes copies of pages."""

    def __init__(self, turn: Turn, layers: tuple[int, int]) -> None:
        self._turn = turn
        self.layers = layers
        self.arrived: deque[Copy | None] = deque()
        self._copies = CopiesOfPages(MOST_PAGES)

    def run(self) -> None:
        turn = self._turn
        turn.wait_for(lambda: turn.before is None)
        turn.sleep(turn.world.chance.choice((0.0, 0.0, 0.5)))
        turn.wait_for(lambda: True)
        pages = turn.process.copies.setdefault(self.layers, empty_pages(1000 + turn.process.number))
        while True:
            turn.wait_for(lambda: self.arrived)
            copy = self.arrived.popleft()
            if copy is None:
                return
            page, step, values = copy
            self._copies.replaces(page)
            for layer, own in zip(range(*self.layers), values, strict=True):
                pages[layer][page * PAGE : (page + 1) * PAGE] = own
            self._copies.stored(page, step)

    @property
    def copied(self) -> CopiedPages:
        return CopiedPages(LayerRange(*self.layers), "float32", self._turn.plan.number, self._copies.until)


class Input:
    """Items as the feeder takes them, from a position on: an ``ItemStream``."""

    fetching = ThreadState.READ

    def __init__(self, turn: Turn, position: int) -> None:
        self._turn = turn
        self._position = position

    def following(self) -> Input:
        return self

    def close(self) -> None:
        pass

    def next(self, microbatch_size: int) -> Items | None:
        world = self._turn.world
        self._turn.sleep(world.chance.uniform(0.0, 0.05))
        first = self._position
        if first >= ITEMS * world.limits.microbatches:
            return None
        self._position += microbatch_size
        return Items(tuple(range(first, first + microbatch_size)))


class Requests(Input):
    """Items that can be taken once, in whatever epoch, as those of requests."""

    fetching = ThreadState.IDLE

    def next(self, microbatch_size: int) -> Items | None:
        world = self._turn.world
        self._turn.sleep(world.chance.uniform(0.0, 0.05))
        if self._turn.stopped:
            raise Closed
        taken = world.taken
        if taken >= ITEMS * world.limits.microbatches:
            return None
        world.taken += microbatch_size
        return AskedItems(tuple(range(taken, taken + microbatch_size)))


class Items:
    """Items of one microbatch: a ``Group``."""

    specs = ()
    is_kept = False
    is_made_anew = False

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._numbers = numbers

    def collate(self, payload: object) -> Microbatch:
        origin: Any = self if self.is_kept else None
        return Microbatch((), (None,) * ITEMS, ("",) * ITEMS, self._numbers, origin=origin)


class AskedItems(Items):
    """Items of requests that travel together."""

    is_kept = True


class OutgoingEnd:
    """The sending end of the data rank, with the interface of ``Outgoing``."""

    def __init__(self, turn: Turn, link: int) -> None:
        self._turn = turn
        self._link = link

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        self._turn.wait_for(lambda: self._turn.outgoing[self._link] > 0)
        return Reserved(tuple(spec.empty() for spec in specs))

    def send(self, packet: Packet) -> int:
        self._turn.note_fed(packet.number)
        self._turn.post(self._link, (packet.number, packet.payload))
        return 0

    def finish(self) -> None:
        self._turn.post(self._link, None)


class Lease:
    """Memory of a frame that has come."""

    def __init__(self, turn: Turn, link: int) -> None:
        self._turn = turn
        self._link = link

    def release(self) -> None:
        self._turn.give_room(self._link)


class IncomingEnd:
    """The receiving end of the data rank, with the interface of ``Incoming``."""

    def __init__(self, turn: Turn, link: int) -> None:
        self._turn = turn
        self._link = link
        self.activity = turn.activity

    def receive(self) -> Packet | None:
        frame = self._turn.receive(self._link)
        if frame is None:
            return None
        number, way = frame
        lease = Lease(self._turn, self._link)
        if self._turn.world.text is not None:
            return Packet(number, len(way[0]), tuple(way), lease)
        outputs = torch.tensor([way] * ITEMS, dtype=torch.float32)
        return Packet(number, ITEMS, (outputs,), lease)


class Sink:
    """The output, which checks each row."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def write(self, number: int, outputs: torch.Tensor, batch: Microbatch) -> None:
        turn, world = self._turn, self._turn.world
        world.note("write", turn.epoch, number)
        if number != len(world.rows):
            raise ViolationError(f"row {number} is written after {len(world.rows)} rows")
        way = [int(layer) for layer in outputs[0].tolist()]
        if way != turn.plan.way:
            raise ViolationError(f"row {number} was computed by {way}, not by {turn.plan.way}")
        if batch.numbers != tuple(range(ITEMS * number, ITEMS * (number + 1))):
            raise ViolationError(f"row {number} has the items {batch.numbers}")
        world.rows.append(number)


class TextSink:
    """The sink of a decoder."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def write(self, number: int, outputs: torch.Tensor, batch: Microbatch) -> None:
        turn, world = self._turn, self._turn.world
        world.note("write", turn.epoch, number)
        if number != len(world.rows):
            raise ViolationError(f"step {number} is written after {len(world.rows)} steps")
        world.rows.append(number)
        turn.process.texts.write(number, outputs, batch)


class RankShell:
    """A process of one rank in a simulated run."""

    def __init__(self, world: World, rank: int, number: int) -> None:
        self.world = world
        self.rank = rank
        self.number = number
        """Its incarnation."""
        self.name = f"{rank}#{number}"
        self.rules = world.rules.member()
        self.turns = Turns(self._tell, lambda: world.now, self.rules, SimCondition(world))  # type: ignore[arg-type]
        self.activity = Activity(lambda: world.now)
        self.ledger = world.rules.ledger(SimCondition(world))  # type: ignore[arg-type]
        self.texts = make_queue(world, SimCondition(world))
        self.loaded: list[LoadedPages] = []
        """Caches of the layers that this process has, as it has left them."""
        self.copies: dict[tuple[int, int], Pages] = {}
        """Copies of the caches of layers that others have."""
        self.turns_by_epoch: dict[int, Turn] = {}
        self.early: dict[tuple[int, int], int] = {}
        """Processes that have asked to open a link of an epoch that is not prepared here."""
        self.alive = True
        self.paused = False
        self.disturbed = False
        """Whether something happened to it or to its network that may make it look dead."""
        self.dismissed = False
        """Whether the hub has sent it a verdict."""
        self.knows_end = False
        """Whether it has heard that the run is complete, or why it has failed."""
        self.has_summary = False
        self.disk = SimCondition(world)
        self.disk_answers = True
        self.loads = False
        self._ended_epochs: set[int] = set()
        self._missed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.hub_heard_at = self.began_at = world.now

    def open_input(self, turn: Turn, position: int | None) -> Input | StepStream:
        """Return the input of an epoch: a file, which is read again, requests, or steps of a decoder."""
        if self.world.text is not None:
            return self.texts.stream()
        return Requests(turn, 0) if self.world.limits.endless else Input(turn, position or 0)

    @property
    def active(self) -> set[int]:
        """Epochs in which it computes, or may do so at once."""
        return {epoch for epoch in self.rules.epochs if self.rules.step(epoch) in _ACTIVE}

    # -- life -------------------------------------------------------------------------------------

    def begin(self) -> None:
        world = self.world
        self.hub_heard_at = world.now
        self._tell(Hello(self.rank, world.limits.ranks, "host"))
        self._tell(Facts(Raw(b"{}")))
        world.threads.start(self, self._main)
        world.after(world.chance.uniform(0.0, BEAT_S), self._beat)

    def die(self) -> None:
        """End at once; peers notice when the network tells them."""
        if not self.alive:
            return
        self.alive = False
        self._leave()
        self.world.after(0.0, self.world.threads.kill, self)

    def fail(self, microbatch: int | None = None) -> None:
        """End because of an exception."""
        self._tell(Failed("an exception", microbatch))
        self.die()

    def _leave(self) -> None:
        world = self.world
        world.network.carry((self.rank, 0), ("to hub", self.number), world.hub.closed, self)
        for epoch, turn in sorted(self.turns_by_epoch.items()):
            self._reset_links(epoch, turn.peers())

    def _reset_links(self, epoch: int, peers: list[tuple[int, int]]) -> None:
        for rank, number in peers:
            if rank != self.rank:
                lane = ("reset", self.number, number)
                peer = self.world.processes[number]
                self.world.network.carry((self.rank, rank), lane, peer.lose, epoch, self.rank)

    def pause(self) -> None:
        self.paused = self.disturbed = True

    def resume(self) -> None:
        self.paused = False
        missed, self._missed = self._missed, []
        for event, args in missed:
            self.do(event, *args)

    def miss(self, event: Callable[..., None], *args: Any) -> None:
        self._missed.append((event, args))

    def do(self, event: Callable[..., None], *args: Any) -> None:
        """Let ``event`` happen to this process, once it runs."""
        if not self.alive:
            return
        if self.paused:
            self._missed.append((event, args))
        else:
            event(*args)

    # -- the disk ---------------------------------------------------------------------------------

    def load(self, epoch: int) -> None:
        """Load the layers for an epoch, whatever becomes of that."""
        chance = self.world.chance
        pieces, most_s = (4, _SLOW_PIECE_S) if chance.random() < 0.02 else (1, 0.5)
        with self.activity.loading(f"loading for epoch {epoch}", pieces * _PIECE_BYTES) as load:
            for _ in range(pieces):
                self.disk.wait_for(lambda: False, chance.uniform(0.0, most_s))
                self.disk.wait_for(lambda: self.disk_answers)
                load.advance(_PIECE_BYTES)
        self.loads = False
        self.disk.notify_all()

    def stop_disk(self) -> None:
        """Let the disk answer no longer: what is loaded hangs, though the process lives."""
        self.disk_answers, self.disturbed = False, True

    def start_disk(self) -> None:
        """Let the disk answer again."""
        self.disk_answers = True
        self.disk.notify_all()

    # -- heartbeats -------------------------------------------------------------------------------

    def _beat(self) -> None:
        self.do(self._beat_now)
        if self.alive:
            self.world.after(BEAT_S, self._beat)

    def _beat_now(self) -> None:
        if self.world.now - self.hub_heard_at > LIMITS.silence_s:
            self.world.note(self.name, "does not hear the hub")
            self.die()
            return
        self._tell(Beat(self.activity.status()))

    # -- the main thread --------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while (order := self.turns.next()) is not None:
                before = self.turns_by_epoch.get(order.replaces) if order.replaces is not None else None
                turn = Turn(self, order, before)
                self.turns_by_epoch[turn.epoch] = turn
                self.turns.on_stop(turn.epoch, lambda turn=turn: self._stop(turn))  # type: ignore[misc]
                self.world.threads.start(self, lambda turn=turn: self._go_through(turn))  # type: ignore[misc]
        except RunFailedError:
            return
        self.knows_end = True
        if self.ledger.complete:
            self.world.ambush_the_end()
            self._tell(Complete())
        if self.turns.latest:
            self._tell(Done(Raw(b"null")))
        else:
            self.die()  # it has nothing to tell

    # -- the thread of an epoch -------------------------------------------------------------------

    def _go_through(self, turn: Turn) -> None:
        with contextlib.suppress(RunFailedError):
            self._obey(turn)

    def _obey(self, turn: Turn) -> None:
        try:
            self._work(turn)
        except EpochStoppedError:
            pass
        except LinkError as error:
            turn.fail(error)
            self.turns.say(LinkLost(turn.epoch, error.peer, str(error)))
        except CannotPrepareError as error:
            self.turns.say(Declined(turn.epoch, str(error)))
        step = self.turns.wait_for_end(turn.epoch)
        if step is MemberStep.ENDED:
            return
        if step is MemberStep.STOPPING:
            self._stop(turn)
            turn.changed.wait_for(lambda: not turn.running)
            self._reset_links(turn.epoch, turn.peers())
        del self.turns_by_epoch[turn.epoch]
        self._ended_epochs.add(turn.epoch)
        self.activity.drop(turn.activity)
        if step is not MemberStep.STOPPING:
            self.copies = {}
            followers = [*self.turns_by_epoch.values()]
            if len(followers) == 1 and followers[0].loaded is not None:
                self.loaded = [followers[0].loaded]
        for other in self.turns_by_epoch.values():
            if other.before is turn:
                other.before = None
                other.changed.notify_all()
        if step is MemberStep.STOPPING:
            copied = [one.copied for one in turn.receivers.values()]
            written = self.ledger.written if turn.is_data else None
            self.turns.say(Stopped(turn.epoch, written, Raw(encode(copied))))

    def _work(self, turn: Turn) -> None:
        world, ledger = self.world, self.ledger
        if turn.is_data and not turn.is_change:
            ledger.restart(turn.epoch, turn.plan.window)
            world.window = turn.plan.window
        turn.open()
        turn.load()
        if turn.is_data and world.text is not None:
            self.begin_text(turn)
        self.turns.ready(turn.epoch)
        if turn.is_data and world.text is not None:
            world.text.open(self)
        if turn.is_data and turn.is_change:
            ledger.change(turn.epoch, turn.plan.window)
            world.window += turn.plan.window
        turn.begin()
        turn.changed.wait_for(lambda: turn.stopped or turn.error or not turn.running)
        turn.check()
        if turn.is_data and ledger.complete:
            self.turns.has_all()
        else:
            self.turns.say(Passed(turn.epoch, ledger.first_of_next if turn.is_data else None))

    def begin_text(self, turn: Turn) -> None:
        """Let the data rank make steps for an epoch."""
        plan, ends = turn.plan, Ends()
        alone = len(plan.stages) == 1 and plan.stages[0][:2] == plan.data
        places = 0 if alone else len(plan.stages)
        if turn.is_change:
            self.texts.change(bounds(plan.pages), places, 0, plan.cache_owners)
        else:
            self.texts.begin(ends, bounds(plan.pages), places, 0, plan.cache_owners)  # type: ignore[arg-type]

    def _stop(self, turn: Turn) -> None:
        """End the threads of an epoch."""
        turn.stopped = True
        turn.wake()

    # -- the hub ----------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        if self.alive:
            world = self.world
            way = (self.rank, 0)
            world.network.carry(way, ("to hub", self.number), world.hub.hear, self, encode(message))

    def hear(self, text: bytes) -> None:
        """Hear a message of the hub."""
        self.do(self._hear, text)

    def _hear(self, text: bytes) -> None:
        self.hub_heard_at = self.world.now
        message = _READ_FROM_HUB(text)
        if isinstance(message, Prepare | Run | Retire | Abort | Complete | Verdict):
            self.world.note(self.name, "hears", text.decode())
        if isinstance(message, Verdict):
            self.knows_end = True
            self.turns.fail(RunFailedError())
            self.die()
        elif isinstance(message, Summary):
            self.has_summary = True
        elif isinstance(message, Prepare | Run | Retire | Abort | Complete):
            try:
                self.turns.heard(message)
            except ValueError as error:
                raise ViolationError(f"the hub breaks the protocol with {self.name}: {error}") from error

    def take_copy(self, epoch: int, number: int, copy: Copy | None) -> None:
        """Get a copy of a page, or the end of the copies."""
        self.do(self._take_copy, epoch, number, copy)

    def _take_copy(self, epoch: int, number: int, copy: Copy | None) -> None:
        turn = self.turns_by_epoch.get(epoch)
        if turn is not None:
            turn.receivers[number].arrived.append(copy)
            turn.changed.notify_all()

    # -- links ------------------------------------------------------------------------------------

    def lose(self, epoch: int, peer: int) -> None:
        """Notice that a peer has closed its links."""
        self.do(self._lose, epoch, peer)

    def _lose(self, epoch: int, peer: int) -> None:
        turn = self.turns_by_epoch.get(epoch)
        if turn is not None and self.rules.step(epoch) in _LINKED:
            turn.fail(LinkError(peer, "reset"))

    def notice_reset(self, peer: int) -> None:
        """Notice that the network has reset a link, if there is one."""
        for epoch, turn in sorted(self.turns_by_epoch.items()):
            if any(turn.plan.ends[link][0] == peer != self.rank for link in turn.incoming):
                self.lose(epoch, peer)
                return

    def get(self, epoch: int, link: int, what: str, *args: Any) -> None:
        """Get something from a link."""
        self.do(self._get, epoch, link, what, args)

    def _get(self, epoch: int, link: int, what: str, args: tuple[Any, ...]) -> None:
        turn = self.turns_by_epoch.get(epoch)
        if what == "open":
            self._get_open(epoch, link, args[0], turn)
            return
        if turn is None:
            return  # the link has been closed
        if what == "frame":
            frames = turn.incoming[link]
            frames.append(args[0])
            if len(frames) - (args[0] is None) > _BUFFERS:
                raise ViolationError(f"{len(frames)} frames wait on link {link} of {self.name}")
        elif what == "room":
            turn.outgoing[link] += 1
        else:
            turn.closed.discard(link)
        turn.changed.notify_all()

    def _get_open(self, epoch: int, link: int, number: int, turn: Turn | None) -> None:
        if turn is None:
            if epoch not in self._ended_epochs:
                self.early[epoch, link] = number
        elif link in turn.closed and turn.plan.ends[link][1] == number:
            turn.accept(link)

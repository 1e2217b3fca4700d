"""A process of one rank in a simulated run: a shell around ``EpochMember`` and ``Ledger``.

What a microbatch carries is the list of what was done to it, so a row shows which stages computed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from failover_shells import BEAT_S, LIMITS, Part, ViolationError, read_plan

from pipeedge.base.fields import encode, reader
from pipeedge.control.epoch_member import Admission, MemberStep
from pipeedge.control.epoch_messages import EPOCH_FROM_HUB, Abort, Prepare, Retire, Run
from pipeedge.control.ledger import Arrival
from pipeedge.control.liveness import Loading, RankStatus
from pipeedge.control.messages import Complete, Message, Verdict

if TYPE_CHECKING:
    from failover_world import World

_LINK_PATIENCE_S = 4.0
_PIECE_BYTES = 10_000_000
_SLOW_PIECE_S = 6.0
"""Longest time that a piece of a slow load takes."""
_BUFFERS = 2
_READ_FROM_HUB = reader(EPOCH_FROM_HUB)
_WORKING = (MemberStep.PREPARING, MemberStep.PREPARED, MemberStep.RUNNING)
_ACTIVE = (*_WORKING, MemberStep.STOPPING)
_END = (-1, None)
"""Frame that nothing follows."""


@dataclass
class Load:
    """Loading of a part, in pieces. It goes on whatever becomes of the part."""

    links: Links
    then: Callable[[Links], None]
    """Called with the part once all is loaded."""
    pieces: int
    most_s: float
    """Longest time that a piece takes."""
    done: int = 0

    @property
    def status(self) -> Loading:
        total = self.pieces * _PIECE_BYTES
        return Loading(f"loading for epoch {self.links.epoch}", self.done * _PIECE_BYTES, total)


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
        self._loads: deque[Load] = deque()
        """What it loads, and what waits for that to end."""
        self._disk_answers = True
        self._hub_heard_at = self.began_at = world.now
        self._has_completed = False

    @property
    def active(self) -> set[int]:
        """Epochs in which it computes, or may do so at once."""
        return {epoch for epoch in self._parts if self.member.step(epoch) in _ACTIVE}

    @property
    def ended(self) -> bool:
        return self.member.ended

    @property
    def is_loading(self) -> bool:
        return self.alive and bool(self._loads)

    def check(self) -> None:
        for links in self._parts.values():
            for link, frames in links.inbox.items():
                if len(frames) > _BUFFERS:
                    raise ViolationError(f"{len(frames)} frames wait on link {link} of {self.name}")

    # -- life -------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._hub_heard_at = self.world.now
        self.world.after(self.world.chance.uniform(0.0, BEAT_S), self._beat)

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
            self.world.after(BEAT_S, self._beat)

    def _beat_now(self) -> None:
        world = self.world
        if self.ended:
            return
        if world.now - self._hub_heard_at > LIMITS.silence_s:
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
        loading = self._loads[0].status if self._loads else None
        status = RankStatus(sent=sent, received=received, awaiting=frozenset(awaited), loading=loading)
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
        plan = read_plan(prepare.plan)
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
        self._load(links, prepared)
        self._later(_LINK_PATIENCE_S, self._lose_closed, links)
        for link in sorted(links.closed):
            if ends[link] == me:
                self._carry(links, link, "open", self.number, epoch, link)
        early, self._early = self._early, []
        for of, event, args in early:
            self._admit(of, event, *args)

    # -- the disk ---------------------------------------------------------------------------------

    def stop_disk(self) -> None:
        """Let the disk answer no longer: what is loaded hangs, though the process lives."""
        self._disk_answers, self.disturbed = False, True

    def start_disk(self) -> None:
        """Let the disk answer again."""
        self._disk_answers = True
        if self._loads:
            self._load_piece()

    def _load(self, links: Links, then: Callable[[Links], None]) -> None:
        is_slow = self.world.chance.random() < 0.02
        pieces, most_s = (4, _SLOW_PIECE_S) if is_slow else (1, 0.5)
        self._loads.append(Load(links, then, pieces, most_s))
        if len(self._loads) == 1:  # what was begun for a part that has been stopped ends first
            self._load_piece()

    def _load_piece(self) -> None:
        if self._disk_answers:
            load = self._loads[0]
            self._later(self.world.chance.uniform(0.0, load.most_s), self._loaded_piece, load, load.done)

    def _loaded_piece(self, load: Load, piece: int) -> None:
        if not self._disk_answers or not self._loads or self._loads[0] is not load or load.done != piece:
            return  # it is loaded again once the disk answers
        load.done += 1
        if load.done == load.pieces:
            self._loads.popleft()
            load.then(load.links)
        if self._loads:
            self._load_piece()

    def _has(self, links: Links) -> bool:
        """Return whether a part is one still."""
        return self._parts.get(links.epoch) is links

    def _loaded(self, links: Links) -> None:
        if self._has(links):
            links.loaded = True
            self._report_prepared(links)

    def _decline(self, links: Links) -> None:
        if self._has(links):
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

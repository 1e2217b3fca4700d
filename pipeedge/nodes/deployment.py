"""One model that a node was asked to serve: from who is here to answers, and on through losses.

    gathering ─> fetching ─> profiling ─> starting ─> serving ──a new node, a removed one──> gathering
        │            │           │            │          └─── rank 0 ends ──wait───────────> gathering
        └────────────┴───────────┴────────────┴── nothing has ever answered ──> ended, with the reason

The steps are those that a person takes by hand: each node profiles the model, the profiles become the
scheduler's files, and ``pipeedge run`` plans with them as rank 0, which is a process of this node. The other
ranks are on the other nodes, started again when they are lost (``launch.supervisor``). What a loss does to
the run is the run's own business (``docs/failures.md``).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipeedge.base.errors import PeerError, PipeEdgeError, one_line
from pipeedge.base.ports import free_port
from pipeedge.base.wording import count, printable
from pipeedge.launch.commands import RankCommand
from pipeedge.launch.supervisor import ExitLimits, Output, RankExit, RankProcess, Supervisor, run_process
from pipeedge.nodes.composing import ProfiledNode, choose_nodes, compose, seconds_of
from pipeedge.nodes.messages import (
    Granted,
    Here,
    Hold,
    News,
    Profile,
    Profiled,
    Refine,
    Serving,
    StartRank,
    Up,
    is_model_name,
)
from pipeedge.nodes.peer import Peer, have_hold, have_profile, measure_link
from pipeedge.nodes.pieces import PieceKeeper
from pipeedge.nodes.programs import rank_words
from pipeedge.nodes.remote_rank import RemoteRank
from pipeedge.nodes.store import NodeStore, OfferedModel
from pipeedge.plan.specs import NeighborLink
from pipeedge.request.environment import BEGINS, LAUNCHED, LAUNCHER, inherited_environment
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key

__all__ = ["Deployment", "Refinement", "Surroundings", "ask_service", "meeting_address"]

_LOOK_S = 5.0
"""Seconds between two looks for nodes that were not there before."""
_AGAIN_S = 2.0
"""Seconds until a rank on another node is started again."""
_RETRY_S = 3.0
"""Seconds until a run that has ended is started again."""
_LEFT_OUT_S = 60.0
"""Seconds until a node that was left out is asked again."""
_RUN_TIMEOUT_S = 30.0
"""Seconds after which the ranks of a run take one that is silent for lost."""
_HEALTH_S = 0.2
"""Seconds between two questions whether the service answers yet."""
_SERVICE_S = 2.0
_LINES = 200
_REFINE_S = 30.0
"""Seconds between two times that nodes are told how slow they are."""
_SAME = 0.02
"""Largest relative difference of what counts as the same slowness."""
_SLOWNESS = (0.1, 10.0)
"""Bounds of what nodes are told: beyond, the run has measured something else."""
_STEPS = 1
"""Size of a microbatch that the profiler takes for a decoder."""
_SAMPLES = 3
"""Number of figures over which the recent rate of answers is taken, some seconds apart."""
_SHORTEST_S = 1.0
"""Shortest time in seconds over which a rate is taken."""


class Surroundings(Protocol):
    """What a deployment needs of its node."""

    name: str
    port: int
    store: NodeStore
    keeper: PieceKeeper

    @property
    def membership(self) -> Membership:
        """Membership with the newest list of removed nodes."""

    def facts(self) -> Here:
        """Return what this node is."""

    def look(self) -> list[tuple[Peer, str]]:
        """Return the other nodes that answer, each with the address of this machine on the way there."""

    def profile(self, request: Profile, words: tuple[str, ...], tell: Callable[[News], None]) -> Profiled:
        """Measure a model here."""

    def refine(self, request: Refine) -> None:
        """Keep by how much a profile of this node is off."""

    def borrow(self, name: str, tell: Callable[[News], None]) -> OfferedModel | None:
        """Return a model that another node has, or None."""

    def fetch(self, name: str, directory: Path) -> None:
        """Fetch the weights of a known model into a directory. Raises PeerFailedError."""

    def say(self, line: str) -> None:
        """Print a line for whoever watches this node."""


@dataclass(frozen=True)
class _Plan:
    """Nodes of one attempt, and what they are to run."""

    peers: tuple[Peer, ...]
    """The other nodes, in the order of their ranks from 1."""
    start: StartRank
    """Their request, for rank 1."""
    planning: tuple[str, ...]
    """Options with which rank 0 plans."""


@dataclass
class _Attempt:
    """What is under way now."""

    phase: str = "gathering"
    peers: tuple[Peer, ...] = ()
    profile: Profile | None = None
    """What was asked of the profiler."""
    slowness: dict[str, float] = field(default_factory=dict)
    """What each node keeps of earlier runs beside its profile, with which this one was planned, by name."""
    supervisor: Supervisor | None = None
    again: bool = False
    """Whether it is ended to be started with other nodes."""
    started_at: float = field(default_factory=time.monotonic)


class Refinement:
    """How slow nodes are, as multiples of their profiles. Pure: time is passed in.

    Args:
        planned: What was known when the run was planned, by the name of the node.
    """

    def __init__(self, planned: Mapping[str, float]) -> None:
        self._planned = dict(planned)
        self._kept = dict(planned)
        self._measured: dict[str, float] = {}
        self._due_at = 0.0

    def due(self, measured: Mapping[str, float], now: float) -> dict[str, float]:
        """Return what nodes are to keep from now on, if that is another than before.

        Args:
            measured: Slowness of hosts, as multiples of what the run was planned with.
            now: Time in seconds.
        """
        self._measured |= measured
        if not self._measured or now < self._due_at:
            return {}
        self._due_at = now + _REFINE_S
        low, high = _SLOWNESS
        found = {
            name: min(high, max(low, self._planned[name] * factor))
            for name, factor in self._measured.items()
            if name in self._planned
        }
        found = {name: new for name, new in found.items() if abs(new / self._kept[name] - 1) > _SAME}
        self._kept |= found
        return found


class Deployment:
    """Serves one model until it is stopped. Its thread belongs to it; any thread may ask and stop it.

    Args:
        wanted: What was asked for.
        around: The node.
        run: Name of the run.
        ended: Called by its thread at the end.
        patient: Whether to try again where nothing has ever answered: after a restart, as of all machines,
            others may not be there yet.
        retry_s: Seconds until a run that has ended is started again.
    """

    def __init__(
        self,
        wanted: Up,
        around: Surroundings,
        run: str,
        ended: Callable[[], None] = lambda: None,
        *,
        patient: bool = False,
        retry_s: float = _RETRY_S,
    ) -> None:
        self.wanted = wanted
        self.run_name = run
        self._around = around
        self._ended = ended
        self._patient = patient
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._attempt = _Attempt()
        self._events: deque[tuple[float, str]] = deque(maxlen=_LINES)
        self._listeners: list[queue.SimpleQueue[News | Serving | PipeEdgeError]] = []
        self._refused: dict[str, tuple[str, float]] = {}
        """Why nodes were left out, and until when they are not asked again, by name."""
        self._began = time.monotonic()
        self._profiled_s = 0.0
        self._served: Serving | None = None
        self._failure: PipeEdgeError | None = None
        self._last_line: dict[int, str] = {}
        self._generates = False
        self._takes_text: bool | None = None  # until the model is found
        self._answered: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)
        """Times, and numbers of items or tokens that were answered until then."""
        self._thread = threading.Thread(target=self._run, name="deployment", daemon=True)

    # -- for the node ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the run, and return when it has ended."""
        self._stopping.set()
        self._end_attempt()
        self._thread.join()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, stopped or failed."""
        return not self._thread.is_alive()

    @property
    def url(self) -> str:
        """Address of the service on this machine."""
        return f"http://127.0.0.1:{self.wanted.serve_port}"

    @property
    def phase(self) -> str:
        """What is done now."""
        return self._attempt.phase

    def start_again(self, why: str) -> None:
        """Plan anew with the nodes that are here."""
        self._note(News(why))
        with self._lock:
            self._attempt.again = True
        self._end_attempt()

    def uses(self, name: str) -> bool:
        """Return whether a node takes part in the run."""
        return any(peer.name == name for peer in self._attempt.peers)

    def listen(self) -> queue.SimpleQueue[News | Serving | PipeEdgeError]:
        """Return a queue that gets all progress from now on, and ``Serving`` or the failure at last."""
        found: queue.SimpleQueue[News | Serving | PipeEdgeError] = queue.SimpleQueue()
        with self._lock:
            end = self._served or self._failure
            if end is not None:
                found.put(end)
            else:
                self._listeners.append(found)
        return found

    def state(self) -> dict[str, Any]:
        """Return the state of the run as JSON."""
        attempt = self._attempt
        service = ask_service(self.wanted.serve_port, "/status") if attempt.phase == "serving" else None
        names = self._names(attempt.peers)
        rate = None if service is None else self._rate(service)
        with self._lock:
            events = [{"at": at, "line": line} for at, line in reversed(self._events)][:20]
        return {
            "model": self.wanted.model,
            "phase": attempt.phase,
            "url": self.url if attempt.phase == "serving" else None,
            "asked": self._around.name,
            "ranks": {str(rank): name for rank, name in enumerate(names)},
            "refused": {name: why for name, (why, _) in self._refused.items() if name not in names},
            "events": events,
            "generates": self._generates,
            "takes_text": self._takes_text,
            "tokens_per_s" if self._generates else "items_per_s": rate,
            "service": service,
        }

    def _rate(self, service: Mapping[str, Any]) -> float | None:
        """Return the items or tokens that came per second lately, or None without an earlier figure."""
        answered, now = self._progress(service), time.monotonic()
        with self._lock:
            earlier = [(at, count) for at, count in self._answered if now - at >= _SHORTEST_S]
        if not earlier or answered < earlier[0][1]:
            return None
        at, before = earlier[0]
        return (answered - before) / (now - at)

    def _progress(self, service: Mapping[str, Any]) -> int:
        return int(service["queue"]["completion_tokens" if self._generates else "answered"])

    def _names(self, peers: Sequence[Peer]) -> list[str]:
        return [self._around.name, *(peer.name for peer in peers)]

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._attempt = _Attempt()
            try:
                status = self._try()
                if self._served is None and not self._attempt.again and not self._stopping.is_set():
                    last = self._last_line.get(0, "see the lines above")
                    raise NotServingError(f"the run ended with status {status}: {last}", status)
            except PipeEdgeError as error:
                if self._served is None and not self._patient:
                    self._fail(error)
                    break
                self._note(News(f"cannot go on yet: {one_line(error)}"))
            except Exception as error:  # a fault of ours, which must not leave the node waiting
                self._fail(PipeEdgeError(f"internal error: {type(error).__name__}: {error}"))
                break
            if not self._attempt.again:
                self._attempt.phase = "waiting"
                self._stopping.wait(self._retry_s)
        self._attempt.phase = "ended"
        self._attempt.peers = ()
        self._ended()

    def _try(self) -> int:
        """Make one attempt, and return the exit status of its run."""
        model = self._find_model()
        plan = self._prepare(model)
        if self._stopping.is_set():
            return 0
        return self._supervise(plan, model)

    def _find_model(self) -> OfferedModel:
        """Return the model: from this machine, from another node that has it, or from its source."""
        name, store = self.wanted.model, self._around.store
        tell = lambda line: self._note(News(line))  # noqa: E731
        with contextlib.suppress(PipeEdgeError):
            return store.offer(name, tell)
        borrowed = self._around.borrow(name, self._teller(self._around.name))
        return store.offer(name, tell, self._around.fetch) if borrowed is None else borrowed

    def _prepare(self, model: OfferedModel) -> _Plan:
        found = self._gather()
        self._enter("fetching")
        peers = self._all(found, lambda peer: self._let_fetch(peer, model))
        self._enter("profiling")
        self._generates = model.outline.family.decodes
        self._takes_text = model.outline.takes_text
        peers, planning = self._schedule(peers, model)
        self._attempt.peers = tuple(peers)
        kept = {peer.name for peer in peers}
        address = meeting_address([own_end for peer, own_end in found if peer.name in kept])
        start = StartRank(
            run=self.run_name,
            rank=1,
            world=1 + len(peers),
            model=model.place,
            batch_size=self.wanted.batch_size,
            addr=address,
            port=free_port(address),
            serve=self.wanted.serve_port,
            key=make_key(),
            timeout_s=_RUN_TIMEOUT_S,
        )
        return _Plan(tuple(peers), start, planning)

    def _gather(self) -> list[tuple[Peer, str]]:
        """Return the nodes that can take part, each with the address of this one on the way there."""
        self._enter("gathering")
        wanted = set(self.wanted.only)
        found = []
        for peer, own_end in self._around.look():
            if wanted and peer.name not in wanted:
                continue
            if peer.here.serves or peer.here.works_for not in ("", self.run_name):
                self._refuse(peer.name, f"works for {peer.here.serves or peer.here.works_for}")
                continue
            if peer.here.version != self._around.facts().version:
                self._refuse(peer.name, f"has version {peer.here.version}")
                continue
            found.append((peer, own_end))
        missing = wanted - {peer.name for peer, _ in found} - {self._around.name}
        if missing:
            self._note(News(f"not here: {', '.join(sorted(missing))}"))
        names = ", ".join(self._names([peer for peer, _ in found]))
        self._note(News(f"{count(1 + len(found), 'node')}: {names}"))
        return found

    def _let_fetch(self, peer: Peer, model: OfferedModel) -> None:
        if model.files:
            name = self.wanted.model
            known_as = name if is_model_name(name) else None
            request = Hold(model.place, list(model.files), self._around.port, known_as)
            have_hold(peer, self._around.membership, request, self._teller(peer.name))

    def _schedule(self, peers: Sequence[Peer], model: OfferedModel) -> tuple[list[Peer], tuple[str, ...]]:
        """Let all nodes profile the model; return those to use, and the scheduler's files as options."""
        began = time.monotonic()
        nodes, kept = self._profiles(peers, model)
        self._profiled_s = time.monotonic() - began
        self._enter("starting")
        run = self._around.store.directory / "run"
        seconds = {node.name: seconds_of(node, run) for node in nodes}
        nodes = choose_nodes(nodes, self.wanted.count, seconds)
        own = dict(zip(model.words[::2], model.words[1::2], strict=True))["--model"]
        planning = compose(nodes, own, run, self.wanted)
        names = {node.name for node in nodes}
        return [peer for peer in kept if peer.name in names], planning.words()

    def _profiles(self, peers: Sequence[Peer], model: OfferedModel) -> tuple[list[ProfiledNode], list[Peer]]:
        wanted = self.wanted
        # A decoder's profile is of steps of several sizes, whatever the number of its texts.
        size = _STEPS if self._generates else wanted.batch_size
        request = Profile(model.place, size, wanted.dtype, wanted.thorough)
        around = self._around
        results: dict[str, tuple[Profiled, NeighborLink]] = {}

        def measure(peer: Peer) -> None:
            link = measure_link(peer, around.membership)
            results[peer.name] = have_profile(peer, around.membership, request, self._teller(peer.name)), link

        with ThreadPoolExecutor(1) as pool:
            own = pool.submit(around.profile, request, model.words, self._teller(around.name))
            kept = self._all([(peer, "") for peer in peers], measure)
            mine = own.result()
        nodes = [ProfiledNode(around.name, mine.results, around.facts().memory, None, mine.slowness)]
        for peer in kept:
            its, link = results[peer.name]
            nodes.append(ProfiledNode(peer.name, its.results, peer.here.memory, link, its.slowness))
        self._attempt.profile = request
        self._attempt.slowness = {node.name: node.slowness for node in nodes}
        return nodes, kept

    def _all(self, found: Sequence[tuple[Peer, str]], work: Callable[[Peer], None]) -> list[Peer]:
        """Do ``work`` with all nodes at once; return those where it succeeded."""
        if not found:
            return []
        kept = []
        with ThreadPoolExecutor(len(found)) as pool:
            futures = [(peer, pool.submit(work, peer)) for peer, _ in found]
            for peer, future in futures:
                try:
                    future.result()
                    kept.append(peer)
                except PipeEdgeError as error:
                    self._refuse(peer.name, one_line(error))
        return kept

    # -- the run ---------------------------------------------------------------------------------------

    def _supervise(self, plan: _Plan, model: OfferedModel) -> int:
        start = plan.start
        words = rank_words(start, 0, model.words, plan.planning)
        commands = [
            RankCommand(0, (sys.executable, "-u", "-m", "pipeedge", *words), secret=start.key),
            *(RankCommand(rank, ("node", peer.name)) for rank, peer in enumerate(plan.peers, 1)),
        ]

        def start_process(
            command: RankCommand,
            environment: Mapping[str, str],
            forward: Callable[[int, str, bool], None],
            ended: Callable[[RankExit], None],
        ) -> RankProcess:
            if command.rank == 0:
                return run_process(command, environment, forward, ended)
            peer = plan.peers[command.rank - 1]
            request = _for_rank(start, command.rank)
            tell = self._teller(peer.name)
            return RemoteRank(lambda: peer.call(self._around.membership), request, forward, tell, ended)

        environment = inherited_environment() | {LAUNCHED: "1", LAUNCHER: str(os.getpid())}
        supervisor = Supervisor(
            commands,
            environment,
            Output(lines=self._take_line, say=lambda line: self._note(News(line))),
            ExitLimits(settle_s=5.0, grace_s=40.0 if self._served else 5.0),
            needed=frozenset({0}),
            begins=f": {BEGINS}",
            start=start_process,
            again_s=_AGAIN_S,
        )
        with self._lock:
            self._attempt.supervisor = supervisor
            if self._stopping.is_set() or self._attempt.again:
                return 0
        over = threading.Event()
        watching = threading.Thread(target=self._watch, args=(over,), name="watch", daemon=True)
        watching.start()
        try:
            with self._around.keeper.listening(self._teller(self._around.name)):
                return supervisor.run()
        finally:
            over.set()
            watching.join()

    def _watch(self, over: threading.Event) -> None:
        """Note when the service answers, and then look for nodes that were not there before."""
        while not over.wait(_HEALTH_S):
            if ask_service(self.wanted.serve_port, "/health") is not None:
                break
        if over.is_set():
            return
        self._attempt.phase = "serving"
        seconds = time.monotonic() - self._attempt.started_at
        self._note(News(f"{self.wanted.model} answers at {self.url} after {seconds:.1f} s"))
        self._tell_end(Serving(self.url, time.monotonic() - self._began, self._profiled_s))
        with self._lock:
            self._answered.clear()
        refinement = Refinement(self._attempt.slowness)
        while not over.wait(_LOOK_S):
            service = ask_service(self.wanted.serve_port, "/status")
            if service is not None:
                with self._lock:
                    self._answered.append((time.monotonic(), self._progress(service)))
                self._refine(refinement.due(service["slowness"], time.monotonic()))
            self._welcome()
        self._refine(refinement.due({}, math.inf))

    def _refine(self, found: Mapping[str, float]) -> None:
        """Let nodes keep how slow they are, for the plans of later runs.

        Args:
            found: Time of the layers of each node as a multiple of what its profile says, by its name.
        """
        attempt, around = self._attempt, self._around
        peers = {peer.name: peer for peer in attempt.peers}
        for name, slowness in found.items():
            if attempt.profile is None:
                return
            request = Refine(attempt.profile, slowness)
            with contextlib.suppress(PipeEdgeError):  # it is measured again
                if name == around.name:
                    around.refine(request)
                elif name in peers:
                    with peers[name].call(around.membership) as talk:
                        talk.ask(request, Granted, _SERVICE_S)

    def _welcome(self) -> None:
        """Plan anew if a node is here that can take part and does not."""
        wanted = set(self.wanted.only)
        taken = set(self._names(self._attempt.peers))
        if self.wanted.count is not None and len(taken) >= self.wanted.count:
            return
        for peer, _ in self._around.look():
            _, until = self._refused.get(peer.name, ("", 0.0))
            if peer.name in taken or (wanted and peer.name not in wanted) or time.monotonic() < until:
                continue
            if not peer.here.serves and not peer.here.works_for:
                self.start_again(f"{peer.name} is here now: planning with it")
                return

    def _end_attempt(self) -> None:
        with self._lock:
            supervisor = self._attempt.supervisor
        if supervisor is not None:
            supervisor.stop()

    # -- what is told ----------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        self._attempt.phase = phase
        if self._stopping.is_set():
            raise NotServingError("stopped", 0)

    def _teller(self, name: str) -> Callable[[News], None]:
        return lambda each: self._note(News(each.line, name, each.done, each.total))

    def _refuse(self, name: str, why: str) -> None:
        before, _ = self._refused.get(name, ("", 0.0))
        self._refused[name] = why, time.monotonic() + _LEFT_OUT_S
        if before != why:
            self._note(News(f"{name} is left out: {why}"))

    def _take_line(self, text: str, *, error: bool) -> None:
        rank = int(text[1 : text.index("]")])
        line = text[text.index("]") + 1 :].strip()
        if line and self._last_line.get(rank) != line:
            self._last_line[rank] = line
            self._note(News(f"rank {rank}: {line}"))

    def _note(self, progress: News) -> None:
        named = f"{progress.node}: {progress.line}" if progress.node else progress.line
        with self._lock:
            if not progress.total or progress.done >= progress.total:
                self._events.append((time.time(), printable(named)))
            listeners = list(self._listeners)
        if not progress.total:
            self._around.say(printable(named))
        for each in listeners:
            each.put(progress)

    def _tell_end(self, end: Serving | PipeEdgeError) -> None:
        with self._lock:
            if isinstance(end, Serving):
                self._served = end
            else:
                self._failure = end
            listeners, self._listeners = self._listeners, []
        for each in listeners:
            each.put(end)

    def _fail(self, error: PipeEdgeError) -> None:
        self._around.say(printable(one_line(error)))
        self._tell_end(error)


class NotServingError(PeerError):
    """A run ended before it served anything."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.exit_code = status or 1


def ask_service(port: int, path: str, timeout_s: float = _SERVICE_S) -> Any:
    """Return what the service on this machine answers to GET as JSON, or None if it does not."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        text = reply.read()
        return json.loads(text) if reply.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _for_rank(request: StartRank, rank: int) -> StartRank:
    values = {name: getattr(request, name) for name in request.__struct_fields__}
    return StartRank(**{**values, "rank": rank})


def meeting_address(own_ends: Sequence[str]) -> str:
    """Return the address of this machine at which rank 0 listens: the one that most nodes reach."""
    usable = [each for each in own_ends if each]
    return Counter(usable).most_common(1)[0][0] if usable else "127.0.0.1"

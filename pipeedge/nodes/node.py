"""A node: it waits at one port for members of its cluster, answers them, and works for them.

    caller ──TLS──> reception ──> a thread ──> the answer to one request
                       └─ no member, removed, another program: one line, and nothing runs

A node computes for one run at a time: as the asked node of a deployment, which has rank 0, or with one rank
for another node, or by profiling. A second run is refused in one line that names the first.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import select
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeedge.base.errors import PeerError, PeerFailedError, PipeEdgeError, RequestError, exit_code, one_line
from pipeedge.base.wording import count, printable
from pipeedge.launch.commands import RankCommand
from pipeedge.launch.supervisor import Output, Supervisor
from pipeedge.models.architecture import Architecture
from pipeedge.models.families.decoder import DecoderOptions
from pipeedge.models.registry import find_any
from pipeedge.models.weights.pieces import PIECES_SUFFIX
from pipeedge.models.weights.safetensors_files import SafetensorsFile
from pipeedge.nodes.deployment import Deployment
from pipeedge.nodes.discovery import Address, Discovery
from pipeedge.nodes.facts import state_facts
from pipeedge.nodes.messages import (
    About,
    Answered,
    Ask,
    Blob,
    ClusterState,
    Down,
    Ended,
    FindModel,
    Get,
    GetRanges,
    Granted,
    Here,
    Hold,
    Measure,
    ModelFile,
    News,
    Offered,
    Profile,
    Profiled,
    Refine,
    Remove,
    Said,
    Serving,
    StartRank,
    StateOf,
    Up,
    is_model_name,
)
from pipeedge.nodes.peer import Acquaintances, Peer, call, get_file, get_ranges
from pipeedge.nodes.pieces import PieceFile, PieceKeeper
from pipeedge.nodes.programs import fetch_words, located, profile_words, rank_words
from pipeedge.nodes.store import KnownNode, Manifest, NodeStore, OfferedModel
from pipeedge.nodes.talk import CHUNK, HELLO, Talk, refusing
from pipeedge.profile.result_files import load_results
from pipeedge.request.environment import LAUNCHER, inherited_environment
from pipeedge.transport.authority import Removals, name_in, read_removals
from pipeedge.transport.interfaces import listen_everywhere
from pipeedge.transport.membership import Membership, refuse_revoked
from pipeedge.transport.reception import Reception
from pipeedge.transport.sealed import SealedSocket, Stream

__all__ = ["NODE_PORT", "Node", "block_key", "describe", "profile_key"]

NODE_PORT = 29600
_FIRST_S = 10.0
"""Seconds within which a member must say what it asks for."""
_MOST_TALKS = 256
"""Largest number of connections of members at once; each node that knows this one keeps one."""
_IDLE_S = 60.0
"""Seconds for which a connection is kept on which nothing is asked."""
_LOOK_S = 2.0
"""Seconds within which other nodes must answer."""
_SLOT_S = 15.0
"""Seconds that a rank waits for the one before it, of the same run, to end."""
_ASK_S = 300.0
_DEPTH = frozenset({"blocks", "num_labels", "head", "pooler", "pooler_size", "pooling"})
"""Fields of a model that do not change its inner blocks."""
_OFFER_S = 120.0
"""Seconds within which a node must have computed the digests of a model."""
_SAMPLES = 1024
"""Number of samples that are asked for at once."""


class _Slot:
    """The one run for which a node computes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.run = ""
        self.asked_by = ""

    def wait_free(self) -> None:
        """Wait a while until this node computes for nobody."""
        with self._changed:
            self._changed.wait_for(lambda: not self.run, _SLOT_S)

    @contextlib.contextmanager
    def taken(self, run: str, asked_by: str) -> Iterator[None]:
        """Compute for a run in the body.

        Raises:
            RequestError: This node computes for another one.
        """
        with self._changed:
            if self.run == run:
                self._changed.wait_for(lambda: not self.run, _SLOT_S)
            if self.run:
                raise RequestError(
                    f"this node works for {self.run} already, as {self.asked_by} has asked: "
                    "end that first with 'pipeedge down'"
                )
            self.run, self.asked_by = run, asked_by
        try:
            yield
        finally:
            with self._changed:
                self.run = self.asked_by = ""
                self._changed.notify_all()


class Node:
    """Serves until it is closed.

    Args:
        membership: Key of this node, signed by the cluster's.
        store: What it keeps.
        discovery: What knows where other nodes may be.
        port: Port to listen at; 0 for any free one.
        say: Prints a line.
    """

    def __init__(
        self,
        membership: Membership,
        store: NodeStore,
        discovery: Callable[[int], Discovery],
        *,
        port: int,
        say: Callable[[str], None],
    ) -> None:
        self.name, serial = name_in(membership.certificate)
        self.serial = f"{serial:x}"
        self.store = store
        self._say = say
        self._lock = threading.Lock()
        self._slot = _Slot()
        self._deployment: Deployment | None = None
        self._talks: set[Talk] = set()
        self._told: dict[tuple[str, str], float] = {}
        self._membership = membership
        self._removals: Removals | None = None
        if text := store.removed():
            self._removals = read_removals(text, membership.trusted)
            self._membership = replace(membership, revoked=text)
        self._context: ssl.SSLContext = self._membership.server_context()
        listener = listen_everywhere(port, "--port")
        self.port = int(listener.getsockname()[1])
        self._discovery = discovery(self.port)
        self._reception = Reception(
            listener,
            context=self._context,
            hello_bytes=len(HELLO),
            admit=self._admit,
            refused=self._refuse_stranger,
        )
        self._acquaintances = Acquaintances()
        self._sources: dict[str, Address] = {}
        """Nodes that have announced files, by digest."""
        self.keeper = PieceKeeper(store.directory, self._fetch_pieces)
        for manifest in store.manifests():
            with contextlib.suppress(PipeEdgeError):
                self._go_on_fetching(manifest)
        if (wanted := store.wanted()) is not None:
            self.say(f"goes on serving {wanted.model}")
            self._deploy(wanted, patient=True)

    # -- what a deployment needs -----------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """Membership with the newest list of removed nodes."""
        with self._lock:
            return self._membership

    def say(self, line: str) -> None:
        """Print a line for whoever watches this node."""
        self._say(printable(line))

    def facts(self) -> Here:
        """Return what this node is."""
        return state_facts(self.name, self.port, self.serial)

    def look(self) -> list[tuple[Peer, str]]:
        """Return the other nodes that answer, each with the address of this machine on the way there."""
        places = self._places()
        if not places:
            return []
        removals, membership = self._removals, self.membership
        number = 0 if removals is None else removals.number

        def ask(place: Address) -> tuple[Peer, str] | None:
            try:
                return self._acquaintances.ask(place, membership, number, _LOOK_S)
            except PipeEdgeError:
                return None

        with ThreadPoolExecutor(min(32, len(places))) as pool:
            answers = [each for each in pool.map(ask, places) if each is not None]
        found: dict[str, tuple[Peer, str]] = {}
        for peer, own_end in answers:
            if peer.here.serial == self.serial or peer.name in found:
                continue
            found[peer.name] = peer, own_end
            self.store.meet(peer.name, KnownNode(peer.address[0], peer.address[1], peer.here.serial))
            self._exchange_removals(peer)
        return [found[name] for name in sorted(found)]

    def _places(self) -> list[Address]:
        known = [(each.address, each.port) for each in self.store.known().values()]
        return list(dict.fromkeys([*self._discovery.places(), *known]))

    def profile(self, request: Profile, words: tuple[str, ...], tell: Callable[[News], None]) -> Profiled:
        """Measure a model here, unless it was measured before.

        Raises:
            PipeEdgeError: The profiler has failed.
        """
        key, path = self._profile_of(request)
        if path.exists():
            with contextlib.suppress(PipeEdgeError):
                load_results(path)
                tell(News("profiled before"))
                return Profiled(path.read_text("utf-8"), 0.0, self.store.slowness(path))
            path.unlink()  # damaged, as by a power failure
        self.store.keep_slowness(path, None)
        began = time.monotonic()
        block = block_key(find_any(words[1]).config, key)
        for like in () if request.thorough else self.store.alike(block):
            tell(News("taking the times from a model with the same blocks"))
            with contextlib.suppress(PeerFailedError):  # its blocks differ in what the key does not say
                self._run_profiler(request, words, path, like)
                self.store.keep_slowness(path, self.store.slowness(like))
                break
        else:
            tell(News("profiling"))
            self._run_profiler(request, words, path)
            self.store.keep_block(path, block)
        seconds = time.monotonic() - began
        tell(News(f"profiled in {seconds:.1f} s"))
        return Profiled(path.read_text("utf-8"), seconds)

    def _profile_of(self, request: Profile) -> tuple[list[str], Path]:
        """Return what a profile of this machine depends on, and the file that has it or is to have it."""
        key = profile_key(request, self.facts(), inherited_environment().get("OMP_NUM_THREADS", ""))
        thorough = self.store.profile([*key, "thorough"])
        return key, thorough if request.thorough or thorough.exists() else self.store.profile(key)

    def refine(self, request: Refine) -> None:
        """Keep by how much a profile is off.

        Raises:
            RequestError: There is no such profile here.
        """
        _, path = self._profile_of(request.profile)
        if not path.exists():
            raise RequestError(f"this node has no profile of {request.profile.model.name}")
        self.store.keep_slowness(path, request.slowness)

    def _run_profiler(
        self, request: Profile, words: tuple[str, ...], path: Path, like: Path | None = None
    ) -> None:
        """Have the profiler write a results file.

        Raises:
            PeerFailedError: It has failed.
        """
        new = path.with_suffix(".new.yml")
        new.unlink(missing_ok=True)
        self._run_program(profile_words(request, words, new, like), "the profiler")
        new.replace(path)

    def fetch(self, name: str, directory: Path) -> None:
        """Fetch the weights of a known model into a directory.

        Raises:
            PeerFailedError: They could not be fetched.
        """
        self._run_program(fetch_words(name, directory), "fetching")

    def _run_program(self, words: tuple[str, ...], what: str) -> None:
        """Run a command of ``pipeedge`` to its end.

        Raises:
            PeerFailedError: It has failed.
        """
        lines: list[str] = []

        def take(text: str, *, error: bool) -> None:
            if error:
                lines.append(text.strip())

        command = RankCommand(0, (sys.executable, "-m", "pipeedge", *words))
        status = Supervisor(
            [command], self._environment(), Output(take, lambda line: None, lambda rank: "")
        ).run()
        if status:
            raise PeerFailedError(f"{what} ended with status {status}" + (f": {lines[-1]}" if lines else ""))

    def _environment(self) -> dict[str, str]:
        return inherited_environment() | {LAUNCHER: str(os.getpid())}

    # -- callers ---------------------------------------------------------------------------------------

    def _refuse_stranger(self, address: str, why: str) -> None:
        """Say who is refused, once in a while for each address and reason."""
        key = address.removeprefix("::ffff:"), why
        now = time.monotonic()
        if now - self._told.get(key, -60.0) >= 60.0:
            self._told = {each: at for each, at in self._told.items() if now - at < 60.0}
            self._told[key] = now
            self.say(f"refused {key[0]}: it {why}")

    def _admit(self, stream: Stream, hello: bytes) -> bool:
        if hello != HELLO or not isinstance(stream, SealedSocket) or len(self._talks) >= _MOST_TALKS:
            stream.close()
            return True
        talk = Talk(stream, "the caller", asks=False)
        talk.name = talk.peer_certificate()[0] or talk.peer_address
        with self._lock:
            self._talks.add(talk)
        threading.Thread(target=self._converse, args=(talk,), name="caller", daemon=True).start()
        return True

    def _converse(self, talk: Talk) -> None:
        try:
            with talk:
                try:
                    self._answer(talk, talk.receive(_FIRST_S))
                except PipeEdgeError as error:
                    line = one_line(error)
                    if not isinstance(error, PeerError) or "does not know" in line:
                        self.say(f"refused {talk.name} ({talk.peer_address}): {line}")
                    refusing(talk, line, exit_code(error))
                except Exception as error:  # a fault of ours, which must not leave the caller waiting
                    line = f"internal error on {self.name}: {type(error).__name__}: {one_line(error)}"
                    self.say(line)
                    refusing(talk, line, 1)
        finally:
            with self._lock:
                self._talks.discard(talk)

    def _answer(self, talk: Talk, request: Any) -> None:
        answers: dict[type, Callable[[Talk, Any], None]] = {
            About: self._tell_about,
            Measure: self._take_bytes,
            Hold: self._hold,
            Get: self._give,
            GetRanges: self._give,
            FindModel: self._offer,
            Profile: self._profile_for,
            Refine: self._refine,
            StartRank: self._run_rank,
            Remove: self._remove,
            Up: self._up,
            Down: self._down,
            StateOf: self._tell_state,
            Ask: self._pass_on,
        }
        answers[type(request)](talk, request)

    def _tell_about(self, talk: Talk, request: About) -> None:
        while True:
            talk.send(self._about(request))
            try:
                request = talk.expect(About, _IDLE_S)
            except PeerError:
                return

    def _about(self, request: About) -> Here:
        deployment, removals = self._deployment, self._removals
        number = 0 if removals is None else removals.number
        here = self.facts()
        values = {name: getattr(here, name) for name in here.__struct_fields__}
        values |= {
            "works_for": self._slot.run,
            "removals": number,
            "removed": removals.text if removals is not None and number > request.removals else "",
        }
        if deployment is not None and not deployment.is_over:
            values |= {
                "serves": deployment.wanted.model,
                "phase": deployment.phase,
                "url": deployment.url,
            }
        return Here(**values)

    def _take_bytes(self, talk: Talk, request: Measure) -> None:
        while True:
            for _ in talk.receive_bytes(request.size):
                pass
            talk.send(Granted())
            try:
                request = talk.expect(Measure, _FIRST_S)
            except PeerError:
                return

    def _hold(self, talk: Talk, request: Hold) -> None:
        manifest = Manifest(request.known_as, request.model, request.files)
        self._hold_files(manifest, (talk.peer_address, request.port), talk.name, talk.send)
        talk.send(Granted())

    def _hold_files(
        self, manifest: Manifest, source: Address, name: str, tell: Callable[[News], None]
    ) -> None:
        """Fetch the small files of a model that are not here, and prepare to fetch pieces of its weights.

        Raises:
            PipeEdgeError: The source is lost, or the disk is full.
        """
        places = self.store.places(manifest.place, manifest.files)
        missing = [(file, path) for file, path in places if not path.exists()]
        small = [(file, path) for file, path in missing if not file.pieces]
        whole = float(sum(file.size for file, _ in small))
        fetched, told_at = 0.0, 0.0

        def counted(parts: Iterator[memoryview], line: str) -> Iterator[memoryview]:
            nonlocal fetched, told_at
            for part in parts:
                yield part
                fetched += len(part)
                if time.monotonic() - told_at >= 0.2 or fetched == whole:
                    told_at = time.monotonic()
                    tell(News(line, done=fetched, total=whole))

        with self._lock:
            self._sources |= {file.sha256: source for file in manifest.files}
        if not missing:
            self._go_on_fetching(manifest)
            return
        with call(source, self.membership, name=name) as talk:
            for file, path in small:
                line = f"fetching {file.name}"
                self.store.receive(file, path, counted(get_file(talk, file.sha256), line))
            self._go_on_fetching(manifest, talk)
        self.store.keep_manifest(manifest)

    def _go_on_fetching(self, manifest: Manifest, talk: Talk | None = None) -> None:
        """Answer the readers of files of which pieces are missing.

        Args:
            manifest: The model.
            talk: Conversation with a node that has the files, if this one has not had them before.
        """
        for file, path in self.store.places(manifest.place, manifest.files):
            is_new = not path.exists()
            if not file.pieces or not (is_new or path.with_name(path.name + PIECES_SUFFIX).exists()):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = self.keeper.keep(path, file)
            try:
                if path.suffix == ".safetensors":
                    self._keep_samples(kept, talk if is_new else None)
            except BaseException:
                if is_new:
                    self.keeper.drop(kept)
                raise

    def _keep_samples(self, file: PieceFile, talk: Talk | None) -> None:
        """Have the bytes by which ranks compare their weights, so that they need not fetch all pieces."""
        weights = SafetensorsFile(file.path)
        samples = list(weights.samples())
        weights.close()
        if talk is not None:
            for start in range(0, len(samples), _SAMPLES):
                part = samples[start : start + _SAMPLES]
                for (offset, _), data in zip(part, get_ranges(talk, file.file.sha256, part), strict=True):
                    file.patch(offset, data)
        file.samples = frozenset(samples)

    def borrow(self, name: str, tell: Callable[[News], None]) -> OfferedModel | None:
        """Return a model that another node has, or None."""
        if not is_model_name(name) or Path(name).exists():
            return None
        for peer, _ in self.look():
            try:
                with peer.call(self.membership) as talk:
                    offered: Offered = talk.ask(FindModel(name), Offered, _OFFER_S)
                manifest = Manifest(name, offered.model, offered.files)
                self._hold_files(manifest, peer.address, peer.name, tell)
                tell(News(f"the files are those of {peer.name}"))
                return self.store.held(manifest)
            except PipeEdgeError as error:
                if "does not have" not in one_line(error):
                    tell(News(f"{peer.name} cannot give the files: {one_line(error)}"))
        return None

    def _offer(self, talk: Talk, request: FindModel) -> None:
        try:
            found = self.store.offer(request.name, self.say)
            talk.send(Offered(found.place, list(found.files)))
        except PipeEdgeError as error:
            for manifest in self.store.manifests():
                if manifest.known_as == request.name:
                    self.store.held(manifest)
                    talk.send(Offered(manifest.place, manifest.files))
                    return
            raise PeerFailedError(f"this node does not have {request.name}") from error

    def _fetch_pieces(
        self, file: ModelFile, numbers: Sequence[int], take: Callable[[int, bytes], None]
    ) -> None:
        """Fetch pieces from the node that has offered them, or else from any that has them.

        Raises:
            PeerFailedError: No node has all of them.
        """
        left = list(numbers)
        with self._lock:
            source = self._sources.get(file.sha256)
        holders = dict.fromkeys([*(() if source is None else (source,)), *self._places()])
        failure = PeerFailedError(f"no node is here that has {file.name}")
        for holder in holders:
            try:
                with call(holder, self.membership) as talk:
                    ends = [(number * file.piece_bytes, (number + 1) * file.piece_bytes) for number in left]
                    ranges = [(start, min(stop, file.size)) for start, stop in ends]
                    for number, data in zip(list(left), get_ranges(talk, file.sha256, ranges), strict=True):
                        take(number, data)
                        left.remove(number)
                return
            except PeerFailedError as error:
                failure = error
        raise PeerFailedError(f"no node here has all of {file.name} ({one_line(failure)})") from failure

    def _give(self, talk: Talk, request: Get | GetRanges) -> None:
        """Give files, or parts of them, until the other end has all that it wants."""
        while True:
            if isinstance(request, Get):
                self._give_file(talk, request)
            else:
                self._give_ranges(talk, request)
            try:
                request = talk.receive(_FIRST_S * 6)
            except PeerError:
                return
            if not isinstance(request, (Get, GetRanges)):
                raise RequestError(f"this node gives files now, and was asked for {request.kind}")

    def _give_file(self, talk: Talk, request: Get) -> None:
        path = self.store.offered(request.sha256)
        if path is None:
            raise RequestError("this node offers no such file")
        size = path.stat().st_size
        with path.open("rb") as stream:
            stream.seek(request.offset)
            talk.send(Blob(max(0, size - request.offset)))
            talk.send_bytes(iter(lambda: stream.read(CHUNK), b""))

    def _give_ranges(self, talk: Talk, request: GetRanges) -> None:
        path = self.store.offered(request.sha256)
        if path is None:
            part = self.keeper.holder(request.sha256)
            if part is None:
                raise PeerFailedError("this node has no such file")
            if not part.can_give(request.ranges):
                raise PeerFailedError("this node does not have that part")
            path = part.path
        with path.open("rb") as stream:
            for start, stop in request.ranges:
                stream.seek(start)
                left = max(0, stop - start)
                talk.send(Blob(left))
                while left:
                    data = stream.read(min(left, CHUNK))
                    if not data:
                        raise PeerFailedError("this node has another file under that digest")
                    talk.send_bytes([data])
                    left -= len(data)

    def _profile_for(self, talk: Talk, request: Profile) -> None:
        with self._slot.taken(f"a profile of {request.model.name}", talk.name):
            talk.send(self.profile(request, located(request.model, self.store.models), talk.send))

    def _refine(self, talk: Talk, request: Refine) -> None:
        self.refine(request)
        talk.send(Granted())

    def _run_rank(self, talk: Talk, request: StartRank) -> None:
        with self._slot.taken(request.run, talk.name):
            self.say(f"runs rank {request.rank} of {request.world} of {request.run} for {talk.name}")
            words = rank_words(request, request.rank, located(request.model, self.store.models))
            argv = (sys.executable, "-u", "-m", "pipeedge", *words)
            lines: queue.SimpleQueue[Said | Ended | News] = queue.SimpleQueue()

            def take(text: str, *, error: bool) -> None:
                lines.put(Said(text[: 32 << 10], error))

            supervisor = Supervisor(
                [RankCommand(request.rank, argv, secret=request.key)],
                self._environment(),
                Output(take, lambda line: None, lambda rank: ""),
            )
            run = threading.Thread(
                target=lambda: lines.put(Ended(supervisor.run())), name="rank", daemon=True
            )
            watch = threading.Thread(target=_when_left, args=(talk, supervisor.stop), daemon=True)
            run.start()
            watch.start()
            is_lost, message = False, None
            with self.keeper.listening(lines.put):
                while not isinstance(message, Ended):
                    message = lines.get()
                    if not is_lost:
                        try:
                            talk.send(message)
                        except PeerError:
                            is_lost = True
                            supervisor.stop()
            self.say(f"rank {request.rank} of {request.run} has ended with status {message.code}")
            talk.hang_up()
            watch.join()

    # -- removed nodes ---------------------------------------------------------------------------------

    def _remove(self, talk: Talk, request: Remove) -> None:
        self._adopt(request.text)
        talk.send(Granted())

    def _adopt(self, text: str) -> None:
        """Take a list of removed nodes if it is newer than that of this node."""
        found = read_removals(text, self._membership.trusted)
        with self._lock:
            if self._removals is not None and found.number <= self._removals.number:
                return
            self._removals = found
            self._membership = replace(self._membership, revoked=text)
            refuse_revoked(self._context, text)
            talks = list(self._talks)
        self.store.keep_removed(text)
        for name, node in self.store.known().items():
            if node.serial and int(node.serial, 16) in found.serials:
                self.say(f"{name} was removed from the cluster")
                self.store.forget(name)
                deployment = self._deployment
                if deployment is not None and deployment.uses(name):
                    deployment.start_again(f"{name} was removed: planning without it")
        for talk in talks:
            serial = talk.peer_certificate()[1]
            if serial and int(serial, 16) in found.serials:
                talk.hang_up()

    def _exchange_removals(self, peer: Peer) -> None:
        """Take the list of a node that has a newer one, or give it that of this node."""
        with contextlib.suppress(PipeEdgeError):
            if peer.here.removed:
                self._adopt(peer.here.removed)
            elif self._removals is not None and peer.here.removals < self._removals.number:
                with peer.call(self.membership) as talk:
                    talk.ask(Remove(self._removals.text), Granted, _LOOK_S)

    # -- the service -----------------------------------------------------------------------------------

    def _up(self, talk: Talk, request: Up) -> None:
        if Path(request.model).exists() and not _is_local(talk):
            raise RequestError("a directory is taken only from a command on this node itself: name a model")
        with self._lock:
            running = self._deployment
            if running is not None and not running.is_over:
                raise RequestError(
                    f"{self.name} serves {running.wanted.model} already: end that first with 'pipeedge down'"
                )
            deployment = self._deploy(request)
        self.store.want(request)
        news = deployment.listen()
        while True:
            new = news.get()
            if isinstance(new, PipeEdgeError):
                self.store.want(None)
                raise new
            try:
                talk.send(new)
            except PeerError:
                self.store.want(None)
                self.say(f"the command that asked for {request.model} has gone: ending it")
                deployment.stop()
                return
            if isinstance(new, Serving):
                return

    def _deploy(self, wanted: Up, *, patient: bool = False) -> Deployment:
        """Serve a model from now on.

        Raises:
            RequestError: This node works for another run.
        """
        run = f"{wanted.model} on {self.name}"
        work = contextlib.ExitStack()
        work.enter_context(self._slot.taken(run, "a command"))
        deployment = Deployment(wanted, self, run, work.close, patient=patient)
        self._deployment = deployment
        deployment.start()
        return deployment

    def _down(self, talk: Talk, request: Down) -> None:
        deployment = self._deployment
        self.store.want(None)
        if deployment is None or deployment.is_over:
            raise RequestError(f"{self.name} serves nothing")
        self.say(f"ends {deployment.wanted.model}, as {talk.name} has asked")
        deployment.stop()
        talk.send(Granted())

    def _tell_state(self, talk: Talk, request: StateOf) -> None:
        found = {peer.name: peer for peer, _ in self.look()}
        nodes = [{**_shown(self.facts()), "here": True, "address": "", "works_for": self._slot.run}]
        nodes += [
            {**_shown(peer.here), "here": True, "address": f"{peer.address[0]}:{peer.address[1]}"}
            for peer in found.values()
        ]
        nodes += [
            {"name": name, "here": False, "address": f"{node.address}:{node.port}", "serial": node.serial}
            for name, node in sorted(self.store.known().items())
            if name not in found
        ]
        deployment = self._deployment
        is_running = deployment is not None and not deployment.is_over
        serving = [peer for peer in found.values() if peer.here.serves]
        talk.send(
            ClusterState(
                {
                    "asked": self.name,
                    "nodes": nodes,
                    "run": deployment.state() if deployment is not None and is_running else None,
                    "runs": {peer.name: peer.here.serves for peer in serving},
                    "removed": 0 if self._removals is None else len(self._removals.serials),
                }
            )
        )

    def _pass_on(self, talk: Talk, request: Ask) -> None:
        body = b"".join(map(bytes, talk.receive_bytes(request.size)))
        deployment = self._deployment
        if deployment is None or deployment.is_over:
            raise RequestError(f"{self.name} serves nothing: 'pipeedge up MODEL' starts a model")
        if request.model and request.model != deployment.wanted.model:
            raise RequestError(f"{self.name} serves {deployment.wanted.model}, not {request.model}")
        connection = http.client.HTTPConnection("127.0.0.1", deployment.wanted.serve_port, timeout=_ASK_S)
        try:
            connection.request("POST", request.path, body, {"Content-Type": request.content_type})
            reply = connection.getresponse()
            talk.send(Answered(reply.status, reply.getheader("Content-Type") or ""))
            while True:
                part = reply.read1(CHUNK)
                talk.send(Blob(len(part)))
                if not part:
                    return
                talk.send_bytes([part])
        except (OSError, http.client.HTTPException) as error:
            raise PeerFailedError(
                f"{deployment.wanted.model} does not answer now ({deployment.phase}; {one_line(error)})"
            ) from error
        finally:
            connection.close()

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """End what this node does, and stop listening. What it serves is served again by the next one."""
        deployment = self._deployment
        if deployment is not None and not deployment.is_over:
            deployment.stop()
        self._reception.close()
        with self._lock:
            talks = list(self._talks)
        for talk in talks:
            talk.hang_up()
        self._acquaintances.close()
        self._slot.wait_free()
        self.keeper.close()


def _when_left(talk: Talk, stop: Callable[[], None]) -> None:
    """Wait until the other end has said that it is done, or is lost, and call ``stop``."""
    poll = select.poll()
    poll.register(talk.socket, select.POLLIN | getattr(select, "POLLRDHUP", 0))
    poll.poll()
    stop()


def _is_local(talk: Talk) -> bool:
    return talk.peer_address in ("127.0.0.1", "::1", talk.own_address)


def _shown(here: Here) -> dict[str, Any]:
    found = {name: getattr(here, name) for name in here.__struct_fields__ if name != "removed"}
    return {name: str(value) if isinstance(value, str) else value for name, value in found.items()}


def profile_key(request: Profile, here: Here, threads: str) -> list[str]:
    """Return what a profile depends on: another of these makes another profile.

    Args:
        request: What is measured.
        here: The machine.
        threads: Number of threads that the user has set, or an empty text.
    """
    model = request.model.digest or request.model.name
    machine = [here.processor, str(here.cores), here.torch, here.version, threads]
    return [model, request.dtype, str(request.batch_size), *machine]


def block_key(config: Architecture, key: Sequence[str]) -> list[str]:
    """Return what the times of a model's blocks depend on: models with equal keys have the same blocks.

    Args:
        config: The model.
        key: What its profile depends on (``profile_key``).
    """
    values = {name: value for name, value in config.as_dict().items() if name not in _DEPTH}
    if isinstance(config.options, DecoderOptions):  # has a window and a rotation for each block
        kinds = set(zip(config.options.windows, config.options.rotation, strict=True))
        values["options"] |= {"windows": sorted(kinds), "rotation": None}
    return [json.dumps(values, sort_keys=True, default=str), *key[1:]]


def describe(here: Here) -> str:
    """Return what a node is in one line."""
    return (
        f"{here.name}: {here.processor}, {count(here.cores, 'core')}, {here.memory / 2**30:.1f} GB free, "
        f"{here.system}, PipeEdge {here.version}, torch {here.torch}; {', '.join(here.links) or 'no network'}"
    )

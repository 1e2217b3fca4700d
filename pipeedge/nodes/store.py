"""What a node keeps between runs: its key, profiles, files of models, and what it was asked to serve.

DIR/node.pem            its own key, signed by the cluster's, where it holds that
DIR/removed.pem         newest list of removed nodes
DIR/known.json          nodes that were met, with address and serial number
DIR/wanted.json         what to serve, also after a restart
DIR/profiles/           results files of the profiler, by device, model, number type and kernels, and what
                        runs have measured of them
DIR/models/DIGEST/      files of models
DIR/run/                the scheduler's files of the run
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import msgspec

from pipeedge.base.errors import ModelError, PeerFailedError, RequestError, WeightsError
from pipeedge.base.fields import MALFORMED, Count, Name, Port, encode, reader
from pipeedge.base.files import make_writable_directory, replace_file, temporary_beside, write_whole
from pipeedge.base.wording import printable
from pipeedge.models.outline import Outline
from pipeedge.models.registry import find_any
from pipeedge.nodes.messages import ModelFile, ModelPlace, Up, is_plain_name
from pipeedge.nodes.pieces import check_pieces, piece_bytes, piece_digests, whole_digest
from pipeedge.nodes.programs import located
from pipeedge.nodes.talk import CHUNK

__all__ = ["KnownNode", "Manifest", "NodeStore", "OfferedModel", "digest_of"]

_PACKAGE_MODELS = Path(__file__).resolve().parent.parent / "assets"


class KnownNode(msgspec.Struct, frozen=True):
    """A node that was met."""

    address: Name
    port: Port
    serial: Name = ""
    """Serial number of its certificate, in hexadecimal."""


class _Hashed(msgspec.Struct, frozen=True):
    """Digest of a file, as long as size and time of the file are these."""

    size: Count
    mtime_ns: int
    sha256: str
    pieces: tuple[str, ...] = ()
    piece_bytes: Count = 0


class Manifest(msgspec.Struct, frozen=True):
    """Files of a model of another node, which this one has, or fetches when they are needed."""

    known_as: str | None
    place: ModelPlace
    files: list[ModelFile]


class OfferedModel:
    """A model that this node has, and that others may fetch from it.

    Args:
        place: Its name and digest.
        files: Its files.
        paths: Where they are here, by their digest.
        words: Options that name the model here.
        outline: The model.
    """

    def __init__(
        self,
        place: ModelPlace,
        files: Sequence[ModelFile],
        paths: Mapping[str, Path],
        words: tuple[str, ...],
        outline: Outline,
    ) -> None:
        self.place = place
        self.files = tuple(files)
        self.paths = dict(paths)
        self.words = words
        self.outline = outline


class NodeStore:
    """Files in the directory of a node. Any thread may use it.

    Args:
        directory: The directory, which is made.

    Raises:
        RequestError: It cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        for path in (directory, directory / "profiles", directory / "models", directory / "run"):
            make_writable_directory(path, "--directory", parents=True)
        with suppress(OSError):
            directory.chmod(0o700)
        self.directory = directory
        self._lock = threading.Lock()
        self._offered: dict[str, Path] = {}

    @property
    def models(self) -> Path:
        """Directory with a directory for each model."""
        return self.directory / "models"

    @property
    def own_key(self) -> Path:
        """File with the key of this node."""
        return self.directory / "node.pem"

    # -- small documents -----------------------------------------------------------------------------

    def removed(self) -> str:
        """Return the newest list of removed nodes, or an empty text."""
        with suppress(OSError):
            return (self.directory / "removed.pem").read_text("ascii")
        return ""

    def keep_removed(self, text: str) -> None:
        """Keep a list of removed nodes."""
        write_whole(self.directory / "removed.pem", text, "--directory")

    def known(self) -> dict[str, KnownNode]:
        """Return the nodes that were met, by name."""
        found: dict[str, KnownNode] = self._read("known.json", dict[str, KnownNode], {})
        return found

    def meet(self, name: str, node: KnownNode) -> None:
        """Remember a node."""
        with self._lock:
            known = self.known()
            if known.get(name) != node:
                self._write("known.json", {**known, name: node})

    def forget(self, name: str) -> None:
        """Forget a node."""
        with self._lock:
            known = self.known()
            if known.pop(name, None) is not None:
                self._write("known.json", known)

    def wanted(self) -> Up | None:
        """Return what this node was asked to serve, if anything."""
        found: Up | None = self._read("wanted.json", Up, None)
        return found

    def want(self, request: Up | None) -> None:
        """Keep what this node was asked to serve, so that it goes on after a restart."""
        if request is None:
            (self.directory / "wanted.json").unlink(missing_ok=True)
        else:
            self._write("wanted.json", request)

    def _read(self, name: str, kind: Any, default: Any) -> Any:
        try:
            return reader(kind)((self.directory / name).read_bytes())
        except FileNotFoundError:
            return default
        except (OSError, *MALFORMED):
            return default  # damaged, as by a power failure: it is written anew

    def _write(self, name: str, value: object) -> None:
        with suppress(OSError):  # a full disk: what is kept only saves time
            replace_file(self.directory / name, encode(value))

    # -- profiles ------------------------------------------------------------------------------------

    def profile(self, key: Sequence[str]) -> Path:
        """Return the path of the results file with a profile, which may not exist.

        Args:
            key: What a profile depends on, as texts.
        """
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
        plain = "".join(letter if letter.isalnum() else "-" for letter in key[0])[-40:]
        return self.directory / "profiles" / f"{plain}-{digest}.yml"

    def slowness(self, profile: Path) -> float:
        """Return what runs have measured of a profile: its times are that many times as long."""
        found: float = self._read(str(_slowness_of(profile).relative_to(self.directory)), float, 1.0)
        return found

    def keep_slowness(self, profile: Path, slowness: float | None) -> None:
        """Keep what runs have measured of a profile, or forget it: the profile is a new one."""
        path = _slowness_of(profile)
        if slowness is None:
            path.unlink(missing_ok=True)
        else:
            self._write(str(path.relative_to(self.directory)), slowness)

    def keep_block(self, profile: Path, block: Sequence[str]) -> None:
        """Remember of which block a profile is, with the machine and all else that it depends on."""
        with suppress(OSError):
            profile.with_suffix(".block").write_text("\n".join(block), "utf-8")

    def alike(self, block: Sequence[str]) -> list[Path]:
        """Return the profiles of models with such a block."""
        text, found = "\n".join(block), []
        for path in sorted((self.directory / "profiles").glob("*.block")):
            profile = path.with_suffix(".yml")
            with suppress(OSError):
                if profile.exists() and path.read_text("utf-8") == text:
                    found.append(profile)
        return found

    # -- models --------------------------------------------------------------------------------------

    def offer(
        self, name: str, tell: Callable[[str], None], fetch: Callable[[str, Path], None] | None = None
    ) -> OfferedModel:
        """Find a model on this machine, or fetch it, and let other nodes have its files.

        Args:
            name: Known name, directory or repository.
            tell: Called with a line about what takes long.
            fetch: Fetches the weights of a known model into a directory; None: nothing may be fetched, not
                even from the hub.

        Raises:
            PipeEdgeError: The model is unknown, or its weights are missing.
        """
        outline = find_any(name, fetch=fetch is not None)
        if outline.is_file:
            raise ModelError(
                f"{printable(name)} is a GGUF file, which nodes do not send to each other; give a "
                "Hugging Face directory or repository, or start the ranks yourself with pipeedge run"
            )
        directory = outline.directory
        if directory is not None and directory.parent == _PACKAGE_MODELS:
            return OfferedModel(ModelPlace(outline.name), (), {}, ("--model", outline.name), outline)
        weights = self._weights_of(outline)
        if not outline.has_weights or (directory is None and not weights.is_file()):
            if fetch is None:
                raise WeightsError(f"the weights of {printable(name)} are not here")
            tell(f"fetching the weights of {printable(name)}")
            if directory is None:
                fetch(outline.name, self.models)
            else:
                outline.fetch_weights()
            weights = self._weights_of(outline)
        paths = {weights.name: weights} if directory is None else _files_of(directory, outline)
        piece = piece_bytes(sum(path.stat().st_size for path in paths.values()))
        files = [self._described(each, path, piece, tell) for each, path in paths.items()]
        digest = digest_of(files)
        words: tuple[str, ...]
        if directory is None:
            place = ModelPlace(outline.name, digest, weights.name)
            words = ("--model", outline.name, "--model-file", str(weights.resolve()))
            # Where it would be if another node had it, which may ask this one to run a rank of it.
            _link(self.models / digest / weights.name, weights)
        else:
            plain = outline.name.rpartition("/")[2] or directory.name
            if not is_plain_name(plain):
                plain = "model"
            place = ModelPlace(plain, digest)
            words = ("--model", str(_link(self.models / digest / plain, directory)))
        by_digest = {file.sha256: paths[file.name] for file in files}
        with self._lock:
            self._offered |= by_digest
        return OfferedModel(place, files, by_digest, words, outline)

    def _weights_of(self, outline: Outline) -> Path:
        """Return where the weights of a known model are, or will be: in the working directory, or fetched."""
        here = outline.default_weights
        return here if here.is_file() else self.models / here.name

    def held(self, manifest: Manifest) -> OfferedModel:
        """Return a model of which another node has described the files, and let others have what is here."""
        words = located(manifest.place, self.models)
        paths = {file.sha256: path for file, path in self.places(manifest.place, manifest.files)}
        with self._lock:
            self._offered |= {file.sha256: paths[file.sha256] for file in manifest.files if not file.pieces}
        return OfferedModel(manifest.place, manifest.files, paths, words, find_any(words[1]))

    def manifests(self) -> Iterator[Manifest]:
        """Yield what is known of the models of other nodes."""
        for path in sorted(self.models.glob("*/manifest.json")):
            found: Manifest | None = self._read(str(path.relative_to(self.directory)), Manifest, None)
            if found is not None:
                yield found

    def keep_manifest(self, manifest: Manifest) -> None:
        """Keep what is known of a model of another node."""
        if manifest.place.digest is not None:
            self._write(f"models/{manifest.place.digest}/manifest.json", manifest)

    def offered(self, sha256: str) -> Path | None:
        """Return the path of a file that others may have, or None."""
        with self._lock:
            return self._offered.get(sha256)

    def places(self, model: ModelPlace, files: Iterable[ModelFile]) -> list[tuple[ModelFile, Path]]:
        """Return the files of a model of another node, with the paths at which they belong.

        Raises:
            RequestError: The digest is not that of the files.
        """
        files = list(files)
        if model.digest is None:
            return []
        if digest_of(files) != model.digest:
            raise RequestError(f"the files of {model.name} are not those of its digest")
        directory = self.models / model.digest
        if model.weights is None:
            directory /= PurePath(model.name).name
        for file in files:
            check_pieces(file)
        return [(file, directory / file.name) for file in files]

    def receive(self, file: ModelFile, path: Path, parts: Iterator[memoryview]) -> None:
        """Write a file of a model, whole and with the right digest, or not at all.

        Raises:
            WeightsError: It cannot be written.
            PeerFailedError: Its digest is another.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_beside(path)
            try:
                digest = hashlib.sha256()
                with temporary.open("xb") as stream:
                    for part in parts:
                        digest.update(part)
                        stream.write(part)
                if digest.hexdigest() != file.sha256:
                    raise PeerFailedError(f"{file.name} arrived damaged: its digest is not the one announced")
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise WeightsError(f"{path} cannot be written: {error.strerror or error}") from error

    def _described(self, name: str, path: Path, piece: int, tell: Callable[[str], None]) -> ModelFile:
        """Return what others need to know of a file."""
        found = self._hash(
            path, piece if path.suffix in _WEIGHTS and path.stat().st_size > piece else 0, tell
        )
        return ModelFile(name, found.size, found.sha256, found.pieces, found.piece_bytes)

    def _hash(self, path: Path, piece: int, tell: Callable[[str], None]) -> _Hashed:
        """Return the digests of a file, from the last time if it has not changed since.

        Args:
            path: The file.
            piece: Size of its pieces in bytes, or 0 for a file that is fetched whole.
            tell: Called with a line about what takes long.
        """
        at = str(path.resolve())
        stat = path.stat()
        with self._lock:
            hashed: dict[str, _Hashed] = self._read("hashes.json", dict[str, _Hashed], {})
        found = hashed.get(at)
        known = (stat.st_size, stat.st_mtime_ns, piece)
        if found is not None and (found.size, found.mtime_ns, found.piece_bytes) == known:
            return found
        if stat.st_size > CHUNK << 6:
            tell(f"computing the digest of {printable(path.name)}")
        if piece:
            pieces = piece_digests(path, piece)
            new = _Hashed(stat.st_size, stat.st_mtime_ns, whole_digest(pieces), pieces, piece)
        else:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            new = _Hashed(stat.st_size, stat.st_mtime_ns, digest)
        with self._lock:
            hashed = self._read("hashes.json", dict[str, _Hashed], {})
            self._write("hashes.json", {**hashed, at: new})
        return new


def digest_of(files: Iterable[ModelFile]) -> str:
    """Return the digest of a model's files: their names, sizes and contents."""
    lines = sorted(f"{file.name} {file.size} {file.sha256}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _link(place: Path, target: Path) -> Path:
    """Make what is here appear at the path at which other nodes have it; return that path."""
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)  # of what has been there
        with suppress(FileExistsError):
            place.symlink_to(target.resolve(), target_is_directory=target.is_dir())
    return place


def _files_of(directory: Path, outline: Outline) -> dict[str, Path]:
    """Return the files of a model by their names, relative to its directory.

    Raises:
        WeightsError: The weights are missing.
    """
    with outline.open():
        pass
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and len(name.parts) <= 2 and path.suffix in _SUFFIXES:
            found[name.as_posix()] = path
    return found


_WEIGHTS = frozenset({".npz", ".safetensors"})
"""Suffixes of files of weights, which are fetched piece by piece."""
_SUFFIXES = frozenset({".json", ".jinja", ".model", ".safetensors", ".txt"})
"""Suffixes of the files of a model directory: configuration, tokenizer and weights."""


def _slowness_of(profile: Path) -> Path:
    return profile.with_suffix(".slowness.json")

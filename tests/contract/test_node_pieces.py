"""Test that a node fetches those pieces of weights that are read there, from any node that has them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from boxes import Box, boxes
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ASSETS
from waiting import LIMIT_S, until

from pipeedge.base.errors import PeerFailedError, RequestError, WeightsError
from pipeedge.base.schedule import LayerRange
from pipeedge.models.model import find_model
from pipeedge.models.weights.download import save_weights
from pipeedge.models.weights.file_kinds import NpzFile
from pipeedge.models.weights.pieces import PIECES_SUFFIX, PartialFile
from pipeedge.nodes import pieces as module
from pipeedge.nodes.messages import Hold, ModelFile, ModelPlace
from pipeedge.nodes.peer import ask_about, have_hold
from pipeedge.nodes.pieces import (
    PieceFile,
    PieceKeeper,
    check_pieces,
    piece_bytes,
    piece_digests,
    whole_digest,
)
from pipeedge.nodes.programs import located

PIECE = 4096


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALLEST", PIECE)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Box]]:
    with boxes(tmp_path) as made:
        yield made


def described(path: Path, piece: int = PIECE) -> ModelFile:
    digests = piece_digests(path, piece)
    return ModelFile(path.name, path.stat().st_size, whole_digest(digests), digests, piece)


class Source:
    """Other nodes, in memory."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.fetched: list[int] = []

    def fetch(self, file: ModelFile, numbers: Sequence[int], take: Callable[[int, bytes], None]) -> None:
        for number in numbers:
            self.fetched.append(number)
            take(number, self.data[number * file.piece_bytes : (number + 1) * file.piece_bytes])


@given(st.integers(1, 5 * 64), st.lists(st.tuples(st.integers(0, 330), st.integers(0, 200)), max_size=6))
@settings(max_examples=cases(20))
def test_whatever_is_read_is_fetched_before_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, size: int, reads: list[tuple[int, int]]
) -> None:
    directory = tmp_path_factory.mktemp("pieces")
    original = directory / "original"
    original.write_bytes(bytes(number * 7 % 256 for number in range(size)))
    source = Source(original)
    keeper = PieceKeeper(directory, source.fetch)
    try:
        kept = keeper.keep(directory / "weights", described(original, 64))
        partial = PartialFile(kept.path)
        partial.announce([(start, start + length) for start, length in reads[:2]])
        needed = {byte // 64 for start, length in reads for byte in range(start, min(start + length, size))}
        with partial.open() as stream:
            for start, length in reads:
                stream.seek(start)
                assert stream.read(length) == source.data[start : start + length]
        partial.close()
        announced = set(kept.numbers([(start, start + length) for start, length in reads[:2]]))
        assert needed <= set(source.fetched)
        assert set(source.fetched) <= needed | announced
        assert len(source.fetched) == len(set(source.fetched))
        assert PartialFile(kept.path).is_whole == (len(source.fetched) == -(-size // 64))
    finally:
        keeper.close()


def test_a_damaged_piece_is_refused_and_not_kept(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_bytes(bytes(100))
    file = described(original, 64)
    source = Source(original)
    source.data = b"x" * 100
    keeper = PieceKeeper(tmp_path, source.fetch)
    try:
        kept = keeper.keep(tmp_path / "weights", file)
        with pytest.raises(WeightsError, match="piece 0 of original arrived damaged"):
            PartialFile(kept.path).wait(0, 10)
        assert not kept.has(0)
    finally:
        keeper.close()
    with pytest.raises(WeightsError, match="is 'pipeedge node' running here"):
        PartialFile(kept.path).wait(0, 10)


def test_a_reader_that_has_gone_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tmp_path / "original"
    original.write_bytes(bytes(640))
    source, asked, gone = Source(original), threading.Event(), threading.Event()

    def fetch(file: ModelFile, numbers: Sequence[int], take: Callable[[int, bytes], None]) -> None:
        asked.set()
        gone.wait(LIMIT_S)
        source.fetch(file, numbers, take)

    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    keeper = PieceKeeper(tmp_path, fetch)
    try:
        kept = keeper.keep(tmp_path / "weights", described(original, 64))
        place = json.loads(Path(f"{kept.path}{PIECES_SUFFIX}").read_text())["socket"]
        with socket.socket(socket.AF_UNIX) as reader:
            reader.connect(os.path.realpath(place))
            reader.sendall(json.dumps(str(kept.path)).encode() + b"\n[[0, 640]]\n")
            assert asked.wait(LIMIT_S)
        gone.set()
        until(lambda: not any(thread.name == "reader" for thread in threading.enumerate()), "the reader")
        assert not failures
    finally:
        keeper.close()


def test_what_is_here_stays_after_a_restart(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_bytes(bytes(range(200)))
    file = described(original, 64)
    first = PieceFile(tmp_path / "weights", file, tmp_path / "sock")
    first.write(1, bytes(range(64, 128)))
    again = PieceFile(tmp_path / "weights", file, tmp_path / "sock")
    assert again.missing([(0, 200)]) == [0, 2, 3]
    assert (tmp_path / "weights").stat().st_size == 200


def test_pieces_must_be_those_of_the_digest(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_bytes(bytes(200))
    file = described(original, 64)
    check_pieces(file)
    for wrong in (
        ModelFile(file.name, 300, file.sha256, file.pieces, 64),
        ModelFile(file.name, 200, "0" * 64, file.pieces, 64),
        ModelFile(file.name, 200, file.sha256, file.pieces[:2], 64),
    ):
        with pytest.raises(RequestError, match="not those of its size and digest"):
            check_pieces(wrong)


@given(st.integers(0, 1 << 50))
def test_the_digests_of_a_model_fit_a_message(size: int) -> None:
    assert size <= piece_bytes(size) << 16


def copy_of(model: str, directory: Path) -> Path:
    shutil.copytree(ASSETS / model, directory)
    return directory


def hold(source: Box, target: Box, directory: Path, known_as: str | None = None) -> tuple[ModelPlace, Path]:
    """Let a node hold the model of another one, and return where it is there."""
    offered = source.store.offer(str(directory), print)
    peer, _ = ask_about(target.address, source.membership)
    request = Hold(offered.place, list(offered.files), source.node.port, known_as)
    have_hold(peer, source.membership, request, lambda news: None)
    return offered.place, Path(located(offered.place, target.store.models)[1])


def fetched(path: Path) -> int:
    """Return the number of pieces of the weights that are here."""
    kept = path / ".model.safetensors.have"
    return sum(kept.read_bytes())


def test_a_node_fetches_the_layers_that_it_computes_and_no_more(
    make: Callable[[str], Box], tmp_path: Path
) -> None:
    pi1, pi2, pi3 = make("pi1"), make("pi2"), make("pi3")
    directory = copy_of("vit-digits", tmp_path / "digits")
    place, there = hold(pi1, pi2, directory, "org/digits")
    original, borrowed = find_model(directory), find_model(there)
    whole = -(-(directory / "model.safetensors").stat().st_size // PIECE)
    assert borrowed.fingerprint() == original.fingerprint()
    few = fetched(there)
    assert few < whole / 10  # the header
    layers = LayerRange(4, 8)
    heard: list[float] = []
    with pi2.node.keeper.listening(lambda news: heard.append(news.done / news.total)):
        shard = borrowed.load(layers, kernels="torch")
    for name, tensor in original.load(layers, kernels="torch").state_dict().items():
        assert torch.equal(tensor, shard.state_dict()[name])
    part = original.weight_bytes(layers, torch.float32) / original.weight_bytes(
        LayerRange(0, original.n_layers), torch.float32
    )
    assert fetched(there) < (part + 0.2) * whole
    assert heard[-1] == 1

    # Another node gets the model by its name from one that has it in part, and the pieces from both.
    model = pi3.node.borrow("org/digits", lambda news: None)
    assert model is not None
    assert model.place == place
    find_model(model.words[1]).load()
    third = Path(model.words[1])
    assert fetched(third) == whole
    assert not (third / f"model.safetensors{PIECES_SUFFIX}").exists()
    pi1.node.close()
    find_model(there).load()  # the first source has gone
    assert (there / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert pi2.node.borrow("org/other", lambda news: None) is None


def test_a_known_model_is_fetched_once_and_any_node_may_be_asked_for_it(make: Callable[[str], Box]) -> None:
    pi1, pi2 = make("pi1"), make("pi2")
    name = "facebook/deit-tiny-distilled-patch16-224"
    with pytest.raises(WeightsError, match=rf"^the weights of {name} are not here$"):
        pi1.store.offer(name, print)
    lines: list[str] = []
    own = pi1.store.offer(name, lines.append, lambda name, where: save_weights([name], where, random_seed=0))
    assert lines == [f"fetching the weights of {name}"]
    assert pi1.store.offer(name, lines.append).place == own.place
    borrowed = pi2.node.borrow(name, lambda news: None)
    assert borrowed is not None
    assert borrowed.place == own.place
    assert own.words[1] == borrowed.words[1] == name

    # The node that has borrowed it lets the other run a rank, too.
    peer, _ = ask_about(pi1.address, pi2.membership)
    request = Hold(borrowed.place, list(borrowed.files), pi2.node.port, name)
    have_hold(peer, pi2.membership, request, lambda news: None)
    for box in (pi1, pi2):
        words = located(own.place, box.store.models)
        assert words[:3] == ("--model", name, "--model-file")
        find_model(name).load(LayerRange(0, 4), weights=Path(words[3]))
    assert Path(own.words[3]).read_bytes() == Path(located(own.place, pi1.store.models)[3]).read_bytes()


def test_a_reader_hears_that_no_node_has_a_piece(make: Callable[[str], Box], tmp_path: Path) -> None:
    pi1, pi2 = make("pi1"), make("pi2")
    _, there = hold(pi1, pi2, copy_of("vit-digits", tmp_path / "digits"))
    pi1.node.close()
    with pytest.raises(WeightsError, match=r"no node here has all of model\.safetensors"):
        find_model(there).load()


def test_arrays_of_an_archive_are_fetched_as_they_are_read(tmp_path: Path) -> None:
    original = tmp_path / "original.npz"
    arrays = {name: np.full((50, 50), number, np.float32) for number, name in enumerate("abcdef")}
    np.savez(original, **arrays)
    source = Source(original)
    keeper = PieceKeeper(tmp_path, source.fetch)
    try:
        kept = keeper.keep(tmp_path / "weights.npz", described(original, 1024))
        with NpzFile(kept.path) as file:
            assert set(file.names) == set(arrays)
            file.announce(["c"])
            out = torch.empty(50, 50)
            file.read_into("c", out)
            assert out.eq(2).all()
            with NpzFile(original) as whole:
                assert list(file.identity()) == list(whole.identity())
        assert len(source.fetched) < 0.5 * len(source.data) / 1024
    finally:
        keeper.close()


def test_a_missing_piece_is_refused_by_who_lacks_it(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_bytes(bytes(100))
    kept = PieceFile(tmp_path / "weights", described(original, 64), tmp_path / "sock")
    with pytest.raises(PeerFailedError, match="arrived damaged"):
        kept.write(0, b"x" * 64)
    kept.write(0, bytes(64))
    assert kept.missing([(0, 64)]) == []
    assert kept.missing([(0, 65)]) == [1]

"""Test that the programs print what docs/troubleshooting.md quotes, by provoking each message.

Every case is registered under its quote, exactly as on the page. In a quote, ``…`` stands for omitted text,
also at its ends; everything else must match, including names and figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_models
import numpy as np
import psutil
import pytest
import torch
import yaml
from file_server import Site, serving, use_hub, write_cache
from msgspec import Raw
from PIL import Image
from places import ROOT
from ports import free_port
from rich.console import Console
from safetensors.torch import load_file, save_file
from small_models import VOCABULARY

from pipeedge.auction import main as auction
from pipeedge.auction.options import parse_auction
from pipeedge.base.errors import PipeEdgeError, one_line
from pipeedge.base.files import write_secret
from pipeedge.base.payload import Payload
from pipeedge.base.schedule import Schedule
from pipeedge.base.streams import unprinted
from pipeedge.control.attendance import Terms
from pipeedge.control.dialling import HubAddress, connect_in_clear, explain_refusal
from pipeedge.control.epoch_messages import EPOCH_TO_HUB
from pipeedge.control.failover import Wanted
from pipeedge.control.liveness import Limits, RankStatus, beat_interval_s
from pipeedge.control.member import Callbacks, Member
from pipeedge.control.messages import (
    FROM_HUB,
    TO_HUB,
    Beat,
    Decoder,
    Facts,
    Hello,
    Message,
    Notice,
    Pace,
    Planned,
    Verdict,
    Waiting,
    WorkByRank,
    frame,
)
from pipeedge.control.rules import HubState
from pipeedge.control.wire import ClearEnd, SealedEnd, WireEnd
from pipeedge.data import arrays, pictures
from pipeedge.data.cola import read_split
from pipeedge.data.images import skipped_line
from pipeedge.data.opening import open_input
from pipeedge.data.results import ResultWriter
from pipeedge.data.text import open_tokenizer, read_sentences
from pipeedge.data.unfinished import Rows, UnfinishedOutput, find_unfinished
from pipeedge.doctor.link_checks import check_links
from pipeedge.doctor.notes import FindingLog
from pipeedge.doctor.probe import Probe
from pipeedge.doctor.run_look import look_at_run
from pipeedge.launch.main import parse_launch, plan_launch
from pipeedge.launch.supervisor import RankExit
from pipeedge.models import find_model
from pipeedge.models.dtypes import slow_here
from pipeedge.models.weights.download import HttpSource, download
from pipeedge.models.weights.reading import open_weights
from pipeedge.models.weights.writing import write_converted
from pipeedge.observe.metrics import StageStats
from pipeedge.observe.monitoring import Exporter
from pipeedge.plan.after_loss import Survivor, smallest_change
from pipeedge.plan.facts import disagreements, rank_facts
from pipeedge.plan.link_speed import Estimate
from pipeedge.plan.planning import Plan
from pipeedge.plan.prediction import Prediction, StagePrediction, compare
from pipeedge.plan.sched_pipeline import find_executable
from pipeedge.plan.spec_files import load_models
from pipeedge.plan.specs import NeighborLink as LinkSpec
from pipeedge.profile import session as profiling
from pipeedge.profile.network import measure_link
from pipeedge.profile.options import parse_profiler
from pipeedge.profile.result_files import load_results
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run import context, pipeline
from pipeedge.run.outcome import explain_missing_figures
from pipeedge.run.preview import show_schedule
from pipeedge.run.replanning import describe
from pipeedge.run.stage import Encode, resolve_device
from pipeedge.run.worker import Activity, Incoming, Outgoing, SendingEnd, StageLoop, StageSteps
from pipeedge.testbed.bed import TestBeds
from pipeedge.testbed.cluster import Cluster, EmulatedHost
from pipeedge.train import session as training
from pipeedge.train.checkpoint import Checkpoint, latest
from pipeedge.train.costs import LayerCosts
from pipeedge.train.options import parse_train
from pipeedge.train.orders import make_order
from pipeedge.train.partition import find_partition
from pipeedge.train.session import train
from pipeedge.transport import interfaces, p2p
from pipeedge.transport.base import Packet
from pipeedge.transport.loopback import LocalLink
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key
from pipeedge.transport.rpc import RpcTransport

PAGE = ROOT / "docs" / "troubleshooting.md"
MIB = 1 << 20
MBPS = MIB / 8

Patch = pytest.MonkeyPatch
Provoke = Callable[[Patch], str]
"""Makes the mistake, in a directory in which much is wrong; what is said of it."""

CASES: dict[str, Provoke] = {}


def says(*quotes: str) -> Callable[[Provoke], Provoke]:
    """Register the function that provokes the quoted messages."""

    def register(provoke: Provoke) -> Provoke:
        for quote in quotes:
            assert quote not in CASES, quote
            CASES[quote] = provoke
        return provoke

    return register


def refused(mistake: Callable[[], object]) -> str:
    """Return the line of the error that ``mistake`` raises."""
    with pytest.raises(PipeEdgeError) as caught:
        mistake()
    return one_line(caught.value)


def quotes() -> Iterator[str]:
    """Yield the quotes of the page: text between backquotes in the first cell of a table row."""
    for line in PAGE.read_text("utf-8").splitlines():
        cell = re.match(r"\| *(`.*?`) *\| ", line)
        if cell is not None:
            yield from re.findall(r"`([^`]+)`", cell[1])


def fits(quote: str, said: str) -> bool:
    """Return whether ``said`` contains ``quote``."""
    parts = (re.escape(part.strip()) for part in quote.split("…"))
    return re.search(r".*".join(parts), said) is not None


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with many mistakes."""
    here = tmp_path_factory.mktemp("trouble")
    for folder in ("photos", "empty", "gpt", "metrics", "model"):
        (here / folder).mkdir()
    for path in ROOT.glob("*.yml"):
        shutil.copy(path, here)
    (here / "photos" / "a.png").write_text("no picture")
    (here / "metrics" / "shard-rank0.csv").write_text("")
    (here / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    for path in DIGITS.weights_path().parent.iterdir():
        shutil.copy(path, here / "model")
    (here / "s.txt").write_text("a sentence\n")
    key = make_key()
    certificate = key.index("-----BEGIN CERTIFICATE")
    keys = {
        "open.pem": key,
        "cut.pem": key[:-40],
        "half.pem": key[:certificate],
        "mixed.pem": key[:certificate] + OTHER_KEY[certificate:],
    }
    for name, text in keys.items():
        (here / name).touch(mode=0o644 if name == "open.pem" else 0o600)
        (here / name).write_text(text)
    (here / "a.csv").write_text("one,other\na,b\n")
    (here / "s.yml").write_text("- mb-0: [1, 8]\n- mb-7: [9, 16]\n")
    np.savez(here / "t.npz", input_ids=np.zeros((2, 4), np.int64))
    np.savez(here / "integers.npz", pixel_values=np.zeros((2, 1, 8, 8), np.int64))
    return here


DIGITS = find_model("vit-digits")
KEY, OTHER_KEY = make_key(), make_key()


@pytest.mark.parametrize("quote", list(quotes()), ids=lambda quote: re.sub(r"\W+", "-", quote)[:50])
def test_the_mistake_gives_the_quoted_message(quote: str, trouble: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(trouble)
    assert quote in CASES, "nothing provokes this message: add a case, or correct the page"
    said = CASES[quote](monkeypatch)
    assert fits(quote, said), said


def test_every_case_is_on_the_page() -> None:
    assert set(CASES) <= set(quotes())
    assert len(list(quotes())) == len(set(quotes()))


def test_a_quote_omits_only_what_it_marks() -> None:
    assert fits("… is 7; use …, at least", "a.yml: x is 7; use 8 or 9, at least 2")
    assert not fits("… is 7; use …, at least", "a.yml: x is 8; use 8 or 9, at least 2")
    assert not fits("a (b) failed: …", "a failed: it")


# --- command lines ------------------------------------------------------------------------------------

RUNTIME = {
    "rank 5 is outside the world: with WORLD 2, RANK is 0 to 1": "5 2 -m vit-digits",
    "RANK and WORLD are missing: give RANK WORLD, e.g. '0 2' for the first of two, or use torchrun": "",
    "a world of 1,000,000 ranks: WORLD is at most 1024": "0 1000000",
    "--addr 10.255.0.77 is not an address of this machine, where rank 0 must listen; its addresses: …": (
        "0 2 -m vit-digits --addr 10.255.0.77"
    ),
    "--addr nowhere.invalid: cannot resolve this name": (
        "1 2 -m vit-digits --addr nowhere.invalid --timeout 1"
    ),
    "--key none.pem: no such file: make it with pipeedge-key, and copy it to every machine": (
        "0 1 -m vit-digits --key none.pem"
    ),
    "--key open.pem: other users may read it (mode 644): run chmod 600 on it, …": (
        "0 1 -m vit-digits --key open.pem"
    ),
    "--key cut.pem: is cut off within a PEM block; copy it again": "0 1 -m vit-digits --key cut.pem",
    "--key half.pem: holds no certificate, or lacks its end; copy it again": (
        "0 1 -m vit-digits --key half.pem"
    ),
    "--key mixed.pem: the private key does not belong to the certificate": (
        "0 1 -m vit-digits --key mixed.pem"
    ),
    "-c p2p with a key: gloo cannot encrypt its links; leave out -c, for links over tcp, or the key": (
        "0 2 -m vit-digits -c p2p --key open.pem"
    ),
    "give either --key (PIPEEDGE_KEY) or --tls-cert, --tls-key and --tls-ca": (
        "0 2 -m vit-digits --key open.pem --tls-cert open.pem --tls-key open.pem --tls-ca open.pem"
    ),
    "-s/--socket-ifname eth77: the interface does not exist": "0 1 -m vit-digits -s eth77",
    "-q changes nothing: with one stage, on the data rank, nothing crosses a link": (
        "0 1 -m vit-digits -q 8 --dry-run"
    ),
    "--adaptive auto changes nothing: with one stage there is no link to adapt": (
        "0 1 -m vit-digits --adaptive auto --dry-run"
    ),
    "no weights at ViT-B_16-224.npz; save_model_weights.py fetches those of the known models": "0 1",
    "vit-base is neither a known model nor a directory; …": "0 1 -m vit-base",
    "… has no config.json: a model directory holds config.json and model.safetensors": "0 1 -m ./empty",
    "model_type 'gpt2' is not supported; supported are …": "0 1 -m ./gpt",
    "nothing: no such file or folder": "0 1 -m vit-digits --input nothing",
    "empty: no image below this folder (known: …": "0 1 -m vit-digits --input empty",
    "photos/a.png: cannot be read as an image": "0 1 -m vit-digits --input photos",
    "photos holds images, s.txt text: give images and folders, or text files, or .npz files, not a mixture": (
        "0 1 -m vit-digits --input photos s.txt"
    ),
    "…: no file matches this pattern": "0 1 -m vit-digits --input *.jpeg",
    "t.npz: no array …": "0 1 -m vit-digits --input t.npz",
    "… not floating point: values must be normalised as in training": (
        "0 1 -m vit-digits --input integers.npz"
    ),
    "--dataset-root nowhere: no such folder": (
        "0 1 -m vit-digits --dataset-name ImageNet --dataset-root nowhere"
    ),
    "give either --input or --dataset-name, not both": (
        "0 1 -m vit-digits --dataset-name CoLA --input photos"
    ),
    "layers 9 to 16 are covered by no stage: the model's layers are 1 to 16": (
        "0 2 -m vit-digits -pt 1,8 --dry-run"
    ),
    "layer 25 is covered by no stage: stage ranges must follow one another, 26-48 begins too late": (
        "0 2 -pt 1,24,26,48 --dry-run"
    ),
    "the range 24-48 overlaps what comes before it: layer 25 should come next": (
        "0 2 -pt 1,24,24,48 --dry-run"
    ),
    "the range 1-24 goes beyond the model: its layers are 1 to 16": "0 2 -m vit-digits -pt 1,24 --dry-run",
    "a partition is pairs of first and last layer; 3 numbers were given": "0 2 -pt 1,24,25 --dry-run",
    "4 stages need as many ranks, the world has 2": ("0 2 -m vit-digits -pt 1,4,5,8,9,12,13,16 --dry-run"),
    "2 bit widths (-q) for 3 stages; give one for each, 0 for none": (
        "0 3 -m vit-digits -pt 1,4,5,8,9,16 -q 8,8 --dry-run"
    ),
    "automatic scheduling needs all three of -sm/--sched-models-file, -sdt/--sched-dev-types-file and "
    "-sd/--sched-dev-file": "0 2 -sm models.yml --dry-run",
    "-H/--hosts names 2 hosts for a world of 3 ranks": (
        "0 3 -m vit-digits -H a,b -sm models.yml -sdt device_types.yml -sd devices.yml"
    ),
    "s.yml: the host mb-0 is no rank; name the host of each rank with -H, or call the hosts by their ranks": (
        "0 2 -m vit-digits --schedule-file s.yml --dry-run"
    ),
    "s.yml: the host mb-7 has no rank; the hosts that have one are mb-0, mb-1": (
        "0 2 -m vit-digits --schedule-file s.yml -H mb-0,mb-1 --dry-run"
    ),
    "models.yml: no model vit-digits; the file has: …": (
        "0 1 -m vit-digits -H mb-0 -sm models.yml -sdt device_types.yml -sd devices.yml --dry-run"
    ),
    "--output a.txt: unknown suffix '.txt'; use .csv, …": "0 1 -m vit-digits --output a.txt",
    "… gives vectors, not classes; vectors are written to .npz only": (
        "0 1 -m bert-base-uncased --output a.csv"
    ),
    "--output out/a.csv: the directory out does not exist; create it first": (
        "0 1 -m vit-digits --output out/a.csv"
    ),
    "--report a.txt: a report is FILE.json, for programs, or FILE.html, for people": (
        "0 1 -m vit-digits --report a.txt"
    ),
    "--resume needs --output FILE, which an earlier run was to write": "0 1 -m vit-digits --resume",
    "--resume cannot be combined with --check, whose items may be written already": (
        "0 1 -m vit-digits --resume --output r.csv --check 3"
    ),
    "--output t.npz: would replace what --input reads; name another file": (
        "0 1 -m vit-digits --input t.npz --output t.npz"
    ),
    "…: would replace config.json, which …": "0 1 -m ./model --report model/config.json",
    "--trace x.json: is the same file as --report x.json; name another one": (
        "0 1 -m vit-digits --report x.json --trace x.json"
    ),
    "--metrics-dir metrics: shard-rank0.csv exists already; choose another directory, or --csv-file-mode "
    "w to replace it or a to append to it": "0 1 -m vit-digits --metrics-dir metrics",
}
"""Command lines of ``runtime.py``."""


def start(line: str) -> str:
    """Return the output of ``runtime.py``, run in this process."""
    shown, notices = io.StringIO(), []
    try:
        command = parse_runtime(line.split(), Environment())
        console = Console(file=shown, width=200)
        if command.dry_run:
            show_schedule(command.request, notices.append)
        else:
            pipeline.run(command.request, lambda: console, notices.append)
    except PipeEdgeError as error:
        return one_line(error)
    return "\n".join((*notices, shown.getvalue()))


@contextlib.contextmanager
def beside(line: str) -> Iterator[None]:
    """Run another rank in a thread."""
    other = threading.Thread(target=start, args=(line,), daemon=True)
    other.start()
    yield
    other.join(30)


for _quote, _line in RUNTIME.items():
    says(_quote)(lambda patch, line=_line: start(line))


# --- the ranks find each other ------------------------------------------------------------------------


class Play:
    """A hub's state with a clock that the test advances; connection n belongs to rank n."""

    def __init__(self, world: int = 3, timeout_s: float = 60.0) -> None:
        self.state = HubState(world_size=world, timeout_s=timeout_s, now=0.0)
        self.world = world
        self.lines: list[str] = []

    def hear(self, connection: int, kind: str, now: float = 0.0, **body: Any) -> Play:
        text = json.dumps({"kind": kind, **body}).encode()
        (message,) = Decoder(TO_HUB | EPOCH_TO_HUB).feed(struct.pack(">I", len(text)) + text)
        self.note(self.state.received(connection, message, now))
        return self

    def hello(self, *ranks: int, world: int | None = None, host: str = "pi") -> Play:
        for rank in ranks:
            place = f"{host}{rank + 1}" if host == "pi" else host
            self.hear(rank, "hello", rank=rank, world=world or self.world, host=place)
        return self

    def started(self) -> Play:
        self.hello(*range(self.world))
        for rank in range(self.world):
            self.hear(rank, "facts", facts={})
        names = {rank: f"stage {rank}" for rank in range(self.world)}
        self.state.plan(Raw(b"{}"), tuple(range(self.world)), names, 0.0, data_rank=0)
        for rank in range(self.world):
            self.hear(rank, "ready")
        return self

    def beat(self, now: float, statuses: Mapping[int, RankStatus]) -> Play:
        for rank, status in statuses.items():
            self.note(self.state.received(rank, Beat(status), now))
        self.note(self.state.tick(now))
        return self

    def note(self, outgoing: list[tuple[int, Message]]) -> None:
        for _, message in outgoing:
            if isinstance(message, Verdict):
                self.lines.append(message.failure.line)
            elif isinstance(message, Notice | Waiting):
                self.lines.append(message.line)

    @property
    def said(self) -> str:
        return "\n".join(self.lines)


@says(
    "rank 0 never appeared at … (Connection refused): start rank 0 or read why it ended, and check "
    "--addr and --port"
)
def nobody_listens(patch: Patch) -> str:
    return refused(lambda: HubAddress("127.0.0.1", free_port()).dial(0.05))


@says(
    "rank 0 never appeared at … (timed out): start rank 0 or read why it ended, and check --addr and --port"
)
def nobody_answers(patch: Patch) -> str:
    patch.setattr(socket, "create_connection", raising(TimeoutError("timed out")))
    return refused(lambda: HubAddress("127.0.0.1", 29500).dial(0.05))


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@says("ranks 1, 2 of 3 never appeared within 60 s: start each rank, with the same --addr and --port")
def ranks_are_absent(patch: Patch) -> str:
    return Play().hello(0).beat(61, {0: RankStatus()}).said


@says("waiting for ranks 1, 2 of 3 to start")
def ranks_are_awaited(patch: Patch) -> str:
    return Play().hello(0).beat(2.1, {0: RankStatus()}).said


@says("rank 1 has already joined, from pi2: start each rank once")
def a_rank_is_there_twice(patch: Patch) -> str:
    play = Play().hello(1)
    return play.hear(7, "hello", rank=1, world=3, host="pi9").said


@says("rank 1 on pi2 says the world has 2 ranks, rank 0 says 3: start all with the same WORLD")
def worlds_differ(patch: Patch) -> str:
    return Play().hello(1, world=2).said


@says(
    "rank 1 on pi9 says the world has 2 ranks, rank 0 says 3: rank 1 has already joined, from pi2: choose "
    "another --port for another run"
)
def another_run_is_there(patch: Patch) -> str:
    return Play().hello(1).hear(7, "hello", rank=1, world=2, host="pi9").said


@says("rank 5 is outside the world of 3")
def a_rank_too_many(patch: Patch) -> str:
    return Play().hello(5).said


@contextlib.contextmanager
def pi1_is(patch: Patch, port: int) -> Iterator[None]:
    """Redirect the name pi1, at any port, to ``port`` of the loopback interface."""

    def find(*_: object, **wanted: Any) -> list[Any]:
        return [(socket.AF_INET, wanted["type"], 0, "", ("127.0.0.1", port))]

    with patch.context() as within:
        within.setattr(socket, "getaddrinfo", find)
        yield


@says("--port 29500 is in use on pi1: another run may still be there; choose another --port")
def a_port_in_use(patch: Patch) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken, pi1_is(patch, taken.getsockname()[1]):
        return refused(lambda: interfaces.listen("pi1", 29500))


@says("--port 80: not permitted here; choose one above 1023")
def a_port_of_roots(patch: Patch) -> str:
    patch.setattr(socket.socket, "bind", raising(PermissionError(errno.EACCES, "Permission denied")))
    return refused(lambda: interfaces.listen("127.0.0.1", 80))


@says("--addr 10.1.1.1: no route leads there")
def no_route(patch: Patch) -> str:
    patch.setattr(socket.socket, "connect", raising(OSError(errno.ENETUNREACH, "Network is unreachable")))
    return refused(lambda: interfaces.choose_interface(None, "10.1.1.1", 29500))


@says("the interface wlan0, which leads to --addr pi1, is down or unplugged")
def an_interface_is_down(patch: Patch) -> str:
    patch.setattr(psutil, "net_if_addrs", lambda: {"wlan0": [SimpleNamespace(address="127.0.0.1", family=2)]})
    patch.setattr(psutil, "net_if_stats", lambda: {"wlan0": SimpleNamespace(isup=False)})
    with pi1_is(patch, 9):
        return refused(lambda: interfaces.choose_interface(None, "pi1", 29500))


@says("received data is not a message of this program: is another program on this port?")
def another_program(patch: Patch) -> str:
    return refused(lambda: Decoder(TO_HUB).feed(b"GET / HTTP/1.1\r\n\r\n"))


@says("the schedule gives it no stage, so it has nothing to do")
def a_rank_without_a_stage(patch: Patch) -> str:
    patch.setattr(sys.stderr, "isatty", lambda: True)
    with beside(f"0 2 -m vit-digits -b 8 -pt 1,16 --port {(port := free_port())}"):
        return start(f"1 2 -m vit-digits -b 8 -pt 1,16 --port {port}")


@says(
    "the links of rank 0 to 1 over … do not open: is there a firewall between them, or another interface to "
    "choose with -s?"
)
def links_do_not_open(patch: Patch) -> str:
    ended = threading.Event()
    within = {10.0: Limits(silence_s=10.0, stall_s=0.05)}
    patch.setattr(p2p, "connect_store", lambda *_, **__: ended.wait(30))
    patch.setattr(context, "Limits", SimpleNamespace(within=lambda s: within.get(s, Limits.within(s))))
    with beside(f"1 2 -m vit-digits --port {(port := free_port())}"):
        said = start(f"0 2 -m vit-digits --port {port} --timeout 10")
        ended.set()
    return said


@says("ranks 0 and 1 disagree on …", "… the weights (-M) … copy the same file to all")
def weights_differ(patch: Patch) -> str:
    return "\n".join(disagreements({0: {"weights": "1a2b"}, 1: {"weights": "3c4d"}}))


@says("rank 1 was given --output out.csv, rank 0 was not; rank 0 is the data rank: give it to rank 0")
def an_option_on_the_wrong_rank(patch: Patch) -> str:
    facts = [
        rank_facts(
            parse_runtime(line.split(), Environment()).request,
            DIGITS,
            weights=None,
            items=None,
            max_tokens=None,
        )
        for line in ("0 2 -m vit-digits", "1 2 -m vit-digits --output out.csv")
    ]
    return "\n".join(disagreements(dict(enumerate(facts))))


# --- it stops while it runs ---------------------------------------------------------------------------


@says("rank 2 (stage 2, …) is gone: it was killed or lost its network")
def a_connection_closes(patch: Patch) -> str:
    play = Play().started()
    play.note(play.state.closed(2, 1.0))
    return play.said


class GoesOn(Play):
    """A run that goes on after failures, with rank 0 as the data rank."""

    def started(self) -> GoesOn:
        self.hello(*range(self.world))
        for rank in range(self.world):
            self.hear(rank, "facts", facts={})
        plan = Raw(b"{}"), tuple(range(self.world)), self.names, 0.0
        self.note(self.state.plan(*plan, data_rank=0, goes_on=True))
        return self.prepared(1, *range(self.world))

    @property
    def names(self) -> Mapping[int, str]:
        return {rank: f"stage {rank}" for rank in range(self.world)}

    def prepared(self, epoch: int, *ranks: int) -> GoesOn:
        for rank in ranks:
            self.hear(rank, "epochready", epoch=epoch)
        return self

    def goes_on_with(self, epoch: int, *ranks: int, line: str = "") -> GoesOn:
        """Stop the epoch before ``epoch`` on all that are left, and prepare the next one."""
        for rank in ranks:
            self.hear(rank, "stopped", epoch=epoch - 1, **({"written": 0} if rank == 0 else {}))
        task = self.state.task()
        assert isinstance(task, Wanted)
        plan = Raw(b"{}"), ranks, self.names, 0.0, line or f"{task.cause}; the run goes on"
        self.note(self.state.plan_again(task.members, *plan))
        return self.prepared(epoch, *ranks)


@says("rank 2 (stage 2, …) is gone: it was killed or lost its network; the run goes on with …")
def a_run_goes_on_without_a_rank(patch: Patch) -> str:
    now = Plan(
        Schedule.from_partition([1, 4, 5, 16]),
        data_rank=0,
        items=1,
        microbatch_size=1,
        max_tokens=None,
        store_port=None,
        prediction=None,
        cause="rank 2 (stage 2, layers 9-16) is gone: it was killed or lost its network",
    )
    before = dataclasses.replace(now, schedule=Schedule.from_partition([1, 4, 5, 8, 9, 16]))
    return describe(before, now)


@says("microbatch 7 cannot be computed, as it failed on rank 1 (…) and rank 2 (…): …")
def a_microbatch_fails_on_rank_after_rank(patch: Patch) -> str:
    play = GoesOn().started().hear(1, "failed", line="RuntimeError: boom", microbatch=7)
    play.goes_on_with(2, 0, 2)
    return play.hear(2, "failed", line="RuntimeError: boom", microbatch=7).said


@says("rank 1 (on pi2) has joined, and is there to take the place of another")
def a_rank_comes_back(patch: Patch) -> str:
    play = GoesOn().started()
    play.note(play.state.closed(1, 1.0))
    play.hear(7, "hello", rank=1, world=3, host="pi2").hear(7, "facts", facts={})
    play.note(play.state.judge_newcomer(7, None, 1.0))
    return play.said


@says("rank 2 (stage 2, …) has not stopped within … what it computes for a failed plan")
def a_rank_does_not_stop(patch: Patch) -> str:
    play = GoesOn().started().hear(1, "failed", line="RuntimeError: boom", microbatch=7)
    play.hear(0, "stopped", epoch=1, written=0)
    for now in range(1, 200):
        play.beat(now, {0: RankStatus(), 2: RankStatus(busy=("computing", now))})
    return play.said


@says("layer 2 needs 2 MB, and no rank that is left has more than 1 MB (rank 0)")
def a_layer_fits_on_no_rank_that_is_left(patch: Patch) -> str:
    schedule = Schedule.from_partition([1, 1, 2, 2])
    return str(smallest_change(schedule, [Survivor(0, MIB)], [MIB, 2 * MIB]))


@says("the layers need 3 MB, and the ranks that are left have 2 MB, which suffices up to layer 2")
def the_ranks_that_are_left_have_too_little_memory(patch: Patch) -> str:
    schedule = Schedule.from_partition([1, 1, 2, 3])
    return str(smallest_change(schedule, [Survivor(0, 2 * MIB)], [MIB] * 3))


@says("rank 1 (stage 1, …) is gone: it was killed or lost its network; the results are complete")
def a_connection_closes_at_the_end(patch: Patch) -> str:
    play = Play().started().hear(0, "complete")
    play.note(play.state.closed(1, 1.0))
    return play.said


@says(
    "rank 1 left without saying how the run went: the results are complete, but its figures are missing "
    "from the table and the report"
)
def a_rank_leaves_at_the_end(patch: Patch) -> str:
    return explain_missing_figures([1])


@says(
    "rank 2 (stage 2, …) has been silent for 57.0 s: its process is suspended or its network is disconnected"
)
def a_rank_is_silent(patch: Patch) -> str:
    return Play().started().beat(57.01, {0: RankStatus(), 1: RankStatus()}).said


@says(
    "rank 0 (stage 0, …) has not heard from any of the 2 other ranks for 57.0 s: its own network is "
    "disconnected, or that of all others"
)
def all_ranks_are_silent(patch: Patch) -> str:
    return Play().started().beat(57.01, {0: RankStatus()}).said


@says(
    "rank 2 (stage 2, …) has waited 58.0 s for microbatch 7 from rank 1 (stage 1, …): the link between them "
    "is dead, or so slow that it needs a longer --timeout"
)
def a_link_is_dead(patch: Patch) -> str:
    statuses = {
        0: RankStatus(sent={1: 9}),
        1: RankStatus(sent={2: 9}, received={0: 9}),
        2: RankStatus(received={1: 7}, awaiting=frozenset({1})),
    }
    return Play().started().beat(0.0, statuses).beat(58.01, statuses).said


@says("… computing microbatch 0 … for 58 s; still alive")
def a_stage_is_slow(patch: Patch) -> str:
    statuses = {rank: RankStatus(busy=("computing microbatch 0", 58.1)) for rank in range(3)}
    return Play().started().beat(0.0, statuses).beat(58.01, statuses).said


@says("rank 1 (stage 1, …) failed: …")
def a_rank_fails(patch: Patch) -> str:
    return Play().started().hear(1, "failed", line="no memory").said


@says("rank 1 (stage 1, …) sent a malformed 'beat'; do all run the same version?")
def a_beat_is_malformed(patch: Patch) -> str:
    return Play().started().hear(1, "beat", status={"busy": 7}).said


@says("… internal error in its hub: …")
def the_hub_fails(patch: Patch) -> str:
    play = Play().started()
    play.note(play.state.failed("MemoryError: no more", 1.0))
    return play.said


@says("internal error in the control connection of rank 1: …")
def a_control_thread_dies(patch: Patch) -> str:
    ours, theirs = socket.socketpair()
    callbacks = Callbacks(status=raising(MemoryError("no more")))
    clock = itertools.count(step=0.9 * beat_interval_s(60.0))  # soon it is time for a heartbeat
    with (
        theirs,
        Member(
            connect_in_clear(ours), rank=1, timeout_s=60.0, callbacks=callbacks, clock=lambda: next(clock)
        ) as member,
    ):
        return refused(lambda: member.wait(Planned))


@says(
    "a process at 10.0.0.9 connected and left before it introduced itself; ranks still missing: 1, 2",
)
def a_rank_dies_before_its_hello(patch: Patch) -> str:
    state = HubState(world_size=3, timeout_s=60.0, now=0.0)
    state.received(0, Hello(0, 3, "pi0"), 0.0)
    ((_, notice),) = state.closed(1, 1.0, left="10.0.0.9")
    return str(notice.line)


def refusal_by(hub: WireEnd, member: WireEnd) -> str:
    """Return what a member says of a hub, after each has received what the other one sends."""
    hub.receive(member.outgoing())
    member.receive(hub.outgoing())
    return str(explain_refusal("rank 0 at pi1:29500", member.failure))


def sealed(key: str, *, accepts: bool) -> SealedEnd:
    membership = Membership.from_text(key, "--key k.pem")
    context = membership.server_context() if accepts else membership.client_context()
    return SealedEnd(context, accepts=accepts)


@says("rank 0 at … has another key: give every rank the same --key")
def rank_0_has_another_key(patch: Patch) -> str:
    return refusal_by(sealed(KEY, accepts=True), sealed(OTHER_KEY, accepts=False))


@says("rank 0 at … has no key: give every rank the same --key")
def rank_0_has_no_key(patch: Patch) -> str:
    return refusal_by(ClearEnd(accepts=True), sealed(KEY, accepts=False))


@says("rank 0 has a key, and this rank has none: give every rank the same --key")
def only_rank_0_has_a_key(patch: Patch) -> str:
    hub = sealed(KEY, accepts=True)
    hub.receive(frame(Hello(1, 2, "pi1")))
    (verdict,) = Decoder(FROM_HUB).feed(hub.outgoing())
    assert isinstance(verdict, Verdict)
    return verdict.failure.line


@says("rank 0 at … does not speak TLS 1.3: is it PipeEdge? Check --addr and --port")
def rank_0_is_a_foreign_service(patch: Patch) -> str:
    member = sealed(KEY, accepts=False)
    member.receive(b"SSH-2.0-OpenSSH_9.2\r\n")
    return str(explain_refusal("rank 0 at pi1:29500", member.failure))


@says("rank 0 at … is another program: is it PipeEdge? Check --addr and --port")
def rank_0_is_a_web_server(patch: Patch) -> str:
    context = Membership.from_text(OTHER_KEY, "a web server").server_context()
    context.set_alpn_protocols(["http/1.1"])
    return refusal_by(SealedEnd(context, accepts=True), sealed(KEY, accepts=False))


@says("a process at 10.0.0.9 has another key; ranks still missing: 1, 2")
def a_process_has_another_key(patch: Patch) -> str:
    state = HubState(world_size=3, timeout_s=60.0, now=0.0)
    state.received(0, Hello(0, 3, "pi0"), 0.0)
    ((_, notice),) = state.refused("10.0.0.9", "has another key", 1.0)
    return str(notice.line)


@says("FILE open.pem: exists already, and is not replaced: name another")
def a_key_exists(patch: Patch) -> str:
    return refused(lambda: write_secret(Path("open.pem"), KEY, "FILE"))


@says("making a key needs the package cryptography: …")
def keys_cannot_be_made(patch: Patch) -> str:
    patch.setitem(sys.modules, "cryptography", None)
    return refused(make_key)


@says(
    "links and control are open: whoever is on this network can take part in the run, and read and change "
    "what is sent; …"
)
def the_run_has_no_key(patch: Patch) -> str:
    patch.setattr(pipeline, "is_loopback", lambda addr: False)
    said: list[str] = []
    line = f"0 2 -m vit-digits -pt 1,8,9,16 --port {free_port()} --timeout 0.1"
    with pytest.raises(PipeEdgeError):  # rank 1 does not come
        pipeline.run(parse_runtime(line.split(), Environment()).request, Console, said.append)
    return said[0]


@says("--key protects the control connection alone: …")
def a_training_has_a_key(patch: Patch) -> str:
    return training.describe_openness(Membership.from_text(KEY, "--key k.pem"))


@says("the display of the run has failed: …")
def a_display_fails(patch: Patch) -> str:
    said: list[str] = []
    ours, theirs = socket.socketpair()
    show = raising(ValueError("no such column"))
    callbacks = Callbacks(notify=said.append, record_stage_work=show)
    with theirs, Member(connect_in_clear(ours), rank=0, timeout_s=1.0, callbacks=callbacks) as member:
        member._handle(WorkByRank({}))
    return said[0]


@says("rank 0 is gone: it was killed or lost its network")
def the_hub_is_gone(patch: Patch) -> str:
    ours, theirs = socket.socketpair()
    theirs.sendall(frame(Pace()))
    theirs.close()
    with Member(connect_in_clear(ours), rank=1, timeout_s=1.0) as member:
        return refused(lambda: member.wait(Planned))


@says("microbatch 3 could not be computed: …")
def computing_fails(patch: Patch) -> str:
    link = LocalLink()
    link.post(Packet(3, 1, (torch.zeros(1),)))
    activity = Activity()
    loop = StageLoop(
        StageSteps(raising(RuntimeError("no memory"))),
        Incoming(link, None, activity),
        Outgoing(SendingEnd(LocalLink()), activity),
        activity,
    )
    return refused(loop.run)


@says("microbatch 3: stage 1 on rank 1 computed values that 8 bits cannot represent")
def values_are_not_finite(patch: Patch) -> str:
    encode_packet = Encode(lambda number, items: 8, "none", 1, stage=1, rank=1)
    payload: Payload = (torch.full((1, 4), float("nan")),)
    return refused(lambda: encode_packet(Packet(3, 1, payload)))


# --- it is slow ---------------------------------------------------------------------------------------


@says(
    "this processor has no instructions for bfloat16 …, so bfloat16 will be slow here; profiler.py --dtype "
    "measures how slow"
)
def a_type_is_slow(patch: Patch) -> str:
    return slow_here(torch.bfloat16, torch.device("cpu"), {"avx2": True}) or ""


def remark(
    *,
    measured_s: float,
    tokens: int | None = None,
    profiled: tuple[int, ...] = (),
    profiled_kernels: str | None = None,
    **more: Any,
) -> str:
    """Return the remarks on a stage with a predicted time of 1 s."""
    values = {
        **dict.fromkeys((field.name for field in dataclasses.fields(StageStats)), 1),
        "stage": 0,
        "rank": 0,
        "compute_s_mean": measured_s,
        "compute_cpu_s_mean": measured_s,
        "link_s": 1.0,
        "threads": 1,
        **more,
    }
    stage = StagePrediction(busy_s=1.0, link_s=1.0, threads=1, tokens=profiled, kernels=profiled_kernels)
    promise = Prediction((stage,), 8, tokens=tokens)
    measured = StageStats(**values)
    found = compare(promise, [measured], items=80, run_items_per_s=7.0, steady_items_per_s=7.5)
    return "\n".join(found.remarks)


@says(
    "stage 0 (rank 0) is off by +80%: it computes with 4 threads and was profiled with 1; set "
    "OMP_NUM_THREADS=1, or profile as it runs"
)
def threads_differ(patch: Patch) -> str:
    return remark(measured_s=1.8, threads=4)


@says(
    "stage 0 (rank 0) computes with the kernels torch and was profiled with onednn; use --kernels onednn, or "
    "profile as it runs"
)
def kernels_differ(patch: Patch) -> str:
    return remark(measured_s=1.0, profiled_kernels="onednn", kernels="torch")


@says("it was kept from its processor for 40% of the time; is other load there")
def other_load(patch: Patch) -> str:
    return remark(measured_s=2.0, compute_cpu_s_mean=1.2)


@says(
    "the link from stage 0 (rank 0) is off by +50%: is other traffic on it, or is bw_Mbps of its devices too "
    "high?"
)
def other_traffic(patch: Patch) -> str:
    return remark(measured_s=1.0, link_s=1.5)


@says(
    "stage 0 (rank 0) is off by -75%: it was profiled with 512 tokens and the longest sentence here has 128: "
    "profile several lengths (profiler.py --tokens)"
)
def lengths_differ(patch: Patch) -> str:
    return remark(measured_s=0.25, tokens=128, profiled=(512,))


@says(
    "stage 0 (rank 0) is off by -60%: its times are those of the longest sentence, 128 tokens, and a "
    "microbatch is only as long as its own longest; are most sentences shorter?"
)
def sentences_are_shorter(patch: Patch) -> str:
    return remark(measured_s=0.4, tokens=128, profiled=(128, 512))


@says(
    "rank 0 -> rank 1: 105 to 338 Mbps in 15 rounds, too unsteady to plan with, so --neighbors-file gets no "
    "figure: measure again when the machines and the network are idle"
)
def rounds_differ(patch: Patch) -> str:
    estimate = Estimate(LinkSpec(200 * MBPS, 0.001), 105 * MBPS, 338 * MBPS, 15)
    return "\n".join(finding.what for finding in check_links([(0, 1)], {0: estimate}, None))


@says(
    "-c rpc listens at 10.0.0.1: whoever can connect there can run programs on this machine, or end the run; "
    "use it in a network that you trust, or leave it out"
)
def rpc_is_exposed(patch: Patch) -> str:
    return RpcTransport(0, 1).exposure(["10.0.0.1"]) or ""


# --- model and weights --------------------------------------------------------------------------------


def load(weights: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    """Return the message for these weights of vit-digits, with ``changes`` to its configuration."""
    model = dataclasses.replace(DIGITS, config=dataclasses.replace(DIGITS.config, **changes))
    return refused(lambda: model.load(weights=weights, dtype=dtype))


def safetensors(path: Path, header: str, size: int) -> Path:
    """Write a file with ``header`` and ``size`` bytes of data."""
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(size))
    return path


def tensor(begin: int, end: int) -> str:
    return json.dumps({"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]})


@says("… is truncated: 1000 bytes of 2000, the first tensor cut off is …")
def weights_are_cut_off(patch: Patch) -> str:
    header = f'{{"a": {tensor(0, 1800)}}}'.ljust(192)
    path = safetensors(Path("cut.safetensors"), header, 800)
    return refused(lambda: open_weights(path))


@says("… the same bytes")
def tensors_share_bytes(patch: Patch) -> str:
    path = safetensors(Path("shared.safetensors"), f'{{"a": {tensor(0, 8)}, "b": {tensor(4, 12)}}}', 12)
    return refused(lambda: open_weights(path))


@says("… is given twice")
def a_tensor_is_given_twice(patch: Patch) -> str:
    path = safetensors(Path("twice.safetensors"), f'{{"a": {tensor(0, 8)}, "a": {tensor(8, 16)}}}', 16)
    return refused(lambda: open_weights(path))


@says("… has shape [10, 64], the model needs [1000, 64]; is it of another model?")
def weights_of_another_model(patch: Patch) -> str:
    return load(DIGITS.weights_path(), num_labels=1000)


@says("… is of a deeper model: it has … the model has 3 blocks")
def weights_of_a_deeper_model(patch: Patch) -> str:
    return load(DIGITS.weights_path(), blocks=3)


@says("… but the model's qkv_bias is false: which of the two is right?")
def biases_without_a_place(patch: Patch) -> str:
    return load(DIGITS.weights_path(), qkv_bias=False)


@says("… is 100000; it must be 1 to …")
def a_size_is_absurd(patch: Patch) -> str:
    config = json.loads((DIGITS.weights_path().parent / "config.json").read_text())
    Path("deep").mkdir()
    Path("deep/config.json").write_text(json.dumps({**config, "num_hidden_layers": 100000}))
    return refused(lambda: find_model("deep"))


def in_8_bits() -> Path:
    path = Path("int8.safetensors")
    with open_weights(DIGITS.weights_path()) as source:
        write_converted(path, DIGITS.build(dtype=torch.int8), DIGITS.config, source, "fingerprint")
    return path


@says(
    "… is stored as int8, float32 is needed; run with --dtype int8, or with weights that are not "
    "quantised (-M)"
)
def weights_are_8_bit(patch: Patch) -> str:
    return load(in_8_bits())


@says("… has scales that are not above 0; convert again")
def scales_are_zero(patch: Patch) -> str:
    tensors = load_file(in_8_bits())
    name = next(name for name in tensors if name.endswith("_scale"))
    tensors[name][1] = 0.0
    save_file(tensors, "zero.safetensors")
    return load(Path("zero.safetensors"), torch.int8)


@says("… is packed by zip method 14; np.savez and np.savez_compressed write what can be read")
def weights_are_packed_oddly(patch: Patch) -> str:
    with zipfile.ZipFile("w.npz", "w", zipfile.ZIP_LZMA) as archive:
        for name, value in load_file(DIGITS.weights_path()).items():
            stream = io.BytesIO()
            np.save(stream, value.numpy())
            archive.writestr(f"{name}.npy", stream.getvalue())
    return load(Path("w.npz"))


@says("… cannot be fetched …")
def no_network_to_fetch_over(patch: Patch) -> str:
    source = HttpSource(f"http://127.0.0.1:{free_port()}/w.npz")
    return refused(lambda: download(DIGITS, source, Path("fetched.npz")))


HUB_MODEL = {path.name: path.read_bytes() for path in DIGITS.weights_path().parent.iterdir()}


def ask_hub(patch: Patch, files: Mapping[str, bytes] | None = None, **site: Any) -> str:
    """Return what loading ``lab/model`` says if the cache is empty; the hub has it if there are files."""
    from huggingface_hub import constants

    hub = Site({}, **site)
    if files is not None:
        hub.add_repository("lab/model", files)
    with tempfile.TemporaryDirectory() as cache, serving(hub):
        patch.setattr(constants, "HF_HUB_CACHE", cache)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        use_hub(hub.url, patch)
        return refused(lambda: find_model("lab/model").load())


@says(
    "lab/model is neither a known model nor a directory, and the hub's local cache does not have it "
    "(HF_HUB_OFFLINE is set); …"
)
def repository_is_not_cached(patch: Patch) -> str:
    return refused(lambda: find_model("lab/model"))


@says(
    "lab/model is neither a known model nor a directory, and the Hugging Face hub has no such repository, or "
    "keeps it private; …"
)
def repository_is_unknown(patch: Patch) -> str:
    return ask_hub(patch)


@says("lab/model is neither a known model nor a directory, and … does not answer …")
def hub_is_away(patch: Patch) -> str:
    return ask_hub(patch, HUB_MODEL, status=500, error_code="InternalError")


@says("… is only for people who accepted its conditions: accept them at …")
def repository_is_gated(patch: Patch) -> str:
    return ask_hub(patch, HUB_MODEL, status=403, error_code="GatedRepo", refused="/lab/model/resolve")


@says(
    "… has no safetensors weights (only pytorch_model.bin), and pickles are not read because unpickling can "
    "run code; …"
)
def repository_has_a_pickle(patch: Patch) -> str:
    return ask_hub(patch, {"config.json": HUB_MODEL["config.json"], "pytorch_model.bin": b""})


@says(
    "… cannot be stored in … (No space left on device); free some space, or name another directory with "
    "HF_HUB_CACHE"
)
def cache_is_full(patch: Patch) -> str:
    import huggingface_hub

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(huggingface_hub, "hf_hub_download", no_space)
    return ask_hub(patch, HUB_MODEL)


def cache_without_weights(patch: Patch) -> None:
    from huggingface_hub import constants

    cache = Path("cache").absolute()
    files = {"config.json": HUB_MODEL["config.json"]}
    write_cache(cache, "lab/model", files, lacks=("modules.json",))
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))


@says("the weights of lab/model are not in the hub's local cache, and HF_HUB_OFFLINE is set: …")
def weights_are_not_cached(patch: Patch) -> str:
    cache_without_weights(patch)
    return refused(lambda: find_model("lab/model").load())


@says("the weights of lab/model are not on this machine; save_model_weights.py fetches them, or a run does")
def doctor_finds_no_cached_weights(patch: Patch) -> str:
    cache_without_weights(patch)
    request = parse_runtime(["0", "1", "-m", "lab/model"], Environment()).request
    return str(look_at_run(request, FindingLog(0, print), Probe(), ()).facts["weights_error"])


@says("-d/--device cuda: this machine has no CUDA device, or torch is a CPU build")
def no_gpu(patch: Patch) -> str:
    patch.setattr(torch.cuda, "is_available", lambda: False)
    return refused(lambda: resolve_device("cuda"))


@says("8 items have outputs that are no numbers: are the weights whole?")
def outputs_are_not_numbers(patch: Patch) -> str:
    tensors = load_file(DIGITS.weights_path())
    tensors["classifier.bias"][:] = float("nan")
    save_file(tensors, "nan.safetensors")
    return start("0 1 -m vit-digits -M nan.safetensors -b 8")


# --- input --------------------------------------------------------------------------------------------


@says("…: skipped 7 files of other types (4 .mov, 3 .txt)")
def files_are_skipped(patch: Patch) -> str:
    return skipped_line("photos", Counter({".mov": 4, ".txt": 3})) or ""


@says("…, and would fill the memory; --max-image-pixels allows more")
def a_picture_is_huge(patch: Patch) -> str:
    Image.new("1", (100, 100)).save("huge.png")
    return start("0 1 -m vit-digits --max-image-pixels 9999 --input huge.png")


@says(
    "photos/a.tif: its values are floating point numbers, whose range is not known; save it with 8 or 16 "
    "bits a value, or give .npz arrays"
)
def a_picture_of_floats(patch: Patch) -> str:
    path = Path("photos/a.tif")
    Image.new("F", (4, 4)).save(path)
    try:
        return refused(lambda: pictures.open_image(path))
    finally:
        path.unlink()


@says("photos/a.png: is not a regular file")
def a_picture_is_a_pipe(patch: Patch) -> str:
    Path("pipes/photos").mkdir(parents=True)
    os.mkfifo("pipes/photos/a.png")
    patch.chdir("pipes")
    return refused(lambda: pictures.open_image(Path("photos/a.png")))


def read_table(*options: str) -> str:
    Path("words").mkdir(exist_ok=True)
    Path("words/vocab.txt").write_text("\n".join(VOCABULARY))
    line = ("0", "1", "-m", "bert-base-uncased", "--input", "a.csv", *options)
    request = parse_runtime(line, Environment()).request
    return refused(lambda: open_input(request.input, fake_models.bert(directory=Path("words"))))


@says("a.csv: which column has the sentences? --text-column NAME, of …")
def no_column_is_usual(patch: Patch) -> str:
    return read_table()


@says("a.csv: has no column …; its columns are …")
def no_column_of_that_name(patch: Patch) -> str:
    return read_table("--text-column", "words")


def read_pairs(content: str, name: str = "pairs.jsonl") -> str:
    Path(name).write_text(content)
    return refused(lambda: read_sentences(Path(name)))


@says("pairs.tsv:3: this row has no column 2")
def pair_is_cut_off(patch: Patch) -> str:
    return read_pairs("query\tpassage\na\tb\nc\n", "pairs.tsv")


@says("pairs.tsv:3: the second sentence of this pair is empty")
def pair_is_half_empty(patch: Patch) -> str:
    return read_pairs("query\tpassage\na\tb\nc\t\n", "pairs.tsv")


@says("pairs.jsonl:2: is not JSON …")
def line_is_not_json(patch: Patch) -> str:
    return read_pairs('["a", "b"]\n["c"\n')


@says("pairs.jsonl:2: a list of 3 values, not a pair of sentences")
def line_is_a_triple(patch: Patch) -> str:
    return read_pairs('["a", "b"]\n["c", "d", "e"]\n')


@says("pairs.jsonl:2: 7 is not a sentence")
def line_has_a_number(patch: Patch) -> str:
    return read_pairs('["a", "b"]\n["c", 7]\n')


@says("pairs.jsonl:2: which key has the sentence? --text-column NAME; its keys are …")
def line_has_unknown_keys(patch: Patch) -> str:
    return read_pairs('["a", "b"]\n{"left": "c"}\n')


@says("pairs.jsonl:1: one sentence, but pairs.jsonl:2 has a pair; give them in two runs")
def lines_of_both_kinds(patch: Patch) -> str:
    return read_pairs('{"text": "a"}\n["a", "b"]\n')


@says("… has token types up to 1, but … has 1 type: it is the tokenizer of another model")
def types_of_another_model(patch: Patch) -> str:
    Path("words").mkdir(exist_ok=True)
    Path("words/vocab.txt").write_text("\n".join(VOCABULARY))
    Path("pairs.jsonl").write_text('["the cat", "sat"]\n')
    model = fake_models.bert(directory=Path("words"))
    one_type = dataclasses.replace(model, config=dataclasses.replace(model.config, type_vocab=1))
    request = parse_runtime(
        ["0", "1", "-m", "bert-base-uncased", "--input", "pairs.jsonl"], Environment()
    ).request
    return refused(lambda: open_input(request.input, one_type))


@says("--input -: launched ranks have no standard input; give a file")
def ranks_without_standard_input(patch: Patch) -> str:
    return refused(
        lambda: plan_launch(parse_launch(["--local", "2", "--", "-m", "vit-digits", "--input", "-"]))
    )


@says(
    "no vocabulary for model, so sentences cannot become token ids: put its tokenizer.json or vocab.txt "
    "into …"
)
def no_vocabulary(patch: Patch) -> str:
    model = dataclasses.replace(fake_models.bert(), name="model", directory=Path("empty"))
    return refused(lambda: open_tokenizer(model, [Path("empty")]))


@says("… MB are free; run fewer (-b)")
def arrays_fill_the_memory(patch: Patch) -> str:
    patch.setattr(arrays, "available_bytes", lambda: 100)
    np.savez("many.npz", pixel_values=np.zeros((2, 1, 8, 8), np.float32))
    return start("0 1 -m vit-digits --input many.npz")


@says("CoLA needs the package datasets: pip install 'pipeedge[runtime]'")
def datasets_is_not_installed(patch: Patch) -> str:
    patch.setitem(sys.modules, "datasets", None)
    return refused(lambda: read_split(None, "validation"))


# --- the scheduler and its files ----------------------------------------------------------------------

MODEL = {"layers": 4, "mem_MB": [1, 2, 1, 2], "parameters_in": 1000, "parameters_out": [1000, 2000]}
PROFILE = {"batch_size": 8, "dtype": "torch.float32", "time_s": [1, 2, 1, 2]}
KIND = {"bw_Mbps": 80, "mem_MB": 100, "model_profiles": {"m": [PROFILE]}}


def schedule(
    *options: str,
    model: Mapping[str, Any] = MODEL,
    kind: Mapping[str, Any] = KIND,
    kinds: Mapping[str, Any] | None = None,
    devices: Any = None,
) -> str:
    """Return the output of ``sched-pipeline`` on standard error."""
    files = {
        "m.yml": {"m": model},
        "t.yml": kinds or {"board": kind},
        "d.yml": devices or {"board": ["a", "b"]},
    }
    for name, content in files.items():
        Path(name).write_text(
            content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        )
    done = subprocess.run(
        [find_executable(), "-m", "m", "-sm", "m.yml", "-sdt", "t.yml", "-sd", "d.yml", *options],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    return done.stderr


@says(
    "no feasible schedule: 1075.0 MB of memory are missing: the layers need 1175.0 MB without buffers, 1 "
    "host together have 100.0 MB"
)
def too_little_memory(patch: Patch) -> str:
    many = {**MODEL, "layers": 47, "mem_MB": [25] * 47, "parameters_out": [1000]}
    kind = {**KIND, "model_profiles": {"m": [{**PROFILE, "time_s": [1] * 47}]}}
    return schedule(model=many, kind=kind, devices={"board": ["a"]})


@says("no feasible schedule: layer 1 fits on no host: it needs …")
def a_layer_is_too_large(patch: Patch) -> str:
    return schedule(model={**MODEL, "mem_MB": [900, 2, 1, 2]})


@says("no schedule survives the loss of any one host: without …, …")
def a_loss_ends_the_run(patch: Patch) -> str:
    return schedule("--survive-loss", kind={**KIND, "mem_MB": 4})


@says("the memory is enough, but no links with bandwidth join the hosts it takes")
def links_without_bandwidth(patch: Patch) -> str:
    return schedule(kind={**KIND, "bw_Mbps": 0, "mem_MB": 4})


@says("… has no profile for … batch size 4, dtype …; left out: 2 hosts")
def no_profile_of_this_size(patch: Patch) -> str:
    return schedule("-b", "4")


@says("no schedule was found within the time limit of …, and none could be ruled out; raise --time-limit")
def too_little_time(patch: Patch) -> str:
    # Each host has room for one of these groups of layers, and the hosts come in another order.
    groups = [
        [7, 22],
        [13, 3, 25],
        [30, 4],
        [11, 16],
        [2, 19, 5],
        [28, 9],
        [14, 1, 8],
        [21, 17],
        [6, 27],
        [12, 10],
    ]
    memory = [sum(group) for group in sorted(groups, key=lambda group: group[0])]
    layers = [size for group in groups for size in group]
    model = {**MODEL, "layers": len(layers), "mem_MB": layers, "parameters_in": 0, "parameters_out": [0]}
    profile = {"m": [{**PROFILE, "time_s": [1] * len(layers)}]}
    kinds = {f"t{n}": {**KIND, "mem_MB": size, "model_profiles": profile} for n, size in enumerate(memory)}
    devices = {f"t{n}": [f"h{n}"] for n in range(len(memory))}
    return schedule("-i", "0", "-o", "0", "--time-limit", "1e-9", model=model, kinds=kinds, devices=devices)


@says("… the type raspi is not in …; left out: 3 hosts", "no host is left to schedule on; …")
def an_unknown_type(patch: Patch) -> str:
    warnings = schedule(devices={"board": ["a", "b"], "raspi": ["r0", "r1", "r2"]})
    return warnings + schedule(devices={"raspi": ["r0", "r1", "r2"]})


@says("… the host rcc-1 is listed twice")
def a_host_is_listed_twice(patch: Patch) -> str:
    return schedule(devices={"board": ["rcc-1", "rcc-1"]})


@says(
    "… was profiled with 512 tokens only; its times are not scaled to 128: profile it with --tokens 128,512"
)
def a_profile_of_one_length(patch: Patch) -> str:
    model = {**MODEL, "tokens": 512, "parameters_in_per_token": 1, "parameters_out_per_token": [1] * 4}
    kind = {**KIND, "model_profiles": {"m": [{**PROFILE, "tokens": 512}]}}
    return schedule("--tokens", "128", model=model, kind=kind)


@says("…: is not valid YAML: …")
def a_file_is_no_yaml(patch: Patch) -> str:
    Path("odd.yml").write_text("m:\n\t- 1\n")
    return refused(lambda: load_models(Path("odd.yml")))


@says("…: is empty")
def a_file_is_empty(patch: Patch) -> str:
    Path("empty.yml").write_text("# nothing\n")
    return refused(lambda: load_models(Path("empty.yml")))


@says("… nor on the PATH; install the package (pip install -e .)")
def the_scheduler_is_not_installed(patch: Patch) -> str:
    patch.setattr(sys, "executable", str(Path("empty/python").absolute()))
    patch.setenv("PATH", str(Path("empty").absolute()))
    return refused(find_executable)


# --- output -------------------------------------------------------------------------------------------


@says("--prometheus-port 9000: cannot listen at …; choose another port, one for each rank of a machine")
def a_port_of_another_rank(patch: Patch) -> str:
    client = pytest.importorskip("prometheus_client")
    patch.setattr(client, "start_http_server", raising(OSError(errno.EADDRINUSE, "Address already in use")))
    return refused(lambda: Exporter("127.0.0.1", 9000, 0))


@says(
    "--resume: … was written with another value of the input (…, now …); leave out --resume to begin with "
    "the first item"
)
def the_input_has_changed(patch: Patch) -> str:
    output = Path("resumed.csv")
    writing = UnfinishedOutput.begin(output, {"the input": "3f0a"})
    writing.append(Rows((0,), (-1,)), b"a row")
    writing.close()
    return refused(lambda: ResultWriter(output, DIGITS, None, {"the input": "77b1"}, find_unfinished(output)))


@says("….part: another run is writing it; wait for it, or name another --output")
def two_runs_write_the_same_output(patch: Patch) -> str:
    writing = UnfinishedOutput.begin(Path("shared.csv"), {})
    said = refused(lambda: UnfinishedOutput.begin(Path("shared.csv"), {}))
    writing.close()
    return said


@says("….part: is not an unfinished output, which goes by this name; rename it")
def a_file_has_the_name_of_an_unfinished_output(patch: Patch) -> str:
    Path("mine.csv.part").write_text("mine")
    return start("0 1 -m vit-digits --output mine.csv")


@says("standard output cannot be written: no space left on device", "… it is closed")
def the_disk_is_full(patch: Patch) -> str:
    numbers = errno.ENOSPC, errno.EBADF
    return "\n".join(str(unprinted(OSError(number, os.strerror(number)))) for number in numbers)


# --- profiling ----------------------------------------------------------------------------------------


def profile(line: str) -> str:
    """Return the output of ``profiler.py`` until its measurements end or it fails."""
    told: list[str] = []
    command = parse_profiler(line.split())
    try:
        if command.measure is None:
            profiling.use_results(command, told.append, told.append)
        else:
            profiling.profile(command, told.append, told.append)
    except PipeEdgeError as error:
        told.append(one_line(error))
    return "\n".join(told)


def profiled(path: str = "profiler_results.yml", **changes: Any) -> None:
    """Write the results of two layers."""
    shapes = {"shape_in": [[17, 64]], "shape_out": [[17, 64]]}
    layers = [{"layer": layer, "memory": 0.1, "time": 1.0, **shapes} for layer in range(1, 17)]
    document = {
        "model_name": "vit-digits",
        "dtype": "torch.float32",
        "batch_size": 8,
        "layers": 16,
        "profile_data": layers,
        **changes,
    }
    Path(path).write_text(yaml.safe_dump(document))


MEASURE = "-m vit-digits -i 1 --no-warmup"


@says(
    "profiler_results.yml has layers 1-16 already, and results are never replaced; choose other layers (-l, "
    "-L) or another file (-o), or use them as they are (--from-results)"
)
def layers_are_measured_already(patch: Patch) -> str:
    profiled()
    return profile(f"{MEASURE} -b 8 -o profiler_results.yml")


@says(
    "profiler_results.yml has results of another batch size: 8, but now it is 4; choose another file with -o"
)
def results_of_another_size(patch: Patch) -> str:
    profiled()
    return profile(f"{MEASURE} -b 4 -o profiler_results.yml")


@says(
    "layer times vary by 24% between repetitions (the medians are kept); measure again while nothing else "
    "runs"
)
def times_vary(patch: Patch) -> str:
    profiled()
    results = load_results(Path("profiler_results.yml"))
    layers = tuple(
        dataclasses.replace(layer, measured=dataclasses.replace(layer.measured, time_spread_s=0.24))
        for layer in results.profile_data
    )
    measured = dataclasses.replace(results, profile_data=layers)
    patch.setattr(profiling, "measure_layers", lambda *_: measured)
    return profile(f"{MEASURE} -b 8 -o others.yml")


@says("… exists already and differs: …; replace it with --overwrite")
def a_model_is_there_already(patch: Patch) -> str:
    profiled()
    Path("own.yml").write_text(yaml.safe_dump({"vit-digits": MODEL}))
    return profile(
        "--from-results -o profiler_results.yml -dt board -sm own.yml -sdt own_types.yml --bw-Mbps 9"
    )


@says("device type board is new; give its bandwidth (--bw-Mbps) or have it measured (--measure-link)")
def a_type_is_new(patch: Patch) -> str:
    profiled()
    return profile("--from-results -o profiler_results.yml -dt board -sm new.yml -sdt new_types.yml")


@says("no measurement server at pi2:29600 (Connection refused); start 'profiler.py --serve-link' there")
def nobody_measures(patch: Patch) -> str:
    error = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    patch.setattr(socket, "create_connection", raising(error))
    return refused(lambda: measure_link("pi2", 29600))


@says("times do not depend on real weights: use --random-weights")
def weights_to_profile_are_missing(patch: Patch) -> str:
    return profile("-m google/vit-base-patch16-224 -b 1 -l 1 -L 1 -o missing.yml")


# --- training -----------------------------------------------------------------------------------------


@says(
    "no partition of 44 layers into 4 parts fits into the 500 MB that a worker has besides the program "
    "itself; about 1200 MB are needed: use more workers, smaller microbatches or schedule 1f1b, or allow "
    "more with --memory"
)
def layers_too_large(patch: Patch) -> str:
    layers, parts = 44, 4
    # Gradients double the memory of the parameters.
    parameters = [1200 * MIB * parts // layers // 2] * layers
    costs = LayerCosts([1.0] * layers, parameters, [0] * layers, [0] * layers)
    order = make_order("gpipe", stages=parts, workers=parts, microbatches=4)
    return refused(lambda: find_partition(costs, order, optimizer="sgd", memory_bytes=500 * MIB))


@says("--batch-size 64 is not divisible by --microbatch-size 5")
def microbatches_do_not_fit(patch: Patch) -> str:
    return refused(
        lambda: parse_train(["--batch-size", "64", "--microbatch-size", "5"], Environment(), cores=2)
    )


@says(
    "schedule 1f1b needs at least as many microbatches as workers, but there are 2 for 4 workers; make "
    "the microbatches smaller"
)
def too_few_microbatches(patch: Patch) -> str:
    return refused(lambda: make_order("1f1b", stages=4, workers=4, microbatches=2))


@says("--checkpoint-dir kept: contains no checkpoint to --resume from")
def no_checkpoint(patch: Patch) -> str:
    return refused(lambda: latest(Path("kept")))


@says("… was made with seed 0, but this run has 1")
def another_seed(patch: Patch) -> str:
    return refused(lambda: Checkpoint(Path("kept/step-1"), 1, {"seed": 0}).check({"seed": 1}))


@says("… lacks layers.0.weight/exp_avg, so it is damaged or of another model; resume from another checkpoint")
def the_optimizers_state_is_missing(patch: Patch) -> str:
    Path("half").mkdir()
    named = {"layers.0.weight": torch.nn.Parameter(torch.zeros(2, 2))}
    stored = {"layers.0.weight": torch.zeros(2, 2), "layers.0.weight/step": torch.zeros(())}
    save_file(stored, "half/worker-0.safetensors")
    optimizer = torch.optim.AdamW(named.values(), lr=0.1)
    return refused(lambda: Checkpoint(Path("half"), 1, {}).restore(named, optimizer))


@says("the loss of batch 3 is not a number: try a smaller --lr")
def the_loss_diverges(patch: Patch) -> str:
    place = Environment(rank=0, world_size=1, local_rank=0, local_world_size=1, master_port=free_port())
    line = "--model vit-digits --schedule sequential --batches 3 --batch-size 4 --lr 1e5"
    notices: list[str] = []
    train(parse_train(line.split(), place, cores=1).request, Console(file=io.StringIO()), notices.append)
    return "\n".join(notices)


# --- launching ----------------------------------------------------------------------------------------


@says("rank 1 is lost: ssh could not connect or lost its connection (see its output above)")
def ssh_fails(patch: Patch) -> str:
    return RankExit(1, 255, remote=True).words()


@says("nothing says where to start the ranks: give one of --local N, --hosts a,b,c or -sd devices.yml")
def launched_nowhere(patch: Patch) -> str:
    return refused(lambda: parse_launch(["--", "-m", "vit-digits"]))


@says("host pi1 is named twice; each host runs one rank")
def a_host_is_named_twice(patch: Patch) -> str:
    return refused(lambda: plan_launch(parse_launch(["--hosts", "pi1,pi1", "--", "-m", "vit-digits"])))


# --- the auction and the test bed ---------------------------------------------------------------------


def take_part(*options: str, types: Mapping[str, Any]) -> str:
    """Return the output of ``revauct.py`` on rank 0."""
    Path("am.yml").write_text(yaml.safe_dump({"m": MODEL}))
    Path("at.yml").write_text(yaml.safe_dump(types))
    line = ["0", "1", "-m", "m", "-sm", "am.yml", "-sdt", "at.yml", "--host", "a"]
    return refused(lambda: auction._take_part(parse_auction([*line, *options], Environment())))


@says("rank 2 (on pi3) is too late, and the others go on without it: start all ranks within 60 s")
def a_bidder_comes_late(patch: Patch) -> str:
    terms = Terms(appear_s=60.0, required=frozenset({0}))
    state = HubState(world_size=3, timeout_s=70.0, now=0.0, terms=terms)
    state.received(0, Hello(0, 3, "pi1"), 0.0)
    state.received(0, Facts(Raw(b"{}")), 0.0)
    state.tick(61.0)
    ((_, verdict),) = state.received(1, Hello(2, 3, "pi3"), 62.0)
    return verdict.failure.line


@says("device type board has no profile of …; profile it (profiler.py)")
def a_bidder_without_a_profile(patch: Patch) -> str:
    return take_part("-u", "2", types={"board": KIND})


@says("at.yml has 2 device types: give this device's with -dt/--dev-type, one of board, desktop")
def a_bidder_of_two_types(patch: Patch) -> str:
    return take_part(types={"board": KIND, "desktop": KIND})


@says("the test bed needs root, because only root can set up network namespaces and control groups")
def no_rights(patch: Patch) -> str:
    patch.setattr(os, "geteuid", lambda: 1000)
    return refused(lambda: TestBeds().up("mine", Cluster(())))


@says("test bed mine is up already; take it down first, or use another --name")
def a_test_bed_is_up(patch: Patch) -> str:
    patch.setattr(TestBeds, "_features", lambda self: ())
    shelf = SimpleNamespace(locked=contextlib.nullcontext, find=lambda name: SimpleNamespace(left_over=False))
    return refused(lambda: TestBeds(shelf=shelf).up("mine", Cluster(())))  # type: ignore[arg-type]


@says(
    "the hosts need 3 processors together, but this machine has 2, so they would slow each other down; lower "
    "cpu_fraction"
)
def too_few_processors(patch: Patch) -> str:
    hosts = (EmulatedHost(f"pi{n}", "board", f"10.213.0.{n}", MBPS, 1.0, MIB) for n in (1, 2, 3))
    cluster = Cluster(tuple(hosts))
    return refused(lambda: cluster.check(processors=2, mem_bytes=1 << 30))

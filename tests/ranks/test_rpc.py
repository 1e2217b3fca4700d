"""Pipelines over RPC: the inbox by itself, then real ranks, the same runs as over p2p, every failure told."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Ended, World

from pipeedge.base.errors import RequestError
from pipeedge.base.payload import TensorSpec
from pipeedge.plan.planning import disagreement
from pipeedge.request.config import Environment, TransportRequest
from pipeedge.request.options import parse_runtime
from pipeedge.transport.base import Link
from pipeedge.transport.channel import Closed
from pipeedge.transport.frame import FrameError, Kind, frame_capacity, write_frame
from pipeedge.transport.rpc import QUEUE, WINDOW, RpcReceiver, exposure

LIMIT_S = 40.0
"""For a world of processes, on a machine that is busy with other tests too."""
SHAPE = (2, 3)
LINK = Link(1, 0, (TensorSpec(SHAPE, torch.float32),))


def frame(number: int, kind: Kind = Kind.MICROBATCH) -> torch.Tensor:
    buffer = torch.zeros(frame_capacity(LINK.specs), dtype=torch.uint8)
    payload = () if kind is Kind.END else (torch.full(SHAPE, float(number)),)
    length = write_frame(buffer, kind=kind, number=number, items=2, payload=payload)
    return buffer[:length]


# -- options --------------------------------------------------------------------------------------


def parsed(*options: str) -> TransportRequest:
    return parse_runtime(["0", "2", *options], Environment()).request.transport


def test_p2p_is_default_and_rpc_can_be_chosen() -> None:
    assert parsed() == TransportRequest("p2p", None)
    assert parsed("-c", "rpc", "-w", "6") == TransportRequest("rpc", 6)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("-w", "4"), "-c rpc"),
        (("-c", "p2p", "-w", "4"), "-c rpc"),
        (("-c", "rpc", "-w", "0"), "-w/--worker-threads 0"),
        (("-c", "rpc", "-w", "-3"), "-w/--worker-threads -3"),
        (("-c", "rpc", "-w", "100000"), "-w/--worker-threads 100000"),
        (("-c", "carrier-pigeon"), "carrier-pigeon"),
    ],
)
def test_invalid_thread_counts_are_refused(options: tuple[str, ...], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parsed(*options)


def test_ranks_with_different_transports_disagree() -> None:
    facts = {0: {"comm": "rpc"}, 1: {"comm": "rpc"}, 2: {"comm": "p2p"}}
    assert disagreement(facts) == (
        "ranks 0 and 2 disagree on the transport (-c): rpc and p2p; start all with the same"
    )
    assert disagreement({rank: {"comm": "rpc"} for rank in range(3)}) is None


# -- the inbox ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(count=st.integers(0, 30), seed=st.integers(0, 2**32 - 1))
def test_frames_are_ordered_and_the_queue_is_bounded(count: int, seed: int) -> None:
    """A sender that keeps its window, a network that reorders, a stage that takes whenever it likes."""
    chance = random.Random(seed)
    receiver = RpcReceiver(LINK)
    to_send = [frame(number) for number in range(count)] + [frame(count, Kind.END)]
    travelling: list[torch.Tensor] = []
    unanswered: list[Any] = []
    arrived: set[int] = set()
    taken: list[int] = []
    sent, ended = 0, False
    while not ended:
        unanswered = [reply for reply in unanswered if not reply.done()]
        choices = []
        if sent < len(to_send) and len(unanswered) + len(travelling) < WINDOW:
            choices.append("send")
        if travelling:
            choices.append("arrive")
        if len(taken) in arrived:
            choices.append("take")
        assert choices, "everything waits for something: a reply was lost"
        choice = chance.choice(choices)
        if choice == "send":
            travelling.append(to_send[sent])
            sent += 1
        elif choice == "arrive":
            buffer = travelling.pop(chance.randrange(len(travelling)))
            number = next(n for n, candidate in enumerate(to_send) if candidate is buffer)
            reply = receiver.deliver(buffer)
            arrived.add(number)
            unanswered.append(reply)
            assert not reply.done() or reply.value() == ""
            assert len(arrived) - len(taken) <= QUEUE
        else:
            packet = receiver.receive()
            ended = packet is None
            if packet is not None:
                assert torch.equal(packet.payload[0], torch.full(SHAPE, float(len(taken))))
                taken.append(packet.number)
    assert taken == list(range(count))
    assert all(reply.done() and reply.value() == "" for reply in unanswered)


def test_reply_is_withheld_while_the_inbox_is_full() -> None:
    receiver = RpcReceiver(LINK)
    replies = [receiver.deliver(frame(number)) for number in range(QUEUE)]
    assert [reply.done() for reply in replies] == [True] * (QUEUE - WINDOW) + [False] * WINDOW
    receiver.receive()
    assert [reply.done() for reply in replies] == [True] * (QUEUE - WINDOW + 1) + [False] * (WINDOW - 1)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (torch.zeros(10_000, dtype=torch.uint8), "agreed capacity"),
        (torch.zeros(600, dtype=torch.uint8), "not a frame"),
        (torch.zeros(600, dtype=torch.float32), "not a frame"),
        (torch.zeros(30, 20, dtype=torch.uint8), "not a frame"),
        ("a string", "not a frame"),
        (frame(QUEUE), "expected 0"),
        (frame(2**63), "expected 0"),
    ],
)
def test_malformed_or_early_frame_fails_at_both_ends(what: Any, told: str) -> None:
    receiver = RpcReceiver(LINK)
    assert told in receiver.deliver(what).value()
    with pytest.raises(FrameError, match=told) as caught:
        receiver.receive()
    assert caught.value.peer == LINK.source


def test_duplicate_frame_number_is_refused() -> None:
    receiver = RpcReceiver(LINK)
    assert receiver.deliver(frame(1)).value() == ""
    assert "expected" in receiver.deliver(frame(1)).value()


def test_close_wakes_waiters_and_answers_late_frames() -> None:
    receiver = RpcReceiver(LINK)
    woken: Future[BaseException] = Future()

    def wait() -> None:
        try:
            receiver.receive()
        except BaseException as error:
            woken.set_result(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    receiver.close()
    assert isinstance(woken.result(5), Closed)
    assert receiver.deliver(frame(0)).value() == "the run has ended"


# -- real ranks -----------------------------------------------------------------------------------

DIGITS = ("-m", "vit-digits")
RPC = ("-c", "rpc")
ENDLESS = (*DIGITS, *RPC, "-b", 10_000_000, "-u", 1, "--output", "rows.csv", "--timeout", 6)


def outputs(directory: Path) -> np.ndarray[Any, Any]:
    with np.load(directory / "out.npz") as arrays:
        return np.array(arrays["outputs"])


def succeed(directory: Path, size: int, *options: object) -> dict[int, Ended]:
    directory.mkdir()
    fixed = (*DIGITS, "-b", 50, "-u", 8, "--output", "out.npz", "--report", "report.json")
    with World(directory, size, *fixed, *options) as world:
        ended = world.start().wait(within=LIMIT_S)
    assert [rank.status for rank in ended.values()] == [0] * size, [rank.err for rank in ended.values()]
    assert [rank.err for rank in ended.values()] == [""] * size
    return ended


def same_as_p2p(root: Path) -> None:
    """Bit for bit the same, whatever the cut, with the same report."""
    cut = ("-pt", "1,5,6,11,12,16")
    succeed(root / "p2p", 3, *cut)
    succeed(root / "rpc", 3, *cut, *RPC)
    assert np.array_equal(outputs(root / "p2p"), outputs(root / "rpc"))
    one, other = (json.loads((root / name / "report.json").read_text()) for name in ("p2p", "rpc"))
    assert one.keys() == other.keys()
    for key in ("model", "schedule", "items", "microbatches", "ubatch_size", "accuracy", "skipped"):
        assert one[key] == other[key], key
    for mine, theirs in zip(one["stages"], other["stages"], strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("stage", "rank", "microbatches", "bytes_out_mean", "parameters"):
            assert mine[key] == theirs[key], key


def one_thread_a_data_rank_in_the_middle(root: Path) -> None:
    """Two links lead to the data rank, one to its stage: with one worker thread they must not block."""
    succeed(root / "alone", 1, *RPC, "-w", 1)
    options = ("-r", "2,0,1", "-D", 0, "-pt", "1,4,5,8,9,16", "-w", 1, "-u", 1)
    succeed(root / "middle", 3, *RPC, *options)
    assert np.allclose(outputs(root / "alone"), outputs(root / "middle"), atol=1e-5)


def more_ranks_than_stages(root: Path) -> None:
    """The data rank has no stage, and one rank has nothing to do at all."""
    succeed(root / "world", 4, *RPC, "-pt", "1,8,9,16", "-D", 2, "-w", 16)
    report = json.loads((root / "world" / "report.json").read_text())
    assert report["items"] == 50
    assert [stage["rank"] for stage in report["stages"]] == [0, 1]


def fails(root: Path, victim: int, number: int, within_s: float, *, fresh: bool = False) -> None:
    with World(root, 3, *ENDLESS, fresh=fresh) as world:
        world.start().until_rows()
        at = world.signal(victim, number)
        others = [rank for rank in range(3) if rank != victim]
        ended = world.wait(*others, within=within_s + 10)
        for rank in others:
            assert ended[rank].status == 4
            assert f"rank {victim}" in ended[rank].line
            assert ended[rank].at - at < within_s
    left = {path.name for path in root.iterdir()} - {
        f"{n}.{kind}" for n in range(3) for kind in ("out", "err")
    }
    # A data rank that was killed cannot clean up; what it leaves has no name that anybody takes for results.
    assert all(name.startswith(".") and victim == 0 for name in left)


def killed_stage(root: Path) -> None:
    """In new interpreters: what torch logs of the lost connections is not to be seen there either."""
    fails(root, 1, signal.SIGKILL, 10, fresh=True)


def killed_hub(root: Path) -> None:
    fails(root, 0, signal.SIGKILL, 10)


def stopped_stage(root: Path) -> None:
    fails(root, 1, signal.SIGSTOP, 6)


def stage_that_cannot_be_created(root: Path) -> None:
    """The rank says what is wrong with its own file, everybody else that it could not."""
    with World(root, 3, *DIGITS, *RPC, "--timeout", 15, own={1: ("-M", "no-such.npz")}) as world:
        ended = world.start().wait(within=LIMIT_S)
    assert {rank: end.status for rank, end in ended.items()} == {0: 4, 1: 2, 2: 4}
    assert "no-such.npz" in ended[1].line
    for rank in (0, 2):
        assert "rank 1" in ended[rank].line
        assert "no-such.npz" in ended[rank].line


SCENARIOS = (
    same_as_p2p,
    one_thread_a_data_rank_in_the_middle,
    more_ranks_than_stages,
    killed_stage,
    killed_hub,
    stopped_stage,
    stage_that_cannot_be_created,
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All scenarios, three at a time: ranks mostly wait for torch to be imported and for one another."""
    pool = ThreadPoolExecutor(3)
    futures = {
        scenario: pool.submit(scenario, tmp_path_factory.mktemp(scenario.__name__)) for scenario in SCENARIOS
    }
    yield futures
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_real_ranks(scenario: Any, played: dict[Any, Future[None]]) -> None:
    played[scenario].result(timeout=4 * LIMIT_S)


# -- one after the other in one process -----------------------------------------------------------

TWICE = """
import threading, sys
import torch
from pipeedge.base.payload import TensorSpec
from pipeedge.transport.base import Link, Packet
from pipeedge.transport.rendezvous import serve_store
from pipeedge.transport.rpc import RpcTransport
import os
os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
for round in range(2):
    store, port = serve_store("127.0.0.1")
    transport = RpcTransport(
        addr="127.0.0.1", port=port, rank=5, members=(5,), worker_threads=1, timeout_s=20.0
    )
    link = Link(5, 5, (TensorSpec((2, 3), torch.float32),))
    receiver, sender = transport.receiver(link), transport.sender(link)
    def feed():
        for number in range(20):
            sender.post(Packet(number, 2, (torch.full((2, 3), float(number)),)))
        sender.finish()
    thread = threading.Thread(target=feed)
    thread.start()
    seen = []
    while (packet := receiver.receive()) is not None:
        seen.append(float(packet.payload[0][0, 0]))
    thread.join()
    transport.close()
    print(seen == [float(n) for n in range(20)])
"""


STOPPED = """
import datetime, os, threading, time
import torch.distributed as dist
from torch.distributed.rpc import TensorPipeAgent, TensorPipeRpcBackendOptions
from pipeedge.transport.rendezvous import connect_store, serve_store
from pipeedge.transport.rpc import UnlockingStore
os.environ["TP_SOCKET_IFNAME"] = "lo"
served, port = serve_store("127.0.0.1")
store = UnlockingStore(connect_store("127.0.0.1", port, timeout_s=20.0))
store.set_timeout(datetime.timedelta(seconds=1.5))
beats = []
def beat():
    while True:
        beats.append(time.monotonic())
        time.sleep(0.05)
threading.Thread(target=beat, daemon=True).start()
options = TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
began = len(beats)
try:
    TensorPipeAgent(dist.PrefixStore("x", store), "rank0", 0, 2, options, {}, [])
except RuntimeError as error:
    print("timeout" in str(error), len(beats) - began > 3, flush=True)
os._exit(0)
"""


def test_other_threads_run_while_rpc_waits_for_a_stopped_rank() -> None:
    ended = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.stdout.split() == ["True", "True"], ended.stderr


@pytest.mark.parametrize(
    ("addresses", "warned"),
    [(["127.0.0.1"], None), (["127.0.0.1", "::1"], None), (["10.0.0.7", "fe80::1"], "10.0.0.7"), ([], None)],
)
def test_rpc_beyond_loopback_gives_a_warning(addresses: list[str], warned: str | None) -> None:
    line = exposure(addresses)
    assert (line is None) == (warned is None)
    assert line is None or f"-c rpc listens at {warned}:" in line


def test_a_transport_can_be_closed_and_opened_again() -> None:
    ended = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.stdout.split() == ["True", "True"], ended.stderr

"""Pipelines over RPC, in real ranks: the same results as over p2p, and every failure is reported."""

from __future__ import annotations

import json
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import load_arrays
from places import ROOT
from processes import Ended, World
from quick_python import run_text
from waiting import LIMIT_S

# -- real ranks -----------------------------------------------------------------------------------

DIGITS = ("-m", "vit-digits")
RPC = ("-c", "rpc")
ENDLESS = (*DIGITS, *RPC, "-b", 10_000_000, "-u", 1, "--output", "rows.csv")


def outputs(directory: Path) -> np.ndarray[Any, Any]:
    return load_arrays(directory / "out.npz")["outputs"]


def succeed(directory: Path, size: int, *options: object) -> dict[int, Ended]:
    directory.mkdir()
    fixed = (*DIGITS, "-b", 50, "-u", 8, "--output", "out.npz", "--report", "report.json")
    with World(directory, size, *fixed, *options) as world:
        ended = world.start().wait(within=LIMIT_S)
    assert [rank.status for rank in ended.values()] == [0] * size, [rank.err for rank in ended.values()]
    assert [rank.err for rank in ended.values()] == [""] * size
    return ended


def same_as_p2p(root: Path) -> None:
    """The results are bit-identical for every cut, with the same report."""
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
    """Links to the data rank and to its stage must not block each other with one worker thread."""
    succeed(root / "alone", 1, *RPC, "-w", 1)
    options = ("-r", "2,0,1", "-D", 0, "-pt", "1,4,5,8,9,16", "-w", 1, "-u", 1)
    succeed(root / "middle", 3, *RPC, *options)
    assert np.allclose(outputs(root / "alone"), outputs(root / "middle"), atol=1e-5)


def more_ranks_than_stages(root: Path) -> None:
    """The data rank has no stage, and one rank has nothing to do."""
    succeed(root / "world", 4, *RPC, "-pt", "1,8,9,16", "-D", 2, "-w", 16)
    report = json.loads((root / "world" / "report.json").read_text())
    assert report["items"] == 50
    assert [stage["rank"] for stage in report["stages"]] == [0, 1]


def fails(root: Path, victim: int, number: int, timeout_s: int = 30, *, fresh: bool = False) -> None:
    with World(root, 3, *ENDLESS, "--timeout", timeout_s, fresh=fresh) as world:
        world.start().until_rows()
        world.signal(victim, number)
        others = [rank for rank in range(3) if rank != victim]
        ended = world.wait(*others, within=LIMIT_S)
        for rank in others:
            assert ended[rank].status == 4
            assert f"rank {victim}" in ended[rank].line
    left = {path.name for path in root.iterdir()} - {
        f"{n}.{kind}" for n in range(3) for kind in ("out", "err")
    }
    # The rows that were written stay for --resume, under a name that nobody takes for results.
    assert left <= {"rows.csv.part"}


def killed_stage(root: Path) -> None:
    """New interpreters also hide what torch logs about lost connections."""
    fails(root, 1, signal.SIGKILL, fresh=True)


def killed_hub(root: Path) -> None:
    fails(root, 0, signal.SIGKILL)


def stopped_stage(root: Path) -> None:
    fails(root, 1, signal.SIGSTOP, timeout_s=10)


def stage_that_cannot_be_created(root: Path) -> None:
    """The rank reports what is wrong with its file, and all others that it failed."""
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
    """Run all scenarios, three at a time, because ranks mostly wait for imports and for each other."""
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

TEN_TIMES = f"""
import os, sys
os.environ["TP_SOCKET_IFNAME"] = "lo"
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from transport_cycles import SPECS, cycle, store_of
from pipeedge.transport.base import Link
from pipeedge.transport.rpc import RpcTransport
transport = RpcTransport(5, 1)
print(cycle(lambda: (store_of(lambda end_store: transport), transport, transport), Link(5, 5, SPECS), 10))
"""


STOPPED = """
import datetime, os, threading, time
import torch.distributed as dist
from torch.distributed.rpc import TensorPipeAgent, TensorPipeRpcBackendOptions
from pipeedge.transport.rendezvous import connect_store, serve_store
from pipeedge.transport.unlocking_store import UnlockingStore
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


def test_other_threads_run_while_rpc_waits_for_a_stopped_rank(tmp_path: Path, quick_python: Path) -> None:
    ended = run_text(STOPPED, tmp_path, quick_python)
    assert ended.stdout.split() == ["True", "True"], ended.stderr


def test_rpc_is_opened_aborted_and_closed_ten_times(tmp_path: Path, quick_python: Path) -> None:
    """In a process of its own, which can have only one RPC agent at a time."""
    ended = run_text(TEN_TIMES, tmp_path, quick_python)
    assert ended.stdout.split() == ["10"], ended.stderr

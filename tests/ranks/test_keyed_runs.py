"""Test whole runs with a key: what a capture of the network shows, and how ranks without the key end."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from networks import enter, make_network
from places import ROOT
from processes import World, environment, run_world
from test_bidders import Auction, write_files
from waiting import LIMIT_S, until

from pipeedge.base.files import write_secret
from pipeedge.transport.new_key import make_key

ETH_P_ALL = 3
"""Constant of Linux's if_ether.h."""
SO_RCVBUFFORCE = 33
"""Constant of Linux's socket.h: a buffer beyond the limit, for root."""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "k.pem"
    write_secret(path, make_key(), "FILE")
    return path


@contextlib.contextmanager
def capture(space: str) -> Iterator[bytearray]:
    """Record everything that crosses the loopback interface of a network namespace."""
    seen, ready, over = bytearray(), threading.Event(), threading.Event()

    def record() -> None:
        enter(space)  # this thread alone
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as sock:
            sock.bind(("lo", 0))
            sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
            sock.settimeout(0.1)
            ready.set()
            while True:
                try:
                    seen.extend(sock.recv(1 << 17))
                except TimeoutError:
                    if over.is_set():  # and all that came before is recorded
                        return

    thread = threading.Thread(target=record)
    thread.start()
    assert ready.wait(LIMIT_S)
    try:
        yield seen
    finally:
        over.set()
        thread.join(LIMIT_S)


@pytest.mark.parametrize("keyed", [True, False], ids=["key", "clear"])
def test_a_capture_shows_input_activations_results_and_plan_only_without_a_key(
    tmp_path: Path, key: Path, keyed: bool
) -> None:
    chance = np.random.default_rng()
    pixels = chance.normal(size=(16, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "in.npz", pixel_values=pixels)
    hosts = [f"{chance.bytes(8).hex()}-{rank}" for rank in range(3)]
    own = ("--key", key) if keyed else ("-c", "tcp")
    with contextlib.ExitStack() as stack:
        # Apart from the traffic of other tests, which would be too much to record.
        space = make_network("pk", 1, stack).space(0)
        seen = stack.enter_context(capture(space))
        ended = run_world(
            tmp_path,
            3,
            *("-m", "vit-digits", "-pt", "1,8,9,16", "-r", "1,2", "-H", ",".join(hosts), *own),
            own={0: ("--input", "in.npz", "--output", "out.npz")},
            space=lambda rank: space,
        )
    assert [end.status for end in ended.values()] == [0, 0, 0], ended
    results = np.load(tmp_path / "out.npz")["outputs"]
    shown = {
        "input": any(item.tobytes() in seen for item in pixels),
        "results": any(item.tobytes() in seen for item in results),
        "plan": all(host.encode() in seen for host in hosts[1:]),
    }
    assert shown == dict.fromkeys(shown, not keyed)


def test_a_rank_with_another_key_ends_and_the_run_waits_for_the_right_one(tmp_path: Path, key: Path) -> None:
    write_secret(tmp_path / "other.pem", make_key(), "FILE")
    options = ("-m", "vit-digits", "-pt", "1,8,9,16", "-b", 16)
    with World(tmp_path, 2, *options, own={0: ("--key", key), 1: ("--key", "other.pem")}) as world:
        world.start(0, 1)
        wrong = world.wait(1)[1]
        assert wrong.status == 2
        assert "has another key: give every rank the same --key" in wrong.line
        notice = "a process at 127.0.0.1 has another key; ranks still missing: 1"
        until(lambda: notice in world.text(0, "err"), "rank 0 says so")
        world.launch(2, "runtime.py", 1, 2, "--port", world.port, *options, env={"PIPEEDGE_KEY": str(key)})
        ended = world.wait(0, 2)
    assert [end.status for end in ended.values()] == [0, 0], ended


def test_a_run_does_not_begin_without_a_rank_that_was_refused(tmp_path: Path, key: Path) -> None:
    write_secret(tmp_path / "other.pem", make_key(), "FILE")
    options = ("-m", "vit-digits", "-pt", "1,8,9,16", "-b", 16, "--timeout", 5)
    with World(tmp_path, 2, *options, own={0: ("--key", key), 1: ("--key", "other.pem")}) as world:
        ended = world.start().wait()
        notes = world.text(0, "err")
    assert [end.status for end in ended.values()] == [4, 2], ended
    assert "a process at 127.0.0.1 has another key; ranks still missing: 1" in notes
    why = "rank 1 of 2 never appeared within 5 s (a process at 127.0.0.1 has another key): "
    assert f"{why}give every rank the same --key" in notes


def test_an_auction_and_its_run_share_a_key(tmp_path: Path, key: Path) -> None:
    with Auction(tmp_path, 2) as auction:
        for rank in range(2):
            more = ("-H", f"h{rank}", "-dt", "quick", "--key", key, "--run", "-b", "16")
            auction.bid(rank, *more)
        ended = auction.wait()
    assert [end.status for end in ended.values()] == [0, 0], ended


def test_a_key_from_standard_input_reaches_the_run_that_follows_an_auction(
    tmp_path: Path, key: Path, quick_python: Path
) -> None:
    write_files(tmp_path)
    options = ("-m", "vit-digits", "-dt", "quick", "--key", "-", "--run", "-b", "8")
    done = subprocess.run(
        [quick_python, ROOT / "revauct.py", "0", "1", *options],
        cwd=tmp_path,
        env={**environment(), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        input=key.read_text(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "throughput" in done.stdout


@pytest.mark.parametrize("seconds", [-3600, 0, 1_800_000_000, 4_102_444_800, 253_402_300_000])
def test_openssl_finds_a_key_valid_at_any_time(key: Path, seconds: int) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl program")
    command = ["openssl", "verify", "-attime", str(seconds), "-CAfile", key, key]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == f"{key}: OK\n", done.stderr

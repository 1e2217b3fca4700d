"""Measure a pipeline that answers: saturated, alone, idle, and through the loss of a stage.

    python benchmarks/serving.py -m vit-digits --ranks 2

Everything is on this machine, with one thread a rank. A client of the standard library asks over HTTP; for
the saturated rate, ``pipeedge.Pipeline`` asks, since a client in Python would be the bottleneck of a small
model. That rate is compared with a run of as many items of the shipped input.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from pipeedge import Pipeline
from pipeedge.data.defaults import asset
from pipeedge.launch.main import free_port

ROOT = Path(__file__).resolve().parents[1]
PHOTO = asset("chelsea.jpg")


@contextmanager
def served(model: str, ranks: int, *options: str) -> Iterator[tuple[int, list[subprocess.Popen[bytes]]]]:
    """Start the ranks, and yield the port of the service and their processes."""
    port, base = free_port("127.0.0.1"), free_port("127.0.0.1")
    common = ["-m", model, "-c", "tcp", "--port", str(base), "--serve", str(port), "--quiet", *options]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with log.open("wb") as stream:
            processes = [
                subprocess.Popen(
                    [sys.executable, str(ROOT / "runtime.py"), str(rank), str(ranks), *common],
                    cwd=ROOT,
                    stderr=stream if rank == 0 else None,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
                for rank in range(ranks)
            ]
        try:
            while b"answers at" not in log.read_bytes():
                if processes[0].poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.1)
            yield port, processes
        finally:
            processes[0].send_signal(signal.SIGTERM)
            for process in processes:
                process.wait(60)


def ask(port: int, body: bytes) -> tuple[int, float]:
    """Send an image; return the status and the seconds until the answer."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/classify", body)
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status, time.perf_counter() - began


def saturated(model: str, ranks: int, seconds: float) -> tuple[float, float]:
    """Return the items per second of a run of a file, and of the same items asked one after the other."""
    with Pipeline(model, ranks=ranks) as pipeline:
        size = pipeline.model.config.image_size
        items = [bytes_of_noise(size)] * 64
        list(pipeline(items))
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            count += len(list(pipeline(items * 8)))
        asked = count / (time.perf_counter() - began)
    command = [
        sys.executable,
        "-m",
        "pipeedge.launch.main",
        "--local",
        str(ranks),
        "--",
        "-m",
        model,
        "-c",
        "tcp",
    ]
    out = subprocess.run(
        [*command, "-b", str(count)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    rate = next(line for line in out.splitlines() if "throughput" in line).split("throughput")[1].split()[0]
    return float(rate.replace(",", "")), asked


def bytes_of_noise(size: tuple[int, int]) -> object:
    """Return an image of the model's own size, which needs no decoding."""
    import numpy as np

    return np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)


def main() -> None:
    """Measure everything and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model-name", default="vit-digits")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each measurement")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    body = PHOTO.read_bytes()
    with served(args.model_name, args.ranks) as (port, processes):
        watched = [psutil.Process(process.pid) for process in processes]
        before = [sum(each.cpu_times()[:2]) for each in watched]
        time.sleep(args.seconds)
        spent = sum(sum(each.cpu_times()[:2]) - early for each, early in zip(watched, before, strict=True))
        print(f"idle         {spent / args.seconds:.2%} of a core over all ranks")
        alone = statistics.median(ask(port, body)[1] for _ in range(100))
        print(f"alone        {alone * 1e3:.1f} ms median of a photo over HTTP")
    with served(args.model_name, args.ranks + 1, "--on-failure", "continue") as (port, processes):
        replies: list[tuple[int, float]] = []
        enough = threading.Event()

        def load() -> None:
            while not enough.is_set():
                replies.append(ask(port, body))

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(args.seconds / 4)
        processes[-1].kill()
        time.sleep(args.seconds / 2)
        enough.set()
        for thread in threads:
            thread.join()
        failed = sum(status != 200 for status, _ in replies)
        slowest = max(seconds for _, seconds in replies)
        print(f"a lost stage {failed} of {len(replies)} requests failed, the slowest took {slowest:.2f} s")
    batch, asked = saturated(args.model_name, args.ranks, args.seconds)
    print(f"saturated    {asked:,.0f} items/s, a run of a file {batch:,.0f}: {asked / batch:.2f}")


if __name__ == "__main__":
    main()

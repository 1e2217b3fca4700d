"""Ranks that answer over HTTP, clients that ask them, and models whose answers transformers gives, too."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import transformers

from pipeedge.launch.main import free_port

__all__ = ["LIMIT_S", "ROOT", "WORDS", "Asked", "Client", "Ranks", "Reply", "open_loop", "save_embedder"]

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 120.0
WORDS = (
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "slept",
    "on",
    "under",
    "mat",
    "house",
    "all",
    "day",
    "and",
    "old",
    "red",
)


@dataclass(frozen=True)
class Reply:
    """An answer."""

    status: int
    body: bytes

    @property
    def line(self) -> str:
        """The sentence that says what was wrong, or nothing if there is none."""
        with suppress(ValueError, KeyError, TypeError):
            error = json.loads(self.body)["error"]
            return error["message"] if isinstance(error, dict) else error
        return ""


class Client:
    """A client that keeps its connection as long as the server does."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: http.client.HTTPConnection | None = None

    def ask(
        self, path: str, body: bytes | None = None, *, kind: str = "application/json", slow: bool = False
    ) -> Reply:
        """Send a request, and return the reply.

        Args:
            path: Path of the route.
            body: What to send; None for a GET.
            kind: Type of the content.
            slow: Whether only half of the body is sent.
        """
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
        connection = self._connection
        connection.putrequest("GET" if body is None else "POST", path)
        if body is not None:
            connection.putheader("content-type", kind)
            connection.putheader("content-length", str(len(body)))
        connection.endheaders()
        if body:
            with suppress(ConnectionError):  # a server that refuses a body need not read all of it
                connection.send(body[: len(body) // 2] if slow else body)
        reply = connection.getresponse()
        found = Reply(reply.status, reply.read())
        if reply.will_close:
            self.close()
        return found

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Ranks:
    """The ranks of a service, with a thread each. A context manager that ends them.

    Args:
        model: Name or directory of the model.
        ranks: Number of ranks.
        options: Further options of all.
    """

    def __init__(self, model: str, ranks: int, *options: str) -> None:
        self.port = free_port("127.0.0.1")
        self._directory = tempfile.TemporaryDirectory()
        base = ["-m", model, "-c", "tcp", "--port", str(free_port("127.0.0.1")), "--quiet"]
        self._options = [*base, "--serve", str(self.port), *options]
        self._ranks = ranks
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Ranks:
        for rank in range(self._ranks):
            self.start(rank)
        self.until("answers at", 1)
        return self

    def __exit__(self, *exc: object) -> None:
        self.processes[0].send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        self._directory.cleanup()

    def start(self, rank: int) -> None:
        """Start a rank, for the first time or again."""
        command = [sys.executable, str(ROOT / "runtime.py"), str(rank), str(self._ranks), *self._options]
        with (Path(self._directory.name) / f"{rank}.log").open("ab") as stream:
            self.processes[rank] = subprocess.Popen(
                command, cwd=ROOT, stderr=stream, stdout=stream, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def kill(self, rank: int) -> None:
        """Kill a rank."""
        self.processes[rank].kill()
        self.processes[rank].wait()

    def said(self, rank: int = 0) -> str:
        """Return what a rank has written."""
        return (Path(self._directory.name) / f"{rank}.log").read_text(errors="replace")

    def until(self, words: str, times: int) -> None:
        """Wait until rank 0 has said ``words`` so often.

        Raises:
            SystemExit: It has ended, or does not say so.
        """
        deadline = time.monotonic() + LIMIT_S
        while self.said().count(words) < times:
            if self.processes[0].poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"serving: rank 0 has not said {words!r}:\n{self.said()[-2000:]}")
            time.sleep(0.05)

    def figures(self) -> dict[str, float]:
        """Return all figures of ``/metrics``."""
        client = Client(self.port)
        text = client.ask("/metrics").body.decode()
        client.close()
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def cpu_s(self) -> float:
        """Return the processor time of all ranks so far, in seconds."""
        times = (psutil.Process(process.pid).cpu_times() for process in self.processes.values())
        return sum(each.user + each.system for each in times)

    def memory_mb(self) -> list[float]:
        """Return the resident memory of each rank, in megabytes."""
        return [psutil.Process(process.pid).memory_info().rss / 1e6 for process in self.processes.values()]


@dataclass
class Asked:
    """Answers to requests that arrived at times of their own."""

    latencies_s: list[float] = field(default_factory=list)
    """Seconds from the time when each was due to its answer."""
    at_s: list[float] = field(default_factory=list)
    """Times when they were due."""
    inputs: list[int] = field(default_factory=list)
    """Numbers of the requests."""
    failed: list[str] = field(default_factory=list)
    """Error of each request that failed."""


@contextmanager
def open_loop(
    send: Callable[[Client, int], str | None], port: int, *, rate: float, inputs: int, clients: int = 32
) -> Iterator[Callable[[float], Asked]]:
    """Yield a function that asks for some seconds, at times that do not depend on the answers.

    MLPerf's LoadGen draws them: a Poisson process, as in its scenario for servers. A time counts from when a
    request is due, so one that waits for a free client is late, too.

    Args:
        send: Sends the request of a number; returns what is wrong with the answer, if anything.
        port: Port of the service.
        rate: Requests a second.
        inputs: Number of different requests.
        clients: Number of connections.
    """
    import mlperf_loadgen as loadgen  # of the extra bench

    due: queue.SimpleQueue[tuple[int, int, float] | None] = queue.SimpleQueue()
    asked, seed = Asked(), 0

    def issue(samples: list[loadgen.QuerySample]) -> None:
        for sample in samples:
            due.put((sample.id, sample.index, time.perf_counter()))

    def work() -> None:
        client = Client(port)
        while (one := due.get()) is not None:
            number, index, at_s = one
            try:
                wrong = send(client, index)
            except (OSError, http.client.HTTPException) as error:
                wrong = f"{type(error).__name__}: {error}"
                client.close()
            asked.latencies_s.append(time.perf_counter() - at_s)
            asked.at_s.append(at_s)
            asked.inputs.append(index)
            if wrong is not None:
                asked.failed.append(wrong)
            loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(number, 0, 0)])
        client.close()

    def run(seconds: float) -> Asked:
        nonlocal asked, seed
        asked, seed = Asked(), seed + 1
        settings = loadgen.TestSettings()
        settings.scenario, settings.mode = loadgen.TestScenario.Server, loadgen.TestMode.PerformanceOnly
        settings.server_target_qps = rate
        settings.schedule_rng_seed = settings.sample_index_rng_seed = seed
        settings.min_duration_ms, settings.min_query_count = int(seconds * 1e3), 1
        logs, output = loadgen.LogSettings(), loadgen.LogOutputSettings()
        with tempfile.TemporaryDirectory() as directory:
            output.outdir = directory
            logs.log_output, logs.enable_trace = output, False
            sut = loadgen.ConstructSUT(issue, lambda: None)
            library = loadgen.ConstructQSL(inputs, inputs, lambda _: None, lambda _: None)
            loadgen.StartTestWithLogSettings(sut, library, settings, logs)
            loadgen.DestroyQSL(library)
            loadgen.DestroySUT(sut)
        return asked

    threads = [threading.Thread(target=work, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield run
    finally:
        for _ in threads:
            due.put(None)


def save_embedder(directory: Path, **sizes: int) -> None:
    """Write a BERT with random weights in the form of sentence-transformers, with a vocabulary of ``WORDS``.

    Args:
        directory: Directory to create.
        sizes: Settings of its configuration; those of BERT-Base by default.
    """
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    settings: Mapping[str, int] = {"vocab_size": 30522, **sizes}
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**settings)).eval().save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(words) + "\n")
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": settings.get("hidden_size", 768), "pooling_mode_mean_tokens": True}
    for name, content in (("modules.json", modules), ("1_Pooling/config.json", pooling)):
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    (directory / "2_Normalize").mkdir()

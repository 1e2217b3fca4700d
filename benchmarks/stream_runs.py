"""Runs of decoders for ``streams.py``: whole runs of PipeEdge, its server, llama.cpp, and emulated hosts."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distant_hosts import DistantHosts
from random_decoders import DecoderShape, write_directory, write_gguf

from pipeedge.base.ports import free_port
from pipeedge.testbed.bed import TestBed, TestBeds
from pipeedge.testbed.cluster_file import load_cluster

__all__ = [
    "Board",
    "Model",
    "Run",
    "Served",
    "Stream",
    "Workers",
    "batched_bench",
    "boards",
    "prompts",
    "run_all",
]

LIMIT_S = 280.0
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
"""llama.cpp's number type with as many bits."""
_ROOT = Path(__file__).resolve().parents[1]
_OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(_ROOT)}


@dataclass(frozen=True)
class Model:
    """A shape with random weights in a number type."""

    shape: DecoderShape
    dtype: str
    files: Path

    @property
    def directory(self) -> Path:
        """Return the directory for PipeEdge, made on first use; its tokenizer has a word for each token."""
        directory = self.files / self.shape.name
        write_directory(self.shape, directory)
        tokenizer = directory / "tokenizer.json"
        if not tokenizer.exists():
            words = {f"w{number}": number for number in range(self.shape.vocab)}
            body = {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
            }
            tokenizer.write_text(json.dumps(body))
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            (directory / "tokenizer_config.json").write_text(json.dumps(settings))
            (directory / "chat_template.jinja").write_text(
                "{% for one in messages %}{{ one.content }} {% endfor %}"
            )
        return directory

    def gguf(self, binaries: Path) -> Path:
        """Return the file for llama.cpp, which quantises it on first use."""
        path = self.files / f"{self.shape.name}.{GGUF_TYPES[self.dtype]}.gguf"
        if not path.exists():
            whole = self.files / f"{self.shape.name}.F32.gguf"
            write_gguf(self.shape, whole)
            if path != whole:
                command = [binaries / "llama-quantize", whole, path, GGUF_TYPES[self.dtype], "2"]
                subprocess.run([str(word) for word in command], check=True, capture_output=True)
        return path


def partition_of(layers: Sequence[int]) -> str:
    """Return ``-pt`` of stages with so many layers each."""
    ends = list(itertools.accumulate(layers))
    return ",".join(f"{first + 1},{last}" for first, last in zip([0, *ends], ends, strict=False))


@dataclass(frozen=True)
class Board:
    """A place for one rank."""

    threads: int = 1
    core: int | None = None
    """Core that the rank is bound to, or None."""
    host: str | None = None
    """Emulated host that it runs on, or None for this machine."""
    bed: TestBed | DistantHosts | None = None

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the words that run a command here."""
        words = [sys.executable, "-m", "pipeedge", *words]
        if self.core is not None:
            words = ["taskset", "-c", str(self.core), *words]
        return list(words) if self.bed is None or self.host is None else self.bed.command(self.host, words)


@dataclass(frozen=True)
class Run:
    """A run that answers prompts, with a rank on each board; rank 0 has both ends.

    Stages are on ranks 1, 2, ... and, last, on rank 0, whose head is as large as several blocks.
    """

    model: str
    """Name or directory of the model."""
    dtype: str
    boards: Sequence[Board]
    prompts: Sequence[Sequence[int] | str]
    streams: int
    """Number of answers at a time."""
    tokens: int
    """Number of tokens of each answer."""
    layers: Sequence[int] | None = None
    """Number of layers of each stage, or None for one stage."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of all prompts."""
    speculate: int = 0
    """Most proposed tokens of a step; random weights repeat themselves more than those of a trained model."""
    draft: str | None = None
    """Name or directory of a model that drafts tokens, or None."""

    def start(self, place: Path) -> list[subprocess.Popen[bytes]]:
        """Start all ranks."""
        place.mkdir(parents=True, exist_ok=True)
        (place / "report.json").unlink(missing_ok=True)
        options = {"max_tokens": self.tokens, "ignore_eos": True, **self.options}
        lines = [{"prompt": prompt, **options} for prompt in self.prompts]
        (place / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        world, first = len(self.boards), self.boards[0]
        context = max(map(len, self.prompts)) + self.tokens
        common = ["-m", self.model, "--dtype", self.dtype, "-u", str(self.streams)]
        common += ["-c", "tcp", "--context", str(context), "--quiet"]
        common += ["--port", str(free_port("127.0.0.1") if first.host is None else 29500)]
        common += ["--addr", first.host or "127.0.0.1"]
        if self.layers is not None:
            order = [*range(1, world), 0]
            common += ["-pt", partition_of(self.layers), "-r", ",".join(map(str, order))]
        data = [
            "--input",
            "prompts.jsonl",
            "--output",
            "answers.jsonl",
            "--report",
            "report.json",
            "--greedy",
            "--speculate",
            str(self.speculate),
            *(() if self.draft is None else ("--draft", self.draft)),
        ]
        started = []
        for rank, board in enumerate(self.boards):
            command = board.command(["run", str(rank), str(world), *common, *(data if rank == 0 else [])])
            variables = {**os.environ, **_OFFLINE, "OMP_NUM_THREADS": str(board.threads)}
            with (place / f"rank{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    command, cwd=place, env=variables, stdout=log, stderr=log, start_new_session=True
                )
            started.append(process)
        return started


def run_all(runs: Mapping[Path, Run]) -> list[dict[str, Any]]:
    """Run some at the same time, each with its place; return the figures of text of each, with elapsed_s."""
    started = {place: run.start(place) for place, run in runs.items()}
    deadline = time.monotonic() + LIMIT_S
    try:
        for place, ranks in started.items():
            statuses = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]
            if any(statuses):
                said = "".join(
                    log.read_text(errors="replace")[-800:] for log in sorted(place.glob("rank*.log"))
                )
                raise SystemExit(f"streams: the ranks ended with {statuses}:\n{said}")
    finally:
        for ranks in started.values():
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
    reports = [json.loads((place / "report.json").read_text()) for place in runs]
    return [{**report["text"], "elapsed_s": report["elapsed_s"]} for report in reports]


def prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Return prompts of so many tokens each, which begin differently as far as possible."""
    return [
        [(number + 7 * place) % (vocabulary - 10) + 10 for place in range(tokens)] for number in range(count)
    ]


# -- emulated hosts ------------------------------------------------------------------------------------


@contextlib.contextmanager
def boards(count: int, cpu: float, bw_mbps: float, directory: Path) -> Iterator[list[Board]]:
    """Yield equal emulated hosts with a part of a processor each. Needs root."""
    names = [f"board{number}" for number in range(count)]
    kind = f"{{mem_MB: 5000, bw_Mbps: {bw_mbps}, model_profiles: {{}}, cpu_fraction: {cpu}}}"
    path = directory / "CLUSTER.yml"
    path.write_text(f"device_types: {{board: {kind}}}\ndevices: {{board: [{', '.join(names)}]}}\n")
    with TestBeds().lent("streams", load_cluster(path)) as bed:
        yield [Board(host=name, bed=bed) for name in names]


# -- llama.cpp -----------------------------------------------------------------------------------------


@dataclass
class Workers:
    """llama.cpp's RPC servers with a thread each, each bound to a core. A context manager."""

    binaries: Path
    cores: Sequence[int]
    ports: list[int] = field(default_factory=list)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Workers:
        for core in self.cores:
            port = free_port("127.0.0.1")
            command = ["taskset", "-c", str(core), str(self.binaries / "ggml-rpc-server")]
            process = subprocess.Popen(
                [*command, "-p", str(port), "-t", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self._processes.append(process)
            self.ports.append(port)
        for port in self.ports:
            _wait_for_port(port)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.terminate()
            process.wait(10)


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise SystemExit("streams: an RPC server does not listen")


def batched_bench(
    binaries: Path,
    gguf: Path,
    streams: Sequence[int],
    prompt: int,
    tokens: int,
    *,
    threads: int = 2,
    options: Sequence[str] = (),
) -> list[float]:
    """Return the tokens a second that llama-batched-bench generates, for each number of streams."""
    sizes = [f"-npp {prompt} -ntg {tokens} -npl {','.join(map(str, streams))}"]
    sizes += [f"-c {max(streams) * (prompt + tokens + 32)} -t {threads} -tb {threads}"]
    command = [str(binaries / "llama-batched-bench"), "-m", str(gguf), *" ".join(sizes).split(), *options]
    done = subprocess.run(
        [*command, "--output-format", "jsonl"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(found) != len(streams):
        raise SystemExit(f"streams: llama-batched-bench failed: {done.stderr[-800:]}")
    return [float(one["speed_tg"]) for one in found]


# -- the server ----------------------------------------------------------------------------------------


@dataclass
class Stream:
    """An answer that comes as events."""

    sent: float = 0.0
    """Moment at which it was asked for."""
    moments: list[float] = field(default_factory=list)
    """Moments at which events came: one for each token that has a text, and one for the end."""
    status: int = 0


class Served:
    """A server in processes of its own, as long as the body of a ``with`` statement.

    Args:
        model: Name or directory of the model.
        options: Further options of the run.
        threads: Number of threads.
    """

    def __init__(self, model: str, *options: str, threads: int = 2) -> None:
        self.port = free_port("127.0.0.1")
        self._command = [sys.executable, "-m", "pipeedge", "run", "0", "1", "-m", model, *options]
        self._command += ["--serve", str(self.port), "--quiet"]
        self._threads = threads

    def __enter__(self) -> Served:
        variables = {**os.environ, **_OFFLINE, "OMP_NUM_THREADS": str(self._threads)}
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, env=variables)
        lines = iter(self.process.stderr or ())
        said = []
        for line in lines:
            said.append(line)
            if "answers at" in line:
                break
        else:
            raise SystemExit(f"streams: the server has ended: {''.join(said)}")
        threading.Thread(target=lambda: list(lines), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.wait(LIMIT_S)

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)

    def post(self, body: Mapping[str, Any], *, leaves: bool = False) -> tuple[int, Any]:
        """Send a request to chats; return the status and the answer, or leave in the middle of it."""
        connection = self.connect()
        try:
            self._send(connection, "/v1/chat/completions", body)
            reply = connection.getresponse()
            return reply.status, None if leaves else json.loads(reply.read())
        finally:
            connection.close()

    def _send(self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]) -> None:
        connection.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})

    def stream(
        self,
        body: Mapping[str, Any],
        found: Stream,
        gone: threading.Event | None = None,
        connection: http.client.HTTPConnection | None = None,
    ) -> Stream:
        """Ask for a completion as a stream, and note when its events come.

        Args:
            body: The request, without ``stream``.
            found: What to write to.
            gone: Set when the client is to leave before the end.
            connection: Connection to use and keep, or None for a new one.
        """
        own = connection or self.connect()
        content = {**body, "model": "", "stream": True, "temperature": 0, "ignore_eos": True}
        found.sent = time.perf_counter()
        self._send(own, "/v1/completions", content)
        reply = own.getresponse()
        found.status = reply.status
        while line := reply.readline():
            if line.startswith(b"data: {"):
                found.moments.append(time.perf_counter())
            if gone is not None and gone.is_set():
                break
        if connection is None:
            own.close()
        return found

    def figures(self) -> dict[str, float]:
        """Return the figures of the server, its memory in MB and its threads."""
        connection = self.connect()
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        found = {
            name: float(value) for name, value in re.findall(r"^pipeedge_(\w+) (\S+)$", text, re.MULTILINE)
        }
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        for name, key, unit in (("memory", "VmRSS", 1024), ("threads", "Threads", 1)):
            found[name] = int(re.findall(rf"^{key}:\s+(\d+)", status, re.MULTILINE)[0]) / unit
        return found

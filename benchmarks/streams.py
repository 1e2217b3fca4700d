#!/usr/bin/env python3
"""Measure many answers of a decoder at once.

    together   tokens a second of 8 and 16 sequences that generate in one process, against llama.cpp's
               llama-batched-bench with as many bits (--llama-cpp DIR)
    paste      time between the tokens of seven others while a prompt of 4,096 tokens is computed beside them,
               against the time without it
    requests   requests to a server with llama-puzzles, of which a tenth is bad and a tenth leaves early:
               wrong answers, and pages, memory and threads at the end

The first two take the shape of Qwen2.5-0.5B with random weights, written once to ``--files``, and
need two idle cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_decoders import SHAPES, write_directory, write_gguf

from pipeedge.decoding.loop import LocalDecoder
from pipeedge.decoding.steps import CacheSize, DecodingStep, StepLimits, StepScheduler
from pipeedge.models.decoder import find_decoder
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.layers.decoder import StepRows

SHAPE = SHAPES["qwen2.5-0.5b"]
GGUF_TYPES = {"bfloat16": "BF16", "int8": "Q8_0"}
PROMPT, TOKENS, PASTED, CONTEXT = 16, 64, 4096, 4608
LIMIT_S = 900
PUZZLES = "llama-puzzles"


class Host:
    """The scheduler of steps with all layers in this process.

    Args:
        directory: The decoder.
        dtype: Number type of its weights.
        threads: Number of threads.
        context: Longest sequence in tokens.
        sequences: Most sequences.
    """

    def __init__(self, directory: Path, dtype: str, threads: int, context: int, sequences: int) -> None:
        torch.set_num_threads(threads)
        model = find_decoder(directory)
        self._decoder = LocalDecoder(
            model, find_dtype(dtype), context=context, sequences=sequences, threads=threads
        )
        limits = StepLimits(context=context, rows=sequences + 256, sequences=sequences)
        self.scheduler = StepScheduler(limits, CacheSize(sequences * -(-context // 32)))
        self.times: dict[int, list[float]] = {}
        """Times at which each sequence got its tokens."""

    def add(self, sequence: int, prompt: Sequence[int], tokens: int) -> None:
        """Add a sequence."""
        self.scheduler.add(sequence, prompt, tokens)
        self.times[sequence] = []

    def step(self) -> bool:
        """Execute the next step; return whether there was one."""
        step = self.scheduler.next()
        if step is None:
            return False
        drawn = self._drawn(step)
        now = time.perf_counter()
        for sequence in drawn:
            self.times[sequence].append(now)
        self.scheduler.finished(step.number, drawn)
        return True

    def _drawn(self, step: DecodingStep) -> dict[int, int]:
        empty = np.zeros(0, np.int32)
        rows = [
            StepRows(part.position, len(part.tokens), np.array(part.pages, np.int32), empty)
            for part in step.parts
        ]
        tokens = [token for part in step.parts for token in part.tokens]
        places = [part.position + row for part in step.parts for row in range(len(part.tokens))]
        payload: tuple[torch.Tensor, ...] = (self._decoder.ends.embed(tokens, places),)
        for stage in self._decoder.stages:
            payload = stage.step(rows, payload)
        ends = np.cumsum([len(part.tokens) for part in step.parts]) - 1
        scored = [
            (int(end), part.sequence) for end, part in zip(ends, step.parts, strict=True) if part.scored
        ]
        if not scored:
            return {}
        scores = self._decoder.score(payload[0][[row for row, _ in scored]]).numpy()
        return {sequence: int(one.argmax()) for (_, sequence), one in zip(scored, scores, strict=True)}


def words(count: int, seed: int) -> list[int]:
    """Return random tokens."""
    return [random.Random(seed).randrange(SHAPE.vocab) for _ in range(count)]


def together(directory: Path, dtype: str, streams: int) -> float:
    """Return the tokens a second of so many sequences, after their first tokens."""
    host = Host(directory, dtype, 2, 256, streams)
    rates = []
    for turn in range(3):
        for number in range(streams):
            host.add(turn * streams + number, words(PROMPT, number), TOKENS)
        while host.step():
            pass
        own = [host.times[turn * streams + number] for number in range(streams)]
        rates.append(streams * (TOKENS - 1) / (max(map(max, own)) - max(times[0] for times in own)))
    return statistics.median(rates)


def paste(directory: Path, dtype: str) -> tuple[float, float, float]:
    """Return 95 % times between tokens of seven sequences, alone and beside a prompt, and its seconds."""
    host = Host(directory, dtype, 2, CONTEXT, 8)
    for number in range(7):
        host.add(number, words(PROMPT, number), CONTEXT - PROMPT)
    while min(map(len, host.times.values())) < 60:
        host.step()
    began = time.perf_counter()
    host.add(7, words(PASTED, 7), 1)
    while not host.times[7]:
        host.step()

    def slow(first: float, last: float) -> float:
        gaps = [
            after - before
            for number in range(7)
            for before, after in zip(host.times[number], host.times[number][1:], strict=False)
            if first <= before and after <= last
        ]
        return float(np.quantile(gaps, 0.95))

    settled = host.times[0][10]
    return slow(settled, began), slow(began, host.times[7][0]), host.times[7][0] - began


def batched_bench(program: Path, gguf: Path, streams: int) -> float:
    """Return the tokens a second that llama-batched-bench generates."""
    size = str(streams * (PROMPT + TOKENS))
    options = [
        "-c",
        size,
        "-npp",
        str(PROMPT),
        "-ntg",
        str(TOKENS),
        "-npl",
        str(streams),
        "-t",
        "2",
        "-tb",
        "2",
    ]
    command = [str(program), "-m", str(gguf), *options, "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return float(found[-1]["speed_tg"])


class Served:
    """A server in a process of its own, as long as the body of a ``with`` statement."""

    def __enter__(self) -> Served:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "pipeedge",
            "run",
            "0",
            "1",
            "-m",
            PUZZLES,
            "--serve",
            str(self.port),
        ]
        self.process = subprocess.Popen([*command, "--quiet"], stderr=subprocess.PIPE, text=True)
        lines = iter(self.process.stderr or ())
        if not any("answers at" in line for line in lines):
            raise SystemExit("the server has ended")
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.wait(LIMIT_S)

    def post(self, body: Mapping[str, Any], *, leaves: bool = False) -> tuple[int, Any]:
        """Send a request; return the status and the answer, or leave in the middle of it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            content = json.dumps(body).encode()
            connection.request("POST", "/v1/chat/completions", content, {"content-type": "application/json"})
            reply = connection.getresponse()
            return reply.status, None if leaves else json.loads(reply.read())
        finally:
            connection.close()

    def figures(self) -> dict[str, float]:
        """Return the figures of the server, its memory in MB and its threads."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
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


def requests(count: int) -> None:
    """Send requests from 16 threads, and print what came of them."""
    source = random.Random(1)
    questions = [f"What is {source.randrange(90)} + {source.randrange(90)}?" for _ in range(60)]
    lengths = [1, 4, 20, 120]

    def body(question: str, tokens: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "ignore_eos": True}

    def text(found: Any) -> str:
        return str(found["choices"][0]["message"]["content"])

    with Served() as served:
        wanted = {(one, size): text(served.post(body(one, size))[1]) for one in questions for size in lengths}
        before, wrong, lock = served.figures(), 0, threading.Lock()
        keys = list(wanted)

        def ask(number: int) -> None:
            nonlocal wrong
            key = keys[(number * 7919) % len(keys)]
            kind = number % 10
            if kind == 0:
                bad = served.post({**body(*key), "temperature": -1})[0] != 400
            elif kind == 1:
                bad = served.post({**body(key[0], 200), "stream": True}, leaves=True)[0] != 200
            else:
                status, found = served.post(body(*key))
                bad = status != 200 or text(found) != wanted[key]
            with lock:
                wrong += bad

        began = time.perf_counter()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, range(count)))
        took = time.perf_counter() - began
        time.sleep(1)
        after = served.figures()
    tokens = after["completion_tokens_total"] - before["completion_tokens_total"]
    print(f"requests: {count:,} in {took:.1f} s, {tokens / took:,.0f} tokens/s, {wrong} wrong answers")
    for name in ("cache_pages_free", "sequences_running", "threads", "memory"):
        print(f"  {name}: {before[name]:,.0f} before, {after[name]:,.0f} after")


def main() -> None:
    """Measure the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=("together", "paste", "requests"), default=None)
    parser.add_argument("--dtype", nargs="+", choices=tuple(GGUF_TYPES), default=list(GGUF_TYPES))
    parser.add_argument("--streams", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--files", type=Path, help="directory of weights (a new one each time)")
    parser.add_argument(
        "--llama-cpp", type=Path, help="directory with llama-batched-bench and llama-quantize"
    )
    options = parser.parse_args()
    parts = options.part or ["together", "paste", "requests"]
    if "requests" in parts:
        requests(options.requests)
    if set(parts) == {"requests"}:
        return
    with tempfile.TemporaryDirectory() as scratch:
        files = options.files or Path(scratch)
        directory = files / SHAPE.name
        write_directory(SHAPE, directory)
        for dtype in options.dtype:
            gguf = files / f"{SHAPE.name}.{GGUF_TYPES[dtype]}.gguf"
            if options.llama_cpp is not None and not gguf.exists():
                whole = files / f"{SHAPE.name}.float32.gguf"
                write_gguf(SHAPE, whole)
                quantise = [options.llama_cpp / "llama-quantize", whole, gguf, GGUF_TYPES[dtype]]
                subprocess.run(quantise, check=True, capture_output=True, timeout=LIMIT_S)
            for streams in options.streams if "together" in parts else ():
                ours = together(directory, dtype, streams)
                line = f"{streams} streams, {dtype}: {ours:.1f} tokens/s"
                if options.llama_cpp is not None:
                    theirs = batched_bench(options.llama_cpp / "llama-batched-bench", gguf, streams)
                    line += f", llama.cpp {theirs:.1f}: {ours / theirs:.2f} x"
                print(line, flush=True)
            if "paste" in parts:
                usual, beside, took = paste(directory, dtype)
                print(
                    f"{PASTED:,} tokens pasted, {dtype}: others' tokens {1e3 * usual:.1f} -> "
                    f"{1e3 * beside:.1f} ms (95 %), {beside / usual:.2f} x; its own after {took:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure many answers of decoders at once. Each part can be run alone (``--part``), in less than 300 s.

    together   tokens a second of 8 and 16 answers in one process of two threads, against llama-batched-bench
    workers    two workers of one thread, each bound to a core, on the loopback: tokens a second of 8 answers
               and of one, against llama.cpp's RPC servers with the same blocks and bits on each
    hosts      2 and 4 equal emulated hosts against one: tokens a second of as many answers, from the first
               prompt to the last token, and while as many as fit are written. All hosts always work: as
               four pipelines of one host, two of two, and one of four (root)
    first      first token of a prompt of 1,024 tokens on 4 of these hosts, against one (root)
    paste      95 % quantile of the time between the tokens of seven others while a prompt of 4,096 tokens is
               computed, against the time before
    speculate  one answer at a time on 3 hosts with round trips of 10 ms: tokens a second with proposals
               against without, where prompts have the answer, and where texts are of chance; with drafts
               of the model itself in int8, of texts as it draws them and of chance (root)
    alone      one lone request over HTTP: time to the first token and between tokens, above those of a run
               without a server
    requests   requests to a server, of which a tenth is bad and a tenth leaves early: wrong answers, and
               pages, memory and threads at the end

Models have public shapes and random weights, which are written once to ``--files``; alone and requests take
llama-puzzles. ``--llama-cpp DIR`` is where llama.cpp was built (its source is in the sdist of
llama-cpp-python): llama-batched-bench, llama-quantize and ggml-rpc-server in DIR/bin. Both sides take turns;
figures are medians, and need two idle cores. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from distant_hosts import distant_hosts
from random_decoders import SHAPES
from stream_runs import Board, Model, Run, Served, Stream, Workers, batched_bench, boards, prompts, run_all

PUZZLES = "llama-puzzles"
PROMPT, TOKENS = 16, 64
PROPOSALS = 16
TOGETHER_TARGET = 1.1
WORKERS_TARGETS = {8: 1.6, 1: 1.0}
HOSTS_TARGETS = {2: 1.8, 4: 3.4}
FIRST_TARGET, FIRST_PROMPT = 0.33, 1024
PASTE_TARGET, PASTED, OTHERS = 1.5, 4096, 7
REPEATED_TARGET, UNLIKE_TARGET, ROUND_TRIP_S = 1.5, 0.97, 10e-3
ALONE_TARGETS_S, ALONE_TOKENS = (2e-3, 0.2e-3), 32
LAYERS_OF_BLOCK = 4
WORKER_BLOCKS = (17, 7)
"""Blocks of Qwen2.5-0.5B's shape on each worker; the second has the head, which is as large as nine."""
HOST_SHAPE, HOST_LAYERS = "tinyllama-1.1b", {2: (48, 40), 4: (24, 24, 24, 16)}
"""Shape of what emulated hosts run, and its layers on each; the last has the head, as large as six of them.

The head of a larger vocabulary cannot be divided: that of Llama-3.2-1B is more than a quarter of its work."""
FIRST_LAYERS = (22, 22, 22, 22)
"""Layers on each while a prompt is computed, of which the head computes one row."""
WARM_TOKENS, PASTE_TOKENS = 30, 150


class Lines:
    """Prints a line for each figure with its target, and keeps whether all were reached."""

    def __init__(self) -> None:
        self.reached = True

    def add(self, what: str, ratio: float, target: float, words: str, *, most: bool = False) -> None:
        """Print a ratio, which is to be at least the target, or at most."""
        good = ratio <= target if most else ratio >= target
        self.reached &= good
        bound = "at most" if most else "at least"
        print(f"{what}: {words}: {ratio:.2f} ({'' if good else 'MISSES '}{bound} {target:g})", flush=True)


def together(args: argparse.Namespace, lines: Lines) -> None:
    """Compare one process with llama-batched-bench."""
    for dtype in args.dtypes:
        model = Model(SHAPES[args.shape], dtype, args.files)
        ours: dict[int, list[float]] = {streams: [] for streams in args.streams}
        theirs: dict[int, list[float]] = {streams: [] for streams in args.streams}
        for _ in range(args.rounds):
            for streams in args.streams:
                asked = prompts(streams, PROMPT, model.shape.vocab)
                run = Run(str(model.directory), dtype, [Board(threads=2)], asked, streams, TOKENS)
                (found,) = run_all({args.scratch / "together": run})
                ours[streams].append(found["decode_tokens_per_s"])
            if args.llama_cpp is not None:
                rates = batched_bench(
                    args.llama_cpp, model.gguf(args.llama_cpp), args.streams, PROMPT, TOKENS
                )
                for streams, rate in zip(args.streams, rates, strict=True):
                    theirs[streams].append(rate)
        for streams in args.streams:
            compare(
                lines,
                f"together, {streams} answers, {dtype}",
                ours[streams],
                theirs[streams],
                TOGETHER_TARGET,
            )


def compare(lines: Lines, what: str, ours: Sequence[float], theirs: Sequence[float], target: float) -> None:
    """Print the medians of both sides."""
    own = statistics.median(ours)
    if not theirs:
        print(f"{what}: {own:.1f} tokens/s", flush=True)
        return
    other = statistics.median(theirs)
    lines.add(what, own / other, target, f"{own:.1f} tokens/s, llama.cpp {other:.1f}")


def workers(args: argparse.Namespace, lines: Lines) -> None:
    """Compare two workers with llama.cpp's RPC servers."""
    for dtype in args.dtypes:
        model = Model(SHAPES[args.shape], dtype, args.files)
        ours: dict[int, list[float]] = {streams: [] for streams in WORKERS_TARGETS}
        theirs: dict[int, list[float]] = {streams: [] for streams in WORKERS_TARGETS}
        for _ in range(args.rounds):
            for streams in WORKERS_TARGETS:
                # Rank 1 has the first stage, rank 0 the second one and the head.
                ranks = [Board(core=1), Board(core=0)]
                layers = [LAYERS_OF_BLOCK * blocks for blocks in WORKER_BLOCKS]
                asked = prompts(streams, PROMPT, model.shape.vocab)
                run = Run(str(model.directory), dtype, ranks, asked, streams, TOKENS, layers)
                (found,) = run_all({args.scratch / "workers": run})
                ours[streams].append(found["decode_tokens_per_s"])
            if args.llama_cpp is None:
                continue
            with Workers(args.llama_cpp, (0, 1)) as servers:
                places = ",".join(f"127.0.0.1:{port}" for port in servers.ports)
                split = f"{WORKER_BLOCKS[0]},{WORKER_BLOCKS[1] + 1}"  # the head counts as a block
                options = ["--rpc", places, "-ngl", "99", "-ts", split, "-fit", "off"]
                gguf, sizes = model.gguf(args.llama_cpp), sorted(WORKERS_TARGETS)
                rates = batched_bench(args.llama_cpp, gguf, sizes, PROMPT, TOKENS, threads=1, options=options)
                for streams, rate in zip(sizes, rates, strict=True):
                    theirs[streams].append(rate)
        for streams, target in WORKERS_TARGETS.items():
            compare(lines, f"workers, {streams} answers, {dtype}", ours[streams], theirs[streams], target)


def hosts(args: argparse.Namespace, lines: Lines) -> None:
    """Compare pipelines of emulated hosts with single ones."""
    model = Model(SHAPES[HOST_SHAPE], args.host_dtype, args.files)
    with boards(4, args.cpu, args.bw_mbps, args.scratch) as all_boards:
        rates, steady = {}, {}
        for size in (1, 2, 4):
            groups = [all_boards[first : first + size] for first in range(0, 4, size)]
            runs = {
                args.scratch / f"hosts{number}": Run(
                    str(model.directory),
                    model.dtype,
                    group,
                    prompts(args.host_streams, 1, model.shape.vocab),
                    args.host_streams,
                    args.host_tokens * size // len(all_boards),  # so that each size takes about as long
                    HOST_LAYERS.get(size),
                )
                for number, group in enumerate(groups)
            }
            # Not by the time in which answers are written: with groups, others still have their first tokens,
            # which do not count there.
            found = run_all(runs)
            rates[size] = statistics.median(one["completion_tokens"] / one["elapsed_s"] for one in found)
            steady[size] = statistics.median(one["tokens_per_s_together"] for one in found)
            said = f"{rates[size]:.1f} tokens/s, {steady[size]:.1f} while all are written"
            print(f"hosts: {size}: {said}", flush=True)
    for size, target in HOSTS_TARGETS.items():
        what = f"hosts, {size} of {args.cpu:g} of a core, {args.host_streams} answers, {args.host_dtype}"
        words = f"{rates[size]:.1f} tokens/s, one {rates[1]:.1f}; written {steady[size] / steady[1]:.2f}"
        lines.add(what, rates[size] / rates[1], target, words)


def first(args: argparse.Namespace, lines: Lines) -> None:
    """Compare the first token of a long prompt on four hosts with that on one."""
    model = Model(SHAPES[HOST_SHAPE], args.host_dtype, args.files)
    with boards(4, args.cpu, args.bw_mbps, args.scratch) as all_boards:

        def measured(size: int) -> float:
            runs = {
                args.scratch / f"first{number}": Run(
                    str(model.directory),
                    model.dtype,
                    all_boards[number : number + size],
                    prompts(args.rounds, FIRST_PROMPT, model.shape.vocab),
                    1,
                    1,
                    FIRST_LAYERS if size > 1 else None,
                )
                for number in range(0, 4, size)
            }
            return statistics.median(found["first_token_s"]["p50"] for found in run_all(runs))

        one, four = measured(1), measured(4)
    words = f"{FIRST_PROMPT:,} tokens, {args.host_dtype}: {one:.2f} s on one host, {four:.2f} s on four"
    lines.add("first", four / one, FIRST_TARGET, words, most=True)


def speculate(args: argparse.Namespace, lines: Lines) -> None:
    """Compare answers one at a time on distant hosts with proposals and without."""
    words = ["house", "banana", "sparkle", "letters", "orchard", "meeting", "pepper", "silence"]
    spelled = [f"Spell {word}. {'-'.join(word)} Spell {word}. " for word in words]
    chance, drawn = {"temperature": 5.0}, {"temperature": 1.0}
    tasks: dict[str, tuple[list[str], dict[str, Any], float, str | None]] = {
        "prompts with the answer": (spelled, {"ignore_eos": False}, REPEATED_TARGET, None),
        "texts of chance": (words, chance, UNLIKE_TARGET, None),
        "drafts of the model itself": (words, drawn, REPEATED_TARGET, PUZZLES),
        "drafts of texts of chance": (words, chance, UNLIKE_TARGET, PUZZLES),
    }
    with distant_hosts(3, ROUND_TRIP_S / 2) as hosts:
        all_boards = [Board(host=host, bed=hosts) for host in hosts.names]
        for what, (asked, options, target, draft) in tasks.items():
            rates: list[list[float]] = [[], []]
            for _ in range(args.rounds):
                for most, model, kept in zip((0, PROPOSALS), (None, draft), rates, strict=True):
                    run = Run(PUZZLES, "float32", all_boards, asked, 1, 40, (4, 4, 8), options, most, model)
                    (found,) = run_all({args.scratch / "speculate": run})
                    kept.append(found["decode_tokens_per_s"])
            without, proposed = map(statistics.median, rates)
            share = found["accepted_tokens"] / max(1, found["proposed_tokens"])
            said = f"{without:.1f} -> {proposed:.1f} tokens/s, {share:.0%} of proposed tokens right"
            if draft is not None:
                right = found["accepted_drafted_tokens"] / max(1, found["drafted_tokens"])
                said += f", of the {found['drafted_tokens']:,} drafted ones {right:.0%}"
            lines.add(f"speculate, {what}", proposed / without, target, said)


def paste(args: argparse.Namespace, lines: Lines) -> None:
    """Let seven others generate while a long prompt is computed."""
    for dtype in args.dtypes:
        model = Model(SHAPES[args.shape], dtype, args.files)
        context = str(PASTED + 1024)
        options = ["--dtype", dtype, "-u", str(OTHERS + 1), "--context", context]
        options += ["--speculate", "0"]
        with Served(str(model.directory), *options) as served, ThreadPoolExecutor(OTHERS + 1) as pool:
            gone = threading.Event()
            others = [Stream() for _ in range(OTHERS)]
            for number, stream in enumerate(others):
                # Texts begin differently, so that nothing is shared.
                body = {"prompt": [100 + number, *range(10, 25)], "max_tokens": 4000}
                pool.submit(served.stream, body, stream, gone)
            wait_for_tokens(others, WARM_TOKENS)
            settled = time.perf_counter()
            wait_for_tokens(others, WARM_TOKENS + PASTE_TOKENS)
            pasted = served.stream({"prompt": list(range(3000, 3000 + PASTED)), "max_tokens": 1}, Stream())
            gone.set()
        if pasted.status != 200 or not pasted.moments:
            raise SystemExit(f"streams: the pasted prompt was not answered: {pasted}")
        usual = slow(others, settled, pasted.sent)
        beside = slow(others, pasted.sent, pasted.moments[0])
        words = (
            f"others' tokens {1e3 * usual:.1f} -> {1e3 * beside:.1f} ms (95 %), its own after "
            f"{pasted.moments[0] - pasted.sent:.1f} s"
        )
        lines.add(f"paste, {PASTED:,} tokens, {dtype}", beside / usual, PASTE_TARGET, words, most=True)


def slow(streams: Sequence[Stream], since: float, until: float) -> float:
    """Return the 95 % quantile of the times between tokens of an interval, in seconds."""
    gaps = [
        after - before
        for stream in streams
        for before, after in pairwise(stream.moments)
        if since <= before and after <= until
    ]
    return float(np.quantile(gaps, 0.95))


def wait_for_tokens(streams: Sequence[Stream], tokens: int, limit_s: float = 200) -> None:
    """Wait until every stream has so many tokens."""
    deadline = time.monotonic() + limit_s
    while min(len(stream.moments) for stream in streams) < tokens:
        if time.monotonic() > deadline:
            raise SystemExit(f"streams: not {tokens} tokens within {limit_s:g} s")
        time.sleep(0.05)


def alone(args: argparse.Namespace, lines: Lines) -> None:
    """Compare one request at a time over HTTP with a run of the same prompts."""
    firsts, gaps = [], []
    asked = [f"What is {number} + {number + 1}? " for number in range(10, 50)]
    for _ in range(args.rounds):
        run = Run(PUZZLES, "float32", [Board(threads=2)], asked, 1, ALONE_TOKENS)
        (own,) = run_all({args.scratch / "alone": run})
        with Served(PUZZLES, "-u", "1") as served:
            connection = served.connect()
            streams = []
            for prompt in asked:
                body = {"prompt": prompt, "max_tokens": ALONE_TOKENS}
                streams.append(served.stream(body, Stream(), connection=connection))
        if any(stream.status != 200 or len(stream.moments) < 2 for stream in streams):
            raise SystemExit(f"streams: a lone request was not answered: {streams[0]}")
        # Some tokens have no text and so no event; the first and the end have one.
        each = [(one.moments[-1] - one.moments[0]) / (ALONE_TOKENS - 1) for one in streams]
        began = [one.moments[0] - one.sent for one in streams]
        for what, found, below, kept in (
            ("to the first token", began, own["first_token_s"]["p50"], firsts),
            ("a token", each, own["between_tokens_s"]["p50"], gaps),
        ):
            kept.append(statistics.median(found) - below)
            print(f"alone: {1e3 * statistics.median(found):.2f} ms {what}, own {1e3 * below:.2f}", flush=True)
    for what, found, target in zip(
        ("to the first token", "a token"), (firsts, gaps), ALONE_TARGETS_S, strict=True
    ):
        above = statistics.median(found)
        lines.add(f"alone, ms {what} above the pipeline's own", 1e3 * above, 1e3 * target, PUZZLES, most=True)


def requests(args: argparse.Namespace, lines: Lines) -> None:
    """Send requests from 16 threads, and print what came of them."""
    source = random.Random(1)
    questions = [f"What is {source.randrange(90)} + {source.randrange(90)}?" for _ in range(60)]
    lengths = [1, 4, 20, 120]

    def body(question: str, tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {"model": PUZZLES, "messages": messages, "max_tokens": tokens, "ignore_eos": True}

    def text(found: Any) -> str:
        return str(found["choices"][0]["message"]["content"])

    with Served(PUZZLES) as served:
        wanted = {(one, size): text(served.post(body(one, size))[1]) for one in questions for size in lengths}
        wrong, lock = 0, threading.Lock()
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

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, range(args.warm_requests)))
            time.sleep(1)
            before = served.figures()
            began = time.perf_counter()
            list(pool.map(ask, range(args.requests)))
            took = time.perf_counter() - began
        time.sleep(1)
        after = served.figures()
    tokens = after["completion_tokens_total"] - before["completion_tokens_total"]
    words = f"{args.requests:,} in {took:.1f} s, {tokens / took:,.0f} tokens/s; wrong answers"
    lines.add("requests", wrong, 0, words, most=True)
    for name in ("cache_pages_free", "sequences_running", "threads", "memory"):
        print(f"  {name}: {before[name]:,.0f} before, {after[name]:,.0f} after", flush=True)
    lines.add("requests", after["threads"] - before["threads"], 0, "threads more than before", most=True)
    lines.add("requests", before["cache_pages_free"] - after["cache_pages_free"], 0, "pages lost", most=True)


PARTS: dict[str, Callable[[argparse.Namespace, Lines], None]] = {
    part.__name__: part for part in (together, workers, hosts, first, speculate, paste, alone, requests)
}


def main() -> None:
    """Measure the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "int8"), default=["bfloat16", "int8"])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", nargs="+", type=int, default=[8, 16], help="answers of together")
    parser.add_argument("--cpu", type=float, default=0.45, help="part of a core of an emulated host")
    parser.add_argument("--bw-mbps", type=float, default=1000, help="rate of its link")
    parser.add_argument("--host-streams", type=int, default=512, help="answers of hosts")
    parser.add_argument("--host-tokens", type=int, default=28, help="tokens of each on 4 hosts")
    parser.add_argument("--host-dtype", choices=("bfloat16", "int8"), default="int8")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--warm-requests", type=int, default=500, help="requests before the count begins")
    parser.add_argument("--files", type=Path, metavar="DIR", help="where weights are kept from run to run")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="where llama.cpp was built")
    args = parser.parse_args()
    if args.llama_cpp is not None:
        args.llama_cpp = args.llama_cpp / "bin"
        if not (args.llama_cpp / "llama-batched-bench").exists():
            sys.exit(f"streams: no llama-batched-bench in {args.llama_cpp}")
    lines = Lines()
    with tempfile.TemporaryDirectory() as scratch:
        args.scratch = Path(scratch)
        args.files = (args.files or args.scratch / "files").resolve()
        for part in args.part:
            PARTS[part](args, lines)
    sys.exit(0 if lines.reached else 1)


if __name__ == "__main__":
    main()

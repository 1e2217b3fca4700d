#!/usr/bin/env python3
"""Disturb a chat server under streams, and compare every token with that of a server that was left alone.

    disturbances   kills, suspensions, exceptions in a layer, cut cables (with root), of any rank but 0 and at
                   any moment; a fourth of them with a second one within two seconds, or in the recovery
    overhead       seconds of a run of prompts with --on-failure stop, against continue; of a larger model,
                   with continue, against --replicate; two ranks on a core each, of which none fails

Eight clients ask all the time: conversations, schemas, calls of functions, penalties, two answers at once,
stop strings, seeds. Each answer must have the tokens, the text and the events of the undisturbed one, so none
is lost, comes twice or is another one. ``--seed`` repeats a choice of disturbances.

Needs two idle cores for figures, and minutes: ``--count 1000`` takes an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disturbing import KINDS, Cables, Disturbance, Ranks, cables, free_port
from random_decoders import DecoderShape, write_directory

from pipeedge.base.files import write_secret
from pipeedge.transport.new_key import make_key

PUZZLES = Path(__file__).resolve().parents[1] / "pipeedge" / "assets" / "llama-puzzles"
STREAMS = 8
WORLD = 4
LIMIT_S = 120.0
"""Longest time in seconds for an answer or an end that is due."""
TIMEOUT_S = 5
SHAPES = (
    ("-pt", "1,5,6,10,11,16"),
    ("-pt", "1,3,4,8,9,13,14,16"),
    ("-pt", "1,8,9,16", "-r", "1,2"),
)
"""Partitions: rank 3 is a spare; every rank has a stage; rank 0 has no stage, and rank 3 is a spare."""
DTYPES = ("float32", "bfloat16", "int8", "int4")
PER_RUN = 25
"""Number of disturbances of one server, without those that follow another one at once."""
SECOND_SHARE = 0.25
SECOND_WITHIN_S = 2.0
RECOVERS_WITHIN_S = 15.0
PAUSE_S = 1.0
"""Longest time in seconds until a disturbed rank is started again, if that is not after the recovery."""
MOST_FAULTS = 10
PARTS = ("disturbances", "overhead")
OVERHEAD_GOAL, COPIES_GOAL = 0.99, 0.98


def bodies() -> list[dict[str, Any]]:
    """Return what clients ask: each the route and the document."""
    long = {"ignore_eos": True, "max_tokens": 210}
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    add = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": person}}
    kinds: list[dict[str, Any]] = [
        {**long, "temperature": 0},
        {**long, "temperature": 1, "frequency_penalty": 0.7},
        {**long, "temperature": 1.3, "n": 2},
        {**long, "temperature": 1, "top_p": 0.9, "presence_penalty": 1.5},
        {**long, "temperature": 1, "stop": ["12", "-q"]},
        {"temperature": 1, "max_tokens": 150, "response_format": schema},
        {"temperature": 1, "max_tokens": 150, "tools": [add], "tool_choice": "required"},
        {"temperature": 1, "max_tokens": 120, "structured_outputs": {"regex": "([a-z]{3,9} ){12}"}},
        {**long, "temperature": 0, "logit_bias": {"50": 3, "60": -5}, "repetition_penalty": 1.2},
    ]
    found = []
    for number in range(3 * len(kinds)):
        text = f"Sort {number % 9} 5 {number % 7} 9 1 and {number} more."
        ask = [{"role": "user", "content": text * (1 + number % 2)}]
        found.append(
            {"model": "", "messages": ask, "seed": number, "logprobs": True, **kinds[number % len(kinds)]}
        )
    return found


@dataclass
class Answer:
    """What came of a request, by the number of the answer to it."""

    tokens: dict[int, list[str]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    events: list[int] = field(default_factory=list)
    """Numbers of the events, in the order in which they came."""

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Take an event of a stream."""
        for one in chunk["choices"]:
            number, delta = one["index"], one["delta"]
            found = (one.get("logprobs") or {}).get("content") or ()
            self.tokens.setdefault(number, []).extend(token["token"] for token in found)
            self.texts[number] = self.texts.get(number, "") + (delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                told = (function.get("name") or "") + (function.get("arguments") or "")
                self.calls[number] = self.calls.get(number, "") + told
            if one.get("finish_reason"):
                self.ends[number] = one["finish_reason"]

    @property
    def count(self) -> int:
        """Number of tokens."""
        return sum(map(len, self.tokens.values()))


@dataclass
class Wrong:
    """Tokens that are not as they were without disturbances."""

    lost: int = 0
    twice: int = 0
    changed: int = 0
    other: int = 0
    """Answers with the same tokens and another text, end, call or order of events."""
    failed: int = 0
    """Requests without an answer."""

    def add(self, wanted: Answer, found: Answer) -> bool:
        """Compare an answer with the undisturbed one; return whether they are equal."""
        if found == wanted:
            return True
        same = found.tokens == wanted.tokens
        self.other += same
        for number in wanted.tokens if not same else ():
            one, other = wanted.tokens[number], found.tokens.get(number, [])
            self.lost += max(0, len(one) - len(other))
            self.twice += max(0, len(other) - len(one))
            self.changed += sum(a != b for a, b in zip(one, other, strict=False))
        return False

    @property
    def nothing(self) -> bool:
        """Whether all is as it should be."""
        return not any(vars(self).values())


class Clients:
    """Eight clients of a server, which ask all the time while the body of a ``with`` statement runs.

    Args:
        port: Port of the server.
        net: Network namespaces, in the first of which the server is, or None.
        asked: What they ask.
        wanted: Answers to that.
        seed: Decides who asks what.
    """

    def __init__(
        self,
        port: int,
        net: Cables | None,
        asked: Sequence[Mapping[str, Any]],
        wanted: Sequence[Answer],
        seed: int,
    ) -> None:
        self._port, self._net, self._asked, self._wanted, self._seed = port, net, asked, wanted, seed
        self.wrong = Wrong()
        self.answers = self.tokens = 0
        self.gaps: list[tuple[float, float]] = []
        """Beginning and end of the pauses of streams of more than 50 ms."""
        self.faults: list[str] = []
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Clients:
        opener = threading.Thread(target=self._open)
        opener.start()
        opener.join()
        return self

    def _open(self) -> None:
        """Start the clients in the network of the server, in which this thread then is."""
        if self._net is not None:
            self._net.enter(0)
        for number in range(STREAMS if self._wanted else 1):
            work = self._ask_all if not self._wanted else self._ask
            thread = threading.Thread(target=work, args=(random.Random(f"{self._seed}, {number}"),))
            self._threads.append(thread)
            thread.start()

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _ask_all(self, _: random.Random) -> None:
        """Ask everything once, and keep the answers."""
        self._wanted = [self.stream(body) for body in self._asked]

    def answers_alone(self) -> Sequence[Answer]:
        """Wait for the answers to everything, one after the other."""
        for thread in self._threads:
            thread.join()
        if len(self._wanted) != len(self._asked):
            sys.exit("decoder_failover: the undisturbed server does not answer")
        return self._wanted

    def _ask(self, chance: random.Random) -> None:
        while not self._ends.is_set():
            which = chance.randrange(len(self._asked))
            try:
                found = self.stream(self._asked[which])
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                with self._lock:
                    self.wrong.failed += 1
                    self.faults.append(f"request {which}: {type(error).__name__}: {error}")
                if self._ends.wait(0.2):
                    return
                continue
            with self._lock:
                self.answers += 1
                self.tokens += found.count
                if not self.wrong.add(self._wanted[which], found):
                    self.faults.append(f"request {which}: {found} instead of {self._wanted[which]}")

    def stream(self, body: Mapping[str, Any]) -> Answer:
        """Ask, and read the answer as it grows."""
        found, last = Answer(), 0.0
        for number, chunk in self._events({**body, "stream": True}):
            now = time.monotonic()
            if last and now - last > 0.05:
                self.gaps.append((last, now))
            last = now
            found.events.append(number)
            found.take(chunk)
        return found

    def _events(self, body: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
        try:
            content = json.dumps(body).encode()
            connection.request("POST", "/v1/chat/completions", content, {"content-type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                raise ValueError(f"status {reply.status}: {reply.read()[:300]!r}")
            number = -1
            for raw in reply:
                line = raw.decode().rstrip("\n")
                if line.startswith("id: "):
                    number = int(line.rpartition("-")[2])
                elif line == "data: [DONE]":
                    return
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise ValueError(f"an error in the stream: {chunk['error']}")
                    yield number, chunk
            raise ValueError("the stream ended early")
        finally:
            connection.close()


@dataclass
class Tally:
    """Outcome of all disturbed runs."""

    wrong: Wrong = field(default_factory=Wrong)
    runs: int = 0
    answers: int = 0
    tokens: int = 0
    epochs: int = 0
    disturbances: list[Disturbance] = field(default_factory=list)
    pauses: dict[str, list[float]] = field(default_factory=dict)
    """Longest pause of a stream after each disturbance that came alone and had one, by its kind."""
    faults: list[str] = field(default_factory=list)


def served(directory: Path, net: Cables | None, *options: str, world: int = WORLD) -> tuple[Ranks, int]:
    """Return the ranks of a server, not started yet, and its port."""
    port = free_port()
    common = ("-c", "tcp", "--on-failure", "continue", "--timeout", str(TIMEOUT_S), *options)
    directory.mkdir(parents=True)
    return Ranks(world, common, ("--serve", str(port), "--quiet", "-u", str(STREAMS)), directory, net), port


def wait_for_words(ranks: Ranks, words: str, times: int, limit_s: float) -> bool:
    """Wait until rank 0 has written ``words`` so often; return whether it has."""
    deadline = time.monotonic() + limit_s
    file = ranks.directory / "rank0-1.err"
    while time.monotonic() < deadline and ranks.status(0) is None:
        if file.exists() and file.read_text(errors="replace").count(words) >= times:
            return True
        time.sleep(0.01)
    return False


class DisturbedRun:
    """A server that is disturbed; its seed determines by what, as far as the speed of the machine allows.

    Args:
        directory: Directory of its own.
        net: Network namespaces, or None.
        chance: Decides what happens.
        asked: What is asked.
    """

    def __init__(
        self, directory: Path, net: Cables | None, chance: random.Random, asked: Sequence[Mapping[str, Any]]
    ) -> None:
        self._directory, self._net, self._chance, self._asked = directory, net, chance, asked
        self._kinds = KINDS if net is not None else KINDS[:-1]
        self._disturbances: list[Disturbance] = []

    def run(self, tally: Tally, wanted: Sequence[Answer], options: Sequence[str], count: int) -> None:
        """Serve, and disturb it so often."""
        ranks, port = served(self._directory, self._net, *options)
        with ranks:
            if not wait_for_words(ranks, "answers at", 1, LIMIT_S):
                tally.faults.append(f"the server has not started: {ranks.said()}")
                return
            with Clients(port, self._net, self._asked, wanted, self._chance.randrange(1000)) as clients:
                for _ in range(count):
                    time.sleep(self._chance.uniform(0.1, 0.8))
                    self._disturb(ranks)
                    if ranks.status(0) is not None:
                        break
                time.sleep(0.3)
            said = (ranks.directory / "rank0-1.err").read_text(errors="replace")
            if ranks.status(0) is not None:
                tally.faults.append(f"rank 0 has ended: {said[-3000:]}")
        tally.runs += 1
        tally.answers += clients.answers
        tally.tokens += clients.tokens
        tally.epochs += said.count("the run goes on after")
        tally.disturbances += self._disturbances
        for name, number in vars(clients.wrong).items():
            setattr(tally.wrong, name, getattr(tally.wrong, name) + number)
        tally.faults += clients.faults
        for one in self._disturbances:
            pauses = [end - begin for begin, end in clients.gaps if begin <= one.at_s + 0.05 <= end + 0.05]
            if one.alone and pauses:
                tally.pauses.setdefault(one.kind, []).append(max(pauses))

    def _disturb(self, ranks: Ranks) -> None:
        """Disturb one rank, or two; start them again when the others have gone on, or before."""
        chance, file = self._chance, ranks.directory / "rank0-1.err"
        before = file.read_text(errors="replace")
        targets, kinds = chance.sample(range(1, WORLD), 2), chance.sample(self._kinds, 2)
        made = [ranks.disturb(kinds[0], targets[0])]
        if chance.random() < SECOND_SHARE:
            # In the recovery of a kill, which takes less than 0.2 s, or later.
            time.sleep(chance.choice((0.0, chance.uniform(0.0, 0.2), chance.uniform(0.0, SECOND_WITHIN_S))))
            made.append(ranks.disturb(kinds[1], targets[1]))
            made[0].alone = made[1].alone = False
        self._disturbances += made
        if chance.random() < 0.7:
            words, times = "the run goes on after", before.count("the run goes on after") + 1
            wait_for_words(ranks, words, times, RECOVERS_WITHIN_S if len(made) > 1 else 6.0)
        time.sleep(chance.uniform(0, PAUSE_S))
        for one in made:
            ranks.repair(one)
        joined = before.count("has joined") + len(made)
        wait_for_words(ranks, "has joined", joined, RECOVERS_WITHIN_S)


def undisturbed(
    directory: Path, net: Cables | None, asked: Sequence[Mapping[str, Any]], *options: str
) -> Sequence[Answer]:
    """Return the answers of a server that is left alone."""
    ranks, port = served(directory, net, *options)
    with ranks:
        if not wait_for_words(ranks, "answers at", 1, LIMIT_S):
            sys.exit(f"decoder_failover: the server has not started: {ranks.said()}")
        with Clients(port, net, asked, (), 0) as clients:
            return clients.answers_alone()


def model_with_tools(directory: Path) -> Path:
    """Return the directory of a model like llama-puzzles whose chat template takes functions."""
    shutil.copytree(PUZZLES, directory)
    template = directory / "chat_template.jinja"
    template.write_text("{# tools with parameters, as in ipython #}" + template.read_text())
    return directory


def disturb(directory: Path, net: Cables | None, arguments: argparse.Namespace) -> bool:
    """Disturb servers until that was often enough; print the outcome and return whether it is right."""
    tally, asked, chance = Tally(), bodies(), random.Random(arguments.seed)
    puzzles, key = model_with_tools(directory / "puzzles"), directory / "run.pem"
    write_secret(key, make_key(), "key")
    wanted: dict[str, Sequence[Answer]] = {}
    until = time.monotonic() + arguments.seconds
    while len(tally.disturbances) < arguments.count and time.monotonic() < until:
        dtype = chance.choice(DTYPES)
        model = ("-m", str(puzzles), "--dtype", dtype)
        if dtype not in wanted:
            wanted[dtype] = undisturbed(directory / f"alone-{dtype}", net, asked, *model, *SHAPES[1])
        secure = ("--key", str(key)) if chance.random() < 0.3 else ()
        kept = [option for option in ("--keep-outputs", "--replicate") if chance.random() < 0.5]
        options = (*model, *chance.choice(SHAPES), *secure, *kept)
        run = DisturbedRun(directory / f"run{tally.runs}", net, chance, asked)
        run.run(tally, wanted[dtype], options, min(PER_RUN, arguments.count - len(tally.disturbances)))
        kinds = Counter(one.kind for one in tally.disturbances)
        by_kind = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
        print(
            f"{len(tally.disturbances)} disturbances ({by_kind}) "
            f"in {tally.runs} runs, {tally.epochs} recoveries; {tally.answers:,} answers of {tally.tokens:,} "
            f"tokens: {tally.wrong.lost} lost, {tally.wrong.twice} twice, {tally.wrong.changed} changed, "
            f"{tally.wrong.other} answers otherwise different, {tally.wrong.failed} without an answer",
            flush=True,
        )
        for fault in tally.faults:
            print(fault[:4000], flush=True)
        if len(tally.faults) >= MOST_FAULTS:
            break
        tally.faults.clear()
    for kind, pauses in tally.pauses.items():
        worst = sorted(pauses)[min(len(pauses) - 1, int(0.95 * len(pauses)))]
        print(
            f"longest pause of a stream, {kind}: {statistics.median(pauses):.3f} s "
            f"(median of {len(pauses)}), {worst:.3f} s (95 %), {max(pauses):.3f} s (most)"
        )
    return tally.wrong.nothing


def write_larger(directory: Path, blocks: int = 12, kv_heads: int = 4) -> Path:
    """Return the directory of a model with the tokens of llama-puzzles and random weights."""
    shape = DecoderShape("larger", "llama", blocks, 512, 2048, 8, kv_heads, 260)
    write_directory(shape, directory)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(PUZZLES / file, directory)
    return directory


def measure_overhead(directory: Path, pairs: int) -> bool:
    """Run prompts in two ways in turn; return whether going on costs nothing, and copies next to nothing."""
    larger = str(write_larger(directory / "larger"))
    policies = [("--on-failure", policy) for policy in ("stop", "continue")]
    copies = (*policies[1], "--replicate")
    small = ("-m", "llama-puzzles", "-pt", "1,8,9,16")
    found = compare(directory, small, 200, policies[0], policies[1], pairs, OVERHEAD_GOAL)
    large = ("-m", larger, "-pt", "1,24,25,48")
    return compare(directory, large, 48, policies[1], copies, pairs, COPIES_GOAL) and found


def compare(
    directory: Path,
    model: Sequence[str],
    texts: int,
    base: Sequence[str],
    way: Sequence[str],
    pairs: int,
    goal: float,
) -> bool:
    """Run prompts with two choices of options in turn; return whether the second one is fast enough."""
    prompts = directory / "prompts.jsonl"
    ask = {"ignore_eos": True, "max_tokens": 200}
    prompts.write_text("".join(json.dumps({"prompt": f"{n} 2 1", **ask}) + "\n" for n in range(texts)))
    ratios = []
    for number in range(pairs):
        took = {}
        for options in (base, way) if number % 2 else (way, base):
            place = Path(tempfile.mkdtemp(dir=directory))
            common = (*model, "-c", "tcp", "-u", "8", *options)
            own = ("--input", str(prompts), "--output", "out.jsonl", "--report", "report.json", "--quiet")
            with Ranks(2, common, own, place, None, pinned=True) as ranks:
                if ranks.status(0, LIMIT_S) != 0:
                    sys.exit(f"decoder_failover: a run failed: {ranks.said()}")
            took[options] = json.loads((place / "report.json").read_text())["elapsed_s"]
        ratios.append(took[base] / took[way])
    ratio = statistics.median(ratios)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f} of {pairs} pairs"
    print(
        f"speed of {' '.join(way)} against {' '.join(base)}: {ratio:.3f} ({spread}; goal {goal})", flush=True
    )
    return ratio >= goal


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of overhead (3)")
    parser.add_argument("--count", type=int, default=100, help="number of disturbances (100)")
    parser.add_argument("--seconds", type=float, default=1e9, help="longest time for all of them")
    parser.add_argument("--seed", type=int, default=0, help="decides what is disturbed, and when (0)")
    parser.add_argument("--no-cables", action="store_true", help="use the loopback, even with root")
    arguments = parser.parse_args()
    right = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        if "overhead" in arguments.part:
            right.append(measure_overhead(directory, arguments.rounds))
        if "disturbances" in arguments.part:
            with contextlib.nullcontext() if arguments.no_cables else cables(WORLD) as net:
                right.append(disturb(directory, net, arguments))
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()

"""Measure a pipeline that answers. Every part prints its line when it is done, and can be run alone.

    saturated    as many items as it takes, asked through pipeedge.Pipeline, against a batch run of as many
    alone        one request at a time over HTTP, above the pipeline's own latency
    padding      padding tokens of sentences of like length together, against batches in order of arrival
    kills        a stage is killed and started again, time after time, while requests arrive
    mixed        requests of many clients, a tenth of them bad; good answers are those of transformers
    idle         processor time while nothing is asked
    embeddings   BERT-Base on two ranks of one thread, against sentence-transformers with two threads

    python benchmarks/serving.py --part mixed
    python benchmarks/serving.py --part saturated -m google/vit-base-patch16-224 --seconds 60

All is on this machine. Rates and latencies (saturated, alone, embeddings) need two idle cores; the others
tell as much on busy ones. Needs ``pip install 'pipeedge[serve,bench]'``.

What arrives during kills is an open loop: MLPerf's LoadGen draws the times, and requests do not wait for the
answers to others. ``saturated`` asks from Python, as a client that speaks HTTP would be the bottleneck of a
small model. ``padding`` takes CoLA from the cache of ``datasets``, or any file with a sentence a line.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from mixed import ask_all, digit_questions, sentence_questions
from PIL import Image
from rates import TOKENS, Rate, asked_rate, batch_rate, example, median_rate
from served import LIMIT_S, WORDS, Client, Ranks, open_loop, save_embedder

from pipeedge import Pipeline
from pipeedge.data.cola import read_split
from pipeedge.models import Model, find_model
from pipeedge.models.weights.writing import write_random
from pipeedge.run.progress import Collected

DIGITS, VIT, BERT = "vit-digits", "google/vit-base-patch16-224", "bert-base-uncased"
PAUSE_S = 0.02
"""Pause between lone requests."""
SENTENCES = 8
"""Number of sentences of a request for embeddings, which is the size of a microbatch, too."""
STAGES = ("1,6", "7,12", "13,16")
"""Layers of the stages that are killed; one more rank is a spare."""
KILL_S = 3.0
"""Seconds of requests around each kill."""
SLOW_S = 8
"""Seconds within which a body must have come."""
MOST_FAULTS = 20
CONTINUE = ("--on-failure", "continue", "--timeout", "20")
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
"""Sizes of an embedder that computes its answers in no time."""
MEDIUM = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
"""Sizes of one that its clients keep busy, so that sentences wait."""
REFERENCE = """
import json, sys, time, warnings
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(2)
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
requests = json.loads(sys.argv[2])
model.encode(requests[0], batch_size=len(requests[0]))
began = time.perf_counter()
for request in requests:
    vectors = model.encode(request, batch_size=len(request))
print(json.dumps([len(requests) / (time.perf_counter() - began), vectors[0].tolist()]))
"""


def row(name: str, text: str) -> None:
    """Print a line of the table."""
    print(f"{name:24} {text}", flush=True)


def embed(client: Client, sentences: Sequence[str]) -> list[list[float]]:
    """Return the vectors of sentences."""
    reply = client.ask("/embed", json.dumps({"inputs": sentences}).encode())
    if reply.status != 200:
        raise SystemExit(f"serving: {reply.status}: {reply.line}")
    return list(json.loads(reply.body))


# -- rates -------------------------------------------------------------------------------------------


def opened(name: str, directory: Path) -> Model:
    """Return a model; BERT-Base as an embedder with a vocabulary, so that it can be asked."""
    if name != BERT:
        return find_model(name)
    save_embedder(directory / "bert-base")
    return find_model(str(directory / "bert-base"))


def random_weights(model: Model, directory: Path) -> list[str]:
    """Return the options for random weights, which are as fast as any; none for a model that has some."""
    if model.name == DIGITS or model.directory is not None:
        return []
    path = directory / "weights.npz"
    if not path.exists():
        write_random(path, model.build(), model.config, seed=0)
    return ["-M", str(path)]


def saturated(args: argparse.Namespace) -> None:
    """Compare the rate of a pipeline that is asked with that of a batch run, in turn."""
    for name in [args.model_name] if args.model_name else [DIGITS, VIT, BERT]:
        with tempfile.TemporaryDirectory() as directory:
            model = opened(name, Path(directory))
            options = random_weights(model, Path(directory))
            asked, batch, shares = list[Rate](), list[Rate](), list[float]()
            for _ in range(args.rounds):
                rate, share, count = asked_rate(model, options, args.ranks, args.seconds)
                asked.append(rate)
                shares.append(share)
                batch.append(batch_rate(model, options, args.ranks, count, Path(directory)))
        ratio = statistics.median(
            one.items_per_s / other.items_per_s for one, other in zip(asked, batch, strict=True)
        )
        taker = f"the thread that takes the answers has {statistics.median(shares):.1%} of a core"
        rates = f"{median_rate(asked)}; a batch run: {median_rate(batch)}"
        row(f"saturated {name.split('/')[-1]}", f"{ratio:.2f} ({rates}; {taker}; at least 0.95)")


def embeddings(args: argparse.Namespace) -> None:
    """Compare embeddings of BERT-Base with those of one process of sentence-transformers."""
    chance = np.random.default_rng(0)
    requests = [
        [" ".join(chance.choice(WORDS, 30)) for _ in range(SENTENCES)] for _ in range(max(8, args.requests))
    ]
    with tempfile.TemporaryDirectory() as directory:
        save_embedder(Path(directory))
        patient = ("--request-timeout", str(int(LIMIT_S)))
        with Ranks(directory, 2, "-u", str(SENTENCES), *patient) as ranks:
            clients = [Client(ranks.port) for _ in range(8)]
            with ThreadPoolExecutor(len(clients)) as workers:
                list(workers.map(embed, clients, requests))
                began = time.perf_counter()
                found = list(workers.map(lambda request: embed(Client(ranks.port), request), requests))
                ours = len(requests) / (time.perf_counter() - began)
        command = [sys.executable, "-c", REFERENCE, directory, json.dumps(requests)]
        out = subprocess.run(
            command, check=True, text=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "2"}
        )
    theirs, vector = json.loads(out.stdout)
    off = float(np.abs(np.subtract(found[-1][0], vector)).max())
    rates = f"{ours:.2f} requests/s of {SENTENCES} sentences, sentence-transformers {theirs:.2f}"
    row("embeddings", f"{ours / theirs:.2f} ({rates}; at least 1.5); vectors differ by {off:.1e}")


# -- one at a time -----------------------------------------------------------------------------------


def lone_request(model: Model) -> tuple[str, bytes, str]:
    """Return route, body and type of a request that is quickly read."""
    one = example(model)
    if not model.takes_text:
        stream = io.BytesIO()
        Image.fromarray(one).save(stream, "PNG")
        return "/classify", stream.getvalue(), "image/png"
    inputs = [
        {"name": name, "shape": [1, TOKENS], "datatype": "INT64", "data": row.tolist()}
        for name, row in one.items()
    ]
    return f"/v2/models/{model.name}/infer", json.dumps({"inputs": inputs}).encode(), "application/json"


@contextmanager
def latencies() -> Iterator[list[float]]:
    """Yield a list of the seconds that each microbatch takes from the data rank and back."""
    found: list[float] = []
    came = Collected.came

    def noted(
        self: Collected, now: float, began_at: float | None, sent_at: float, *rest: Any, **more: Any
    ) -> None:
        found.append(now - sent_at)
        came(self, now, began_at, sent_at, *rest, **more)

    Collected.came = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Collected.came = came  # type: ignore[method-assign]


def alone(args: argparse.Namespace) -> None:
    """Compare the time of a lone request with that of a microbatch from the data rank and back."""
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        model = opened(args.model_name or DIGITS, Path(directory))
        path, body, kind = lone_request(model)
        options = random_weights(model, Path(directory))
        with Ranks(model.name, args.ranks, *options) as ranks:
            client = Client(ranks.port)
            for _ in range(args.requests):
                time.sleep(PAUSE_S)
                began = time.perf_counter()
                reply = client.ask(path, body, kind=kind)
                seconds.append(time.perf_counter() - began)
                if reply.status != 200:
                    raise SystemExit(f"serving: {reply.status}: {reply.line}")
        one = example(model)
        with latencies() as own, Pipeline(model.name, ranks=args.ranks, options=options) as pipeline:
            for _ in range(args.requests):
                time.sleep(PAUSE_S)
                pipeline(one)
    http, below = statistics.median(seconds) * 1e3, statistics.median(own) * 1e3
    row("alone", f"{http - below:.1f} ms above the pipeline's own {below:.1f} ms (medians; at most 3)")


def idle(args: argparse.Namespace) -> None:
    """Measure the processor time while nothing is asked."""
    with Ranks(args.model_name or DIGITS, args.ranks) as ranks:
        time.sleep(2)
        before = ranks.cpu_s()
        time.sleep(args.seconds)
        spent = (ranks.cpu_s() - before) / args.seconds
    row("idle", f"{spent:.2%} of a core over {args.ranks} ranks in {args.seconds:.0f} s (below 1 %)")


# -- many at a time ----------------------------------------------------------------------------------


def padding(args: argparse.Namespace) -> None:
    """Count the tokens that only pad a batch, against batches in order of arrival."""
    if args.sentences is None:
        sentences = [str(each) for each in read_split(None, "train")["sentence"]]
    else:
        sentences = [line for line in args.sentences.read_text().splitlines() if line.strip()]
    requests = [list(some) for some in batched(sentences)]
    with tempfile.TemporaryDirectory() as directory:
        save_embedder(Path(directory), **MEDIUM)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        lengths = [[len(ids) for ids in tokenizer(request)["input_ids"]] for request in requests]
        with Ranks(directory, 1, "-u", str(SENTENCES)) as ranks, ThreadPoolExecutor(args.clients) as workers:
            found = list(workers.map(lambda request: embed(Client(ranks.port), request), requests))
            figures = ranks.figures()
    if [len(each) for each in found] != [len(each) for each in requests]:
        raise SystemExit("serving: a sentence has no vector")
    in_order = sum(len(each) * max(each) for each in lengths)
    needed = sum(map(sum, lengths))
    padded = int(figures["pipeedge_padded_tokens_total"])
    row(
        "padding",
        f"{1 - (padded - needed) / (in_order - needed):.0%} fewer padding tokens than in order of arrival "
        f"(at least 30 %): {padded - needed:,} and {in_order - needed:,} beside the {needed:,} of "
        f"{len(sentences):,} sentences; {1 - padded / in_order:.0%} fewer tokens are computed",
    )


def batched(sentences: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the sentences of each request."""
    for start in range(0, len(sentences), SENTENCES):
        yield sentences[start : start + SENTENCES]


def kills(args: argparse.Namespace) -> None:
    """Kill a stage and start it again, time after time, while requests arrive."""
    questions, _ = digit_questions()
    chance = random.Random(args.seed)

    def send(client: Client, index: int) -> str | None:
        question = questions[index]
        return question.fault(client.ask(question.path, question.body, kind=question.kind))

    failed, after, asked_items = list[str](), list[float](), 0
    with (
        Ranks(DIGITS, len(STAGES) + 1, *CONTINUE, "-pt", ",".join(STAGES)) as ranks,
        open_loop(send, ranks.port, rate=args.rate, inputs=len(questions)) as ask,
        ThreadPoolExecutor(1) as load,
    ):
        for number in range(args.kills):
            stages = json.loads(Client(ranks.port).ask("/status").body)["stages"]
            rank = chance.choice([stage["rank"] for stage in stages if stage["rank"] != 0])
            asking = load.submit(ask, KILL_S)
            time.sleep(chance.uniform(0.2, 0.6) * KILL_S)
            killed_at = time.perf_counter()
            ranks.kill(rank)
            ranks.start(rank)
            asked = asking.result()
            ranks.until("has joined", number + 1)
            failed += asked.failed
            asked_items += sum(questions[index].items for index in asked.inputs)
            after += [
                seconds
                for at_s, seconds in zip(asked.at_s, asked.latencies_s, strict=True)
                if killed_at - seconds <= at_s < killed_at + 1
            ]
        figures = ranks.figures()
    answered = int(figures["pipeedge_items_answered_total"])
    for line in failed[:MOST_FAULTS]:
        print(f"  {line}")
    p99 = sorted(after)[int(0.99 * (len(after) - 1))]
    row(
        "kills",
        f"{args.kills} kills, {asked_items:,} items in requests: {len(failed)} requests failed (0), "
        f"{answered - asked_items} items answered twice (0); p99 within a second of a kill {p99:.2f} s",
    )


def mixed(args: argparse.Namespace) -> None:
    """Ask good and bad things at a time, of an image classifier and of an embedder."""
    with tempfile.TemporaryDirectory() as directory:
        save_embedder(Path(directory), **SMALL)
        for name, model, (good, bad) in (
            ("mixed vit-digits", DIGITS, digit_questions()),
            ("mixed embedder", directory, sentence_questions(Path(directory), 300)),
        ):
            options = ["--max-waiting", str(16 * args.clients), "--request-timeout", str(SLOW_S)]
            with Ranks(model, args.ranks, *options) as ranks:
                found = ask_all(ranks, good, bad, count=args.count, clients=args.clients)
                said = [line for line in ranks.said().splitlines() if "answers at" not in line]
            for line in (*found.faults[:MOST_FAULTS], *said[:MOST_FAULTS]):
                print(f"  {line}")
            wrong = sum(found.asked[question.name] for question in bad)
            row(
                name,
                f"{args.count:,} requests of {args.clients} clients, {wrong:,} bad, in "
                f"{found.elapsed_s:.0f} s: {len(found.faults)} answers are not as due (0); memory of the "
                f"last third against the second {found.growth:.3f} (flat)",
            )


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    each.__name__: each for each in (saturated, alone, padding, kills, mixed, idle, embeddings)
}
NEEDS = {"kills": "mlperf_loadgen", "embeddings": "sentence_transformers"}
"""Modules of the extra ``bench`` that parts import long after their start."""


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="part to measure (all)")
    parser.add_argument(
        "-m", "--model-name", help="model of saturated, alone and idle (all three; vit-digits)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of saturated and idle (20)")
    parser.add_argument("--rounds", type=int, default=3, help="comparisons of saturated, for a median (3)")
    parser.add_argument("--requests", type=int, default=100, help="requests of alone and embeddings (100)")
    parser.add_argument("--sentences", type=Path, metavar="FILE", help="sentences of padding (CoLA's)")
    parser.add_argument("--kills", type=int, default=100, help="number of kills (100)")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second of kills (50)")
    parser.add_argument("--count", type=int, default=10_000, help="requests of mixed (10,000)")
    parser.add_argument("--clients", type=int, default=64, help="clients of padding and mixed (64)")
    parser.add_argument("--seed", type=int, default=0, help="which stages are killed, and when (0)")
    args = parser.parse_args()
    parts = [name for name in PARTS if args.part is None or name in args.part]
    for name in parts:
        if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
            parser.error(f"the part {name} needs {NEEDS[name]}: pip install 'pipeedge[serve,bench]'")
    os.environ["OMP_NUM_THREADS"] = "1"
    transformers.utils.logging.disable_progress_bar()
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    for name in parts:
        PARTS[name](args)


if __name__ == "__main__":
    main()

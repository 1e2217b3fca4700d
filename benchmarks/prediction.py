"""Compare predictions with measurements: ``python benchmarks/prediction.py``.

For each model, profiles two cores of this machine, lets the scheduler cut the model for a rank on each, runs
the ranks pinned to these cores, and compares the throughput with the prediction. To obtain other cuts, the
second host is given less memory, so that predictions still use measured times. Needs an idle machine; reports
medians over repetitions.

``--quotas`` runs four ranks instead, each on a host of the test bed with a quota of processor time: four
equal hosts, and two that are twice as fast as the other two. Needs root.

``--text`` runs a BERT with sentences of several lengths, and also shows the prediction from a profile of only
the longest sentence.

``--mixed`` runs a BERT with an input of sentences of several lengths, in no order, and also shows the
prediction for the longest sentence alone.

``--decoder`` runs a decoder of a public shape with random weights on two pinned cores: one stream and
several, each with the cut that the scheduler chooses and with one that memory forces. Tokens a second, the
time between two tokens, that to the first one, and the bytes of the cache are compared. Tokens a second are
also compared *as run*: with what is predicted for hosts as fast as the run found them, which does not count
where short runs end before any host is measured, because slow runs alone have it then. Cores share the memory
that steps wait for, which hosts do not. So they are profiled as the run finds them: for one stream, whose
stages take turns, one after the other, while the other core spins, and for several at the same time. Both
count with the mean.

``--decoder --quotas`` runs four ranks of a small decoder in int4, with 32 texts, on hosts of the test bed
with quotas, also with narrow links. Where the plan is one host alone, it is profiled and run again as
that: a host took 1.3 to 1.5 times as long where no other one kept the machine's memory busy. Needs root.

``--sums`` runs no ranks: it compares the sums of layer times over random ranges with the times of these
ranges as shards, both measured alternately in one process.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decoder_replan
import numpy as np
import torch
import yaml
from beds import Kind, Workload, median_document, raised, steady_items_per_s
from decoder_failover import write_larger
from random_decoders import SHAPES, write_directory
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pipeedge.base.payload import Payload
from pipeedge.base.schedule import LayerRange
from pipeedge.data.defaults import PHOTO_FILE, asset
from pipeedge.models import Shard, find_model
from pipeedge.plan import scheduler
from pipeedge.profile.measuring import Pacing, made_up_payload, time_layers

ROOT = Path(__file__).resolve().parents[1]
MODELS = (
    "google/vit-base-patch16-224",
    "facebook/deit-small-distilled-patch16-224",
    "facebook/deit-tiny-distilled-patch16-224",
)
CUTS = (1 / 2, 1 / 3, 1 / 6)
"""Fraction of the layers that the second host can hold."""
TARGET = 0.05
QUOTAS = {
    "4 x 0.25": (Kind("quarter", 4, 0.25, 1000),),
    "2 x 0.4, 2 x 0.2": (Kind("fast", 2, 0.4, 1000), Kind("slow", 2, 0.2, 1000)),
}
DECODER_QUOTAS = {
    "4 x 0.4": (Kind("host", 4, 0.4, 1000),),
    "2 x 0.5, 2 x 0.25": (Kind("host", 2, 0.5, 1000), Kind("other", 2, 0.25, 1000)),
    "4 x 0.4, 5 Mbps": (Kind("host", 4, 0.4, 5),),
}
QUOTA_TEXTS = decoder_replan.Texts(tokens=200, count=32, dtype="int4", temperature=0.0)
"""So many, of such a type, that each text makes a step longer, whatever the processor. Then the best plan
keeps every host at work: one that waits pauses less than its quota says, and is no slow host. Profiles are of
greedy texts where the files of a model ask for no others."""
QUOTA_BLOCKS, QUOTA_KV_HEADS = 60, 1
"""Size of the decoder: steps of a stage take several periods of a quota, and cache little."""
QUOTA_ITERATIONS = 5
QUOTAS_TARGET = 0.1
TEXT_MODEL = "bert-base-uncased"
TEXT_LENGTHS = (16, 64, 128, 256)
"""Tokens of the sentences to run; 32, 128 and 512 are profiled."""
TEXT_TARGET = 0.1
MIXED_LENGTHS = (12, 200)
"""Shortest and longest sentence of a mixture, in which short ones are more frequent."""
MIXED_TARGET = 0.05
DECODER_PROMPT = 96
DECODER_ANSWERS = {1: 64, 8: 600}
"""Tokens of each answer, by the number of streams: long ones for a run that is watched, short ones where
texts are to follow each other, as the cache has no room for two."""
DECODER_TEXTS = 8
DECODER_TARGET = 0.1
UBATCH = 8
LEAST_MICROBATCHES = 8
RUN_S = 12.0
LIMIT_S = 600


@dataclass(frozen=True)
class Cores:
    """Processors that ranks run on."""

    numbers: tuple[int, ...]
    first: bool
    """Whether ranks have priority over nearly all other work, for a machine that is not idle. Needs root.
    This is not a real-time policy, under which the threads of a rank would not share its core."""

    def pinned(self, index: int) -> list[str]:
        """Return the command prefix that pins a process to the processor of ``index``."""
        # Linux first divides processors between sessions, by the niceness of each, then within each.
        script = 'echo -20 > /proc/self/autogroup; exec nice -n -20 "$@"'
        priority = ["sh", "-c", script, "sh"] if self.first else []
        return ["taskset", "-c", str(self.numbers[index]), *priority]


def environment() -> dict[str, str]:
    """Return the environment of a rank, with one compute thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def profile(model: str, directory: Path, cores: Cores, iterations: int | None, ubatch: int = UBATCH) -> None:
    """Write ``models.yml`` and ``device_types.yml`` with the types core0 and core1.

    Both cores are profiled at once, because they share caches and memory bandwidth in the run. Without
    ``iterations`` the profiler chooses their number, as it does for its users: more for a small model.
    """
    options = ["-m", model, "--random-weights", "-b", str(ubatch)]
    if iterations is not None:
        options += ["-i", str(iterations)]
    running = []
    for core in range(2):
        place = directory / f"core{core}"
        place.mkdir()
        emit = ["-dt", place.name, "--mem-MB", "65536", "--bw-Mbps", "8000"]
        command = [*cores.pinned(core), sys.executable, str(ROOT / "profiler.py"), *options, *emit]
        running.append(start(command, place))
    wait(running)
    shutil.copy(directory / "core0" / "models.yml", directory)
    kinds = {}
    for core in range(2):
        kinds.update(read(directory / f"core{core}" / "device_types.yml"))
    (directory / "device_types.yml").write_text(yaml.safe_dump(kinds))


def start(command: Sequence[str], directory: Path) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own and discard its standard output."""
    return subprocess.Popen(
        command, cwd=directory, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True
    )


def wait(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have succeeded."""
    for process in running:
        if process.wait(LIMIT_S):
            raise SystemExit(f"{process.args} failed with exit status {process.returncode}")


def read(path: Path) -> dict[str, Any]:
    """Read a YAML file."""
    return dict(yaml.safe_load(path.read_text()))


def write_cluster(model: str, directory: Path, part: float, ubatch: int = UBATCH) -> None:
    """Write two hosts; the second can hold only the fraction ``part`` of the layers, with buffers."""
    spec = read(directory / "models.yml")[model]
    kinds = read(directory / "device_types.yml")
    layers = int(part * spec["layers"]) // 4 * 4
    buffered = 2 * (spec["parameters_out"][-layers - 1] + spec["parameters_out"][-1])
    activations = max(kinds["core1"]["model_profiles"][model][0]["activations_MB"][-layers:])
    memory = sum(spec["mem_MB"][-layers:]) + activations + buffered * ubatch * 4 / 2**20
    kinds["core1"]["mem_MB"] = memory + 0.001
    (directory / "kinds.yml").write_text(yaml.safe_dump(kinds))
    (directory / "devices.yml").write_text(yaml.safe_dump({"core0": ["0"], "core1": ["1"]}))


def run(
    model: str, weights: Path, directory: Path, cores: Cores, items: int, port: int, own: Sequence[str] = ()
) -> dict[str, Any]:
    """Run two ranks with a computed schedule; return the report.

    ``own`` are options of the data rank. Without any, its input is as many files as there are items, which
    are decoded in the run as in the profile; the input of a run that names none is in memory.
    """
    own = own or ("--input", str(write_photos(directory / "photos", items)))
    files = ["-sm", "models.yml", "-sdt", "kinds.yml", "-sd", "devices.yml"]
    common = ["-m", model, "-M", str(weights), "-b", str(items), "-u", str(UBATCH), "--port", str(port)]
    options = [[*files, "--report", "report.json", *own], []]
    script = [sys.executable, str(ROOT / "runtime.py")]
    wait(
        [
            start([*cores.pinned(rank), *script, str(rank), "2", *common, *options[rank]], directory)
            for rank in range(2)
        ]
    )
    return dict(json.loads((directory / "report.json").read_text()))


def write_photos(directory: Path, items: int) -> Path:
    """Fill ``directory`` with copies of the photo that the profiler decodes, and return it."""
    directory.mkdir()
    for number in range(items):
        shutil.copyfile(asset(PHOTO_FILE), directory / f"{number:06}.jpg")
    return directory


def errors(reports: Sequence[dict[str, Any]], key: str) -> float:
    """Return the median of an error, as a fraction."""
    return statistics.median(report["predicted"][f"{key}_error_percent"] for report in reports) / 100


def measure(model: str, cores: Cores, arguments: argparse.Namespace, table: Table, console: Console) -> float:
    """Compare one model at all cuts and return the worst error."""
    worst = 0.0
    name = model.split("/")[-1]
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        weights = random_weights(model, directory)
        for number, part in enumerate(CUTS):
            reports = []
            for repetition in range(arguments.repetitions):
                # Profile before each run: machines drift, and predictions are for a recent profile.
                shutil.rmtree(directory / "profile", ignore_errors=True)
                work = directory / "profile"
                work.mkdir()
                profile(model, work, cores, arguments.iterations)
                write_cluster(model, work, part)
                kind = read(work / "device_types.yml")["core0"]
                pass_s = sum(kind["model_profiles"][model][0]["time_s"])
                count = max(LEAST_MICROBATCHES, int(RUN_S / (pass_s * max(part, 1 - part))))
                port = arguments.port + repetition + number * arguments.repetitions
                reports.append(run(model, weights, work, cores, UBATCH * count, port))
                off = reports[-1]["predicted"]["throughput_items_per_s_error_percent"]
                console.print(
                    f"{name}, cut {number + 1}, run {repetition + 1}: {off:+.1f} %", highlight=False
                )
            last = reports[-1]
            layers = last["schedule"][0]["layers"][1]
            steady, whole = errors(reports, "throughput_items_per_s"), errors(reports, "run_items_per_s")
            stages = [
                statistics.median(
                    report["predicted"]["stages"][stage]["compute_s_error_percent"] for report in reports
                )
                for stage in range(2)
            ]
            predicted = last["predicted"]
            table.add_row(
                name,
                f"1-{layers} | {layers + 1}-{last['schedule'][1]['layers'][1]}",
                f"{predicted['throughput_items_per_s']:.2f}",
                f"{predicted['throughput_items_per_s_measured']:.2f}",
                f"{steady:+.1%}",
                f"{whole:+.1%}",
                *(f"{error:+.1f}%" for error in stages),
            )
            worst = max(worst, abs(steady))
    return worst


def random_weights(model: str, directory: Path) -> Path:
    """Write random weights of the right shapes to ``directory``."""
    command = [sys.executable, str(ROOT / "save_model_weights.py"), "--random", "-m", model]
    subprocess.run(
        [*command, "-o", str(directory)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )
    (weights,) = (path for path in directory.iterdir() if path.suffix in (".npz", ".safetensors"))
    return weights


def write_sentences(path: Path, items: int, tokens: int) -> None:
    """Write ``items`` sentences of ``tokens`` arbitrary tokens each, as arrays."""
    ids = np.random.default_rng(0).integers(1000, 20000, (items, tokens))
    np.savez(path, input_ids=ids, attention_mask=np.ones_like(ids), token_type_ids=np.zeros_like(ids))


def measure_text(model: str, cores: Cores, arguments: argparse.Namespace, table: Table) -> float:
    """Compare a text model at several lengths by medians over repetitions, and return the worst error."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        weights = random_weights(model, directory)
        promised: dict[int, list[float]] = {tokens: [] for tokens in TEXT_LENGTHS}
        measured: dict[int, list[float]] = {tokens: [] for tokens in TEXT_LENGTHS}
        before: list[float] = []
        for repetition in range(arguments.repetitions):
            work = directory / f"profile{repetition}"
            work.mkdir()
            profile(model, work, cores, arguments.iterations)
            write_cluster(model, work, CUTS[0])
            for number, tokens in enumerate(TEXT_LENGTHS):
                asked = scheduler.SchedulerRequest(
                    work / "models.yml",
                    work / "kinds.yml",
                    work / "devices.yml",
                    model,
                    UBATCH,
                    tokens=tokens,
                )
                rate = scheduler.plan(asked).costs.throughput_items_per_s or 1.0
                items = UBATCH * max(LEAST_MICROBATCHES, int(RUN_S * rate / UBATCH))
                write_sentences(work / "sentences.npz", items, tokens)
                port = arguments.port + repetition * len(TEXT_LENGTHS) + number
                own = ("--input", "sentences.npz")
                predicted = run(model, weights, work, cores, items, port, own)["predicted"]
                promised[tokens].append(predicted["throughput_items_per_s"])
                measured[tokens].append(predicted["throughput_items_per_s_measured"])
            as_profiled = dataclasses.replace(asked, tokens=None)
            alone = scheduler.plan(as_profiled).costs.throughput_items_per_s
            before.append(alone or 1.0)
        for tokens in TEXT_LENGTHS:
            errors = [
                found / wanted - 1 for found, wanted in zip(measured[tokens], promised[tokens], strict=True)
            ]
            old = [found / wanted - 1 for found, wanted in zip(measured[tokens], before, strict=True)]
            middle = statistics.median(errors)
            rates = (statistics.median(promised[tokens]), statistics.median(measured[tokens]))
            row = (*(f"{rate:.2f}" for rate in rates), f"{middle:+.1%}", f"{statistics.median(old):+.0%}")
            table.add_row(model, str(tokens), *row)
            worst = max(worst, abs(middle))
    return worst


def write_mixture(directory: Path, items: int) -> list[str]:
    """Write ``items`` sentences of mixed lengths, a file each, and return the names of the files."""
    directory.mkdir()
    shortest, longest = MIXED_LENGTHS
    drawn = np.exp(np.random.default_rng(1).uniform(np.log(shortest), np.log(longest), items))
    names = []
    for number, tokens in enumerate([longest, *drawn.round().astype(int).tolist()[1:]]):
        names.append(f"{directory.name}/{number:05}.npz")
        write_sentences(directory / f"{number:05}.npz", 1, tokens)
    return names


def measure_mixed(model: str, cores: Cores, arguments: argparse.Namespace, table: Table) -> float:
    """Compare a text model with a mixture of lengths by medians over repetitions, and return the error."""
    promised, measured, longest = [], [], []
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        weights = random_weights(model, directory)
        for repetition in range(arguments.repetitions):
            work = directory / f"profile{repetition}"
            work.mkdir()
            profile(model, work, cores, arguments.iterations)
            write_cluster(model, work, CUTS[0])
            files = (work / "models.yml", work / "kinds.yml", work / "devices.yml")
            asked = scheduler.SchedulerRequest(*files, model, UBATCH, tokens=MIXED_LENGTHS[1])
            rate = scheduler.plan(asked).costs.throughput_items_per_s or 1.0
            items = UBATCH * max(LEAST_MICROBATCHES, int(RUN_S * 1.3 * rate / UBATCH))
            own = ("--input", *write_mixture(work / "sentences", items))
            predicted = run(model, weights, work, cores, items, arguments.port + repetition, own)["predicted"]
            promised.append(predicted["throughput_items_per_s"])
            measured.append(predicted["throughput_items_per_s_measured"])
            longest.append(rate)
    off = [
        [found / wanted - 1 for found, wanted in zip(measured, known, strict=True)]
        for known in (promised, longest)
    ]
    middle = statistics.median(off[0])
    rates = (f"{statistics.median(rate):.2f}" for rate in (promised, measured))
    each = " ".join(f"{error:+.1%}" for error in off[0])
    table.add_row(model, *rates, f"{middle:+.1%}", f"{statistics.median(off[1]):+.0%}", each)
    return abs(middle)


def measure_quotas(
    model: str, arguments: argparse.Namespace, table: Table, directory: Path, console: Console
) -> float:
    """Compare one model on four hosts with quotas by medians over repetitions; return the worst error."""
    worst = 0.0
    load = Workload(model, UBATCH, directory)
    for title, kinds in QUOTAS.items():
        promised, measured = [], []
        for repetition in range(arguments.repetitions):
            place = directory / f"{load.name}-{kinds[0].name}-{repetition}"
            with raised(f"prediction{os.getpid()}", kinds, place) as bed:
                bed.profile(load, arguments.iterations or QUOTA_ITERATIONS)
                promise = bed.schedule(load, bed.hosts)
                count = max(LEAST_MICROBATCHES * 2, int(RUN_S * 2 * promise.items_per_s / UBATCH))
                (report,) = bed.run(load, [promise.pipeline], [UBATCH * count])
            promised.append(promise.items_per_s)
            measured.append(steady_items_per_s(report))
            off = measured[-1] / promised[-1] - 1
            console.print(f"{load.name}, {title}, run {repetition + 1}: {off:+.1%}", highlight=False)
        errors = [found / wanted - 1 for found, wanted in zip(measured, promised, strict=True)]
        middle = statistics.median(errors)
        row = (f"{statistics.median(promised):.2f}", f"{statistics.median(measured):.2f}", f"{middle:+.1%}")
        table.add_row(load.name, title, *row, " ".join(f"{error:+.1%}" for error in errors))
        worst = max(worst, abs(middle))
    return worst


def profile_decoder(model: Path, dtype: str, directory: Path, cores: Cores, *, busy: bool) -> None:
    """Write ``models.yml`` and ``kinds.yml`` for both cores, which have the mean of what was found on them.

    They are equal: what differs between two profiles is noise, by which the cut would be unequal.

    Args:
        model: Directory of the model.
        dtype: Number type.
        directory: Where to write.
        cores: The cores.
        busy: Whether both compute at the same time, rather than one after the other. Then, the other core
            spins: in a run, too, one of them always computes, and a machine that idles wakes up more slowly.
    """
    meeting = directory / "meeting"
    meeting.mkdir(parents=True)
    together = [str(ROOT / "benchmarks" / "profile_together.py"), str(meeting), "2"]
    running = []
    for core in range(2):
        place = directory / f"core{core}"
        place.mkdir()
        script = [*together, place.name] if busy else [str(ROOT / "profiler.py")]
        options = ["-m", str(model), "--dtype", dtype, "-dt", place.name]
        options += ["--mem-MB", "65536", "--bw-Mbps", "8000"]
        running.append(start([*cores.pinned(core), sys.executable, *script, *options], place))
        if not busy:
            spinning = start([*cores.pinned(1 - core), sys.executable, "-c", "while True: pass"], place)
            try:
                wait(running)
            finally:
                spinning.kill()
                spinning.wait()
    wait(running)
    names = ("core0", "core1")
    found = median_document([read(directory / name / "device_types.yml")[name] for name in names])
    shutil.copy(directory / "core0" / "models.yml", directory)
    kinds = {name: copy.deepcopy(found) for name in names}
    (directory / "kinds.yml").write_text(yaml.safe_dump(kinds))
    (directory / "devices.yml").write_text(yaml.safe_dump({"core0": ["0"], "core1": ["1"]}))


def force_cut(model: Path, directory: Path, streams: int) -> None:
    """Leave both hosts with memory for about half of the layers, besides the head."""
    kinds = read(directory / "kinds.yml")
    one = kinds["core0"]["model_profiles"][str(model)][0]
    context = -(-(DECODER_PROMPT + DECODER_ANSWERS[streams]) // 32) * 32
    cache = streams * context * sum(one["steps"]["cache_bytes"]) / 2**20
    weights = sum(one.get("weights_MB") or read(directory / "models.yml")[str(model)]["mem_MB"])
    kinds["core1"]["mem_MB"] = 0.6 * (weights + cache) + 20
    kinds["core0"]["mem_MB"] = kinds["core1"]["mem_MB"] + one["steps"]["ends"]["mem_MB"]
    (directory / "kinds.yml").write_text(yaml.safe_dump(kinds))


def run_decoder(
    model: Path, dtype: str, streams: int, directory: Path, cores: Cores, port: int
) -> dict[str, Any]:
    """Run two ranks with the scheduler's cut; return the report."""
    chance = random.Random(streams)
    rows = [
        {
            "prompt_token_ids": [chance.randrange(100, 40000) for _ in range(DECODER_PROMPT)],
            "max_tokens": DECODER_ANSWERS[streams],
            "ignore_eos": True,
        }
        for _ in range(DECODER_TEXTS)
    ]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["-m", str(model), "--dtype", dtype, "-u", str(streams), "-c", "tcp", "--port", str(port)]
    own = ["-sm", "models.yml", "-sdt", "kinds.yml", "-sd", "devices.yml", "--speculate", "0"]
    own += ["--context", str(DECODER_PROMPT + DECODER_ANSWERS[streams])]
    own += ["--input", "prompts.jsonl", "--output", "answers.jsonl", "--report", "report.json"]
    script = [sys.executable, str(ROOT / "runtime.py")]
    wait(
        [
            start([*cores.pinned(rank), *script, str(rank), "2", *common, *options], directory)
            for rank, options in enumerate((own, []))
        ]
    )
    return dict(json.loads((directory / "report.json").read_text()))


def add_figure(table: Table, labels: Sequence[str], pairs: Sequence[tuple[float, float]]) -> float:
    """Add what was predicted and measured in each run to the table; return the median error, without sign."""
    errors = [measured / promised - 1 for promised, measured in pairs]
    middle = statistics.median(errors)
    numbers = (f"{statistics.median(side):.4g}" for side in zip(*pairs, strict=True))
    table.add_row(*labels, *numbers, f"{middle:+.1%}", " ".join(f"{error:+.1%}" for error in errors))
    return abs(middle)


def measure_decoder(
    shape: str, cores: Cores, arguments: argparse.Namespace, table: Table, console: Console
) -> float:
    """Compare a decoder at several numbers of streams; return the worst error by medians."""
    with tempfile.TemporaryDirectory() as text:
        model = write_model(shape, Path(arguments.models or text))
        found: dict[tuple[int, str, str], list[tuple[float, float]]] = {}
        for repetition in range(arguments.repetitions):
            for number, (streams, forced) in enumerate(
                (streams, forced) for streams in DECODER_ANSWERS for forced in (False, True)
            ):
                work = Path(text) / f"profile{repetition}-{streams}"
                if not forced:
                    profile_decoder(model, arguments.dtype, work, cores, busy=streams > 1)
                else:
                    force_cut(model, work, streams)
                port = arguments.port + 4 * repetition + number
                report = run_decoder(model, arguments.dtype, streams, work, cores, port)
                cut = "forced" if forced else "chosen"
                add_pairs(found, (streams, cut), report)
                off = report["predicted"]["tokens_per_s_error_percent"]
                what = f"{shape}, {streams} streams, {cut} cut"
                console.print(f"{what}, run {repetition + 1}: {off:+.1f} %", highlight=False)
        return add_figures(table, shape, found, arguments.repetitions)


def write_model(shape: str, directory: Path) -> Path:
    """Write a model of random weights, with a tokenizer that has a word for each token; return its place."""
    model = directory / shape
    write_directory(SHAPES[shape], model)
    words = {f"w{token}": token for token in range(SHAPES[shape].vocab)}
    Tokenizer(WordLevel(words)).save(str(model / "tokenizer.json"))
    return model


def add_pairs(
    found: dict[tuple[int, str, str], list[tuple[float, float]]],
    what: tuple[int, str],
    report: dict[str, Any],
) -> None:
    """Add each figure of a run that was predicted and measured."""
    for key in ("tokens_per_s", "between_tokens_s", "first_token_s", "cache_bytes"):
        if f"{key}_measured" in report["predicted"]:
            pair = (report["predicted"][key], report["predicted"][f"{key}_measured"])
            found.setdefault((*what, key), []).append(pair)
    as_run = report.get("as_run", {})
    if "items_per_s" in as_run:
        pair = (as_run["items_per_s"], as_run["items_per_s_measured"])
        found.setdefault((*what, "tokens_per_s as run"), []).append(pair)


def add_figures(
    table: Table, title: str, found: dict[tuple[int, str, str], list[tuple[float, float]]], runs: int
) -> float:
    """Add all figures to the table; return the worst median error of those that each of the runs has."""
    worst = 0.0
    for (streams, cut, key), pairs in found.items():
        off = add_figure(table, (title, str(streams), cut, key), pairs)
        if len(pairs) == runs:
            worst = max(worst, off)
    return worst


def measure_decoder_quotas(
    arguments: argparse.Namespace, table: Table, directory: Path, console: Console
) -> float:
    """Compare a decoder on four hosts with quotas; return the worst error of its figures, by medians."""
    worst = 0.0
    model = write_larger(directory / "larger", QUOTA_BLOCKS, QUOTA_KV_HEADS)
    texts, options = QUOTA_TEXTS, ("--speculate", "0", "--context", str(QUOTA_TEXTS.tokens + 32))
    for number, (title, kinds) in enumerate(DECODER_QUOTAS.items()):
        found: dict[tuple[int, str, str], list[tuple[float, float]]] = {}
        for repetition in range(arguments.repetitions):
            with raised(f"prediction{os.getpid()}", kinds, directory / f"{number}-{repetition}") as bed:
                bed.profile_decoder(model, texts.dtype)
                run = decoder_replan.Run(bed, model, "run", texts, "only-report", more=options)
                report = run.finish()[0]
                if len(report["schedule"]) == 1:
                    bed.profile_decoder(model, texts.dtype, alone=True)
                    run = decoder_replan.Run(bed, model, "alone", texts, "only-report", more=options)
                    report = run.finish()[0]
                add_pairs(found, (texts.count, ""), report)
                off = report["predicted"]["tokens_per_s_error_percent"]
                console.print(f"{title}, run {repetition + 1}: {off:+.1f} %", highlight=False)
        worst = max(worst, add_figures(table, title, found, arguments.repetitions))
    return worst


def compare_sums(model_name: str, ranges: int, repetitions: int, seed: int) -> list[tuple[str, float, float]]:
    """Yield ranges of layers, each with the sum of its layers' times and the time of its shard."""
    torch.set_num_threads(1)
    model = find_model(model_name)
    chance = random.Random(seed)
    chosen = []
    for _ in range(ranges):
        first, last = sorted(chance.sample(range(model.n_layers + 1), 2))
        chosen.append(LayerRange(first, last))
    generator = torch.Generator().manual_seed(seed)

    def made(layers: LayerRange) -> tuple[Shard, Payload]:
        specs = model.payload_specs(layers.start, UBATCH)
        return model.random(layers), made_up_payload(specs, torch.device("cpu"), generator)

    whole = made(LayerRange(0, model.n_layers))
    shards = [made(layers) for layers in chosen]
    times: list[list[float]] = [[] for _ in range(model.n_layers)]
    passes: list[list[float]] = [[] for _ in chosen]
    for repetition in range(repetitions + 1):
        for layer, (seconds,) in enumerate(time_layers(*whole, Pacing(1, warmup=False))[0]):
            times[layer].append(seconds)
        for number, (shard, payload) in enumerate(shards):
            began = time.perf_counter()
            with torch.inference_mode():
                shard(payload)
            passes[number].append(time.perf_counter() - began)
        if repetition == 0:  # warm
            for found in (*times, *passes):
                found.clear()
    middle = [statistics.median(found) for found in times]
    return [
        (f"{layers}", sum(middle[layers.start : layers.stop]), statistics.median(found))
        for layers, found in zip(chosen, passes, strict=True)
    ]


def print_sums(model_name: str, arguments: argparse.Namespace, console: Console) -> float:
    """Print the table of ``--sums`` and return the worst error, as a fraction."""
    table = Table("model", "layers", "sum", "shard", "error")
    worst = 0.0
    for layers, total, shard in compare_sums(
        model_name, arguments.sums, max(5, arguments.iterations or 0), 0
    ):
        error = total / shard - 1
        worst = max(worst, abs(error))
        row = (f"{1e3 * total:.2f} ms", f"{1e3 * shard:.2f} ms", f"{error:+.1%}")
        table.add_row(model_name.split("/")[-1], layers, *row)
    console.print(table)
    return worst


def common_options(description: str | None, port: int) -> argparse.ArgumentParser:
    """Return a parser of the options for measuring models against what is predicted of them.

    Args:
        description: Docstring of the benchmark.
        port: First of the ports to use.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-m",
        "--model-name",
        action="append",
        metavar="NAME",
        help="model to measure (three ViT and DeiT models)",
    )
    parser.add_argument(
        "-i", "--iterations", type=int, metavar="N", help="iterations of the profiler (its own choice)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=3, metavar="N", help="repetitions of profile and run (3)"
    )
    parser.add_argument("--cores", default="0,1", metavar="A,B", help="cores of the two ranks (0,1)")
    parser.add_argument(
        "--port", type=int, default=port, metavar="PORT", help=f"first of the ports to use ({port})"
    )
    parser.add_argument(
        "--first", action="store_true", help="give the ranks priority over other work; needs root"
    )
    return parser


def main() -> int:
    """Print the table; return 1 if an error exceeds the target."""
    parser = common_options(__doc__, 29700)
    parser.add_argument(
        "--quotas", action="store_true", help="run four ranks with quotas of processor time; needs root"
    )
    parser.add_argument("--text", action="store_true", help="run a BERT with sentences of several lengths")
    parser.add_argument("--mixed", action="store_true", help="run a BERT with a mixture of lengths")
    parser.add_argument(
        "--decoder", action="store_true", help="run a decoder with several numbers of streams"
    )
    parser.add_argument("--dtype", default="bfloat16", help="number type of --decoder (bfloat16)")
    parser.add_argument(
        "--models", metavar="DIR", help="where --decoder keeps its weights (a temporary place)"
    )
    parser.add_argument("--sums", type=int, metavar="N", help="compare N ranges of layers with whole shards")
    arguments = parser.parse_args()
    cores = Cores(tuple(int(core) for core in arguments.cores.split(",")), arguments.first)
    console = Console()
    console.print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", highlight=False)
    names = arguments.model_name or MODELS
    if arguments.sums is not None:
        worst = max(print_sums(name, arguments, console) for name in names)
        console.print(f"worst error {worst:.1%}, asked <= {TARGET:.0%}", highlight=False)
        return 0 if worst <= TARGET else 1
    if arguments.decoder:
        table = Table("model", "streams", "cut", "figure", "predicted", "measured", "error", "each")
        shapes = arguments.model_name or ("smollm2-135m",)
        if arguments.quotas:
            with tempfile.TemporaryDirectory() as text:
                worst = measure_decoder_quotas(arguments, table, Path(text), console)
        else:
            worst = max(measure_decoder(shape, cores, arguments, table, console) for shape in shapes)
        console.print(table)
        console.print(f"worst error {worst:.1%}, asked <= {DECODER_TARGET:.0%}", highlight=False)
        return 0 if worst <= DECODER_TARGET else 1
    if arguments.quotas:
        table = Table("model", "quotas", "predicted", "measured", "error", "each")
        with tempfile.TemporaryDirectory() as text:
            worst = max(measure_quotas(name, arguments, table, Path(text), console) for name in names)
        console.print(table)
        console.print(f"worst error {worst:.1%}, asked <= {QUOTAS_TARGET:.0%}", highlight=False)
        return 0 if worst <= QUOTAS_TARGET else 1
    if arguments.text:
        table = Table("model", "tokens", "predicted", "measured", "error", "by the longest alone")
        names = arguments.model_name or (TEXT_MODEL,)
        worst = max(measure_text(name, cores, arguments, table) for name in names)
        console.print(table)
        console.print(f"worst error {worst:.1%}, asked <= {TEXT_TARGET:.0%}", highlight=False)
        return 0 if worst <= TEXT_TARGET else 1
    if arguments.mixed:
        table = Table("model", "predicted", "measured", "error", "by the longest alone", "each")
        names = arguments.model_name or (TEXT_MODEL,)
        worst = max(measure_mixed(name, cores, arguments, table) for name in names)
        console.print(table)
        console.print(f"worst error {worst:.1%}, asked <= {MIXED_TARGET:.0%}", highlight=False)
        return 0 if worst <= MIXED_TARGET else 1
    table = Table("model", "cut", "predicted", "measured", "error", "whole run", "stage 0", "stage 1")
    worst = max(measure(model, cores, arguments, table, console) for model in names)
    console.print(table)
    console.print(f"worst error {worst:.1%}, asked <= {TARGET:.0%}", highlight=False)
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())

"""Rates of a pipeline that is asked, and of a batch run, with the processor time that they take."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from served import ROOT

from pipeedge import Pipeline
from pipeedge.launch.commands import RUNTIME_MODULE
from pipeedge.models import Model

__all__ = ["TOKENS", "Rate", "asked_rate", "batch_rate", "example", "median_rate"]

TOKENS = 128
"""Number of tokens of each sentence where only the rate counts."""
SAMPLE_S = 0.1
"""Time between two looks at the processor time of a batch run."""


@dataclass(frozen=True)
class Rate:
    """Speed of a run, and the processor time that it takes."""

    items_per_s: float
    data_rank_us: float
    """Processor time of the data rank for each item, in microseconds."""
    others_us: float
    """Processor time of the other ranks for each item, in microseconds."""

    def __str__(self) -> str:
        return (
            f"{self.items_per_s:,.1f} items/s, processor time of an item {self.data_rank_us:,.0f} us on the "
            f"data rank and {self.others_us:,.0f} us on the others"
        )


def processor_s(processes: Iterable[psutil.Process]) -> float:
    """Return the processor time of running processes so far, in seconds."""
    found = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def asked_rate(model: Model, options: Sequence[str], ranks: int, seconds: float) -> tuple[Rate, float, int]:
    """Return the rate of a pipeline that is asked, the share of the thread that asks, and the items."""
    with Pipeline(model.name, ranks=ranks, options=options) as pipeline:
        one, count = example(model), 0
        answers, others = pipeline(cycle([one])), psutil.Process().children()
        list(islice(answers, 64))
        began, own_s, others_s = time.perf_counter(), time.process_time(), processor_s(others)
        thread_s = time.thread_time()
        while time.perf_counter() - began < seconds:
            count += len(list(islice(answers, 64)))
        elapsed_s = time.perf_counter() - began
        each_us = 1e6 / count
        rate = Rate(
            count / elapsed_s,
            (time.process_time() - own_s) * each_us,
            (processor_s(others) - others_s) * each_us,
        )
        share = (time.thread_time() - thread_s) / elapsed_s
        answers.close()
    return rate, share, count


def batch_rate(model: Model, options: Sequence[str], ranks: int, items: int, directory: Path) -> Rate:
    """Return the rate of a run with as many items of the same size."""
    given = ["-b", str(items)]
    if model.takes_text:
        path = directory / "sentences.npz"
        np.savez(path, **{name: np.stack([row] * items) for name, row in example(model).items()})
        given = ["--input", str(path)]
    report = directory / "report.json"
    command = [sys.executable, "-m", "pipeedge.launch.main", "--local", str(ranks), "--"]
    command += ["-m", model.name, "-c", "tcp", "--report", str(report), *options, *given]
    samples: list[tuple[float, float, float]] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as launcher:
        while launcher.poll() is None:
            data_rank, others = ranks_of(launcher.pid, ranks)
            samples.append((time.perf_counter(), processor_s(data_rank), processor_s(others)))
            time.sleep(SAMPLE_S)
        if launcher.returncode:
            raise SystemExit(f"serving: a batch run has ended with status {launcher.returncode}")
    rate = float(json.loads(report.read_text())["throughput_items_per_s"])
    # The middle of the run, as the ranks also start and end.
    ended, run_s = samples[-1][0], items / rate
    some = [each for each in samples if 0.2 * run_s < ended - each[0] < 0.8 * run_s]
    each_us = 1e6 / ((some[-1][0] - some[0][0]) * rate) if len(some) > 1 else float("nan")
    spent = [(some[-1][of] - some[0][of]) * each_us if some else each_us for of in (1, 2)]
    return Rate(rate, *spent)


def ranks_of(launcher: int, ranks: int) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the process of the data rank, and those of the others, as far as a launcher has them."""
    found: dict[str, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children():
            with suppress(psutil.NoSuchProcess, ValueError):
                words = process.cmdline()
                found[words[words.index(RUNTIME_MODULE) + 1]] = process
    data_rank = found.pop("0", None)
    return [] if data_rank is None else [data_rank], list(found.values())


def median_rate(rates: Sequence[Rate]) -> Rate:
    """Return the median of each figure."""
    return Rate(
        statistics.median(each.items_per_s for each in rates),
        statistics.median(each.data_rank_us for each in rates),
        statistics.median(each.others_us for each in rates),
    )


def example(model: Model) -> Any:
    """Return something of the model's own size to ask about: an image of noise, or a sentence as ids."""
    random = np.random.default_rng(0)
    if not model.takes_text:
        height, width = model.config.image_size
        shape = (height, width) if model.config.channels == 1 else (height, width, model.config.channels)
        return random.integers(0, 256, shape, dtype=np.uint8)
    ids = random.integers(1, model.config.vocab, TOKENS)
    others = {"attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return {name: others.get(name, ids) for name in model.input_names}

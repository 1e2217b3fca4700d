"""The programs that a node runs for others: a rank of a run, the profiler, and what fetches weights. Pure.

    StartRank ──rank_words──────> run RANK WORLD -m MODEL ... --key -
    Profile   ──profile_words───> profile -m MODEL -b N --dtype TYPE ... -o FILE
    Up        ──fetch_words─────> fetch -m MODEL -o DIR, for a known model whose weights no node has

Nothing that a member sends becomes a word of a command line but what is read here from a typed request, each
as the value of an option that this module names. Values that could be taken for an option are no values of
their types (``messages``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePath

from pipeedge.nodes.messages import ModelPlace, Profile, StartRank, Up

__all__ = ["QUICK_PASSES", "SpecPaths", "fetch_words", "located", "profile_words", "rank_words"]


QUICK_PASSES = "3"
"""Passes of a quick profile, or rounds of a decoder's steps, after one that warms up. With a single one, a
moment's load on the machine moves the cut; a run corrects what is left (``--replan auto``)."""


@dataclass(frozen=True)
class SpecPaths:
    """Files and options with which rank 0 plans."""

    models: Path
    device_types: Path
    devices: Path
    neighbors: Path
    hosts: tuple[str, ...]
    """Name of each rank's node, as in the files."""
    wanted: Up
    """What was asked for."""

    def words(self) -> tuple[str, ...]:
        """Return the options."""
        wanted = self.wanted
        return (
            *("--sched-models-file", str(self.models), "--sched-dev-types-file", str(self.device_types)),
            *("--sched-dev-file", str(self.devices), "--sched-dev-neighbors-file", str(self.neighbors)),
            *("--hosts", ",".join(self.hosts), "--objective", wanted.objective, "--plan", wanted.plan),
            *(("--dtype", wanted.dtype) if wanted.dtype != "float32" or wanted.plan == "cut" else ()),
            *(() if wanted.context is None else ("--context", str(wanted.context))),
            *("--replan", "auto"),
        )


def located(model: ModelPlace, models: Path) -> tuple[str, ...]:
    """Return the options that name a model where this node has it.

    Args:
        model: The model.
        models: Directory with a directory for each model, by its digest.
    """
    if model.digest is None:
        return ("--model", model.name)
    directory = models / model.digest
    if model.weights is not None:
        return ("--model", model.name, "--model-file", str(directory / model.weights))
    return ("--model", str(directory / PurePath(model.name).name))


def rank_words(
    request: StartRank, rank: int, model: tuple[str, ...], planning: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return the words after ``pipeedge`` that run a rank, whose key comes from its standard input.

    Args:
        request: The run.
        rank: Number of the rank; 0 is only run by the asked node for itself.
        model: Options that name the model here.
        planning: Options with which rank 0 plans.
    """
    return (
        *(
            "run",
            str(rank),
            str(request.world),
            "--config",
            os.devnull,
            *model,
            "--ubatch-size",
            str(request.batch_size),
        ),
        *("--addr", request.addr, "--port", str(request.port), "--key", "-", "--comm", "tcp"),
        *("--on-failure", "continue", "--timeout", f"{request.timeout_s:g}", "--serve", str(request.serve)),
        *planning,
    )


def profile_words(
    request: Profile, model: tuple[str, ...], results: Path, like: Path | None = None
) -> tuple[str, ...]:
    """Return the words after ``pipeedge`` that measure a model's layers.

    Args:
        request: What to measure.
        model: Options that name the model here.
        results: File for the results.
        like: Results of a model with the same blocks, from which the times are taken.
    """
    return (
        *(
            "profile",
            "--config",
            os.devnull,
            *model[:2],
            "--random-weights",
            "--batch-size",
            str(request.batch_size),
        ),
        *("--dtype", request.dtype, *(() if request.thorough else ("--iterations", QUICK_PASSES))),
        *("--results-yml", str(results), *(() if like is None else ("--like", str(like)))),
    )


def fetch_words(model: str, directory: Path) -> tuple[str, ...]:
    """Return the words after ``pipeedge`` that fetch the weights of a known model into a directory."""
    return ("fetch", "--config", os.devnull, "--model", model, "--output-dir", str(directory))

"""Parse the command line of ``train.py``. Imports nothing heavy, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.request.config import WorldRequest
from pipeedge.request.declared import (
    Section,
    add_sections,
    given,
    option,
    option_of,
    options_of,
    read_variables,
)
from pipeedge.request.environment import Environment
from pipeedge.request.keys import KeyRequest
from pipeedge.request.parsing import OneLineParser, add_common, path
from pipeedge.train.request import DEFAULT_RATES, PipelineRequest, TrainingRequest

__all__ = ["PROGRAM", "TrainCommand", "parse_train", "train_parser"]

PROGRAM = "train.py"
SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class TrainCommand:
    """The request of this process."""

    request: TrainingRequest
    is_worker: bool
    """Whether this process is one of the workers; otherwise it starts them."""
    place: int
    """Index of this worker among those on this machine."""
    launcher: int | None = None
    """Process id of the ``train.py`` that started this worker, or None."""
    dry_run: bool = option(False, "--dry-run", help="print the layers that each worker would have, and stop")
    export: Path | None = option(
        None,
        "--export",
        type=path,
        metavar="DIR",
        help="write the model of the last checkpoint to this new directory, for {runtime.py} -m, and stop",
    )


SECTIONS = (
    Section(
        "pipeline",
        (
            *options_of(PipelineRequest),
            replace(
                option_of(WorldRequest, "timeout_s"),
                help="longest wait for a worker that is absent, silent or stuck ({default})",
            ),
        ),
    ),
    Section("key (for the control connection alone)", options_of(KeyRequest)),
    Section("model", options_of(TrainingRequest, "model", "pretrained", "optimizer", "rate", "seed")),
    Section(
        "data",
        options_of(TrainingRequest, "data", "batch_size", "max_image_pixels", "microbatch_size", "batches"),
    ),
    Section(
        "output",
        (
            *options_of(TrainingRequest, "checkpoint_dir", "checkpoint_every", "resume"),
            option_of(TrainCommand, "export"),
            *options_of(TrainingRequest, "report", "trace"),
        ),
    ),
)
"""Options of ``train.py`` in the order of ``--help``."""


def parse_train(argv: Sequence[str], environment: Environment, *, cores: int) -> TrainCommand:
    """Parse the command line of ``train.py``.

    Args:
        argv: Arguments, without the program.
        environment: Environment of torchrun, or of a worker that ``train.py`` started.
        cores: Number of cores that may be used.

    Raises:
        RequestError: An option or a value is invalid.
        SystemExit: After ``--help`` or ``--version``.
    """
    arguments = train_parser().parse_args(argv)
    read_variables(arguments, SECTIONS, environment.variables)
    is_worker = environment.rank is not None and environment.world_size is not None
    rank = environment.rank or 0
    pipeline = _pipeline_request(given(arguments, PipelineRequest), environment, cores)
    training = given(arguments, TrainingRequest)
    request = TrainingRequest(
        world=WorldRequest(
            rank=rank,
            size=environment.world_size or pipeline.workers,
            addr=environment.master_addr or WorldRequest.addr,
            port=environment.master_port or WorldRequest.port,
            **given(arguments, WorldRequest),
            agent_store=environment.agent_store,
            agent_run=environment.agent_run,
            keys=KeyRequest(**given(arguments, KeyRequest)),
        ),
        pipeline=pipeline,
        **_training_defaults(training, pipeline.schedule) | training,
        command=(*program_name(PROGRAM).split(), *argv),
    )
    command = TrainCommand(
        request,
        is_worker,
        place=rank if environment.local_rank is None else environment.local_rank,
        launcher=environment.launcher if is_worker else None,
        **given(arguments, TrainCommand),
    )
    if command.export is not None and request.checkpoint_dir is None:
        raise RequestError("--export needs the directory of the checkpoint: give --checkpoint-dir")
    return command


def _pipeline_request(fields: dict[str, Any], environment: Environment, cores: int) -> PipelineRequest:
    """Return the request; what ``fields`` leaves out follows from the others and the machine."""
    sequential = fields.get("schedule") == SEQUENTIAL
    partition = fields.get("partition")
    stages = 1 if sequential else PipelineRequest.stages
    if partition is not None:
        stages = max(1, len(partition) // 2)
    stages = fields.get("stages", stages)
    workers = environment.world_size or (1 if sequential else max(1, min(stages, cores)))
    workers = fields.get("workers", workers)
    local = environment.local_world_size or workers
    threads = max(1, cores // max(1, local))
    return PipelineRequest(**{"stages": stages, "workers": workers, "threads": threads} | fields)


def _training_defaults(fields: Mapping[str, Any], schedule: str) -> dict[str, Any]:
    """Return defaults that depend on options in ``fields``."""
    batch_size = fields.get("batch_size", TrainingRequest.batch_size)
    sequential = schedule == SEQUENTIAL
    microbatch_size = batch_size if sequential else min(TrainingRequest.microbatch_size, batch_size)
    rate = DEFAULT_RATES[fields.get("optimizer", TrainingRequest.optimizer)]
    return {"microbatch_size": microbatch_size, "rate": rate}


def train_parser() -> argparse.ArgumentParser:
    """Return the parser of ``train.py``."""
    parser = OneLineParser(
        prog=program_name(PROGRAM),
        description="Train a model in a pipeline of workers, each of which has some of its layers. Started "
        "by itself, it starts the workers on this machine, one per core; under torchrun it is a worker.",
        epilog=f"Example: '{program_name(PROGRAM)} --schedule 1f1b --stages 4 --workers 2' trains vgg19 "
        "on random images. Exit status: 0 done, "
        "2 the request is wrong, 3 no partition fits, 4 a worker failed, 130 "
        "interrupted, 1 a fault of this program.",
        allow_abbrev=False,
    )
    add_common(parser)
    option_of(TrainCommand, "dry_run").add_to(parser)
    add_sections(parser, SECTIONS)
    parser.common = (
        *(
            "--model",
            "--data",
            "--schedule",
            "--stages",
            "--workers",
            "--partition",
        ),
        *(
            "--batch-size",
            "--microbatch-size",
            "--batches",
            "--optimizer",
            "--lr",
            "--checkpoint-dir",
        ),
    )
    program = program_name(PROGRAM)
    parser.examples = (
        f"{program} --model vit-digits --data digits --schedule 1f1b --stages 4 --workers 2 --batches 50",
        f"{program} --model vit-digits --data digits --checkpoint-dir kept --checkpoint-every 10",
        f"{program} --dry-run --stages 4 --partition auto",
    )
    return parser

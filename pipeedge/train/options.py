"""Parse the command line of ``train.py``. Imports nothing heavy, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.base.wording import figure
from pipeedge.request.config import Environment, WorldRequest
from pipeedge.request.options import OneLineParser, add_common, add_image_limit, image_limit, name, path
from pipeedge.train.orders import SCHEDULES
from pipeedge.train.request import (
    AUTO,
    DEFAULT_RATES,
    DIGITS,
    OPTIMIZERS,
    RANDOM,
    VGG19,
    PipelineRequest,
    TrainingRequest,
)

__all__ = ["PROGRAM", "TrainCommand", "parse_train", "train_parser"]

PROGRAM = "train.py"
_STAGES = 4
_MICROBATCH = 4
_BATCH = 64


@dataclass(frozen=True)
class TrainCommand:
    """The request of this process."""

    request: TrainingRequest
    is_worker: bool
    """Whether this process is one of the workers; otherwise it starts them."""
    place: int
    """Index of this worker among those on this machine."""
    dry_run: bool
    """Whether to print the layers of each worker instead of training."""
    launcher: int | None = None
    """Process id of the ``train.py`` that started this worker, or None."""
    export: Path | None = None
    """Directory to write the last checkpoint's model to, instead of training."""


def parse_train(argv: Sequence[str], environment: Environment, *, cores: int) -> TrainCommand:
    """Parse the command line of ``train.py``.

    Args:
        argv: arguments, without the program.
        environment: environment of torchrun, or of a worker that ``train.py`` started.
        cores: number of cores that may be used.

    Raises:
        RequestError: an option or a value is invalid.
        SystemExit: after ``--help`` or ``--version``.
    """
    arguments = train_parser().parse_args(argv)
    is_worker = environment.rank is not None and environment.world_size is not None
    sequential = arguments.schedule == "sequential"
    stages = _stages(arguments, sequential)
    workers = arguments.workers
    if workers is None:
        workers = environment.world_size or (1 if sequential else min(stages, cores))
    local = environment.local_world_size or workers
    rank = environment.rank or 0
    if arguments.export is not None and arguments.checkpoint_dir is None:
        raise RequestError("--export needs the directory of the checkpoint: give --checkpoint-dir")
    request = TrainingRequest(
        world=WorldRequest(
            rank=rank,
            size=environment.world_size or max(1, workers),
            addr=environment.master_addr or "127.0.0.1",
            port=environment.master_port or 29500,
            timeout_s=arguments.timeout,
            agent_store=environment.agent_store,
            agent_run=environment.agent_run,
        ),
        pipeline=PipelineRequest(
            schedule=arguments.schedule,
            stages=stages,
            workers=workers,
            threads=max(1, cores // max(1, local)) if arguments.threads is None else arguments.threads,
            partition=arguments.partition,
            memory_mb=arguments.memory,
        ),
        model=arguments.model,
        pretrained=arguments.pretrained,
        data=arguments.data,
        max_image_pixels=image_limit(arguments),
        batch_size=arguments.batch_size,
        microbatch_size=_microbatch_size(arguments, sequential),
        batches=arguments.batches,
        optimizer=arguments.optimizer,
        rate=DEFAULT_RATES[arguments.optimizer] if arguments.lr is None else arguments.lr,
        seed=arguments.seed,
        checkpoint_dir=arguments.checkpoint_dir,
        checkpoint_every=arguments.checkpoint_every,
        resume=arguments.resume,
        report=arguments.report,
        trace=arguments.trace,
        command=(*program_name(PROGRAM).split(), *argv),
    )
    place = rank if environment.local_rank is None else environment.local_rank
    launcher = environment.train_launcher if is_worker else None
    return TrainCommand(request, is_worker, place, arguments.dry_run, launcher, arguments.export)


def _stages(arguments: argparse.Namespace, sequential: bool) -> int:
    if arguments.stages is not None:
        return int(arguments.stages)
    if arguments.partition is not None:
        return max(1, len(arguments.partition) // 2)
    return 1 if sequential else _STAGES


def _microbatch_size(arguments: argparse.Namespace, sequential: bool) -> int:
    if arguments.microbatch_size is not None:
        return int(arguments.microbatch_size)
    return int(arguments.batch_size) if sequential else min(_MICROBATCH, int(arguments.batch_size))


def _partition(text: str) -> tuple[int, ...] | None:
    if text == AUTO:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a list like 1,19,20,44") from None


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
    parser.add_argument(
        "--dry-run", action="store_true", help="print the layers that each worker would have, and stop"
    )

    pipeline = parser.add_argument_group("pipeline")
    pipeline.add_argument(
        "--schedule", choices=SCHEDULES, default="1f1b", help="order of the workers' actions (1f1b)"
    )
    pipeline.add_argument("--stages", type=int, metavar="N", help=f"number of parts of the model ({_STAGES})")
    pipeline.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of processes, each with one or more stages (one per core)",
    )
    pipeline.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of each worker (its share of the cores, to which it is bound)",
    )
    pipeline.add_argument(
        "--partition",
        type=_partition,
        metavar="LIST|auto",
        help="first and last layer of each stage, from 1, e.g. 1,19,20,44; auto measures every layer and "
        "makes the slowest worker as fast as possible (auto)",
    )
    pipeline.add_argument(
        "--memory",
        type=float,
        metavar="MB",
        help="memory of a worker, for --partition auto (its share of the free memory)",
    )
    pipeline.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="longest wait for a worker that is absent, silent or stuck (%(default)g)",
    )

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        type=name,
        default=VGG19,
        metavar="NAME|DIR",
        help=f"{VGG19}, vit-digits, a known ViT or DeiT, or a local Hugging Face directory (%(default)s)",
    )
    model.add_argument(
        "--pretrained", action="store_true", help="start from the model's weights instead of random ones"
    )
    model.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="optimizer (sgd)")
    rates = ", ".join(f"{figure(rate)} for {optimizer}" for optimizer, rate in DEFAULT_RATES.items())
    model.add_argument("--lr", type=float, metavar="RATE", help=f"learning rate ({rates})")
    model.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of initial weights, item order, dropout (0)"
    )

    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        type=name,
        default=RANDOM,
        metavar="NAME|FOLDER",
        help=f"{RANDOM}, {DIGITS} (for vit-digits), or a folder with one folder of images per class "
        f"({RANDOM})",
    )
    data.add_argument(
        "--batch-size", type=int, default=_BATCH, metavar="N", help="items per update (%(default)s)"
    )
    add_image_limit(data)
    data.add_argument(
        "--microbatch-size",
        type=int,
        metavar="N",
        help=f"items in a microbatch ({_MICROBATCH}; sequential: the whole batch)",
    )
    data.add_argument(
        "--batches", type=int, default=4, metavar="N", help="number of batches in total (%(default)s)"
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--checkpoint-dir",
        type=path,
        metavar="DIR",
        help="save checkpoints here, in a directory that all workers share",
    )
    output.add_argument(
        "--checkpoint-every",
        type=int,
        default=10,
        metavar="N",
        help="batches between two checkpoints (%(default)s)",
    )
    output.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint")
    output.add_argument(
        "--export",
        type=path,
        metavar="DIR",
        help="write the model of the last checkpoint to this new directory, for "
        f"{program_name('runtime.py')} -m, and stop",
    )
    output.add_argument(
        "--report",
        type=path,
        metavar="FILE",
        help="write a report of what ran, how fast, and where the time went: .json, or .html for a page",
    )
    output.add_argument(
        "--trace",
        type=path,
        metavar="FILE.json",
        help="write the activities of each worker, for ui.perfetto.dev",
    )
    return parser

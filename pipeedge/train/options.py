"""The command line of ``train.py``. Imports nothing heavy, so that ``--help`` is there at once."""

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
    """What ``train.py`` was asked, here."""

    request: TrainingRequest
    is_worker: bool
    """This process is one of the workers; else it starts them."""
    place: int
    """Of this worker among those of this machine."""
    dry_run: bool
    launcher: int | None = None
    """The process that started this worker, if it was ``train.py``."""
    export: Path | None = None
    """Directory to write the last checkpoint's model to, instead of training."""


def parse_train(argv: Sequence[str], environment: Environment, *, cores: int) -> TrainCommand:
    """The command line of ``train.py``.

    Args:
        argv: without the program.
        environment: torchrun's, or that of a worker that ``train.py`` started.
        cores: processors that may be used.

    Raises:
        RequestError: an option or a value that cannot be.
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
        raise RequestError("--export needs --checkpoint-dir, where the checkpoint is")
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
        "by itself it starts the workers on this machine, one for each core; under torchrun it is one.",
        epilog=f"Example: '{program_name(PROGRAM)} --schedule 1f1b --stages 4 --workers 2' trains vgg19 "
        "on random images. Exit status: 0 done, "
        "2 the request is wrong, 3 no partition fits, 4 a worker failed, 130 "
        "interrupted, 1 a fault of this program.",
        allow_abbrev=False,
    )
    add_common(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print which worker would have which layers, and stop"
    )

    pipeline = parser.add_argument_group("pipeline")
    pipeline.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="who does what when (1f1b)")
    pipeline.add_argument("--stages", type=int, metavar="N", help=f"parts of the model ({_STAGES})")
    pipeline.add_argument(
        "--workers", type=int, metavar="N", help="processes; each has one or more stages (one for each core)"
    )
    pipeline.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="of each worker (its part of the cores, to which it is bound)",
    )
    pipeline.add_argument(
        "--partition",
        type=_partition,
        metavar="LIST|auto",
        help="first and last layer of each stage, from 1, e.g. 1,19,20,44; auto: every layer is measured, "
        "and the slowest worker is as fast as can be (auto)",
    )
    pipeline.add_argument(
        "--memory",
        type=float,
        metavar="MB",
        help="a worker's, for --partition auto (its part of what is free)",
    )
    pipeline.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="no worker waits longer for one that is absent, silent or stuck (%(default)g)",
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
        "--pretrained", action="store_true", help="begin with the model's weights, not with random ones"
    )
    model.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="how weights change (sgd)")
    rates = ", ".join(f"{figure(rate)} for {optimizer}" for optimizer, rate in DEFAULT_RATES.items())
    model.add_argument("--lr", type=float, metavar="RATE", help=f"learning rate ({rates})")
    model.add_argument(
        "--seed", type=int, default=0, metavar="N", help="fixes initial weights, order of items, dropout (0)"
    )

    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        type=name,
        default=RANDOM,
        metavar="NAME|FOLDER",
        help=f"{RANDOM}, {DIGITS} (for vit-digits), or a folder with a folder of pictures a class ({RANDOM})",
    )
    data.add_argument(
        "--batch-size", type=int, default=_BATCH, metavar="N", help="items an update (%(default)s)"
    )
    add_image_limit(data)
    data.add_argument(
        "--microbatch-size",
        type=int,
        metavar="N",
        help=f"items that travel together ({_MICROBATCH}; sequential: the batch)",
    )
    data.add_argument("--batches", type=int, default=4, metavar="N", help="batches in all (%(default)s)")

    output = parser.add_argument_group("output")
    output.add_argument(
        "--checkpoint-dir", type=path, metavar="DIR", help="save what was learnt; all workers must see it"
    )
    output.add_argument(
        "--checkpoint-every", type=int, default=10, metavar="N", help="batches between two (%(default)s)"
    )
    output.add_argument("--resume", action="store_true", help="go on from the last whole checkpoint")
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
        help="what ran, how fast, where the time went: .json, or .html for a page",
    )
    output.add_argument(
        "--trace", type=path, metavar="FILE.json", help="what each worker was at, for ui.perfetto.dev"
    )
    return parser

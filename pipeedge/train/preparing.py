"""Prepare a worker of a training alone: all that can be refused before it meets the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeedge.base.errors import RequestError
from pipeedge.base.files import InputPath, OutputFile, check_outputs, check_writable
from pipeedge.base.machine import available_bytes
from pipeedge.data.images import is_image
from pipeedge.data.protected_files import model_paths
from pipeedge.train.checkpoint import Checkpoint, CheckpointWriter, is_checkpoint_file, latest
from pipeedge.train.networks import Network, Transformer, find_network
from pipeedge.train.orders import Order, make_order
from pipeedge.train.partition import check_partition, check_stages
from pipeedge.train.request import DIGITS, RANDOM, TrainingRequest
from pipeedge.train.samples import Samples, open_samples

__all__ = ["TrainingSetup", "order_of", "prepare_training"]

_MB = 1 << 20
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class TrainingSetup:
    """A training as one worker has prepared it."""

    request: TrainingRequest
    network: Network
    order: Order
    """Order in which all workers act."""
    samples: Samples
    replaced: frozenset[Path]
    """Outputs that existed before the training."""
    checkpoint: Checkpoint | None
    """Checkpoint to continue from, or None."""
    writer: CheckpointWriter | None
    """Writer of checkpoints, or None."""

    @property
    def rank(self) -> int:
        """Number of this worker."""
        return self.request.world.rank

    @property
    def first_step(self) -> int:
        """Number of batches that the checkpoint has behind it."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def prepare_training(request: TrainingRequest) -> TrainingSetup:
    """Open and check all that ``request`` names.

    Raises:
        PipeEdgeError: This worker cannot take part.
    """
    network = find_network(request.model, seed=request.seed, pretrained=request.pretrained)
    order = order_of(request)
    images = request.batch_size * math.prod(network.image_shape) * _FLOAT_BYTES
    if images > available_bytes():
        raise RequestError(
            f"--batch-size {request.batch_size}: its images alone take {images / _MB:.0f} MB, "
            "more than is free"
        )
    if request.pipeline.partition is not None:
        check_partition(request.pipeline.partition, network.n_layers)
    check_stages(order.stages, network.n_layers)
    samples = open_samples(
        request.data,
        network,
        batch_size=request.batch_size,
        seed=request.seed,
        max_image_pixels=request.max_image_pixels,
    )
    replaced = _check_outputs(request, network)
    checkpoint = _find_checkpoint(request)
    writer = None
    if request.checkpoint_dir is not None:
        writer = CheckpointWriter(request.checkpoint_dir, _description(request))
        writer.make_directory()
    return TrainingSetup(request, network, order, samples, replaced, checkpoint, writer)


def order_of(request: TrainingRequest) -> Order:
    """Return the order in which the workers of ``request`` act."""
    return make_order(
        request.pipeline.schedule,
        stages=request.pipeline.stages,
        workers=request.pipeline.workers,
        microbatches=request.microbatches,
    )


def _check_outputs(request: TrainingRequest, network: Network) -> frozenset[Path]:
    """Refuse outputs that would replace what is read, or each other; return those that exist already."""
    outputs = [
        OutputFile(option, path)
        for option, path in (("--report", request.report), ("--trace", request.trace))
        if path is not None
    ]
    inputs: list[InputPath] = []
    if isinstance(network, Transformer):
        inputs += model_paths(network.model, None)
    if request.data not in (RANDOM, DIGITS):
        inputs.append(InputPath("--data", Path(request.data), is_image, nested=True))
    if request.checkpoint_dir is not None:
        inputs.append(InputPath("--checkpoint-dir", request.checkpoint_dir, is_checkpoint_file, nested=True))
    replaced = check_outputs(outputs, inputs)
    if request.report is not None:
        check_writable(request.report, "--report")
    if request.trace is not None:
        check_writable(request.trace, "--trace")
    return replaced


def _description(request: TrainingRequest) -> dict[str, Any]:
    """Return the options that a run resumed from this one's checkpoints must share."""
    names = ("model", "data", "batch_size", "optimizer", "seed")
    return {name: getattr(request, name) for name in names}


def _find_checkpoint(request: TrainingRequest) -> Checkpoint | None:
    directory = request.checkpoint_dir
    if not request.resume or directory is None:
        return None
    found = latest(directory)
    found.check(_description(request))
    if found.step >= request.batches:
        raise RequestError(
            f"{found.path}: is at batch {found.step} already, and --batches asks for "
            f"{request.batches} in all; ask for more"
        )
    return found

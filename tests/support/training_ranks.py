"""Run the workers of ``test_training.py``, in processes that meet through a file.

Each set of workers runs all its cases in one process group, so that torch is imported only once.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import fork_server
from waiting import LIMIT_S

from pipeedge.base.schedule import LayerRange
from pipeedge.train.engine import BatchSize, Engine
from pipeedge.train.networks import Network, Vgg, find_network
from pipeedge.train.orders import make_order

BATCH, MICROBATCH = 12, 2
MICROBATCHES = BATCH // MICROBATCH
STEPS = 3

Tensors = dict[str, torch.Tensor]


def small_vgg(dropout: float, *, wide: bool = False) -> Vgg:
    """Return a network of 18 layers for 16x16 images.

    It has four convolutions, three poolings and the head. If it is ``wide``, the gradients of two of the
    three linear layers are deferred to the end of the batch.
    """
    return Vgg(
        seed=3,
        widths=(4, None, 6, None, 8, 64 if wide else 8, None),
        side=16,
        hidden=256 if wide else 24,
        classes=7,
        dropout=dropout,
        linear_deviation=0.05 if wide else 0.2,
    )


WIDE_WEIGHTS = {"layers.11.weight", "layers.14.weight"}


def network_named(name: str) -> Network:
    """Return the network that a case names."""
    if name == "vit":
        return find_network("vit-digits", seed=3, pretrained=False)
    return small_vgg(0.5 if name.endswith("dropout") else 0.0, wide=name.startswith("wide"))


@dataclass(frozen=True)
class Case:
    """A network with its cut and schedule."""

    network: str
    schedule: str
    layers: tuple[LayerRange, ...]
    optimizer: str = "sgd"

    @property
    def name(self) -> str:
        """Name for files and test ids."""
        cuts = "-".join(str(part.stop) for part in self.layers)
        return f"{self.network}_{self.schedule}_{cuts}_{self.optimizer}"


def batch(network: Network, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(BATCH, *network.image_shape, generator=generator)
    return images, torch.randint(network.classes, (BATCH,), generator=generator)


def optimizer_for(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the network that a case names."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=0.001)
    return torch.optim.SGD(parameters, lr=0.02)


def unpipelined(network: Network, optimizer: str) -> tuple[Tensors, Tensors, list[float]]:
    """Train the whole network on whole batches with plain autograd.

    Returns the gradients of the first batch, the weights after the last, and the losses.
    """
    whole = network.build(LayerRange(0, network.n_layers))
    named = dict(whole.named_parameters())
    steps = optimizer_for(optimizer, list(named.values()))
    gradients: Tensors = {}
    losses = []
    for step in range(STEPS):
        images, labels = batch(network, step)
        whole.position.item = step * BATCH
        steps.zero_grad()
        loss = F.cross_entropy(whole(images), labels)
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = {name: value.grad.clone() for name, value in named.items() if value.grad is not None}
        steps.step()
    return gradients, {name: value.detach() for name, value in named.items()}, losses


def _run_case(case: Case, worker: int, workers: int, directory: Path) -> None:
    network = network_named(case.network)
    order = make_order(case.schedule, stages=len(case.layers), workers=workers, microbatches=MICROBATCHES)
    cuts = [0, *(part.stop for part in case.layers)]
    engine = Engine(
        order,
        worker,
        {stage: network.build(case.layers[stage]) for stage in order.stages_of(worker)},
        [network.crossing(cut, MICROBATCH) for cut in cuts],
        BatchSize(MICROBATCHES, MICROBATCH),
    )
    named = engine.parameters
    idle = torch.nn.Parameter(torch.zeros(0))
    steps = optimizer_for(case.optimizer, list(named.values()) or [idle])
    gradients: Tensors = {}
    late: list[str] = []
    losses = []
    for step in range(STEPS):
        images, labels = batch(network, step)
        loss = engine.batch(
            step * BATCH, images if engine.has_first else None, labels if engine.has_last else None
        )
        if loss is not None:
            losses.append(loss)
        if step == 0:
            there = {name for name, value in named.items() if value.grad is not None}
            for _ in engine.late_gradients():
                pass
            gradients = {name: value.grad.clone() for name, value in named.items() if value.grad is not None}
            late = sorted(gradients.keys() - there)
        steps.step()
        steps.zero_grad()
        for _ in engine.late_gradients():
            steps.step()
            steps.zero_grad()
    images, labels = batch(network, STEPS)
    found = {
        "late": late,
        "gradients": gradients,
        "weights": {name: value.detach() for name, value in named.items()},
        "losses": losses,
        "correct": engine.correct(images, labels),
    }
    torch.save(found, directory / f"{case.name}-{worker}.pt")


def _work(worker: int, workers: int, cases: list[Case], directory: Path) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(directory / f"store-{workers}"), workers)
        dist.init_process_group("gloo", store=store, rank=worker, world_size=workers)
        for case in cases:
            _run_case(case, worker, workers, directory)
        dist.destroy_process_group()
    except BaseException:
        (directory / f"failed-{workers}-{worker}").write_text(traceback.format_exc())
        raise


def run_cases(workers: int, cases: list[Case], directory: Path) -> Mapping[str, list[dict]]:
    """Return the findings of each worker in each case, by the case's name."""
    context = fork_server()
    processes = [
        context.Process(target=_work, args=(worker, workers, cases, directory)) for worker in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
    failures = [path.read_text() for path in sorted(directory.glob(f"failed-{workers}-*"))]
    assert not failures, "\n".join(failures)
    return {
        case.name: [
            torch.load(directory / f"{case.name}-{worker}.pt", weights_only=True) for worker in range(workers)
        ]
        for case in cases
    }

"""Test that every schedule learns like the unpipelined network: gradients, weights, losses, over gloo."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch
from effort import all_cases
from tensors import TOLERANCE, assert_close
from training_ranks import BATCH, STEPS, WIDE_WEIGHTS, Case, batch, network_named, run_cases, unpipelined

from pipeedge.base.schedule import LayerRange
from pipeedge.train.orders import SCHEDULES


def ranges(*stops: int) -> tuple[LayerRange, ...]:
    return tuple(LayerRange(start, stop) for start, stop in itertools.pairwise((0, *stops)))


# Cuts before ReLUs, next to poolings and dropout, within blocks; stages without a weight.
VGG = (ranges(5, 9, 13, 18), ranges(2, 3, 12, 18), ranges(1, 4, 6, 8, 12, 13, 17, 18))
VIT = (ranges(4, 8, 12, 16), ranges(1, 2, 3, 16), ranges(3, 7, 9, 16))
DROPOUT = ranges(6, 12, 14, 18)
WIDE = (ranges(4, 9, 13, 18), ranges(5, 11, 14, 18))  # linear layers together, and at the start of a stage
PIPELINED = [schedule for schedule in SCHEDULES if schedule != "sequential"]


def cases_for(workers: int) -> list[Case]:
    if workers == 1:
        return [
            Case("vgg", "sequential", ranges(7, 18)),
            Case("wide", "sequential", ranges(18)),
            Case("vit", "sequential", ranges(16)),
        ]
    if workers == 3:
        uneven = [
            Case("vgg", schedule, ranges(5, 8, 13, 18)) for schedule in ("gpipe", "1f1b", "zero-bubble")
        ]
        return [
            *uneven,
            Case("vit", "interleaved", ranges(2, 5, 7, 9, 14, 16)),
            Case("vit", "1f1b", ranges(5, 6, 16)),
        ]
    vgg = each_schedule("vgg", VGG[:2])
    vgg += [Case("vgg", schedule, VGG[2]) for schedule in ("1f1b", "interleaved")]
    adamw = [Case("vgg", schedule, VGG[0], "adamw") for schedule in ("interleaved", "zero-bubble")]
    vit = each_schedule("vit", VIT)
    dropout = each_schedule("vgg-dropout", (DROPOUT,))
    wide = each_schedule("wide", WIDE)
    wide += [Case("wide", "1f1b", WIDE[0], "adamw"), Case("wide-dropout", "gpipe", WIDE[1])]
    wide += [Case("wide-dropout", "zero-bubble", layers) for layers in WIDE]
    return [*vgg, *adamw, *vit, *dropout, *wide]


def each_schedule(network: str, cuts: Sequence[tuple[LayerRange, ...]]) -> list[Case]:
    """Return cases of every schedule with one of the cuts in turn, or with each of them if all are wanted."""
    return [
        Case(network, schedule, layers)
        for place, schedule in enumerate(PIPELINED)
        for layers in (cuts if all_cases() else [cuts[place % len(cuts)]])
    ]


ALL = {workers: cases_for(workers) for workers in (1, 2, 3)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[dict]]:
    results: dict[str, list[dict]] = {}
    for workers, cases in ALL.items():
        for name, result in run_cases(workers, cases, tmp_path_factory.mktemp(f"workers-{workers}")).items():
            results[f"{workers}_{name}"] = result
    return results


@pytest.fixture(scope="module")
def references() -> Mapping[tuple[str, str], tuple]:
    kinds = {(case.network, case.optimizer) for cases in ALL.values() for case in cases}
    return {kind: unpipelined(network_named(kind[0]), kind[1]) for kind in kinds}


def merged(results: list[dict], what: str) -> dict[str, torch.Tensor]:
    together: dict[str, torch.Tensor] = {}
    for result in results:
        assert not together.keys() & result[what].keys()
        together |= result[what]
    return together


@pytest.mark.parametrize(
    ("workers", "case"),
    [(w, c) for w, cases in ALL.items() for c in cases],
    ids=lambda v: getattr(v, "name", v),
)
def test_a_schedule_learns_like_the_unpipelined_network(
    workers: int, case: Case, found: Mapping[str, list[dict]], references: Mapping
) -> None:
    """This includes dropout, because an item loses the same values however it is computed."""
    results = found[f"{workers}_{case.name}"]
    gradients, weights, losses = references[case.network, case.optimizer]
    assert_close(merged(results, "gradients"), gradients)
    assert_close(merged(results, "weights"), weights)
    (ours,) = [result["losses"] for result in results if result["losses"]]
    assert ours == pytest.approx(losses, rel=TOLERANCE)
    assert len(ours) == STEPS


def test_gradients_of_wide_layers_are_deferred_to_the_end_of_the_batch(
    found: Mapping[str, list[dict]],
) -> None:
    for workers, cases in ALL.items():
        for case in cases:
            late = {name for result in found[f"{workers}_{case.name}"] for name in result["late"]}
            assert {name for name in late if name.endswith("weight")} == (
                WIDE_WEIGHTS if case.network.startswith("wide") else set()
            )


def test_dropout_applies_in_training_and_not_in_evaluation(
    found: Mapping[str, list[dict]], references: Mapping
) -> None:
    assert references["vgg-dropout", "sgd"][2] != pytest.approx(references["vgg", "sgd"][2], rel=1e-3)
    for case in ALL[2]:
        if case.network != "vgg-dropout":
            continue
        results = found[f"2_{case.name}"]
        network = network_named("vgg")  # without dropout, with the trained weights
        whole = network.build(LayerRange(0, network.n_layers))
        weights = merged(results, "weights")
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                parameter.copy_(weights[name])
            images, labels = batch(network, STEPS)
            right = int((whole(images).argmax(dim=1) == labels).sum())
        assert sum(result["correct"] for result in results) == right <= BATCH

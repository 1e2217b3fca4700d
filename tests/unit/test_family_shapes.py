"""Test that families state the shapes of their tensors, by which plans are checked, as their layers do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from models_oracle import IMAGE_CLASSES, TEXT_CLASSES, Case, image_cases, text_cases
from tower_cases import CASES, TowerCase

from pipeedge.base.schedule import LayerRange
from pipeedge.models import Architecture, Model
from pipeedge.models.activations import ACTIVATIONS
from pipeedge.models.architecture import ACTIVATION_NAMES, LAYERS_PER_BLOCK
from pipeedge.models.families.catalogue import FAMILIES, family_of, parse_hf_config
from pipeedge.models.layers.catalogue import LAYERS
from pipeedge.models.pooling import DenseModule, Pooling
from pipeedge.models.weights.comparing import Placeholder, end_tensors
from pipeedge.models.weights.names import canonical_name

DRAWN: dict[str, st.SearchStrategy[Case] | st.SearchStrategy[TowerCase]] = {
    **{family: image_cases(family) for family in IMAGE_CLASSES},
    **{family: text_cases(family) for family in TEXT_CLASSES},
    **{name: strategy() for name, strategy in CASES.items()},
}
POOLINGS = (
    Pooling(("mean", "cls"), (DenseModule("2_Dense", 7, True, "tanh"),), True),
    Pooling(("cls",), (DenseModule("2_Dense", 5, False, "linear"), DenseModule("3_Dense", 3, True, "relu"))),
)


def architecture_of(case: Case | TowerCase) -> Architecture:
    if isinstance(case, Case):
        config = getattr(transformers, case.cls).config_class(**dict(case.options))
    else:
        config = case.config
    tower = case.tower.removeprefix("#") or None if isinstance(case, TowerCase) else None
    return parse_hf_config({**config.to_dict(), "architectures": [case.cls]}, tower=tower)[0]


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[object, tuple[int, ...]]:
    return {canonical_name(name): tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", DRAWN)
@settings(max_examples=cases(50))
@given(data=st.data(), pooling=st.none() | st.sampled_from(POOLINGS))
def test_ends_have_the_tensors_of_their_layers(
    family: str, data: st.DataObject, pooling: Pooling | None
) -> None:
    config = architecture_of(data.draw(DRAWN[family]))
    if pooling is not None and config.takes_text and config.head == "vector":
        config = dataclasses.replace(config, pooler=False, pooler_size=0, pooling=pooling)
    model = Model(family, config, None, None, Path())
    ends = end_tensors(config)
    starts = sorted({0, config.n_layers - LAYERS_PER_BLOCK})
    assert len(ends) == len(starts)
    for start, found in zip(starts, ends, strict=True):
        shard = model.build(LayerRange(start, start + LAYERS_PER_BLOCK))
        stored = shard.stored_tensors()
        assert shapes(found) == shapes(stored)


@pytest.mark.parametrize("family", DRAWN)
@settings(max_examples=cases(20))
@given(data=st.data())
def test_layouts_give_a_placeholder_the_shape_of_a_tensor(family: str, data: st.DataObject) -> None:
    config = architecture_of(data.draw(DRAWN[family]))
    names = dict(family_of(config).shapes(config, config.blocks - 1))
    for dialect in family_of(config).dialects(config):
        for name, shape in names.items():
            sources = dialect.get(name, ())
            if not sources:
                continue
            parts = Placeholder(shape).chunk(len(sources))
            tensors = torch.empty(shape, device="meta").chunk(len(sources))
            for source, part, tensor in zip(sources, parts, tensors, strict=True):
                assert source.layout(part, config.heads).shape == tuple(  # type: ignore[arg-type]
                    source.layout(tensor, config.heads).shape
                )


def test_every_family_has_layers() -> None:
    assert set(LAYERS) == {family.name for family in FAMILIES if not family.decodes}


def test_every_activation_that_a_config_may_name_exists() -> None:
    assert tuple(sorted(ACTIVATIONS)) == ACTIVATION_NAMES

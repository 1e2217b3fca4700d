"""Stand-ins for models, with only what reading their input needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipeedge.data.defaults import asset
from pipeedge.models.families.deit import DEIT
from pipeedge.models.families.vit import VIT
from pipeedge.models.family import ImageDefaults

TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class FakeConfig:
    image_size: tuple[int, int] = (0, 0)
    interpolated: bool = False
    channels: int = 0
    vocab: int = 0
    max_positions: int = 0
    type_vocab: int = 0
    num_labels: int = 0


@dataclass(frozen=True)
class FakeModel:
    name: str
    takes_text: bool
    input_names: tuple[str, ...]
    config: FakeConfig
    image_defaults: ImageDefaults = VIT.image_defaults
    directory: Path | None = None
    labels: tuple[str, ...] | None = None
    full_length: bool = False
    output_kind: Literal["logits", "vector"] = "logits"


def vit(
    size: int = 224, channels: int = 3, *, family: str = "vit", directory: Path | None = None
) -> FakeModel:
    config = FakeConfig(image_size=(size, size), channels=channels, num_labels=1000)
    defaults = {"vit": VIT, "deit": DEIT}[family].image_defaults
    return FakeModel(f"local/{family}", False, ("pixel_values",), config, defaults, directory)


def digits() -> FakeModel:
    """Return a stand-in for the model in the package."""
    model = vit(8, 1, directory=asset("vit-digits"))
    return replace(model, config=replace(model.config, num_labels=10))


def bert(vocab: int = 30522, max_positions: int = 512, *, directory: Path | None = None) -> FakeModel:
    config = FakeConfig(vocab=vocab, max_positions=max_positions, type_vocab=2, num_labels=2)
    return FakeModel("local/bert", True, TEXT_INPUTS, config, directory=directory)

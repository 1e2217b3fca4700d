"""Small models without weights, with what reading their input and writing their results needs; tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pipeedge.data.defaults import asset
from pipeedge.models.architecture import HeadKind, ImageInput, TextInput
from pipeedge.models.known import KNOWN
from pipeedge.models.outline import Outline

_PATCH = 16
_KNOWN = {
    "vit": KNOWN["google/vit-base-patch16-224"],
    "deit": KNOWN["facebook/deit-base-distilled-patch16-224"],
    "bert": KNOWN["bert-base-uncased"],
}


def _model(family: str, directory: Path | None, **dimensions: Any) -> Outline:
    known = _KNOWN[family]
    config = replace(known.config, **dimensions)
    return replace(known, name=f"local/{family}", directory=directory, config=config)


def vit(
    size: int = 224,
    channels: int = 3,
    *,
    family: str = "vit",
    directory: Path | None = None,
    classes: int = 1000,
) -> Outline:
    patch = min(size, _PATCH)
    images = ImageInput((size, size), (patch, patch), channels)
    return _model(family, directory, input=images, num_labels=classes)


def digits() -> Outline:
    """Return a stand-in for the model in the package."""
    return vit(8, 1, directory=asset("vit-digits"), classes=10)


def bert(
    vocab: int = 30522,
    max_positions: int = 512,
    *,
    type_vocab: int = 2,
    directory: Path | None = None,
    classes: int = 2,
) -> Outline:
    sentences = TextInput(vocab, max_positions, type_vocab)
    return _model("bert", directory, input=sentences, head="classifier", num_labels=classes)


def with_head(labels: tuple[str, ...] | None = None, head: HeadKind = "classifier") -> Outline:
    """Return a model with this head, and with names of its classes."""
    model = replace(bert(), name="a-model", labels=labels)
    classes = 0 if head == "vector" else len(labels or "ab")
    return replace(model, config=replace(model.config, head=head, num_labels=classes))


def write_tokenizer(directory: Path, words: Sequence[str], *, second: int) -> None:
    """Write a tokenizer of whole words that gives the second sentence of a pair the token type ``second``."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair=f"$A $B:{second}")
    tokenizer.save(str(directory / "tokenizer.json"))

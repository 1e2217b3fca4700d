"""The input that ships with the package, for runs that name none (origin: ``assets/CREDITS.md``)."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from pipeedge.base.payload import BYTE_VALUES, PixelTable
from pipeedge.data.images import ImageTransform, open_image
from pipeedge.data.items import Item, Items, MemoryItems
from pipeedge.data.text import Sentence, TokenItems, find_tokenizer
from pipeedge.models.outline import Outline

__all__ = ["asset", "default_digits", "default_photo", "default_sentences", "digits_fit"]

DIGITS_FILE = "digits.npz"
DIGIT_SIZE = (8, 8)
DIGIT_CLASSES = 10
DIGIT_LEVELS = 16
PHOTO_FILE = "chelsea.jpg"
SENTENCES_FILE = "sentences.json"
BERT_UNCASED_VOCAB = 30522

log = logging.getLogger(__name__)


def asset(name: str) -> Path:
    """Return the path of a file or directory that ships with the package."""
    return Path(str(files("pipeedge") / "assets" / name))


def default_digits() -> MemoryItems:
    """Return the held-out images of ``vit-digits``, with labels.

    They are scaled as in ``tools/train_vit_digits.py``: 0 to 16 becomes -1 to 1.
    """
    with np.load(asset(DIGITS_FILE), allow_pickle=False) as arrays:
        images, labels = arrays["images_heldout"], arrays["labels_heldout"]
    levels = (torch.arange(BYTE_VALUES).float()[None] / DIGIT_LEVELS - 0.5) / 0.5
    pixels = torch.from_numpy(images).to(torch.uint8).unsqueeze(1)
    return MemoryItems(
        tuple(
            Item((image,), int(label), f"{DIGITS_FILE}[{index}]")
            for index, (image, label) in enumerate(zip(pixels, labels, strict=True))
        ),
        pixels=PixelTable(levels),
    )


def default_photo(transform: ImageTransform) -> MemoryItems:
    """Return a photograph of a cat, without a label because its class in ImageNet is debatable."""
    item = Item((transform.encode(open_image(asset(PHOTO_FILE))),), None, PHOTO_FILE)
    return MemoryItems((item,), pixels=transform.table)


def digits_fit(model: Outline) -> bool:
    """Return whether ``model`` takes images like the shipped digits and distinguishes ten classes."""
    config = model.config
    return (config.channels, *config.image_size, config.num_labels) == (1, *DIGIT_SIZE, DIGIT_CLASSES)


@dataclass(frozen=True)
class ShippedSentence:
    """A sentence, and its token ids in the vocabulary of BERT's uncased models."""

    sentence: Sentence
    bert_uncased_ids: tuple[int, ...]


def shipped_sentences() -> list[ShippedSentence]:
    """Return the sentences in ``assets/sentences.json``."""
    entries = json.loads(asset(SENTENCES_FILE).read_text(encoding="utf-8"))
    return [
        ShippedSentence(
            Sentence(entry["text"], f"{SENTENCES_FILE}[{index}]"), tuple(entry["bert_uncased_ids"])
        )
        for index, entry in enumerate(entries)
    ]


def default_sentences(model: Outline, directories: Iterable[Path]) -> Items:
    """Return a few sentences, as ids of the model's own tokenizer if this machine has it.

    Without a tokenizer, a model with BERT's uncased vocabulary gets the ids that ship with the package. For
    any other model the ids are unknown. Words are then hashed into its vocabulary, which is useful only for
    timing, and a warning says so.
    """
    shipped = shipped_sentences()
    tokenizer = find_tokenizer(model, directories)
    if tokenizer is not None:
        return tokenizer.items([entry.sentence for entry in shipped])
    if model.config.vocab == BERT_UNCASED_VOCAB:
        encoded = [entry.bert_uncased_ids for entry in shipped]
    else:
        log.warning(
            "no tokenizer.json or vocab.txt for %s: the default sentences get arbitrary token ids, "
            "so the results are good for timing only",
            model.name,
        )
        encoded = [hashed_ids(entry.sentence.text, model.config.vocab) for entry in shipped]
    return TokenItems(
        tuple(ids[: model.config.max_positions] for ids in encoded),
        tuple(entry.sentence.source for entry in shipped),
        (None,) * len(shipped),
        model.input_names,
        tuple(entry.sentence.text for entry in shipped),
    )


def hashed_ids(text: str, vocab: int) -> tuple[int, ...]:
    """Return one id below ``vocab`` for each word, the same on every machine."""
    return tuple(zlib.crc32(word.encode()) % vocab for word in text.split())

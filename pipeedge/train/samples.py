"""Provide batches of images and labels.

The batch of a step depends only on the seed and the step, so every worker can make its part of it without
the others, and a resumed run continues where it stopped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image

from pipeedge.base.errors import InputError
from pipeedge.base.wording import count, printable
from pipeedge.data.images import ImageRecipe, encode_picture, find_images, open_image, skipped_line
from pipeedge.request.files import DEFAULT_MAX_IMAGE_PIXELS
from pipeedge.train.networks import Network
from pipeedge.train.request import DIGITS, RANDOM

__all__ = ["HeldOut", "Samples", "open_samples"]

_DIGITS_FILE = Path(__file__).resolve().parent.parent / "assets" / "digits.npz"
_INK_LEVELS = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """Items that are not trained on."""

    images: torch.Tensor
    """Images as float32 [items, channels, height, width]."""
    labels: torch.Tensor
    """Labels as int64 [items]."""


class Samples(Protocol):
    """Images and labels to train on."""

    def images(self, step: int) -> torch.Tensor:
        """Return the images of batch ``step``, from 0, as float32 [batch, channels, height, width]."""

    def labels(self, step: int) -> torch.Tensor:
        """Return the labels of batch ``step`` as int64 [batch]."""

    @property
    def held_out(self) -> HeldOut | None:
        """Items to measure the accuracy on, or None."""


def open_samples(
    data: str,
    network: Network,
    *,
    batch_size: int,
    seed: int,
    max_image_pixels: int = DEFAULT_MAX_IMAGE_PIXELS,
) -> Samples:
    """Open the samples that ``--data`` names; images of a folder may have ``max_image_pixels`` at most.

    Raises:
        InputError: There is no such folder, or it does not match the network.
    """
    if data == RANDOM:
        return _RandomSamples(network.image_shape, network.classes, batch_size, seed)
    if data == DIGITS:
        return _digits(network, batch_size, seed)
    return _folder(Path(data), network, batch_size, seed, max_image_pixels)


@dataclass(frozen=True)
class _RandomSamples:
    shape: tuple[int, int, int]
    classes: int
    batch_size: int
    seed: int
    held_out: HeldOut | None = None

    def images(self, step: int) -> torch.Tensor:
        return torch.randn(self.batch_size, *self.shape, generator=self._generator(step, 0))

    def labels(self, step: int) -> torch.Tensor:
        return torch.randint(self.classes, (self.batch_size,), generator=self._generator(step, 1))

    def _generator(self, step: int, what: int) -> torch.Generator:
        words = np.random.SeedSequence([self.seed, step, what]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(words[0] >> 1))


@dataclass(frozen=True)
class _ListedSamples:
    """Items by number, each used once per epoch, in a new order every epoch."""

    read: Callable[[int], torch.Tensor]
    """Returns the image of an item, [channels, height, width]."""
    known: Sequence[int]
    """Label of each item."""
    batch_size: int
    seed: int
    held_out: HeldOut | None = None

    def images(self, step: int) -> torch.Tensor:
        return torch.stack([self.read(item) for item in self._items(step)])

    def labels(self, step: int) -> torch.Tensor:
        return torch.tensor([self.known[item] for item in self._items(step)])

    def _items(self, step: int) -> list[int]:
        count = len(self.known)
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        orders = {place // count: self._order(place // count) for place in (places[0], places[-1])}
        for epoch in range(min(orders) + 1, max(orders)):
            orders[epoch] = self._order(epoch)
        return [int(orders[place // count][place % count]) for place in places]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.known))


def _digits(network: Network, batch_size: int, seed: int) -> Samples:
    """Return the split that ``vit-digits`` is trained and tested on."""
    with np.load(_DIGITS_FILE, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    shape = (1, *arrays["images_train"].shape[1:])
    if network.image_shape != shape or network.classes < 10:
        raise InputError(
            f"--data digits has images of {_dimensions(shape)} in 10 classes, but {network.name} takes "
            f"{_dimensions(network.image_shape)} in {network.classes}; use --model vit-digits"
        )
    images, held_out = (
        torch.from_numpy(arrays[f"images_{part}"]).float().unsqueeze(1) / (_INK_LEVELS / 2) - 1
        for part in ("train", "heldout")
    )
    labels = torch.from_numpy(arrays["labels_heldout"]).long()
    return _ListedSamples(
        images.__getitem__, arrays["labels_train"].tolist(), batch_size, seed, HeldOut(held_out, labels)
    )


def _folder(folder: Path, network: Network, batch_size: int, seed: int, max_image_pixels: int) -> Samples:
    """Return the images of a folder with one folder per class, in the order of the folders' names."""
    if not folder.is_dir():
        raise InputError(f"--data {folder}: no such folder; choose random, digits or a folder of classes")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    pictures = [find_images(place) for place in classes]
    found = [(path, label) for label, place in enumerate(pictures) for path in place.paths]
    if not found:
        raise InputError(f"--data {folder}: has no folders with images; make a folder for each class")
    if len(classes) > network.classes:
        raise InputError(
            f"--data {folder}: has {count(len(classes), 'class')}, but {network.name} has only "
            f"{network.classes}; remove folders or use another model"
        )
    line = skipped_line(str(folder), sum((place.skipped for place in pictures), Counter()))
    if line is not None:
        log.warning("%s", line)
    channels, height, width = network.image_shape
    if channels not in (1, 3):
        raise InputError(f"{network.name} takes {channels} channels, but images have 1 or 3")
    half = (0.5,) * channels
    recipe = ImageRecipe(channels, (height, width), (height, width), Image.Resampling.BILINEAR, half, half)

    def read(item: int) -> torch.Tensor:
        path = found[item][0]
        pixels = encode_picture(recipe, printable(path), lambda: open_image(path, max_image_pixels))
        return recipe.table.look_up(pixels[None])[0]

    return _ListedSamples(
        read,
        [label for _, label in found],
        batch_size,
        seed,
    )


def _dimensions(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))

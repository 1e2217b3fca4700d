"""Prepare inputs of a user as items for the pipeline: sentences, images, and arrays of a model's inputs.

    "a sentence", ("a question", "a passage") ──tokenizer──┐
    path, bytes, Pillow image, uint8 array ──image recipe──┼──> Item
    {"input_ids": array, ...}, float array ──checks────────┘

Items are checked as those of a file are. Nothing of a request is executed, and images are decoded within
limits.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pipeedge.base.errors import InputError
from pipeedge.base.payload import BYTE_VALUES, PixelTable
from pipeedge.base.wording import excerpt
from pipeedge.data.arrays import IDS, MASK, PIXELS, ArrayItems
from pipeedge.data.companions import companion_directories
from pipeedge.data.images import (
    NO_MEMORY,
    DirectoryTransform,
    ImageTransform,
    check_shape,
    encode_picture,
    image_transform,
)
from pipeedge.data.items import Item
from pipeedge.data.opening import with_companions
from pipeedge.data.pictures import decode_image, eight_bit, open_image, url_of
from pipeedge.data.png import is_small_png
from pipeedge.data.text import Sentence, Tokenizer, check_sentence, open_tokenizer
from pipeedge.models.outline import Outline
from pipeedge.request.config import RunRequest

__all__ = ["Preparation"]

_REFUSED_CHARACTERS = 1 << 17
"""Number of characters of a stranger's sentence that must give as many tokens as the model takes, if more
follow: a tokenizer takes seconds for a word of a million letters, and has no time for others meanwhile.
"""
_QUICK_SIZE = 1024
"""Largest number of characters or bytes that are prepared by the thread that receives them."""
_QUICK_PIXELS = 1 << 14
"""Largest image, in pixels, that is decoded by the thread that receives it."""
_CHANNELS = (1, 3, 4)
"""Numbers of channels that a picture may have."""
_SLACK = 1e-3
"""Largest distance of a pixel's value from that of a byte, as a fraction of the step between two bytes."""


class Preparation:
    """Turns what users give into items of one model. Any thread may use it.

    Args:
        model: The model.
        tokenizer: Its tokenizer, if it takes sentences.
        transform: Its conversion of images, if it takes images.
        as_bytes: Whether images travel as bytes, if that is exact.
        max_pixels: Largest image to decode, in pixels; None for the default.
        for_strangers: Whether values come over a network, from those who cannot choose ``as_bytes``.
    """

    def __init__(
        self,
        model: Outline,
        *,
        tokenizer: Tokenizer | None = None,
        transform: ImageTransform | None = None,
        as_bytes: bool = True,
        max_pixels: int | None = None,
        for_strangers: bool = False,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._transform = transform
        self._max_pixels = max_pixels
        self._for_strangers = for_strangers
        self._tokenizing = threading.Lock()  # transformers' tokenizers keep settings between two calls
        self.pixels: PixelTable | None = transform.table if transform is not None and as_bytes else None
        """Values that the bytes of images stand for, or None if items hold what the model takes."""

    @classmethod
    def open(cls, request: RunRequest, model: Outline, *, as_bytes: bool = True) -> Preparation:
        """Return the preparation for a run, with the tokenizer or image processor of its model.

        Raises:
            InputError: There is none, or it does not fit the model.
        """
        wanted = with_companions(request)
        directories = companion_directories(wanted, model)
        return cls(
            model,
            tokenizer=open_tokenizer(model, directories) if model.takes_text else None,
            transform=None if model.takes_text else image_transform(model, directories),
            as_bytes=as_bytes,
            max_pixels=wanted.max_image_pixels,
        )

    def for_strangers(self, model: Outline) -> Preparation:
        """Return the preparation for requests over a network, which may neither see paths nor take long.

        Args:
            model: The model, with the name that strangers may see.
        """
        tokenizer, transform = self._tokenizer, self._transform
        if tokenizer is not None:
            tokenizer = replace(
                tokenizer,
                model=model,
                path=Path(tokenizer.path.name),
                refused_characters=_REFUSED_CHARACTERS,
            )
        if isinstance(transform, DirectoryTransform):
            transform = replace(transform, path=Path(transform.path.name))
        return Preparation(
            model,
            tokenizer=tokenizer,
            transform=transform,
            as_bytes=self.pixels is not None,
            max_pixels=self._max_pixels,
            for_strangers=True,
        )

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens of the longest sentence; None for images."""
        return None if self._tokenizer is None else self._tokenizer.most_tokens

    def is_quick(self, values: Sequence[str | bytes]) -> bool:
        """Return whether texts, or image files, become items in less time than another thread takes to wake.

        That is the case for a few short texts, while no other is tokenised, and for a small image.
        """
        if sum(map(len, values)) > _QUICK_SIZE:
            return False
        if self._tokenizer is not None:
            return not self._tokenizing.locked()
        return all(isinstance(data, bytes) and is_small_png(data, _QUICK_PIXELS) for data in values)

    def item(self, value: Any, source: str = "input") -> Item:
        """Return the item for a value of any kind that fits the model.

        Args:
            value: A sentence or a pair of them; a path, bytes, Pillow image, or uint8 array [height, width]
                or [height, width, channels]; a float array [channels, height, width]; or arrays by the names
                of the model's inputs, without the dimension of items.
            source: What messages call it.

        Raises:
            InputError: It cannot be read, or does not fit the model.
        """
        if isinstance(value, Mapping):
            arrays = {str(name): np.asarray(array)[None] for name, array in value.items()}
            return self.arrays(arrays, source)[0]
        if self._tokenizer is not None:
            if isinstance(value, str):
                return self.sentence(value, source=source)
            if isinstance(value, tuple) and [type(one) for one in value] == [str, str]:
                return self.sentence(value[0], value[1], source=source)
            raise InputError(
                f"{source}: {type(value).__name__}; {self._model.name} takes sentences: give a string, or a "
                "pair of them"
            )
        if isinstance(value, bytes | bytearray | memoryview):
            return self.image(bytes(value), source)
        if isinstance(value, str) and not value:
            raise InputError(f"{source}: the path of the image is empty")
        url = url_of(value) if isinstance(value, str) else None
        if url is not None:
            raise InputError(
                f"{source}: {url} is a URL, and nothing is fetched: download it, and give its path or its "
                "bytes"
            )
        if isinstance(value, str | Path):
            return self._picture(lambda: open_image(Path(value), self._max_pixels), str(value))
        if isinstance(value, Image.Image):
            return self._picture(lambda: eight_bit(value, source), source)
        if isinstance(value, np.ndarray | torch.Tensor):
            array = np.asarray(value)
            if array.dtype == np.uint8:
                return self._images(array[None], [source])[0]
            if self._is_picture(array):
                raise InputError(
                    f"{source}: {array.dtype} {list(array.shape)}; an image is uint8, with values from 0 to "
                    "255: convert the array"
                )
            return self.arrays({PIXELS: array[None]}, source)[0]
        raise InputError(
            f"{source}: {type(value).__name__}; {self._model.name} takes images: give a path, the bytes of a "
            "file, a Pillow image or an array"
        )

    def together(self, values: Sequence[Any], sources: Sequence[str]) -> list[Item] | None:
        """Return the items for values that take a fraction of the time together, or None for others.

        These are sentences, and uint8 arrays of one shape.

        Args:
            values: What ``item`` takes.
            sources: What messages call each.

        Raises:
            InputError: One of them cannot be read, or does not fit the model.
        """
        kinds = set(map(type, values))
        if kinds == {str} and self._tokenizer is not None:
            return self.sentences(list(map(Sentence, values, sources)))
        if kinds == {np.ndarray} and self._tokenizer is None:
            (shape, dtype), *others = {(value.shape, value.dtype) for value in values}
            if dtype == np.uint8 and shape and not others:
                return self._images(np.concatenate(values).reshape(len(values), *shape), sources)
        return None

    def sentence(
        self,
        text: str,
        pair: str | None = None,
        *,
        source: str = "input",
        truncate: bool = True,
        warn: bool = True,
    ) -> Item:
        """Return the item for a sentence, or for a pair of them.

        Args:
            text: The sentence.
            pair: The other one of a pair, or None.
            source: Its name in messages.
            truncate: Whether to cut one that is too long.
            warn: Whether to log that it was cut.

        Raises:
            InputError: It is empty, not valid Unicode, too long and not to be truncated, or the model takes
                images.
        """
        return self.sentences([Sentence(text, source, pair=pair)], truncate=truncate, warn=warn)[0]

    def sentences(
        self, sentences: Sequence[Sentence], *, truncate: bool = True, warn: bool = True
    ) -> list[Item]:
        """Return the items for sentences, or for pairs of them. Together, they take a fraction of the time.

        Args:
            sentences: The sentences, with their names in messages.
            truncate: Whether to cut those that are too long.
            warn: Whether to log that some were cut.

        Raises:
            InputError: One is empty, not valid Unicode, too long and not to be truncated, or the model takes
                images.
        """
        found: dict[int, Item] = {}
        for sentence in sentences:
            if self._tokenizer is None:
                raise InputError(f"{sentence.source}: a sentence; {self._model.name} takes images")
            check_sentence(sentence)
        for is_pair in (False, True):  # a tokenizer takes either in one call
            places = [place for place, each in enumerate(sentences) if (each.pair is not None) == is_pair]
            if places and self._tokenizer is not None:
                some = [sentences[place] for place in places]
                with self._tokenizing:
                    tokens = self._tokenizer.items(some, truncate=truncate, warn=warn)
                found |= {place: tokens.read(row) for row, place in enumerate(places)}
        return [found[place] for place in range(len(sentences))]

    def image(self, data: bytes, source: str = "input") -> Item:
        """Return the item for an image file in memory.

        Raises:
            InputError: It cannot be decoded, is too large, or the model takes sentences.
        """
        return self._picture(lambda: decode_image(io.BytesIO(data), source, self._max_pixels), source)

    def arrays(self, arrays: Mapping[str, np.ndarray], source: str = "input") -> list[Item]:
        """Return the items for arrays by the names of the model's inputs, [items, ...].

        Raises:
            InputError: An array is missing or does not fit, or the model has no input of its name.
        """
        unknown = next((name for name in arrays if name not in self._model.input_names), None)
        if unknown is not None:
            names = ", ".join(self._model.input_names)
            raise InputError(
                f"{source}: no input is called {excerpt(unknown)}; {self._model.name} takes {names}"
            )
        if IDS in arrays and MASK in self._model.input_names and MASK not in arrays:
            arrays = {**arrays, MASK: np.ones_like(arrays[IDS])}
        rows = ArrayItems.of(source, arrays, self._model)
        items = [rows.read(index) for index in range(len(rows))]
        return items if self.pixels is None else [self._in_bytes(item, self.pixels) for item in items]

    @staticmethod
    def _is_picture(array: np.ndarray) -> bool:
        """Return whether an array has the type or shape of a picture, rather than of what a model takes.

        That is float [channels, height, width].
        """
        if not np.issubdtype(array.dtype, np.floating):
            return True
        has_channels_last = (
            array.ndim == 3 and array.shape[2] in _CHANNELS and array.shape[0] not in _CHANNELS
        )
        return array.ndim == 2 or has_channels_last

    def _picture(self, open_picture: Callable[[], Image.Image], source: str) -> Item:
        if self._transform is None:
            raise InputError(f"{source}: an image; {self._model.name} takes sentences")
        pixels = encode_picture(self._transform, source, open_picture)
        return self._encoded(self._transform, pixels[None], [source])[0]

    def _encoded(self, transform: ImageTransform, pixels: torch.Tensor, sources: Sequence[str]) -> list[Item]:
        if self.pixels is None and transform.table is not None:
            pixels = transform.table.look_up(pixels)
        return [Item((each,), None, source) for each, source in zip(pixels.unbind(), sources, strict=True)]

    def _images(self, images: np.ndarray, sources: Sequence[str]) -> list[Item]:
        """Return the items for images of one size, uint8 [items, ...]."""
        if images.ndim == 4 and images.shape[3] == 1:
            images = images[:, :, :, 0]
        if not images.size or (images.ndim != 3 and not (images.ndim == 4 and images.shape[3] in (3, 4))):
            raise InputError(
                f"{sources[0]}: uint8 {list(images.shape[1:])}; an image is [height, width], or that with "
                "channels"
            )
        if self._transform is None:
            raise InputError(f"{sources[0]}: an image; {self._model.name} takes sentences")
        check_shape(self._transform, sources[0], images.shape[2], images.shape[1])
        try:
            pixels = self._transform.encode_arrays(images)
        except MemoryError:
            raise InputError(f"{sources[0]}: {NO_MEMORY}") from None
        return self._encoded(self._transform, pixels, sources)

    def _in_bytes(self, item: Item, table: PixelTable) -> Item:
        """Return an item of pixel values as the bytes that stand for them.

        Raises:
            InputError: Some value is not that of a byte.
        """
        (values,) = item.tensors
        low, steps = table.values[:, :1, None], table.values.diff(dim=1)
        places = ((values - low) / steps.mean(dim=1)[:, None, None]).round().clamp(0, BYTE_VALUES - 1).long()
        found = table.values.gather(1, places.flatten(1)).view_as(values)
        if bool(((found - values).abs() > _SLACK * steps.min()).any()):
            raise InputError(
                f"{item.source}: {PIXELS} has values that no image of 8 bits a value gives; send the image"
                + ("" if self._for_strangers else ", or start the pipeline with images_as_bytes=False")
            )
        return Item((places.to(torch.uint8),), item.label, item.source)

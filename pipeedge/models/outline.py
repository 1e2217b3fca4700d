"""A model without its layers: its properties, the shapes of its payloads, and its files."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeedge.base.errors import InputError, ScheduleError
from pipeedge.base.schedule import DTYPES
from pipeedge.base.shapes import TensorShape, shapes_bytes
from pipeedge.base.wording import count
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.cuts import payload_shapes, stream_type
from pipeedge.models.families.catalogue import family_of
from pipeedge.models.family import Family, ImageDefaults
from pipeedge.models.weights.comparing import check_tensors, end_tensors
from pipeedge.models.weights.file_kinds import identity_digest, open_weights
from pipeedge.models.weights.files import WeightsFile
from pipeedge.models.weights.gguf_files import GgufFile
from pipeedge.models.weights.hub import fetch_weights, missing_weights
from pipeedge.models.weights.joined import JoinedWeights
from pipeedge.models.weights.locating import find_pooler
from pipeedge.models.weights.safetensors_files import INDEX_FILE, SINGLE_FILE

if TYPE_CHECKING:
    import torch

__all__ = ["Outline", "with_pooler_of"]

_FLOATING = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Outline:
    """A transformer that can be cut, as far as planning needs it: without torch, and without weights."""

    name: str
    """Name as given by the user: one of ``MODEL_NAMES``, a directory, or a repository of the hub."""
    config: Architecture
    labels: tuple[str, ...] | None
    """Names of the classes, or None if the model does not define them."""
    directory: Path | None
    """Hugging Face directory of the model, which may also hold a tokenizer or image processor."""
    default_weights: Path
    """Path of its weights; relative to the working directory for the known names."""
    repository: str | None = None
    """Repository of the Hugging Face hub whose snapshot is ``directory``, or None."""
    is_file: bool = False
    """Whether the weights are a GGUF file, which has configuration, tokenizer and chat template, too."""

    @property
    def family(self) -> Family:
        """Family of the model."""
        return family_of(self.config)

    @property
    def takes_text(self) -> bool:
        """Whether the model takes sentences, rather than images."""
        return self.config.takes_text

    @property
    def image_defaults(self) -> ImageDefaults:
        """How images become its input where no file describes it."""
        return self.family.image_defaults

    @property
    def full_length(self) -> bool:
        """Whether every sentence is padded to the longest length."""
        return self.family.full_length

    @property
    def n_layers(self) -> int:
        """Number of layers, four per block."""
        return self.config.n_layers

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the arrays that the first layer takes, in payload order."""
        return self.family.inputs(self.config)

    @property
    def output_kind(self) -> str:
        """Kind of output.

        ``logits``; ``tokens``, logits of each token; ``vector`` of an encoder without a classifier;
        ``text`` of a decoder.
        """
        kinds = {"vector": "vector", "tokens": "tokens", "next": "text"}
        return kinds.get(self.config.head, "logits")

    @property
    def max_tokens(self) -> int:
        """Longest sentence in tokens for text, or the number of tokens of every image."""
        return self.config.max_positions if self.takes_text else self.config.image.tokens

    def shared_with(self, layer: int) -> int | None:
        """Return the nearest layer before ``layer`` that has the same weights, or None; both from 0."""
        block, part = divmod(layer, LAYERS_PER_BLOCK)
        stored = self.family.stored_block
        earlier = range(block - 1, -1, -1)
        same = (each for each in earlier if stored(self.config, each) == stored(self.config, block))
        found = next(same, None)
        return None if found is None else found * LAYERS_PER_BLOCK + part

    @property
    def stored_dtype(self) -> str | None:
        """Number type in which a GGUF file has most of its weights, or None for other models, which name one.

        Raises:
            WeightsError: The file is missing or damaged.
        """
        return GgufFile(self.default_weights).stored_dtype if self.is_file else None

    def weights_path(self) -> Path:
        """Return the path of the default weights."""
        return self.default_weights

    def converted_path(self, dtype: torch.dtype, weights: Path | None = None) -> Path:
        """Return where ``save_model_weights.py --dtype`` stores ``weights`` (or the default)."""
        return self._converted_path(str(dtype).removeprefix("torch."), weights)

    def _converted_path(self, dtype: str, weights: Path | None = None) -> Path:
        original = self.default_weights if weights is None else weights
        if original.is_dir():
            original /= SINGLE_FILE
        elif original.name == INDEX_FILE:
            original = original.with_name(SINGLE_FILE)
        # Two towers may have one original, but not one converted file.
        tower = f".{self.family.tower}" if self.family.tower else ""
        return original.with_name(f"{original.stem}{tower}.{dtype}.safetensors")

    def find_weights(self, dtype: torch.dtype | None = None) -> Path:
        """Return the default weights for ``dtype``: those stored in that type if any, else the original.

        With ``dtype`` None and no original, any converted weights will do, since they carry its fingerprint.
        """
        if dtype is not None and not self.is_file:
            converted = self.converted_path(dtype)
            return converted if converted.exists() else self.default_weights
        if self.default_weights.exists():
            return self.default_weights
        others = (self._converted_path(name) for name in DTYPES)
        return next((path for path in others if path.exists()), self.default_weights)

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on this machine, as far as they can be fetched when they are read."""
        return self.repository is None or self.directory is None or not missing_weights(self.directory)

    def fetch_weights(self) -> None:
        """Fetch the weights of a repository of the hub, unless they are on this machine.

        Raises:
            WeightsError: They cannot be fetched.
        """
        if self.repository is not None and self.directory is not None:
            fetch_weights(self.repository, self.directory)

    def payload_shapes(
        self, after_layer: int, items: int, tokens: int | None = None, dtype: str = "float32"
    ) -> tuple[TensorShape, ...]:
        """Return the shapes and number types of the payload after ``after_layer`` layers.

        Args:
            after_layer: 0 for the model's input, ``n_layers`` for its output.
            items: Number of items in the microbatch.
            tokens: Sentence length in tokens (text only; by default the longest).
            dtype: Name of the number type of the weights, which decides that of the hidden states.

        Raises:
            ScheduleError: The layer is beyond the model.
            InputError: There are more tokens than the model has positions.
        """
        if not 0 <= after_layer <= self.n_layers:
            raise ScheduleError(f"there is no cut after layer {after_layer}: layers are 1 to {self.n_layers}")
        if not self.takes_text or tokens is None:
            tokens = self.max_tokens
        elif not 1 <= tokens <= self.max_tokens:
            raise InputError(
                f"{count(tokens, 'token')} in a sentence: {self.name} takes 1 to {self.max_tokens}"
            )
        return payload_shapes(
            self.family, self.config, after_layer, items=items, tokens=tokens, dtype=stream_type(dtype)
        )

    def input_shapes(
        self, items: int, tokens: int | None = None, dtype: str = "float32", *, eight_bit: bool = True
    ) -> tuple[TensorShape, ...]:
        """Return the shapes and number types of the input that the data rank sends to the first stage.

        Args:
            items: Number of items in the microbatch.
            tokens: Sentence length in tokens, as for ``payload_shapes``.
            dtype: Name of the number type of the weights of the first stage.
            eight_bit: Whether images are sent as bytes (``payload.PixelTable``). They are, unless they were
                given as floating point arrays.
        """
        shapes = self.payload_shapes(0, items, tokens, dtype)
        if not eight_bit:
            return shapes
        return tuple(
            dataclasses.replace(shape, dtype="uint8") if shape.dtype in _FLOATING else shape
            for shape in shapes
        )

    def input_bytes(
        self, tokens: int | None = None, dtype: str = "float32", *, eight_bit: bool = True
    ) -> int:
        """Return the bytes of one input item that the data rank sends to the first stage.

        Args:
            tokens: Sentence length in tokens (text only; by default the longest).
            dtype: Name of the number type of the weights of the first stage.
            eight_bit: Whether images are sent as bytes, as for ``input_shapes``.
        """
        return shapes_bytes(self.input_shapes(1, tokens, dtype, eight_bit=eight_bit))

    def check_sizes(self, weights: str | os.PathLike[str] | None = None) -> None:
        """Compare the model's sizes with those in the weights file, if it exists, before anything is built.

        The first and the last block show all sizes, and whether the number of blocks agrees.

        Raises:
            WeightsError: The file is truncated, of an unknown kind, or belongs to a model of another size.
        """
        path = self.find_weights() if weights is None else Path(weights)
        if path.is_file() or (weights is not None and path.is_dir()):
            with self.open(path) as file:
                config = with_pooler_of(self.config, file)
                for tensors in end_tensors(config):
                    check_tensors(tensors, config, file)

    def fingerprint(self, weights: str | os.PathLike[str] | None = None) -> str:
        """Return a digest of configuration and weights, for comparing ranks at start-up.

        It covers the name, shape and position of every tensor. For an ``.npz`` file it uses the checksum of
        every array in the table of contents. For a ``.safetensors`` file two samples of each tensor are read,
        because reading gigabytes at every start is too slow for a small board. The path of the file plays no
        part, nor does the size of images if positions are interpolated to it. Converted weights have the
        fingerprint of their original, so that each rank may hold those of its own type.

        Raises:
            WeightsError: The file is missing, truncated, or of an unknown kind.
        """
        with self.open(weights) as file:
            if file.source is not None:
                return file.source
            config = json.dumps(self.config.as_trained().as_dict(), sort_keys=True).encode()
            return identity_digest(iter([config, *file.identity()]))

    def open(
        self, weights: str | os.PathLike[str] | None = None, dtype: torch.dtype | None = None
    ) -> WeightsFile:
        """Open the weights in a file, or the default ones for ``dtype``, fetching those of a repository.

        Raises:
            WeightsError: The file is missing, damaged, or of a kind that cannot be read.
        """
        if weights is not None:
            return self._with_modules(open_weights(weights))
        path = self.find_weights(dtype)
        if path == self.default_weights:
            self.fetch_weights()
        return self._with_modules(open_weights(path))

    def _with_modules(self, file: WeightsFile) -> WeightsFile:
        """Return ``file`` with the dense layers of a sentence embedding, which have a file of their own."""
        pooling = self.config.pooling
        if pooling is None or self.directory is None or not pooling.dense:
            return file
        first = pooling.dense[0]
        if f"{first.path}.linear.weight" in file.names:  # as in converted weights
            return file
        modules = {f"{one.path}.": open_weights(self.directory / one.path) for one in pooling.dense}
        return JoinedWeights(file, modules)


def with_pooler_of(config: Architecture, file: WeightsFile) -> Architecture:
    """Return ``config`` with the pooler that ``file`` has, if the file decides."""
    if config.pooling is not None:
        return config
    found = find_pooler(config, file.names)
    if found is not None:
        return dataclasses.replace(config, pooler=True, pooler_size=file.entry(found).shape[0])
    if not family_of(config).optional_pooler(config):
        return config
    if config.pooler and config.pooler_size == config.hidden:
        return dataclasses.replace(config, pooler=False, pooler_size=0)
    return config

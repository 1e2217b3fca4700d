"""A model: its properties, payloads and shards."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeedge.base.errors import ScheduleError
from pipeedge.base.payload import TensorSpec
from pipeedge.base.schedule import LayerRange
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.dtypes import dtype_name
from pipeedge.models.kernels import choose
from pipeedge.models.outline import Outline, with_pooler_of
from pipeedge.models.registry import find_outline
from pipeedge.models.shard import Shard
from pipeedge.models.weights.comparing import check_tensors
from pipeedge.models.weights.files import WeightsFile
from pipeedge.models.weights.fill import fill, plan
from pipeedge.models.weights.locating import hub_tensors
from pipeedge.models.weights.random_weights import RandomWeights
from pipeedge.models.words import touched_bytes

__all__ = ["Model", "find_model"]


@dataclass(frozen=True)
class Model(Outline):
    """A transformer that can be cut into shards. It holds no weights; ``load`` and ``random`` make shards."""

    def payload_specs(
        self,
        after_layer: int,
        items: int,
        tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[TensorSpec, ...]:
        """Return what ``payload_shapes`` does, as specifications of tensors."""
        return tuple(map(TensorSpec.of, self.payload_shapes(after_layer, items, tokens, dtype_name(dtype))))

    def input_specs(
        self,
        items: int,
        tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        eight_bit: bool = True,
    ) -> tuple[TensorSpec, ...]:
        """Return what ``input_shapes`` does, as specifications of tensors."""
        shapes = self.input_shapes(items, tokens, dtype_name(dtype), eight_bit=eight_bit)
        return tuple(map(TensorSpec.of, shapes))

    def parameter_count(self, layers: LayerRange | None = None) -> int:
        """Return the number of weights of ``layers`` (by default all)."""
        return self.build(layers).parameter_count

    def weight_bytes(self, layers: LayerRange | None = None, dtype: torch.dtype = torch.float32) -> int:
        """Return the size of the weights of ``layers`` (by default all) in bytes."""
        shard = self.build(layers, dtype)
        return sum(tensor.nbytes for tensor in (*shard.parameters(), *shard.buffers()))

    def maps_words(
        self, weights: str | os.PathLike[str] | None = None, dtype: torch.dtype = torch.float32
    ) -> bool:
        """Return whether a table of words stays in the weights file (by default the model's own) on a CPU."""
        path = self.find_weights(dtype) if weights is None else Path(weights)
        return self.takes_text and path.suffix != ".npz"

    def held_bytes(
        self,
        layers: LayerRange,
        dtype: torch.dtype,
        rows: int,
        weights: str | os.PathLike[str] | None = None,
    ) -> int:
        """Return the bytes of the weights of ``layers`` that are in memory on a CPU.

        Args:
            layers: Layers to count.
            dtype: Number type of the weights.
            rows: Number of tokens of a microbatch, whose rows of a mapped table of words are counted.
            weights: File of the weights; by default the model's own.
        """
        table = self.build(layers, dtype).word_table
        total = self.weight_bytes(layers, dtype)
        if table is None or not self.maps_words(weights, dtype):
            return total
        return total - table.numel() * table.element_size() + touched_bytes(table, rows)

    def build(self, layers: LayerRange | None = None, dtype: torch.dtype = torch.float32) -> Shard:
        """Build the shard of ``layers`` (by default all) on ``meta``: shapes without storage.

        Raises:
            ScheduleError: The layers go beyond the model.
        """
        return self._build(self.config, layers, dtype)

    def load(
        self,
        layers: LayerRange | None = None,
        weights: str | os.PathLike[str] | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        progress: Callable[[int], object] = lambda _: None,
        kernels: str = "auto",
        beside: Shard | None = None,
    ) -> Shard:
        """Load the shard of ``layers`` (by default all) with weights from a file, ready to compute.

        Only the shard's own tensors are read, one at a time, after all their names and shapes have been
        compared with the model's. ``dtype`` is one of ``schedule.DTYPES``; see ``models.dtypes``.
        ``progress`` is called with the bytes of each piece that is loaded. ``kernels`` is ``auto`` or a name
        from ``models.kernels``; only with ``torch`` are all weights parameters that can be looked at.
        Layers that the shard ``beside``, of the same type on the same device, has already are not loaded, but
        shared with it.

        Raises:
            RequestError: This machine does not have those kernels.
            ScheduleError: The layers go beyond the model.
            WeightsError: The file is missing, truncated, of an unknown kind, or does not fit the model.
        """
        chosen = choose(kernels, dtype, torch.device(device))
        with self.open(weights, dtype) as file:
            self._compare(file, layers)
            shard = self.shard_for(file, layers, dtype, chosen)
            if beside is not None and beside.kernels != chosen:
                beside = None
            return fill(shard, self.config, file, device=device, progress=progress, beside=beside)

    def check_weights(
        self, weights: str | os.PathLike[str] | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        """Compare the names and shapes in a file with those of the whole model, without reading data.

        Raises:
            WeightsError: The file is missing, truncated, of an unknown kind, or does not fit the model.
        """
        with self.open(weights, dtype) as file:
            self._compare(file)
            plan(self.shard_for(file, dtype=dtype), self.config, file)

    def _compare(self, file: WeightsFile, layers: LayerRange | None = None) -> None:
        layers = layers if layers is not None else LayerRange(0, self.n_layers)
        whole_block = min(len(layers), LAYERS_PER_BLOCK)
        ends = {layers.start, layers.stop - whole_block}
        for start in sorted(ends):
            part = LayerRange(start, start + whole_block)
            check_tensors(self.shard_for(file, part).stored_tensors(), self.config, file)

    def shard_for(
        self,
        file: WeightsFile,
        layers: LayerRange | None = None,
        dtype: torch.dtype = torch.float32,
        kernels: str = "torch",
    ) -> Shard:
        """Build the shard as ``build`` does, with a pooler if an open weights file has one.

        A model without a classifier outputs the result of the pooler if the file has one, else the first
        token. Google's image classifiers may have a pooler in front of the classifier.
        """
        return self._build(with_pooler_of(self.config, file), layers, dtype, kernels)

    def random(
        self,
        layers: LayerRange | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        kernels: str = "auto",
    ) -> Shard:
        """Return the shard of ``layers`` (by default all) with random weights, the same for every cut.

        ``kernels`` is as for ``load``.
        """
        shard = self._build(self.config, layers, dtype, choose(kernels, dtype, torch.device(device)))
        source = RandomWeights(hub_tensors(shard, self.config), seed)
        return fill(shard, self.config, source, device=device)

    def _build(
        self, config: Architecture, layers: LayerRange | None, dtype: torch.dtype, kernels: str = "torch"
    ) -> Shard:
        layers = layers if layers is not None else LayerRange(0, self.n_layers)
        if layers.stop > self.n_layers:
            raise ScheduleError(
                f"the range {layers} goes beyond {self.name}: its layers are 1 to {self.n_layers}"
            )
        return Shard(self.family, config, layers, dtype, kernels)


def find_model(name_or_dir: str | os.PathLike[str], *, fetch: bool = True) -> Model:
    """Return what ``registry.find_outline`` does, as a model whose shards can be made."""
    outline = find_outline(name_or_dir, fetch=fetch)
    return Model(*(getattr(outline, field.name) for field in dataclasses.fields(outline)))

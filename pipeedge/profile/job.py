"""A request to measure layers that has passed its checks, and the results that its measurements make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from pipeedge.base.errors import InputError, ScheduleError, WeightsError
from pipeedge.base.payload import TensorSpec
from pipeedge.base.schedule import LayerRange
from pipeedge.models import Model, find_model
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.kernels import choose
from pipeedge.models.shard import Shard
from pipeedge.models.words import touched_bytes
from pipeedge.profile.handling import Handling
from pipeedge.profile.measuring import shard_bytes
from pipeedge.profile.request import MeasureRequest, ProfileConditions
from pipeedge.profile.results import LayerResult, LengthResult, Measurement, ProfileResults, Shapes
from pipeedge.run.stage import resolve_device

__all__ = ["SEED", "Job", "Readings"]

SEED = 0
"""Seed of random weights and of the input of the first layer."""


@dataclass
class Readings:
    """Readings of all layers with sentences of one length."""

    times: list[tuple[float, float | None]] = field(default_factory=list)
    """Seconds of each layer, with their spread."""
    peaks: list[int] = field(default_factory=list)
    """Peak activations of each layer in bytes."""
    handling: list[Handling] = field(default_factory=list)
    """Costs of links at the cut before each layer, and at the one after the last."""


@dataclass(frozen=True)
class Job:
    """A profile to measure, of a request that has passed its checks."""

    request: MeasureRequest
    conditions: ProfileConditions
    model: Model
    device: torch.device
    layers: LayerRange
    tokens: tuple[int | None, ...]
    """Sentence lengths, longest first, or a single None for images."""
    kernels: str
    """Kernels of the linear layers."""

    @property
    def dtype(self) -> torch.dtype:
        """Number type of weights and computation."""
        return find_dtype(self.conditions.dtype)

    @property
    def batch_size(self) -> int:
        """Number of items in a microbatch."""
        return self.conditions.batch_size

    @classmethod
    def each(cls, request: MeasureRequest) -> tuple[Job, ...]:
        """Check a request against its model, and return a job for each of its profiles.

        Raises:
            PipeEdgeError: The model is unknown, layers or sentence lengths are beyond it, or the device is
                missing.
        """
        model = find_model(request.model.name)
        device = resolve_device(request.model.device)
        last = model.n_layers if request.last is None else request.last
        if max(request.first, last) > model.n_layers:
            raise ScheduleError(
                f"layers {request.first}-{last} go beyond {model.name}: its layers are 1 to {model.n_layers}"
            )
        layers = LayerRange.inclusive(request.first, last)
        tokens = _tokens(request, model, layers.start)
        return tuple(
            cls(
                request,
                conditions,
                model,
                device,
                layers,
                tokens,
                choose(request.model.kernels, find_dtype(conditions.dtype), device),
            )
            for conditions in request.conditions
        )

    def specs(self, after_layer: int, tokens: int | None) -> tuple[TensorSpec, ...]:
        """Return the tensors at the cut after ``after_layer`` layers, with sentences of ``tokens``."""
        return self.model.payload_specs(after_layer, self.batch_size, tokens, self.dtype)

    def load(self, layers: LayerRange) -> Shard:
        """Load ``layers`` on the device, with random weights if the request asks for them.

        Raises:
            WeightsError: The weights are missing or do not fit the model.
        """
        if self.request.random_weights:
            return self.model.random(layers, SEED, self.device, self.dtype, self.kernels)
        try:
            weights = self.request.model.weights
            return self.model.load(layers, weights, self.device, self.dtype, kernels=self.kernels)
        except WeightsError as error:
            raise WeightsError(
                f"{error}; times do not depend on real weights: use --random-weights"
            ) from error

    def expected(self) -> ProfileResults:
        """Return the results to expect, without times."""
        nothing = Readings(times=[(0.0, None)] * len(self.layers))
        return self.results(
            self.bytes_of_layers(self.model.build(self.layers, self.dtype)),
            dict.fromkeys(self.tokens, nothing),
        )

    def bytes_of_layers(self, shard: Shard) -> list[int]:
        """Return the bytes of parameters and buffers of each layer of ``shard`` that are in memory.

        Those of a table of words that stays in its file are the rows that a microbatch may look up.
        """
        sizes = [shard_bytes(shard, layer) for layer in range(shard.layers.start, shard.layers.stop)]
        table, tokens = shard.word_table, self.tokens[0]
        maps = self.device.type == "cpu" and self.model.maps_words(self.request.model.weights, self.dtype)
        if table is not None and tokens is not None and maps:
            touched = touched_bytes(table, self.batch_size * tokens)
            sizes[0] += touched - table.numel() * table.element_size()
        return sizes

    def results(self, sizes: list[int], readings: Mapping[int | None, Readings]) -> ProfileResults:
        """Return the results that ``readings`` make.

        Args:
            sizes: Bytes of each layer's parameters and buffers.
            readings: Readings by sentence length.
        """
        reduced = self.dtype is not torch.float32
        full = self.bytes_of_layers(self.model.build(self.layers)) if reduced else []
        longest, *shorter = self.tokens
        return ProfileResults(
            model_name=self.model.name,
            dtype=str(self.dtype),
            batch_size=self.batch_size,
            layers=self.model.n_layers,
            profile_data=tuple(
                LayerResult(
                    layer=layer + 1,
                    memory_bytes=sizes[index],
                    measured=self._measurement(index, longest, readings[longest]),
                    float32_bytes=full[index] if reduced else None,
                    shared_with=None if (twin := self.model.shared_with(layer)) is None else twin + 1,
                    lengths=tuple(
                        LengthResult(tokens, self._measurement(index, tokens, readings[tokens]))
                        for tokens in shorter
                        if tokens is not None
                    ),
                )
                for index, layer in enumerate(range(self.layers.start, self.layers.stop))
            ),
            device=str(self.device),
            threads=torch.get_num_threads(),
            kernels=self.kernels,
            tokens=longest,
        )

    def _measurement(self, index: int, tokens: int | None, readings: Readings) -> Measurement:
        """Return the measurement of one layer with sentences of ``tokens``."""
        layer = self.layers.start + index
        time_s, spread_s = readings.times[index]
        return Measurement(
            shape_in=_shapes(self.specs(layer, tokens)),
            shape_out=_shapes(self.specs(layer + 1, tokens)),
            time_s=time_s,
            time_spread_s=spread_s,
            activations_bytes=readings.peaks[index] if readings.peaks else None,
            receive_s=readings.handling[index].receive_s if readings.handling else None,
            send_s=readings.handling[index + 1].send_s if readings.handling else None,
        )


def _tokens(request: MeasureRequest, model: Model, start: int) -> tuple[int | None, ...]:
    """Return the sentence lengths to measure, longest first, or a single None for images.

    Raises:
        InputError: Lengths are beyond the model, or shapes do not match the layer.
    """
    given = request.shapes
    if request.tokens and not model.takes_text:
        raise InputError(
            f"--tokens is for text models; {model.name} makes {model.max_tokens} tokens of every image"
        )
    if not given:
        if not model.takes_text:
            return (None,)
        longest = model.max_tokens
        lengths = request.tokens or {max(1, longest // part) for part in (1, 4, 16)}
        if max(lengths) > longest:
            raise InputError(f"--tokens {max(lengths)}: {model.name} takes 1 to {longest}")
        return tuple(sorted(lengths, reverse=True))
    tokens = given[0][0] if model.takes_text else None
    specs = model.payload_specs(start, 1, tokens)
    wanted = _shapes(specs)
    # A text model's inputs have the same shape, and what follows the hidden state, such as the mask, need not
    # be given.
    enough = _shapes(spec for spec in specs if spec.dtype.is_floating_point) or wanted[:1]
    if given not in (wanted, enough):
        raise InputError(
            f"-s/--shape-input {_shape_text(given)} does not match layer {start + 1} of {model.name}, which "
            f"takes {_shape_text(wanted)}"
        )
    return (tokens,)


def _shapes(specs: Iterable[TensorSpec]) -> Shapes:
    return tuple(spec.shape[1:] for spec in specs)


def _shape_text(shapes: Shapes) -> str:
    return " and ".join(",".join(map(str, shape)) for shape in shapes)

"""The two ends of a compressed link, microbatch by microbatch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from pipeedge.base.payload import Payload
from pipeedge.compress.clamping import WHOLE_RANGE, Levels, Sample, choose_levels
from pipeedge.compress.codec import (
    EncodedTensor,
    NonFiniteError,
    as_array,
    decode_tensor,
    encode_tensor,
    is_compressible,
)
from pipeedge.compress.sizes import Granularity, row_count
from pipeedge.compress.transform import Transform, hadamard
from pipeedge.compress.wire import WirePart, from_wire, to_wire

__all__ = ["LinkDecoder", "LinkEncoder"]

TRANSFORMS = ("auto", "off", "hadamard")
DEFAULT_WINDOW = 10
"""Number of microbatches for which the levels and the transform of a tensor stay the same."""

_SAMPLE_ROWS = 64
_SAMPLE_VALUES = 1 << 16
_TRANSFORM_GAIN = 0.98
"""Largest squared error that a transform may leave, as a fraction of the error without it on the same sample.
Less would not be worth its time.
"""


@dataclass(frozen=True)
class _Form:
    """How a tensor is encoded, besides its bits."""

    levels: Levels = WHOLE_RANGE
    transform: Transform | None = None


class LinkEncoder:
    """Encoder for the payloads of one link.

    The levels of each tensor of the payload and its transform are chosen once per window of microbatches, and
    whenever the bits change, from a sample of equidistant rows, the same rows for the same shape.

    Args:
        clamp: One of the methods of ``pipeedge.compress.clamping``.
        granularity: Part of a tensor that has its own range.
        window: Number of microbatches in a window.
        transform: ``off``, ``hadamard``, or ``auto`` for the one with less error on the sample.
    """

    def __init__(
        self,
        clamp: str,
        granularity: Granularity = Granularity.TOKEN,
        window: int = DEFAULT_WINDOW,
        transform: str = "auto",
    ) -> None:
        if transform not in TRANSFORMS:
            raise ValueError(f"there is no transform {transform}: choose one of {', '.join(TRANSFORMS)}")
        self._clamp = clamp
        self._granularity = granularity
        self._window = window
        self._transform = transform
        self._done = Counter[int]()
        self._forms: dict[int, dict[tuple[int, int], _Form]] = {}
        self._encoded = self._transformed = 0

    @property
    def transformed_fraction(self) -> float:
        """Fraction of the tensors encoded so far whose rows were transformed, or 0 without any."""
        return self._transformed / max(self._encoded, 1)

    def encode(self, payload: Payload, bits: int, kind: int = 0) -> Payload:
        """Return ``payload`` in wire form with ``bits`` bits a value; 0 is bit-exact.

        Masks and indices are never encoded.

        Args:
            payload: Payload of a microbatch.
            bits: Number of bits a value.
            kind: Kind of the microbatch; each has levels and windows of its own.

        Raises:
            NonFiniteError: A tensor to be encoded contains NaN or infinity.
            ValueError: The bits are not supported.
        """
        forms = self._forms.setdefault(kind, {})
        if self._done[kind] % self._window == 0:
            forms.clear()
        self._done[kind] += 1
        return to_wire([self._part(forms, index, tensor, bits) for index, tensor in enumerate(payload)])

    def _part(
        self, forms: dict[tuple[int, int], _Form], index: int, tensor: torch.Tensor, bits: int
    ) -> WirePart:
        if not bits or not is_compressible(tensor.dtype):
            return tensor
        tensor = tensor.float() if tensor.dtype is torch.float16 else tensor.contiguous()
        try:
            key = index, bits
            if key not in forms and tensor.numel():
                forms[key] = self._choose(tensor, bits)
            form = forms.get(key, _Form())
            encoded = encode_tensor(tensor, bits, form.levels, self._granularity, form.transform)
        except NonFiniteError as error:
            raise NonFiniteError(f"tensor {index} of the payload, {error}") from None
        self._encoded += 1
        self._transformed += encoded.transform is not None
        return encoded

    def _choose(self, tensor: torch.Tensor, bits: int) -> _Form:
        if self._clamp == "none" and self._transform == "off":
            return _Form()
        rows = row_count(tuple(tensor.shape), self._granularity)
        values = tensor.reshape(rows, -1)
        length = values.shape[1]
        wanted = max(1, min(_SAMPLE_ROWS, _SAMPLE_VALUES // length))
        values = values[:: max(1, rows // wanted)][:wanted].contiguous()
        if not bool(torch.isfinite(values).all()):
            return _Form()  # the codec will find the value and report it
        sampled = as_array(values)
        along = -(-length // _SAMPLE_VALUES)
        plain = Sample.of(np.ascontiguousarray(sampled[:, ::along]))
        form = _Form(choose_levels(self._clamp, plain, bits))
        if self._transform == "off":
            return form
        transform = hadamard(length)
        turned = np.ascontiguousarray(transform.rows(sampled)[:, ::along])
        if not np.isfinite(turned).all():
            return form  # sums of these values overflow
        sample = Sample.of(turned, symmetric=True)
        other = _Form(choose_levels(self._clamp, sample, bits), transform)
        if self._transform == "hadamard":
            return other
        least = plain.squared_error(bits, form.levels)
        return other if sample.squared_error(bits, other.levels) < _TRANSFORM_GAIN * least else form


class LinkDecoder:
    """Decoder for the payloads of one link."""

    def __init__(self) -> None:
        self.latest_bits = 0
        """Bits a value of the last payload decoded, or 0 if it was not compressed."""

    def decode(self, payload: Payload) -> Payload:
        """Return the decoded payload. Tensors that were sent unencoded remain views of the received ones.

        Raises:
            PeerFailedError: ``payload`` is not in wire form.
        """
        parts = from_wire(payload)
        self.latest_bits = max((part.bits for part in parts if isinstance(part, EncodedTensor)), default=0)
        return tuple(decode_tensor(part) if isinstance(part, EncodedTensor) else part for part in parts)

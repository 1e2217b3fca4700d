"""Decode, compute and encode the microbatches of one stage.

    packet ──Decode──> payload ──Stage──> payload ──Encode──> packet

Only payloads of compressed links are decoded and encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from pipeedge.base.errors import PeerFailedError, RequestError
from pipeedge.base.heap import return_freed_memory
from pipeedge.base.payload import Payload, PixelTable
from pipeedge.base.schedule import LayerRange
from pipeedge.compress import LinkDecoder, LinkEncoder, NonFiniteError
from pipeedge.models.layers.decoder import DecoderStage, StepRows
from pipeedge.models.layers.kept_outputs import KeptOutputs
from pipeedge.models.shard import Shard
from pipeedge.models.step_rows import (
    StepBounds,
    computing_layers,
    kind_of_rows,
    number_of_step,
    unpack_rows,
)
from pipeedge.run.copying import CopySender
from pipeedge.transport.base import Packet

__all__ = ["Decode", "Encode", "Stage", "StepStage", "resolve_device"]


class Stage:
    """Computes microbatches. Payloads are on the CPU, whatever the device.

    In the first microbatch, kernels allocate what they keep, between activations that are about to be freed.
    No later activation fits the holes that this leaves, so their memory is returned to the system as they
    arise.

    Args:
        shard: Layers of this stage.
        device: Device of the shard.
        pixels: Value of each pixel byte, for a first stage that receives pictures as bytes.
    """

    def __init__(self, shard: Shard, device: torch.device, pixels: PixelTable | None = None) -> None:
        self._shard = shard
        self._device = device
        self._pixels = pixels
        self._is_first = True

    def __call__(self, packet: Packet) -> Packet:
        """Compute this stage's layers on a microbatch, which keeps its number and items."""
        with torch.inference_mode():
            inputs = tuple(tensor.to(self._device) for tensor in packet.payload)
            if self._pixels is not None:
                inputs = tuple(self._pixels.look_up(tensor, self._shard.stream_dtype) for tensor in inputs)
            after_layer = return_freed_memory if self._is_first else None
            self._is_first = False
            outputs = tuple(tensor.to("cpu") for tensor in self._shard(inputs, after_layer))
        return _with_payload(packet, outputs)


class StepStage:
    """Executes the steps of a decoder.

    Args:
        stage: Layers of this stage, with their cache.
        bounds: Bounds of steps.
        source: Rank that sends the steps.
        is_last: Whether the hidden states go back to the data rank, which knows what the rows are.
        outputs: What is kept of the payloads of cuts, by the number of layers before.
    """

    def __init__(
        self,
        stage: DecoderStage,
        bounds: StepBounds,
        source: int,
        *,
        is_last: bool,
        outputs: Mapping[int, KeptOutputs] = MappingProxyType({}),
    ) -> None:
        self._stage = stage
        self._bounds = bounds
        self._source = source
        self._is_last = is_last
        self.outputs = outputs
        """What is kept; a plan that is to take over may keep other outputs of the same layers."""
        self._behind: dict[int, DecoderStage] = {}
        """Layers behind cuts that steps have begun at."""
        self.copies: Sequence[CopySender] = ()
        """What copies pages to other ranks."""
        self.latest_kind = 0
        """1 if the latest step had rows of prompts, whose values differ from those of decoding, else 0."""

    def __call__(
        self,
        packet: Packet,
        seconds: npt.NDArray[np.float64] | None = None,
        *,
        processor_time: bool = False,
    ) -> Packet:
        """Compute this stage's layers for the rows of a step.

        Args:
            packet: The step.
            seconds: Array of a number for each layer, which gets its time; or None.
            processor_time: Whether that is the calling thread's processor time, which no pause makes longer.

        Raises:
            PeerFailedError: The step is malformed.
        """
        try:
            *state, table = packet.payload or (torch.empty(0),)
            rows = unpack_rows(table, self._bounds)
            inputs = self._stage.checked_inputs(rows, state)
            computing = computing_layers(table)
            if computing.start >= self._stage.architecture.n_layers:
                raise PeerFailedError(f"it is for layers beyond the model, from {computing.first} on")
            if self._stage.layers.start < computing.start <= self._stage.layers.stop:
                outputs = self._compute_again(rows, computing)
            elif self._stage.layers.shared(computing):
                outputs = self._stage.step(
                    rows, inputs, seconds=seconds, processor_time=processor_time, stop=computing.stop
                )
            else:
                outputs = self._stage.unknown_outputs(sum(one.rows for one in rows))
        except PeerFailedError as error:
            raise PeerFailedError(f"step {packet.number} from rank {self._source}: {error}") from error
        self.latest_kind = kind_of_rows(table)
        kept = self.outputs.get(self._stage.layers.stop)
        if kept is not None and computing.start < self._stage.layers.stop <= computing.stop:
            kept.write(_places(rows), outputs)
        number = number_of_step(table)
        if number is not None:  # nobody needs what a trial writes
            for one in self.copies:
                one.executed(rows, number)
        return _with_payload(packet, outputs if self._is_last else (*outputs, table))

    def _compute_again(self, rows: Sequence[StepRows], computing: LayerRange) -> tuple[torch.Tensor, ...]:
        """Compute from a cut whose payload was kept, which may be the one behind the stage."""
        cut = computing.start
        kept = self.outputs.get(cut)
        if kept is None:
            raise PeerFailedError(f"it begins after layer {cut}, whose outputs are not kept here")
        outputs = kept.read(_places(rows))
        if cut == self._stage.layers.stop:
            return outputs
        if cut not in self._behind:
            self._behind[cut] = self._stage.behind(cut)
        return self._behind[cut].step(rows, outputs, stop=computing.stop)


class Decode:
    """Decodes the packets of a compressed link."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._decoder = LinkDecoder()

    @property
    def latest_bits(self) -> int:
        """Bits per value of the previous packet, or 0 if it was not encoded."""
        return self._decoder.latest_bits

    def __call__(self, packet: Packet) -> Packet:
        """Decode the payload of a packet.

        Raises:
            PeerFailedError: Rank ``source`` sent a payload that is malformed.
        """
        try:
            payload = self._decoder.decode(packet.payload)
        except PeerFailedError as error:
            raise PeerFailedError(f"microbatch {packet.number} from rank {self._source}: {error}") from error
        return _with_payload(packet, payload)


class Encode:
    """Encodes the packets of a compressed link.

    Args:
        bits: Function that returns the bits of a microbatch from its number and its items; called once for
            each, in order.
        clamp: Method of clamping.
        window: Number of microbatches for which levels and transform are kept.
        transform: ``auto``, ``off`` or ``hadamard``.
        stage: Sending stage.
        rank: Rank of that stage.
        kind: Returns the kind of the packet, each of which has levels of its own.
    """

    def __init__(
        self,
        bits: Callable[[int, int], int],
        clamp: str,
        window: int,
        *,
        transform: str = "auto",
        stage: int,
        rank: int,
        kind: Callable[[], int] = lambda: 0,
    ) -> None:
        self._bits = bits
        self._kind = kind
        self._encoder = LinkEncoder(clamp, window=window, transform=transform)
        self._where = f"stage {stage} on rank {rank}"

    @property
    def transformed_fraction(self) -> float:
        """Fraction of the tensors encoded so far whose rows were transformed."""
        return self._encoder.transformed_fraction

    def __call__(self, packet: Packet) -> Packet:
        """Encode the payload of a packet.

        Raises:
            NonFiniteError: A value is NaN or infinite; the message names microbatch, stage and rank.
        """
        bits = self._bits(packet.number, packet.items)
        try:
            with torch.inference_mode():
                payload = self._encoder.encode(packet.payload, bits, self._kind())
        except NonFiniteError as error:
            raise NonFiniteError(
                f"microbatch {packet.number}: {self._where} computed values that {bits} bits cannot "
                f"represent ({error}); check its weights and the input, or do not compress them (-q 0)"
            ) from error
        return _with_payload(packet, payload)


def _places(rows: Sequence[StepRows]) -> npt.NDArray[np.int64]:
    return np.concatenate([one.places for one in rows])


def _with_payload(packet: Packet, payload: Payload) -> Packet:
    """Return ``packet`` with another payload.

    Its memory is released unless part of it passed through, as a skip connection or a mask does.
    """
    if _memory(payload).isdisjoint(_memory(packet.payload)):
        packet.lease.release()
        return Packet(packet.number, packet.items, payload)
    return Packet(packet.number, packet.items, payload, packet.lease)


def _memory(payload: Payload) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in payload}


def resolve_device(name: str) -> torch.device:
    """Return the device called ``name``: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        RequestError: This machine has no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(f"-d/--device {name}: unknown; use cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise RequestError(f"-d/--device {name}: not supported; use cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise RequestError(f"-d/--device {name}: this machine has no CUDA device, or torch is a CPU build")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise RequestError(f"-d/--device {name}: CUDA devices here are 0 to {torch.cuda.device_count() - 1}")
    return device

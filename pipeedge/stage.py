"""One stage: a shard on a device, applied to one microbatch at a time."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeedge.errors import RequestError
from pipeedge.models import Shard
from pipeedge.payload import Payload
from pipeedge.transport.base import OWNED, Packet

__all__ = ["Stage", "resolve_device"]


class Stage:
    """Computes microbatches. Links are over the CPU, whatever the device."""

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self._shard = shard
        self._device = device

    def __call__(self, packet: Packet) -> Packet:
        """The microbatch after this stage's layers; same number, same items."""
        with torch.inference_mode():
            inputs = tuple(tensor.to(self._device) for tensor in packet.payload)
            outputs = tuple(tensor.to("cpu") for tensor in self._shard(inputs))
        result = replace(packet, payload=outputs)
        if _memory(outputs).isdisjoint(_memory(packet.payload)):
            packet.lease.release()
            return replace(result, lease=OWNED)
        return result  # a skip connection passed through: what came in is still needed


def _memory(payload: Payload) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in payload}


def resolve_device(name: str) -> torch.device:
    """The device called ``name``: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        RequestError: no such device here.
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

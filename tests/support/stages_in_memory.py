"""Stages of a schedule one after the other, as ranks run them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from shipped_model import CPU

from pipeedge.base.payload import Payload
from pipeedge.base.schedule import Schedule
from pipeedge.compress.adaptation import FixedBits
from pipeedge.models import Model
from pipeedge.plan.planning import Plan
from pipeedge.request.scheduling import CompressionRequest
from pipeedge.run.stage import Decode, Encode, Stage
from pipeedge.transport.base import Packet
from pipeedge.transport.frame import FrameBuffer, Kind, frame_capacity


def run(
    model: Model,
    schedule: Schedule,
    inputs: Payload,
    *,
    clamp: str = "mse",
    transform: str = "auto",
    size: int = 8,
) -> torch.Tensor:
    """Run the pipeline in one thread; every link uses a frame of the planned capacity."""
    items = inputs[0].shape[0]
    plan = Plan(schedule, 0, items, size, inputs[0].shape[1], None, CompressionRequest(clamp, transform))
    steps: list[Callable[[Packet], Packet]] = []
    for number, (stage, link) in enumerate(zip(schedule.stages, plan.links(model)[1:], strict=True)):
        steps.append(Stage(model.load(stage.layers, None, CPU), CPU))
        if stage.quant_bits:
            steps.append(
                Encode(
                    FixedBits(stage.quant_bits),
                    clamp,
                    10,
                    transform=transform,
                    stage=number,
                    rank=stage.rank,
                )
            )
        steps.append(functools.partial(through_frame, FrameBuffer(frame_capacity(link.specs))))
        if stage.quant_bits:
            steps.append(Decode(stage.rank))
    outputs = []
    for number, start in enumerate(range(0, items, size)):
        packet = Packet(number, size, tuple(tensor[start : start + size] for tensor in inputs))
        for step in steps:
            packet = step(packet)
        outputs.append(packet.payload[0].clone())
    return torch.cat(outputs)


def through_frame(buffer: FrameBuffer, packet: Packet) -> Packet:
    buffer.write(kind=Kind.MICROBATCH, number=packet.number, items=packet.items, payload=packet.payload)
    frame = buffer.read()
    return Packet(frame.number, frame.items, frame.payload)

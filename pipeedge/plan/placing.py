"""Stages on the hosts of a cluster, as the scheduler names them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pipeedge.base.schedule import LayerRange, Schedule

__all__ = ["PlacedStage", "Placing", "placed", "to_bodies"]


@dataclass(frozen=True)
class PlacedStage:
    """A stage of a schedule on its host."""

    host: str
    layers: LayerRange
    bits: int = 0
    """Bits per value on its outgoing link; 0 if the values travel as they are."""
    dtype: str = "float32"


Placing: TypeAlias = tuple[PlacedStage, ...]


def placed(schedule: Schedule, names: Sequence[str]) -> Placing:
    """Return the stages of a schedule on the hosts that ``names`` has for its ranks."""
    return tuple(
        PlacedStage(names[one.rank], one.layers, one.quant_bits, one.dtype) for one in schedule.stages
    )


def to_bodies(stages: Sequence[PlacedStage]) -> list[dict[str, Any]]:
    """Return stages as ``sched-pipeline`` reads a given plan."""
    return [
        {
            "host": stage.host,
            "layers": [stage.layers.first, stage.layers.last],
            "quant_bits": stage.bits,
            "dtype": stage.dtype,
        }
        for stage in stages
    ]

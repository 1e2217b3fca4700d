"""The plan that rank 0 announces before anything starts. Pure.

options ──schedule_choice──> schedule ─┐
what each rank says ──facts────────────┴──> Plan ──(announced)──> links of every rank
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pipeedge.base.fields import Count, LongLine, Positive, Text
from pipeedge.base.payload import PixelTable, TensorSpec
from pipeedge.base.schedule import BIT_WIDTHS, Schedule
from pipeedge.base.text_lengths import InputSizes, TextLengths, check_lengths
from pipeedge.compress import wire_specs
from pipeedge.compress.policies import Sizes
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.step_rows import StepBounds
from pipeedge.observe.lanes import DEFAULT_ROWS
from pipeedge.plan.cache_owners import CacheOwner, CacheOwners, CopiedPages, KeptOutput, Standby
from pipeedge.plan.prediction import Prediction
from pipeedge.request.scheduling import CompressionRequest
from pipeedge.transport.base import Link
from pipeedge.transport.frame import frame_capacity

if TYPE_CHECKING:
    from pipeedge.models import Model

__all__ = ["MEASURED_LINK_S", "InputFacts", "Plan", "link_specs"]

MEASURED_LINK_S = 1e-3
"""Shortest predicted time of a link that is measured; for faster links, receipts cost too much."""


def _check_table(text: str | None) -> None:
    """Raise ValueError unless ``text`` is a table of pixels as ``PixelTable.to_text`` writes it, or None."""
    if text is not None:
        PixelTable.from_text(text)


@dataclass(frozen=True)
class InputFacts:
    """The facts of the data rank about its input."""

    items: Count | None
    """Number of items, or None for an input without end."""
    record_rows: Count
    max_tokens: Count | None
    """Tokens of the longest sentence, or None for images."""
    pixel_table: Text | None
    lengths: Text | None = None
    """Histogram of the lengths of the sentences, or None if they do not differ or are unknown."""
    texts: Text | None = None
    """Output of ``TextLengths.to_text``, or None if the texts are unknown, or none are generated."""

    @property
    def text_lengths(self) -> TextLengths | None:
        """Lengths of the texts to generate, or None if they are unknown, or none are."""
        return None if self.texts is None else TextLengths.from_text(self.texts)

    @property
    def sizes(self) -> InputSizes:
        """Sizes of the input that a plan is for."""
        return InputSizes(self.max_tokens, self.lengths, self.text_lengths, self.pixel_table is not None)

    def __post_init__(self) -> None:
        _check_table(self.pixel_table)
        check_lengths(self.lengths)
        _ = self.text_lengths


def link_specs(specs: tuple[TensorSpec, ...], bits: int) -> tuple[TensorSpec, ...]:
    """Return the tensors that cross a link for a payload of ``specs`` at ``bits`` per value."""
    return wire_specs(specs, bits) if bits else specs


@dataclass(frozen=True)
class Plan:
    """The plan of a run, from which every rank knows its part."""

    schedule: Schedule
    data_rank: Count
    items: Count | None
    """Number of items, or None for an input without end."""
    microbatch_size: Positive
    max_tokens: Count | None
    prediction: Prediction | None
    compression: CompressionRequest = field(default_factory=CompressionRequest)
    lengths: Text | None = None
    """Histogram of the lengths of the sentences, or None if they do not differ or are unknown."""
    pixel_table: Text | None = None
    """Output of ``PixelTable.to_text``; None if pictures are not sent as bytes."""
    record_rows: Count = DEFAULT_ROWS
    """Number of rows that each thread keeps of its activities."""
    goes_on: bool = False
    """Whether another plan follows when a rank is lost."""
    cause: LongLine = ""
    """Reason why the plan before this one failed; empty for the first."""
    lost: tuple[Count, ...] = ()
    """Ranks that were lost since the plan before."""
    steps: StepBounds | None = None
    """Bounds of the steps of a decoder; None for an encoder."""
    texts: TextLengths | None = None
    """Lengths of the texts of a decoder that the prediction is for; None if they are unknown."""
    number: Count = 0
    """Number of the plan; larger than those of plans before."""
    since: tuple[Count, ...] = ()
    """For each layer, number of the plan since which its process has had it in every plan; empty if no plan
    came before."""
    standbys: tuple[Standby, ...] = ()
    """Ranks that hold layers of others, too, in case those are lost."""
    copies: tuple[CopiedPages, ...] = ()
    """Copies with which ranks have taken layers of others."""
    outputs: tuple[KeptOutput, ...] = ()
    """Outputs that ranks of a decoder keep, from which lost layers behind them are computed again."""

    @property
    def participants(self) -> tuple[int, ...]:
        """Ranks that have something to do, in order."""
        return tuple(sorted({*self.schedule.ranks, self.data_rank, *(one.rank for one in self.standbys)}))

    @property
    def input_sizes(self) -> InputSizes:
        """Sizes of the input that the plan is for."""
        return InputSizes(self.max_tokens, self.lengths, self.texts, self.pixel_table is not None)

    @property
    def most_items(self) -> int:
        """Number of items in the largest microbatch."""
        return self.microbatch_size if self.items is None else min(self.microbatch_size, self.items)

    def __post_init__(self) -> None:
        _check_table(self.pixel_table)
        check_lengths(self.lengths)
        layers = self.schedule.stages[-1].layers.stop
        if self.since and len(self.since) != layers:
            raise ValueError(f"{len(self.since)} ages of {layers} layers")

    def links(self, model: Model | DecoderModel) -> list[Link]:
        """Return all links, in order: from the data rank to stage 0, from stage to stage, and back.

        Values are sent in the type of the sending stage. The data rank sends pictures as bytes if that is
        exact, and other values in the type of the first stage.
        """
        ranks = (self.data_rank, *self.schedule.ranks, self.data_rank)
        specs = [self._input_specs(model)]
        specs += (self._link_specs(model, stage) for stage in range(len(self.schedule.stages)))
        return [
            Link(
                ranks[number],
                ranks[number + 1],
                crossing,
                receipts=number > 0 and self.measures(number - 1),
                starts_anywhere=bool(self.cause),
                # Results are small, and taken as they come: nobody computes meanwhile.
                is_read_ahead=number < len(self.schedule.stages),
            )
            for number, crossing in enumerate(specs)
        ]

    @property
    def step_bounds(self) -> StepBounds:
        """Bounds of the steps of a decoder. Raises TypeError for the plan of an encoder."""
        if self.steps is None:
            raise TypeError("the plan of an encoder has no steps")
        return self.steps

    @property
    def cache_owners(self) -> CacheOwners | None:
        """Stages of a decoder, and since when they have their caches; None if all of these are empty."""
        if not self.since:
            return None
        owners = tuple(
            CacheOwner(one.rank, one.layers, one.dtype, self.since[one.layers.start : one.layers.stop])
            for one in self.schedule.stages
        )
        return CacheOwners(self.number, owners, self.copies, self.outputs)

    def copied(self, standby: Standby) -> int:
        """Return the number of the stage that a standby has layers of."""
        return next(
            number
            for number, stage in enumerate(self.schedule.stages)
            if stage.layers.start <= standby.layers.start < stage.layers.stop
        )

    def copy_link(self, model: DecoderModel, standby: Standby) -> Link:
        """Return the link on which a standby gets copies: numbers of page and step, and the bytes."""
        source = self.schedule.stages[self.copied(standby)].rank
        full, _ = model.page_bytes(standby.layers, find_dtype(standby.dtype))
        specs = TensorSpec((2,), torch.int64), TensorSpec((full,), torch.uint8)
        return Link(source, standby.rank, specs, is_read_ahead=False)

    def measures(self, stage: int) -> bool:
        """Return whether receipts measure the link that leaves ``stage``.

        They do if its bits adapt to the bandwidth, or if a prediction exists to compare with.
        """
        promised = self.prediction is not None and self.prediction.stages[stage].link_s >= MEASURED_LINK_S
        return self.adapts(stage) or promised

    def adapts(self, stage: int) -> bool:
        """Return whether the link that leaves ``stage`` adapts its bits to the bandwidth."""
        return self.compression.adaptive is not None and stage < len(self.schedule.stages) - 1

    def compresses(self, stage: int) -> bool:
        """Return whether the output of ``stage`` is encoded."""
        return self.adapts(stage) or self.schedule.stages[stage].quant_bits != 0

    def sizes(self, model: Model | DecoderModel, stage: int) -> Sizes:
        """Return the size of the largest microbatch at each bit width, on the link that leaves ``stage``."""
        return Sizes({bits: frame_capacity(specs) for bits, specs in self._by_width(model, stage).items()})

    def _link_specs(self, model: Model | DecoderModel, stage: int) -> tuple[TensorSpec, ...]:
        if self.adapts(stage):
            return self._by_width(model, stage)[0]
        plan = self.schedule.stages[stage]
        return link_specs(self._payload_specs(model, plan.layers.stop, plan.dtype), plan.quant_bits)

    def _by_width(self, model: Model | DecoderModel, stage: int) -> dict[int, tuple[TensorSpec, ...]]:
        """Return the tensors for each bit width of the adaptive link: 0, and every width that is smaller."""
        plan = self.schedule.stages[stage]
        specs = self._payload_specs(model, plan.layers.stop, plan.dtype)
        found = {0: wire_specs(specs, 0)}
        largest, least = frame_capacity(found[0]), self.compression.min_bits or 0
        for bits in BIT_WIDTHS:
            crossing = wire_specs(specs, bits)
            if bits >= least and frame_capacity(crossing) < largest:
                found[bits] = crossing
        return found

    def _input_specs(self, model: Model | DecoderModel) -> tuple[TensorSpec, ...]:
        first = self.schedule.stages[0].dtype
        if isinstance(model, DecoderModel):
            return self._payload_specs(model, 0, first)
        eight_bit = self.pixel_table is not None
        return model.input_specs(self.most_items, self.max_tokens, find_dtype(first), eight_bit=eight_bit)

    def _payload_specs(self, model: Model | DecoderModel, cut: int, dtype: str) -> tuple[TensorSpec, ...]:
        if isinstance(model, DecoderModel):
            return model.most_specs(cut, self.step_bounds, find_dtype(dtype))
        return model.payload_specs(cut, self.most_items, self.max_tokens, find_dtype(dtype))

    def name(self, rank: int) -> str | None:
        """Describe ``rank`` for messages, or return None if it has no role."""
        stage = self.schedule.stage_of(rank)
        if stage is not None:
            return f"stage {stage}, {self.schedule.stages[stage].layers.named}"
        if rank != self.data_rank and any(one.rank == rank for one in self.standbys):
            return "standby"
        return "data rank" if rank == self.data_rank else None

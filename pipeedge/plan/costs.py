"""What a plan costs, as ``sched-pipeline`` states it. Pure.

Nothing in Python computes seconds of a stage or a link from layers and bandwidths: who needs them asks the
program, through ``plan.scheduler``.
"""

from __future__ import annotations

from msgspec import Struct

from pipeedge.plan.prediction import Prediction, StagePrediction, TextPrediction

__all__ = ["HostLoss", "LimitingPart", "MomentCosts", "PlanCosts", "StageCosts", "TextCosts"]


class StageCosts(Struct, frozen=True):
    """Costs of one stage for a microbatch, in seconds and bytes."""

    host: str
    layers: tuple[int, int]
    """First and last layer, from 1."""
    quant_bits: int
    """Bits per value on its outgoing link; 0 for uncompressed values."""
    dtype: str
    compute_s: float
    """Seconds for its layers, receiving and sending."""
    data_s: float
    """Seconds of the data rank's own work on its host."""
    link_in_s: float
    """Seconds of its incoming link; 0 where nothing is counted."""
    link_out_s: float
    """Seconds of its outgoing link; 0 where nothing is counted."""
    receive_s: float = 0.0
    """Seconds of ``compute_s`` to receive a microbatch."""
    send_s: float = 0.0
    """Seconds of ``compute_s`` to send it."""
    link_in_latency_s: float = 0.0
    """Seconds of ``link_in_s`` in which the next microbatch may follow."""
    link_out_latency_s: float = 0.0
    """Seconds of ``link_out_s`` in which the next microbatch may follow."""
    output_bytes: float = 0.0
    """Bytes that leave the stage."""
    sent_bytes: float = 0.0
    """Bytes that cross its outgoing link."""
    mem_bytes: float = 0.0
    """Memory for weights, activations and buffers."""
    state_bytes: float = 0.0
    """Memory for what the layers of a decoder remember."""
    activation_bytes: float = 0.0
    buffer_bytes: float = 0.0
    mem_available_bytes: float = 0.0
    load_bytes: float | None = None
    """Bytes of weights that its host does not have, or None if it is not known what it has."""
    threads: int | None = None
    """Threads its device was profiled with, or None if the profile does not say."""
    tokens: tuple[int, ...] = ()
    """Sentence lengths its device was profiled with, shortest first; empty if unknown."""
    kernels: str | None = None
    """Kernels its device was profiled with, or None if the profile does not say."""

    @property
    def layers_s(self) -> float:
        """Seconds for its layers, with what any stage takes besides: the time while it computes."""
        return self.compute_s - self.receive_s - self.send_s

    @property
    def busy_s(self) -> float:
        """Seconds that the stage is occupied by a microbatch."""
        return self.compute_s + self.data_s


class HostLoss(Struct, frozen=True):
    """Cost of losing one host."""

    host: str
    why: str | None = None
    """Why it would end the run, or None if the run would go on."""
    throughput_items_per_s: float | None = None
    """Items per second on the other hosts; None if the run would end, or if nothing takes time."""
    effect: str = ""
    """What becomes of a run: ``none``, ``continues``, ``ends`` or ``unknown``."""
    pause_s: float | None = None
    """Longest pause of the texts of a decoder in seconds; None where none goes on."""
    pause_with_outputs_s: float | None = None
    """The same if ranks have kept their outputs."""
    pause_with_copies_s: float | None = None
    """The same if the ranks that take the layers have copies of weights and caches."""


class MomentCosts(Struct, frozen=True):
    """Costs of a plan under some conditions."""

    batch_size: float
    """Number of items in a microbatch; of a decoder, rows of the steps that are best then."""
    bottleneck_s: float
    latency_s: float
    joules_per_item: float | None = None

    @property
    def items_per_s(self) -> float:
        """Items per second once the pipeline is full."""
        return self.batch_size / self.bottleneck_s


class TextCosts(Struct, frozen=True):
    """What a plan means for the texts of a decoder."""

    streams: float
    groups: float
    context: float
    prompt_tokens: float
    answer_tokens: float
    chunk: float
    tokens_per_s: float
    between_tokens_s: float
    token_s: float
    first_token_s: float


class LimitingPart(Struct, frozen=True):
    """What limits the throughput of a plan."""

    words: str
    """Description: ``stage 3 on rcc-0 computes 1.549 s``."""


class PlanCosts(Struct, frozen=True):
    """Costs of a plan, as the program states them."""

    layers: int
    batch_size: float
    schedule: tuple[StageCosts, ...]
    bottleneck: LimitingPart
    bottleneck_s: float
    """Seconds of the slowest stage or link for one microbatch."""
    latency_s: float
    """Seconds of one microbatch through the idle pipeline."""
    throughput_items_per_s: float | None
    """Items per second once the pipeline is full, or None if nothing takes time."""
    feed_s: float
    """Seconds that the data rank takes to read and feed a microbatch, with sending it if the first stage is
    on another host; 0 if unknown."""
    collect_s: float
    """Seconds that the data rank takes to collect the results of a microbatch, with receiving them if the
    last stage is on another host; 0 if unknown."""
    loss: float
    """Expected fraction of items whose class changes."""
    losses_known: bool
    """Whether losses were measured."""
    warnings: tuple[str, ...]
    """Warnings, such as device types that cannot take part, one line each."""
    max_loss: float | None = None
    """Largest loss that was allowed, or None for any."""
    gap: float = 0.0
    """Largest possible distance from the optimum, as a fraction; 0 if proven optimal, or if it was given."""
    joules_per_item: float | None = None
    """Energy of all hosts that are on, or None if the watts of one are unknown."""
    fits: bool = True
    """Whether the stages of a given plan fit into memory, beside what runs there."""
    losses: tuple[HostLoss, ...] = ()
    """What the loss of each host would cost; empty if not asked for."""
    text: TextCosts | None = None
    """Figures of the texts of a decoder; None for an encoder."""
    moments: tuple[MomentCosts, ...] = ()
    """Costs at the moments that were asked for."""

    def prediction(self, tokens: int | None, *, mixed: bool = False) -> Prediction:
        """Return the prediction for sentences of at most ``tokens`` tokens, or images (None).

        Args:
            tokens: Tokens of the longest sentence; None for images.
            mixed: Whether the costs are averages over sentences of several lengths.
        """
        return Prediction(
            tuple(
                StagePrediction(stage.busy_s, stage.link_out_s, stage.threads, stage.tokens, stage.kernels)
                for stage in self.schedule
            ),
            max(1, round(self.batch_size)),
            self.bottleneck_s,
            self.feed_s + self.latency_s,
            self.bottleneck.words,
            tokens,
            self.schedule[0].link_in_s,
            self.joules_per_item,
            mixed,
            None if self.text is None else self._text_prediction(self.text),
        )

    def _text_prediction(self, text: TextCosts) -> TextPrediction:
        return TextPrediction(
            streams=round(text.streams),
            groups=round(text.groups),
            chunk=round(text.chunk),
            context=round(text.context),
            prompt_tokens=round(text.prompt_tokens),
            answer_tokens=round(text.answer_tokens),
            tokens_per_s=text.tokens_per_s,
            between_tokens_s=text.between_tokens_s,
            token_s=text.token_s,
            first_token_s=text.first_token_s,
            cache_bytes=tuple(stage.state_bytes for stage in self.schedule),
            limited_by=self.bottleneck.words,
        )

"""The queue of steps with stages of small decoders: the tokens are those of one process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from decoder_cases import CASES

from pipeedge.base.errors import InputError, PipeEdgeError
from pipeedge.base.schedule import LayerRange
from pipeedge.decoding.generation import Piece, WrittenAnswer
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.decoding.pages import pages_of, window_pages_of
from pipeedge.decoding.prompt import Prompt
from pipeedge.decoding.sampling import Sampling
from pipeedge.models.decoder import DecoderModel, find_decoder
from pipeedge.models.layers.decoder import PAGE
from pipeedge.models.step_rows import StepBounds
from pipeedge.run.stage import StepStage
from pipeedge.run.step_queue import StepQueue
from pipeedge.transport.base import Packet

FAMILIES = ("llama3", "llama-dynamic", "mistral", "ministral", "qwen2-window", "qwen3", "gemma2", "gemma3")
FAMILIES += ("phi3", "olmo2", "smollm3", "granite", "gpt2")
CONTEXT = 128


class Numbers:
    """Texts of tokens: their numbers."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    def is_silent(self, token: int) -> bool:
        return False

    def is_byte(self, token: int) -> bool:
        return False


@dataclass
class Heard:
    pieces: list[str] = field(default_factory=list)
    answer: WrittenAnswer | None = None
    error: BaseException | None = None

    def grew(self, sequence: int, piece: Piece) -> None:
        self.pieces.append(piece.text)

    def ended(self, sequence: int, answer: WrittenAnswer) -> None:
        self.answer = answer

    def failed(self, sequence: int, error: PipeEdgeError) -> None:
        self.error = error

    def broke(self, error: BaseException) -> None:
        self.error = error


class Chain:
    """A queue and the stages behind it."""

    def __init__(self, model: DecoderModel, cuts: Sequence[int]) -> None:
        window = min(window_pages_of(model.window, PAGE), pages_of(CONTEXT, PAGE)) if model.window else 0
        pages = 4 * pages_of(CONTEXT, PAGE) if model.attends_to_all else 0
        bounds = StepBounds(CONTEXT, 40, 4, pages, 4 * window)
        edges = list(itertools.pairwise([0, *cuts, model.n_layers]))
        self.stages = [
            StepStage(
                model.stage(
                    LayerRange(start, stop), pages=pages, window_pages=bounds.window_pages, context=CONTEXT
                ),
                bounds,
                0,
                is_last=stop == model.n_layers,
            )
            for start, stop in edges
        ]
        self.queue = StepQueue(Numbers())
        self.queue.begin(model.ends(), bounds, 1, model.window)

    def run(self) -> None:
        """Let one step after the other pass until the queue is drained."""
        self.queue.drain()
        with self.queue:
            while (group := self.queue.next(8)) is not None:
                batch = group.collate(tuple(spec.empty() for spec in group.specs))
                packet = Packet(group.step.number, batch.items, batch.payload)
                for stage in self.stages:
                    packet = stage(packet)
                self.queue.write(packet.number, packet.payload[0], batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_one_process_for_drawn_cuts(family: str, tmp_path: Path) -> None:
    CASES[family].save(tmp_path)
    model = find_decoder(tmp_path)
    draw = random.Random(family)
    cuts = sorted(draw.sample(range(1, model.n_layers), draw.randint(0, 2)))
    chain = Chain(model, cuts)
    prompts = [[draw.randrange(model.config.vocab) for _ in range(draw.randint(1, 70))] for _ in range(5)]
    heard = [Heard() for _ in prompts]
    for item, (prompt, listener) in enumerate(zip(prompts, heard, strict=True)):
        options = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
        chain.queue.submit(Prompt(tuple(prompt), options, item), listener)
    chain.run()
    alone = LocalDecoder(model, context=CONTEXT)
    for prompt, listener in zip(prompts, heard, strict=True):
        assert listener.answer is not None
        assert [one.token for one in listener.answer.drawn] == alone.generate(prompt, 12)
        assert "".join(listener.pieces) == listener.answer.text
    figures = chain.queue.figures
    assert (figures.answers, figures.completion_tokens) == (5, 60)
    assert figures.prompt_tokens == sum(map(len, prompts))


def test_those_who_wait_hear_why_there_is_no_answer() -> None:
    chain = Chain(find_decoder("llama-puzzles"), ())
    waiting, gone = Heard(), Heard()
    options = Sampling(temperature=0.0, max_tokens=4)
    chain.queue.submit(Prompt((50, 51), options), waiting)
    given_up = chain.queue.submit(Prompt((50, 51), options), gone)
    chain.queue.cancel(given_up)
    with pytest.raises(InputError, match=r"the context of 128 must have room"):
        chain.queue.submit(Prompt((50,) * 200, Sampling(max_tokens=1)), Heard())
    reason = PipeEdgeError("a rank is gone")
    chain.queue.fail(reason)
    assert waiting.error is reason
    assert gone.error is None
    with pytest.raises(PipeEdgeError, match=r"^a rank is gone$"):
        chain.queue.submit(Prompt((50,), options), Heard())

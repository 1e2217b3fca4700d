"""A decoder of the simulated world: what a stage remembers, what is asked, and what must be answered.

    prompts ──> StepQueue, StepScheduler, Generation of the product ──> steps ──> stages with pages ──> tokens

A layer mixes the value of a row with those of all rows of its sequence that it finds in its pages. So a token
shows every page that any stage has read on its way, and one wrong place changes all that follows. The pages
of a stage are those of its process, which keeps them, with whatever is in them, from epoch to epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from failover_shells import LAYERS, ViolationError

from pipeedge.base.errors import RequestError
from pipeedge.data.step_queue import StepQueue
from pipeedge.decoding.generation import Generation, Piece, WrittenAnswer
from pipeedge.decoding.prompt import Prompt
from pipeedge.decoding.sampling import Sampling
from pipeedge.models.layers.decoder import PAGE, StepRows
from pipeedge.models.step_rows import StepBounds, computing_layers, unpack_rows

if TYPE_CHECKING:
    from failover_rank_shell import RankShell
    from failover_world import World

CONTEXT = 96
PAGES = CONTEXT // PAGE
"""Number of pages of one sequence."""
MOST_PAGES = 4 * PAGES
_SEQUENCES = 3
_ROWS = 24
_VOCABULARY = 10
_ODD = np.arange(1, 2 * _VOCABULARY, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_WEIGHTS = np.arange(1, CONTEXT + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
_FACTOR, _TERM, _SHIFT = np.uint64(0x94D049BB133111EB), np.uint64(0x2545F4914F6CDD1D), np.uint64(29)

Values = npt.NDArray[np.uint64]
Pages = list[Values]
"""For each layer, the values of all places of all pages."""
Outputs = dict[int, Values]
"""For each cut, by the number of layers before, the values that were sent on, in all places of all pages."""


def bounds(pages: int) -> StepBounds:
    """Return the bounds of steps with so many pages."""
    return StepBounds(CONTEXT, _ROWS, _SEQUENCES, pages, 0)


def empty_pages(filling: int) -> Pages:
    """Return the pages of all layers, with something in them."""
    return [empty_layer(filling) for _ in range(LAYERS)]


def empty_layer(filling: int) -> Values:
    """Return the pages of a layer, with something in them."""
    return np.full(MOST_PAGES * PAGE, filling, np.uint64)


def compute(pages: Pages, rows: Sequence[StepRows], values: Values, first: int, stop: int) -> Values:
    """Compute some layers for the rows of a step, as stages do: each writes its places, and reads all."""
    values = values.copy()
    for layer in range(first, stop):
        start = 0
        for one in rows:
            places = np.arange(one.position + one.rows)
            places = one.pages[places // PAGE] * PAGE + places % PAGE
            own = slice(start, start := start + one.rows)
            pages[layer][places[one.position :]] = values[own]
            seen = np.cumsum(pages[layer][places] * _WEIGHTS[: len(places)], dtype=np.uint64)
            mixed = values[own] * _FACTOR + seen[one.position :] * _TERM + np.uint64(layer)
            values[own] = mixed ^ (mixed >> _SHIFT)
    return values


def compute_step(
    pages: Pages, outputs: Outputs, plan: StepBounds, payload: Sequence[torch.Tensor], first: int, stop: int
) -> tuple[torch.Tensor, ...]:
    """Compute some layers for a step as it travels, without its table behind the last one."""
    hidden, table = payload
    values = hidden.numpy().view(np.uint64)[:, 0]
    rows = unpack_rows(table, plan)
    places = np.concatenate([one.places for one in rows])
    computing = computing_layers(table)
    if first < computing.start <= stop:
        if computing.start not in outputs:
            raise ViolationError(f"nothing is kept after layer {computing.start}")
        first, values = computing.start, outputs[computing.start][places]
    end = min(stop, computing.stop)
    found = compute(pages, rows, values, first, end) if computing.start <= first else np.zeros_like(values)
    if computing.stop < stop:
        found = np.zeros_like(values)
    elif stop in outputs and computing.start < stop:
        outputs[stop][places] = found
    sent = torch.from_numpy(found.view(np.int64)[:, None])
    return (sent,) if stop == LAYERS else (sent, table)


class Ends:
    """Embedding and head of the decoder."""

    architecture = SimpleNamespace(hidden=1)
    stream_dtype = torch.int64

    def embed(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        values = (np.array(tokens, np.uint64) + np.uint64(1)) * _FACTOR
        values += np.array(positions, np.uint64) * _TERM
        return torch.from_numpy(values.view(np.int64)[:, None])

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        values = hidden.numpy().view(np.uint64)
        return torch.from_numpy(((values * _ODD) >> np.uint64(44)).astype(np.float32) / 2**17)


class Numbers:
    """Texts of tokens: their numbers."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    def is_silent(self, token: int) -> bool:
        return False

    def is_byte(self, token: int) -> bool:
        return False


def answer_alone(prompt: Prompt, choice: int) -> tuple[Generation, WrittenAnswer]:
    """Return the answer of one process that loses nothing."""
    texts: Any = Numbers()
    generation, ends = Generation(prompt, texts, CONTEXT, choice=choice), Ends()
    pages, numbers = empty_pages(0), np.arange(PAGES, dtype=np.int32)
    tokens, position = list(prompt.tokens), 0
    while generation.finish_reason is None:
        values = ends.embed(tokens[position:], range(position, len(tokens))).numpy().view(np.uint64)[:, 0]
        rows = StepRows(position, len(values), numbers, np.array([], np.int32))
        last = compute(pages, [rows], values, 0, LAYERS)[-1:]
        scores = ends.score(torch.from_numpy(last.view(np.int64)[:, None]))
        position = len(tokens)
        tokens.append(generation.take(scores.numpy()[0]).drawn.token)
    return generation, generation.answer()


@dataclass
class Told:
    """Listener of a sequence, which checks every token."""

    wanted: WrittenAnswer
    pieces: list[str] = field(default_factory=list)
    tokens: int = 0
    ended_: int = 0
    cancelled: bool = False

    def grew(self, sequence: int, piece: Piece) -> None:
        if self.cancelled or self.ended_:
            raise ViolationError(f"sequence {sequence}, which has ended, is told a token")
        index, self.tokens = self.tokens, self.tokens + 1
        if index >= len(self.wanted.drawn) or piece.drawn != self.wanted.drawn[index]:
            raise ViolationError(f"token {index} of sequence {sequence} is another one")
        self.pieces.append(piece.text)

    def ended(self, sequence: int, answer: WrittenAnswer) -> None:
        self.ended_ += 1
        if answer != self.wanted or "".join(self.pieces) != answer.text:
            raise ViolationError(f"the answer of sequence {sequence} is another one")

    def failed(self, sequence: int, error: RequestError) -> None:
        raise ViolationError(f"sequence {sequence} fails: {error}")

    def broke(self, error: BaseException) -> None:
        pass


class TextLoad:
    """What is asked of the decoder in a run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.told: list[Told] = []
        self._is_open = False

    def open(self, process: RankShell) -> None:
        """Ask, at once and later, once the pipeline is ready for the first time."""
        if self._is_open:
            return
        self._is_open = True
        chance = self.world.chance
        beginnings = [[chance.randrange(_VOCABULARY) for _ in range(70)] for _ in range(2)]
        times = sorted(chance.choice((0.0, chance.uniform(0.0, 4.0))) for _ in range(chance.randint(1, 6)))
        for item, time in enumerate(times):
            prompt = _drawn_prompt(chance, item, chance.choice(beginnings))
            self._at(time, process, self._submit, process, prompt)
        self._at(times[-1] + 0.01, process, process.texts.drain)  # not at the same moment

    def _at(self, seconds: float, process: RankShell, event: Callable[..., None], *args: Any) -> None:
        if seconds:
            self.world.after(seconds, self._ask, process, event, args)
        else:
            self._ask(process, event, args)

    def _ask(self, process: RankShell, event: Callable[..., None], args: tuple[Any, ...]) -> None:
        process.do(event, *args)

    def _submit(self, process: RankShell, prompt: Prompt) -> None:
        chance = self.world.chance
        for choice in range(prompt.sampling.n):
            told = Told(answer_alone(prompt, choice)[1])
            self.told.append(told)
            sequence = process.texts.submit(prompt, told, choice=choice)
            if chance.random() < 0.15:
                self._at(chance.uniform(0.1, 3.0), process, self._cancel, process, sequence, told)

    def _cancel(self, process: RankShell, sequence: int, told: Told) -> None:
        told.cancelled = not told.ended_
        process.texts.cancel(sequence)

    def check_end(self) -> None:
        """Check that everybody has an answer."""
        for number, told in enumerate(self.told):
            if told.ended_ != 1 and not told.cancelled:
                raise ViolationError(f"sequence {number} has ended {told.ended_} times")


def _drawn_prompt(chance: random.Random, item: int, beginning: Sequence[int]) -> Prompt:
    tokens = (*beginning[: chance.randint(0, 70)], chance.randrange(_VOCABULARY))
    options = Sampling(
        temperature=chance.choice((0.0, 1.0)),
        max_tokens=chance.randint(1, 14),
        ignore_eos=True,
        n=chance.choice((1, 1, 2)),
        seed=chance.choice((None, 3)),
        frequency_penalty=chance.choice((0.0, 0.7)),
        stop=chance.choice(((), ("7 1",))),
    )
    return Prompt(tokens, options, item)


def make_queue(world: World, condition: Any) -> StepQueue:
    """Return the queue of a process."""
    texts: Any = Numbers()
    return world.rules.queue(
        texts,
        measures=False,
        proposals=5,
        clock=lambda: world.now,
        changed=condition,
        make_scheduler=world.rules.scheduler,
    )

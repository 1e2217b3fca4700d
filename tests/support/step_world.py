"""A pipeline in memory for the scheduler of steps, which looks at every page that a row reads.

Instead of keys and values, a place of a page holds all tokens from the beginning of a sequence up to its own.
So a row that meets a page of somebody else, or one that has been written over, is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pipeedge.base.schedule import LayerRange
from pipeedge.decoding.pages import LostLayers, LostPart
from pipeedge.decoding.speculation import DraftedTokens, DraftFigures, WantedDraft
from pipeedge.decoding.step_limits import CacheSize, StepLimits
from pipeedge.decoding.steps import DecodingStep, StepPart, StepScheduler

VOCABULARY = 1000
LAYERS = 4
_PERIOD = 3


@dataclass
class Wanted:
    """A sequence, and what it must become."""

    prompt: tuple[int, ...]
    most: int
    stops_after: int
    """Number of generated tokens after which it ends, if there are as many."""
    drawn: list[int] = field(default_factory=list)
    last: int | None = None
    """Last step in which it had rows."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and generated tokens."""
        return (*self.prompt, *self.drawn)

    def next_token(self, number: int) -> int:
        """Return what follows: often the token that stood some places before, as texts repeat."""
        draw = hash(self.tokens) ^ number
        repeats = len(self.tokens) > _PERIOD and draw % 5
        return self.tokens[-_PERIOD] if repeats else draw % VOCABULARY

    @property
    def over(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.drawn) >= min(self.most, self.stops_after)


class StepWorld:
    """The scheduler with sequences, and stages that execute its steps in order.

    Args:
        limits: Bounds of steps.
        cache: Pages.
        places: Number of sequences whose tokens a small model can draft at a time; 0 without such a model.
    """

    def __init__(self, limits: StepLimits, cache: CacheSize, places: int = 0) -> None:
        self.limits, self.cache = limits, cache
        self.scheduler = StepScheduler(limits, cache)
        if places:
            self.scheduler.draft = DraftFigures(limits.context - 3, places)
        self.alive: dict[int, Wanted] = {}
        self.finished: dict[int, Wanted] = {}
        self.flights: deque[DecodingStep] = deque()
        self.added = self.steps = self.rows = self.accepted = 0
        self._oldest = (-1, 0)
        self._full: dict[tuple[int, int, int], tuple[int, ...]] = {}
        """Tokens up to each place that has been written: of a layer, of a page."""
        self._outputs: dict[tuple[int, int, int], tuple[int, ...]] = {}
        """The same for what is kept at cuts."""
        self._around: dict[tuple[int, int], tuple[int, ...]] = {}
        self._written: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, prompt: Sequence[int], most: int, stops_after: int) -> int:
        """Add a sequence, and return its number."""
        number, self.added = self.added, self.added + 1
        self.scheduler.add(number, prompt, most)
        self.alive[number] = Wanted(tuple(prompt), most, stops_after)
        return number

    def cancel(self, number: int) -> None:
        """Cancel a sequence."""
        self.scheduler.cancel(number)
        self.alive.pop(number, None)

    def step(self) -> bool:
        """Let all stages execute the next step, if there is one; return whether there is."""
        step = self.scheduler.next()
        while step is None and self.scheduler.wanted_drafts:
            self.scheduler.drafted([self._draft(one) for one in self.scheduler.wanted_drafts])
            step = self.scheduler.next()
        if step is None:
            assert self.flights or not self.alive, "nothing is under way, and sequences wait"
            return False
        assert step.number == self.steps
        self.steps += 1
        self.flights.append(step)
        assert len(self.flights) <= self.limits.groups
        assert 1 <= step.rows <= self.limits.rows
        numbers = [part.sequence for part in step.parts]
        assert len(set(numbers)) == len(numbers)
        assert all(part.tokens for part in step.parts)
        self.rows += step.rows
        self._written[step.number] = []
        layers = LayerRange(0, LAYERS) if step.layers is None else step.layers
        for part in step.parts:
            wanted = self.alive[part.sequence]
            end = part.position + len(part.tokens)
            known = end - part.proposed
            assert wanted.tokens[part.position : known] == part.tokens[: len(part.tokens) - part.proposed]
            assert part.scored == (known == len(wanted.tokens))
            assert part.scored or not part.proposed
            assert end <= len(wanted.prompt) + wanted.most - bool(part.proposed), "a row has no use"
            wanted.last = step.number
        self._look_at_oldest(step.number)
        # As stages do it: page by page, all sequences of the step at once.
        for turn in range(2 + max(len(part.tokens) for part in step.parts) // self.cache.page):
            for part in step.parts:
                self._write(part, turn, layers, self._written[step.number])
            for part in step.parts:
                self._read(part, turn, layers)
        return True

    def _draft(self, wanted: WantedDraft) -> DraftedTokens:
        """Draft tokens, of which some are wrong; after long prompts, none."""
        one, figures = self.alive[wanted.sequence], self.scheduler.draft
        assert wanted.tokens == one.tokens
        assert figures is not None
        assert wanted.sequence in figures.readers
        assert len(figures.readers) <= figures.places
        assert len(wanted.tokens) + wanted.most <= figures.context
        guesses = Wanted(one.tokens, one.most, one.stops_after)
        for _ in range(wanted.most if hash(one.tokens) % 7 else 0):
            token = guesses.next_token(wanted.sequence)
            guesses.drawn.append(token if hash(guesses.tokens) % 4 else token + 1)
        return DraftedTokens(
            wanted.sequence, len(one.tokens), tuple(guesses.drawn), len(one.tokens), token_s=0.1
        )

    def finish(self) -> None:
        """Let the oldest step return with its tokens."""
        step = self.flights.popleft()
        del self._written[step.number]
        drawn: dict[int, list[int]] = {}
        ended = []
        for part in step.parts:
            wanted = self.alive.get(part.sequence)
            if not part.scored or wanted is None:
                continue
            known = len(part.tokens) - part.proposed
            assert part.position + known == len(wanted.tokens), "a token is drawn twice"
            drawn[part.sequence] = []
            for guess in (*part.tokens[known:], None):
                token = wanted.next_token(part.sequence)
                wanted.drawn.append(token)
                drawn[part.sequence].append(token)
                if wanted.over or token != guess:
                    break
            self.accepted += len(drawn[part.sequence]) - 1
            if wanted.over:
                if len(wanted.drawn) < wanted.most:
                    ended.append(part.sequence)
                self.finished[part.sequence] = self.alive.pop(part.sequence)
        self.scheduler.finished(step.number, drawn, ended)

    def restart(
        self,
        limits: StepLimits | None = None,
        cache: CacheSize | None = None,
        lost: Collection[int] = range(LAYERS),
        *,
        keeps: bool = False,
        outputs: Collection[int] = (),
    ) -> None:
        """Lose all steps in flight, and what some layers have in their pages.

        Args:
            limits: Limits from now on; None for those of before.
            cache: Pages from now on, of which there may be fewer or more.
            lost: Layers that lose everything. Others only lose what the steps in flight may have written.
            keeps: Whether the scheduler is told of these.
            outputs: Cuts of which is left what was kept, of those behind layers that lose nothing.
        """
        self.limits, self.cache = limits or self.limits, cache or self.cache
        self.flights.clear()
        for place in (place for places in self._written.values() for place in places):
            self._full[place] = ()
        self._written.clear()
        self._full = {place: tokens for place, tokens in self._full.items() if place[0] not in lost}
        self._around.clear()
        left = frozenset(cut for cut in outputs if cut - 1 not in lost)
        self._outputs = {place: tokens for place, tokens in self._outputs.items() if place[0] in left}
        parts = [LostPart(LayerRange(layer, layer + 1)) for layer in lost]
        self.scheduler.restart(self.limits, self.cache, *([LostLayers(LAYERS, parts, left)] if keeps else []))

    def drain(self) -> None:
        """Let everything that is there come to its end."""
        idle = 0
        patience = self.steps + 200 * (1 + sum(len(one.prompt) + one.most for one in self.alive.values()))
        while self.alive:
            assert self.steps < patience, "sequences yield to each other for ever"
            idle = 0 if self.step() else idle + 1
            if self.flights and (idle or len(self.flights) == self.limits.groups):
                self.finish()
        while self.flights:
            self.finish()
        assert self.scheduler.next() is None
        assert self.scheduler.draft is None or not self.scheduler.draft.readers, "places are lost"

    def check(self) -> None:
        """Check what holds at all times."""
        scheduler = self.scheduler
        assert scheduler.running + scheduler.waiting == len(self.alive)
        assert scheduler.in_flight == len(self.flights)
        if not scheduler.running:
            pools = [size for size in (self.cache.pages, self.cache.window_pages) if size]
            assert scheduler.free_pages == min(pools), "pages are lost"

    def _look_at_oldest(self, step: int) -> None:
        """Check that the oldest sequence moves on, whoever else is there."""
        oldest = min(self.alive)
        if oldest != self._oldest[0]:
            self._oldest = oldest, step
        since = max(self._oldest[1], self.alive[oldest].last or 0)
        assert step - since <= self.limits.sequences + 2 * self.limits.groups, "the oldest sequence waits"

    def _tokens(self, part: StepPart) -> tuple[int, ...]:
        """Return the tokens of a sequence with those that a step proposes."""
        return (*self.alive[part.sequence].tokens, *part.tokens[len(part.tokens) - part.proposed :])

    def _places(self, part: StepPart, turn: int) -> range:
        """Return the positions of a part that are executed in a turn: those of a page."""
        page, end = self.cache.page, part.position + len(part.tokens)
        first = part.position // page + turn
        return range(max(part.position, first * page), min(end, (first + 1) * page))

    def _write(
        self, part: StepPart, turn: int, layers: LayerRange, written: list[tuple[int, int, int]]
    ) -> None:
        tokens, page = self._tokens(part), self.cache.page
        for position in self._places(part, turn):
            for layer in range(layers.start, layers.stop) if self.cache.pages else ():
                place = (layer, part.pages[position // page], position % page)
                self._full[place] = tokens[: position + 1]
                if layer + 1 in self.cache.outputs:
                    self._outputs[layer + 1, *place[1:]] = tokens[: position + 1]
                written.append(place)
            if self.cache.window_pages:
                self._around[part.window_pages[position // page], position % page] = tokens[: position + 1]

    def _read(self, part: StepPart, turn: int, layers: LayerRange) -> None:
        tokens, page = self._tokens(part), self.cache.page
        places = self._places(part, turn)
        for position in places if layers.start else ():
            kept = self._outputs.get((layers.start, part.pages[position // page], position % page))
            assert kept == tokens[: position + 1], f"sequence {part.sequence} reads another's outputs"
        for position in range(places.stop) if places else ():
            for layer in range(layers.start, layers.stop) if self.cache.pages else ():
                found = self._full.get((layer, part.pages[position // page], position % page))
                assert found == tokens[: position + 1], f"sequence {part.sequence} reads another's page"
            if self.cache.window_pages and position > places.start - self.cache.window:
                found = self._around.get((part.window_pages[position // page], position % page))
                assert found == tokens[: position + 1], f"sequence {part.sequence} reads another's window"

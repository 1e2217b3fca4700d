"""Sequences that wait for their tokens: input and results of the pipeline of a decoder.

    submit ──> StepScheduler ──step──> [feed] embed ──> stages ──> [collect] score, choose ──> listeners
                    ^                                                      │
                    └────── tokens that were chosen, sequences that ended ─┘

The first steps measure how long steps take, which the scheduler decides by; with a single answer there is
nothing to decide.

The thread that feeds takes the next step of the scheduler, and waits where there is none. It also drafts
tokens for the step, while others may ask, cancel and collect. The one that collects scores the rows that
decide a token, and tells the scheduler at once. Whoever listens to a sequence is told afterwards, in that
thread.

All that decides a text is here: tokens, random numbers, penalties, structures, stop strings. So a new epoch
computes once more what its stages have lost of the tokens of each sequence, and goes on behind the last one:
what was told is never drawn again.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pipeedge.base.crew import Closed
from pipeedge.base.errors import InputError, RequestError
from pipeedge.base.payload import Payload, PixelTable, TensorSpec
from pipeedge.base.wording import count
from pipeedge.data.ends import QueueStream
from pipeedge.data.source import Group, Microbatch, SkippedItem
from pipeedge.decoding.drafting import Drafter
from pipeedge.decoding.generation import AnswerTexts, Generation, Piece, WrittenAnswer
from pipeedge.decoding.prompt import Prompt
from pipeedge.decoding.sampler import Sampler
from pipeedge.decoding.sampling import Sampling
from pipeedge.decoding.speculation import DraftedTokens
from pipeedge.decoding.step_limits import CacheSize, PlannedGroups, StepLimits
from pipeedge.decoding.step_trial import StepTrial
from pipeedge.decoding.steps import DecodingStep, StepPart, StepScheduler
from pipeedge.models.decoder_ends import DecoderEnds
from pipeedge.models.layers.decoder import PAGE, StepRows
from pipeedge.models.step_rows import StepBounds, pack_rows, packed_length
from pipeedge.observe.lanes import DEFAULT_ROWS
from pipeedge.observe.token_figures import StepPace, TextState, TokenFigures
from pipeedge.plan.cache_owners import CacheOwners

__all__ = ["KeptAnswer", "Listener", "StepBatch", "StepGroup", "StepQueue", "StepStream"]


class Listener(Protocol):
    """Hears of one sequence, in the thread that collects; it must not wait."""

    def grew(self, sequence: int, piece: Piece) -> None:
        """Take another token, with the text that became certain."""

    def ended(self, sequence: int, answer: WrittenAnswer) -> None:
        """Take the whole answer."""

    def failed(self, sequence: int, error: RequestError) -> None:
        """Hear why the sequence has no answer."""

    def broke(self, error: BaseException) -> None:
        """Hear why the run has ended without the answer."""


@dataclass(frozen=True)
class StepBatch(Microbatch):
    """A step under way, without its values."""

    step: DecodingStep | None = None

    @property
    def items(self) -> int:
        """Number of rows."""
        return self.made.rows

    @property
    def made(self) -> DecodingStep:
        """The step."""
        if self.step is None:
            raise TypeError("the batch of a step has none")
        return self.step


@dataclass(frozen=True)
class StepGroup(Group):
    """A step that is not embedded yet."""

    step: DecodingStep
    ends: DecoderEnds

    is_made_anew: ClassVar[bool] = True

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specification of the payload: hidden states, and the tensor that describes the rows."""
        pages = sum(len(part.pages) + len(part.window_pages) for part in self.step.parts)
        hidden = self.ends.architecture.hidden
        return (
            TensorSpec((self.step.rows, hidden), self.ends.stream_dtype),
            TensorSpec((packed_length(len(self.step.parts), pages),), torch.int32),
        )

    def collate(self, payload: Payload) -> Microbatch:
        """Embed the tokens into ``payload``, which has ``specs``."""
        hidden, table = payload
        parts = self.step.parts
        tokens = [token for part in parts for token in part.tokens]
        positions = [part.position + row for part in parts for row in range(len(part.tokens))]
        hidden.copy_(self.ends.embed(tokens, positions))
        rows = [
            StepRows(
                part.position,
                len(part.tokens),
                np.array(part.pages, np.int32),
                np.array(part.window_pages, np.int32),
            )
            for part in parts
        ]
        number = None if self.step.is_trial else self.step.number
        pack_rows(rows, table, self.step.layers, kind=int(self.step.reads_prompt), number=number)
        return StepBatch(payload, (), (), (self.step.number,), step=self.step)


@dataclass
class _Sequence:
    """A sequence that waits for tokens."""

    generation: Generation
    listener: Listener
    began: bool = False


@dataclass(frozen=True)
class _Scored:
    """A sequence whose next tokens a step decides."""

    first: int
    """First row of the step that decides one of them."""
    part: StepPart
    sequence: _Sequence


@dataclass
class KeptAnswer:
    """An answer with the hidden states that decided its tokens."""

    generation: Generation
    hidden: list[torch.Tensor] = field(default_factory=list)
    """Hidden state [D] behind the last block, for each token of the answer."""


class StepStream(QueueStream):
    """The steps of one epoch, as the thread that feeds takes them.

    Args:
        queue: Queue that makes them.
        takes_over: Whether the epoch takes over from another one, whose steps end first.
    """

    def __init__(self, queue: StepQueue, *, takes_over: bool = False) -> None:
        super().__init__(queue.wake)
        self._queue = queue
        self._takes_over = takes_over

    def following(self) -> StepStream:
        """Return the steps of an epoch that takes over."""
        return StepStream(self._queue, takes_over=True)

    def next(self, microbatch_size: int) -> StepGroup | None:
        """Wait for the next step; return None once the queue is drained.

        Raises:
            Closed: The epoch has stopped.
        """
        if self._takes_over:
            self._queue.take_over(lambda: self._closed)
            self._takes_over = False
        return self._queue.wait_for_step(lambda: self._closed)


class StepQueue:
    """Source and sink of the pipeline of a decoder.

    Args:
        texts: The texts of tokens.
        end_tokens: The model's tokens that end an answer.
        seed: Seed of the run, for prompts without one of their own.
        measures: Whether the first steps measure how long steps take.
        proposals: Most proposed tokens of a sequence in a step; 0 for none.
        drafter: Drafts tokens to propose, besides those of earlier text; None: nobody does.
        clock: Clock in seconds.
        changed: Wakes the threads that wait; None for one that belongs to the queue.
        make_scheduler: Makes what decides the rows of steps.
    """

    max_tokens: int | None = None
    lengths: str | None = None
    pixels: PixelTable | None = None
    unfinished: Path | None = None

    def __init__(
        self,
        texts: AnswerTexts,
        *,
        end_tokens: Collection[int] = (),
        seed: int = 0,
        measures: bool = True,
        proposals: int = 0,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        changed: threading.Condition | None = None,
        make_scheduler: Callable[[StepLimits, CacheSize], StepScheduler] = StepScheduler,
    ) -> None:
        self.measures = measures
        """Whether the first steps measure how long steps take."""
        self.streams = True
        """Whether somebody may wait for single tokens, which prompts should not hold up for long."""
        self.total: int | None = None
        """Number of answers of the run, or None if there is no end."""
        self.skipped: tuple[SkippedItem, ...] = ()
        """Prompts without an answer, and why."""
        self.keeps: frozenset[int] = frozenset()
        """Numbers of the prompts whose first answer is kept with its hidden states."""
        self.kept: dict[int, KeptAnswer] = {}
        """What is kept, by the number of the prompt."""
        self.figures = TokenFigures()
        self._pace = StepPace()
        self.started = threading.Event()
        """Set once the pipeline is ready, or will never be."""
        self._texts = texts
        self._end_tokens = frozenset(end_tokens)
        self._seed = seed
        self._proposals = proposals
        self._drafter = drafter
        self._clock = clock
        self._changed = threading.Condition() if changed is None else changed
        self._make_scheduler = make_scheduler
        self._numbers = itertools.count()
        self._sequences: dict[int, _Sequence] = {}
        self._scheduler: StepScheduler | None = None
        self._trial: StepTrial | None = None
        """Measurement at the start, until it is over."""
        self._trial_sampler = Sampler(Sampling(), ())
        self._ends: DecoderEnds | None = None
        self._bounds: StepBounds | None = None
        self._owners: CacheOwners | None = None
        """Stages for which the latest steps were made."""
        self._following: tuple[StepLimits, CacheSize, CacheOwners | None] | None = None
        """Bounds of steps, pages and stages of the plan that is to take over."""
        self._drains = False
        self._closed = False
        self.error: BaseException | None = None

    # -- plans ------------------------------------------------------------------------------------

    @property
    def ends(self) -> DecoderEnds | None:
        """Embedding and head, once there is a plan."""
        return self._ends

    def begin(
        self,
        ends: DecoderEnds,
        bounds: StepBounds,
        stages: int,
        window: int,
        owners: CacheOwners | None = None,
        *,
        exact: bool = True,
        planned: PlannedGroups | None = None,
    ) -> None:
        """Take what a plan has decided, before anything is submitted or after an epoch has stopped.

        Sequences that go on compute once more what stages have lost of their tokens.

        Args:
            ends: Embedding and head.
            bounds: Bounds of steps, with the context that was promised to the sequences that are here.
            stages: Number of stages, or 0 if the data rank computes all layers.
            window: Widest window of a block, or 0.
            owners: The stages, and since when they have their caches; None if all of these are empty.
            exact: Whether rows are the same whatever else a step has, so that tokens may be proposed.
            planned: Number of groups that the plan expects; None if it expects none.
        """
        limits, cache = self._limits(bounds, stages, window, owners, exact=exact, planned=planned)
        with self._changed:
            self._ends, self._bounds = ends, bounds
            if self._scheduler is None:
                self._scheduler = self._make_scheduler(limits, cache)
                self._scheduler.draft = None if self._drafter is None else self._drafter.figures
                self._trial = StepTrial(limits, cache) if self.measures else None
                self._owners = owners
            else:
                self._restart(self._scheduler, limits, cache, owners)

    def change(
        self,
        bounds: StepBounds,
        stages: int,
        window: int,
        owners: CacheOwners | None = None,
        *,
        exact: bool = True,
        planned: PlannedGroups | None = None,
    ) -> None:
        """Take what was decided for a plan that is to take over while another one runs, as ``begin`` does."""
        limits, cache = self._limits(bounds, stages, window, owners, exact=exact, planned=planned)
        with self._changed:
            self._following = limits, cache, owners

    def take_over(self, is_closed: Callable[[], bool]) -> None:
        """Wait until all steps of the plan before have results, then go on with the one that takes over.

        Args:
            is_closed: Returns whether the caller is to wait no longer.

        Raises:
            Closed: It is not, or the run has ended.
        """
        with self._changed:
            while not is_closed() and not self._closed:
                if self._scheduler is None or self._following is None:
                    raise RuntimeError("no plan was to take over")
                if not self._scheduler.in_flight and (self._trial is None or not self._trial.in_flight):
                    self._restart(self._scheduler, *self._following)
                    self._following = None
                    return
                self._changed.wait()
            raise Closed

    def _limits(
        self,
        bounds: StepBounds,
        stages: int,
        window: int,
        owners: CacheOwners | None,
        *,
        exact: bool,
        planned: PlannedGroups | None,
    ) -> tuple[StepLimits, CacheSize]:
        """Return the limits of steps and the pages that a plan has."""
        limits = StepLimits(
            bounds.context,
            2 * stages or 1,
            max(1, stages),
            bounds.rows,
            bounds.sequences,
            planned=planned,
            proposals=self._proposals if exact else 0,
        )
        if not self.streams:
            limits = replace(limits, slowdown=math.inf)
        kept = frozenset[int]() if owners is None else owners.cuts
        return limits, CacheSize(bounds.pages, bounds.window_pages, window, PAGE, kept)

    def _restart(
        self, scheduler: StepScheduler, limits: StepLimits, cache: CacheSize, owners: CacheOwners | None
    ) -> None:
        """Go on with other stages; measuring again would keep those waiting whose text has stopped."""
        if self._trial is not None:
            scheduler.begin(limits, self._trial.steps)
            self._trial = None
        self._pace.pause()
        known = scheduler.limits
        lost = None if owners is None else owners.lost_since(self._owners)
        scheduler.restart(limits.timed_as(known), cache, lost)
        self._owners = owners

    @property
    def context(self) -> int:
        """Longest sequence in tokens, once the plan is known."""
        return self._known.context

    @property
    def sequences(self) -> int:
        """Most sequences that run at a time, once the plan is known."""
        return self._known.sequences

    @property
    def _known(self) -> StepBounds:
        if self._bounds is None:
            raise RuntimeError("the bounds of steps are not known before the plan")
        return self._bounds

    @property
    def coming_bytes(self) -> int:
        """Memory of drafts that is going to be used, in bytes."""
        return 0 if self._drafter is None else self._drafter.memory.cache_bytes

    # -- whoever asks -----------------------------------------------------------------------------

    def submit(self, prompt: Prompt, listener: Listener, *, choice: int = 0) -> int:
        """Ask for the answer to a prompt; return the number by which to cancel it.

        Args:
            prompt: The prompt.
            listener: Hears of the tokens, and of the end.
            choice: Number among the answers to this prompt.

        Raises:
            InputError: It can never fit the context or the cache.
            Closed: The run has ended.
        """
        generation = Generation(
            prompt, self._texts, self.context, self._end_tokens, seed=self._seed, choice=choice
        )
        if generation.most_tokens < 1:
            raise InputError(
                f"the prompt has {count(len(prompt.tokens), 'token')}; the context of {self.context} must "
                "have room for one more: shorten it, or raise --context or --cache-mb"
            )
        with self._changed:
            if self._scheduler is None or self._closed:
                raise self.error or Closed
            number = next(self._numbers)
            self._scheduler.add(number, prompt.tokens, generation.most_tokens)
            self._sequences[number] = _Sequence(generation, listener)
            self._changed.notify_all()
        return number

    def cancel(self, sequence: int) -> None:
        """Give a sequence up; its listener hears nothing more."""
        with self._changed:
            self._forget(sequence)
            self._changed.notify_all()

    def _forget(self, sequence: int) -> None:
        if self._sequences.pop(sequence, None) is not None and self._scheduler is not None:
            self._scheduler.cancel(sequence)
            self.figures.ended(sequence, self._clock())

    @property
    def is_ending(self) -> bool:
        """Whether nothing further is to be asked."""
        return self._drains or self._closed

    def state(self) -> TextState:
        """Return the state of this moment."""
        with self._changed:
            scheduler, figures = self._scheduler, self.figures
            if scheduler is None:
                return TextState()
            draft = scheduler.draft
            return TextState(
                waiting=scheduler.waiting,
                running=scheduler.running,
                steps=scheduler.in_flight,
                answered=figures.answers,
                prompt_tokens=figures.prompt_tokens,
                completion_tokens=figures.completion_tokens,
                reused_tokens=scheduler.reused_tokens,
                yields=scheduler.yields,
                repeated_tokens=scheduler.repeated_tokens,
                partly_repeated_tokens=scheduler.partly_repeated_tokens,
                kept_tokens=scheduler.kept_tokens,
                proposed_tokens=scheduler.proposed_tokens,
                accepted_tokens=scheduler.accepted_tokens,
                drafted_tokens=0 if draft is None else draft.proposed_tokens,
                accepted_drafted_tokens=0 if draft is None else draft.accepted_tokens,
                pages=scheduler.cache.pages or scheduler.cache.window_pages,
                free_pages=scheduler.free_pages,
                kept_pages=scheduler.kept_pages,
                work=self._pace.work,
            )

    def drain(self) -> None:
        """End the run once every sequence has its answer."""
        with self._changed:
            self._drains = True
            self._changed.notify_all()

    def abandon(self, error: BaseException) -> None:
        """End the run without the answers that are missing; their listeners are told ``error``."""
        with self._changed:
            listeners = [one.listener for one in self._sequences.values()]
            for sequence in tuple(self._sequences):
                self._forget(sequence)
            self._drains = True
            self._changed.notify_all()
        for listener in listeners:
            listener.broke(error)

    # -- the source -------------------------------------------------------------------------------

    def stream(self, *, position: int | None = None, rows: int = DEFAULT_ROWS) -> StepStream:
        """Return the steps from now on."""
        return StepStream(self)

    def close(self) -> None:
        """End: there will be no more steps."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Let the thread that waits for a step look whether it still should."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_step(self, is_closed: Callable[[], bool]) -> StepGroup | None:
        """Wait for the next step; return None once the queue is drained.

        What is to be drafted for it is drafted here, while others may ask, cancel and get results.

        Args:
            is_closed: Returns whether the caller is to wait no longer.

        Raises:
            Closed: It is not, or the run has ended.
        """
        drafts: list[DraftedTokens] = []
        while True:
            with self._changed:
                if self._scheduler is not None:
                    self._scheduler.drafted(drafts)
                while True:
                    if is_closed() or self._closed or self._scheduler is None or self._ends is None:
                        raise Closed
                    if self._drains and not self._sequences:
                        return None
                    step = self._next_step(self._scheduler)
                    if step is not None:
                        return StepGroup((), step, self._ends)
                    wanted, draft = self._scheduler.wanted_drafts, self._scheduler.draft
                    if wanted and draft is not None:
                        readers = frozenset(draft.readers)
                        break
                    self._changed.wait()
            drafts = [] if self._drafter is None else self._drafter.draft(wanted, readers)

    def _next_step(self, scheduler: StepScheduler) -> DecodingStep | None:
        """Return the next step, or None if something has to happen before; the lock is held."""
        trial = self._trial
        if trial is not None:
            if not trial.is_over:
                return trial.next(self._clock())
            scheduler.begin(trial.limits, trial.steps)
            self._trial = None
        step = scheduler.next(self._clock())
        if step is not None:
            self._note_begun(step)
        return step

    def _note_begun(self, step: DecodingStep) -> None:
        now = self._clock()
        for part in step.parts:
            sequence = self._sequences[part.sequence]
            if not sequence.began:
                sequence.began = True
                self.figures.began(part.sequence, len(sequence.generation.prompt.tokens), now)

    # -- the sink ---------------------------------------------------------------------------------

    @property
    def items(self) -> int:
        """Number of answers that have ended."""
        return self.figures.answers

    def add_dependencies(self, depends_on: Mapping[str, str]) -> None:
        """Do nothing: answers in memory are not kept for a later run."""

    def __enter__(self) -> StepQueue:
        """Begin: the pipeline is ready."""
        self.started.set()
        return self

    def write(self, microbatch_number: int, outputs: torch.Tensor, microbatch: Microbatch) -> None:
        """Choose the tokens that a step decides, from the hidden states behind the last block."""
        if not isinstance(microbatch, StepBatch) or self._ends is None or self._scheduler is None:
            raise TypeError("only steps of this queue have results")
        step = microbatch.made
        if self._trial is not None:
            ends = itertools.accumulate(len(part.tokens) for part in step.parts)
            for scores in self._ends.score(outputs[[end - 1 for end in ends]]).numpy():
                with suppress(RequestError):  # nobody gets the token
                    self._trial_sampler.choose(scores)
            with self._changed:
                self._trial.finished(self._clock())
                self._changed.notify_all()
            return
        told: list[Callable[[], None]] = []
        drawn: dict[int, list[int]] = {}
        ended: list[int] = []
        scored = self._scored(step)
        if scored:
            rows = torch.cat([torch.arange(one.first, one.first + one.part.deciding) for one in scored])
            hidden = outputs.index_select(0, rows)
            scores = self._ends.score(hidden).numpy()
            end = 0
            for one in scored:
                own = slice(end, end := end + one.part.deciding)
                if tokens := self._draw(one, hidden[own], scores[own], told, ended):
                    drawn[one.part.sequence] = tokens
        now = self._clock()
        with self._changed:
            self._scheduler.finished(step.number, drawn, ended, now)
            for number, tokens in drawn.items():
                if number in self._sequences:
                    self.figures.drew(number, now, len(tokens))
            for number in ended:
                if self._sequences.pop(number, None) is not None:
                    self.figures.ended(number, now)
            self._pace.note(step.rows, step.positions, now, self._scheduler.growing)
            self._changed.notify_all()
        for tell in told:
            tell()

    def _draw(
        self,
        one: _Scored,
        hidden: torch.Tensor,
        scores: npt.NDArray[np.float32],
        told: list[Callable[[], None]],
        ended: list[int],
    ) -> list[int]:
        """Choose the tokens that the last rows of a sequence decide, as far as proposed tokens are right.

        Args:
            one: The sequence and its rows.
            hidden: Hidden state behind the last block, of each of these rows.
            scores: Scores of all tokens, of each of them.
            told: What listeners are to hear, which grows.
            ended: Sequences that end, which grow.
        """
        number, listener, generation = one.part.sequence, one.sequence.listener, one.sequence.generation
        proposed = one.part.tokens[len(one.part.tokens) - one.part.proposed :]
        drawn: list[int] = []
        for state, values, guess in zip(hidden, scores, (*proposed, None), strict=True):
            self._keep(generation, state)
            try:
                piece = generation.take(values)
            except RequestError as error:
                ended.append(number)
                told.append(_failed(listener, number, error))
                break
            drawn.append(piece.drawn.token)
            told.append(_grew(listener, number, piece))
            if piece.finish_reason is not None:
                ended.append(number)
                told.append(_ended(listener, number, generation))
                break
            if piece.drawn.token != guess:
                break
        return drawn

    def _keep(self, generation: Generation, hidden: torch.Tensor) -> None:
        """Keep the hidden state that decides a token, if the answer is one of those that are asked for."""
        item = generation.prompt.item
        if item in self.keeps and generation.choice == 0:
            self.kept.setdefault(item, KeptAnswer(generation)).hidden.append(hidden.clone())

    def _scored(self, step: DecodingStep) -> list[_Scored]:
        """Return the sequences whose next tokens the step decides."""
        found = []
        end = 0
        scheduler = self._scheduler
        with self._changed:
            for part in step.parts:
                end += len(part.tokens)
                sequence = self._sequences.get(part.sequence)
                if part.scored and sequence is not None:
                    if scheduler is not None and not sequence.generation.began:
                        sequence.generation.reused_tokens = scheduler.reused_by(part.sequence)
                    found.append(_Scored(end - part.deciding, part, sequence))
        return found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Note that no more answers come."""
        if error is not None:
            self.fail(error)
        self.close()

    def fail(self, error: BaseException) -> None:
        """Note why the run has failed, and tell those who wait."""
        with self._changed:
            self.error = self.error or error
            listeners = [one.listener for one in self._sequences.values()]
            self._sequences.clear()
        self.close()
        self.started.set()
        for listener in listeners:
            listener.broke(error)


def _grew(listener: Listener, sequence: int, piece: Piece) -> Callable[[], None]:
    return lambda: listener.grew(sequence, piece)


def _ended(listener: Listener, sequence: int, generation: Generation) -> Callable[[], None]:
    return lambda: listener.ended(sequence, generation.answer())


def _failed(listener: Listener, sequence: int, error: RequestError) -> Callable[[], None]:
    return lambda: listener.failed(sequence, error)

"""Which tokens of which sequences the next step of a decoder computes; the data rank decides for all stages.

    add ──> waiting ──pages free──> running: prompt in chunks, then one row a step ──> ended
                ^                       │
                └──── youngest yields ──┘

A step is in flight from ``next`` until ``finished``, and several are, so that no stage waits for another:

    stage 0   a   b   c   p   a   b   c   p         a, b, c: decode rows of three groups of sequences
    stage 1       a   b   c   p   a   b   c   p     p: a chunk of a prompt
    head              a   b   c   p   a   b   c

Whoever came first goes first: the running sequences are always older than the waiting ones, and when pages
run out, the youngest running one yields its own and computes them again later. So the oldest always moves on.

Stages execute steps in the order of their numbers. Pages that a sequence leaves may therefore be given to
another one in the very next step, and a page that a step under way fills may be shared from the next on.

A row of a sequence that generates may be followed by rows of tokens that are only proposed (``speculation``).
Those that turn out to be wrong leave wrong places behind, which the next rows of the sequence write again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pipeedge.base.errors import InputError
from pipeedge.base.schedule import LayerRange
from pipeedge.base.wording import count
from pipeedge.decoding.groups import Deal
from pipeedge.decoding.pages import LostLayers, PageLists, PagePool, page_key, pages_of, window_pages_of
from pipeedge.decoding.slowest_place import SlowestPlace
from pipeedge.decoding.speculation import (
    DraftedText,
    DraftedTokens,
    DraftFigures,
    LoneSteps,
    PromptLookup,
    ProposalOffer,
    Proposer,
    WantedDraft,
    best_offer,
    best_proposals,
)
from pipeedge.decoding.step_limits import UNMEASURED, CacheSize, StepLimits
from pipeedge.decoding.step_times import StepTimes

__all__ = ["DecodingStep", "StepPart", "StepScheduler"]


_PROPOSALS = 64
"""Most proposed tokens of a step."""
_OTHERS_WAIT = 4.0
"""Time in which only what stages have lost is computed again, in times of the step for others before it: they
go on slowly, rather than wait for all of that.
"""


@dataclass(frozen=True)
class StepPart:
    """The rows of one sequence in a step."""

    sequence: int
    """Number of the sequence; negative for rows of a trial."""
    position: int
    """Position of the first row in the sequence."""
    tokens: tuple[int, ...]
    """Token of each row."""
    pages: tuple[int, ...]
    """Numbers of the pages from the beginning to the last row; empty without blocks that need them."""
    window_pages: tuple[int, ...]
    """The same for blocks with a window, in which only those that the window reaches count."""
    scored: bool
    """Whether the last row decides the next token."""
    proposed: int = 0
    """Number of tokens, at the end, that are proposed."""

    @property
    def deciding(self) -> int:
        """Number of rows, at the end, that decide a token, as far as those in front of them are right."""
        return self.scored * (1 + self.proposed)

    @property
    def reads_prompt(self) -> bool:
        """Whether there are rows of known tokens besides the last one."""
        return len(self.tokens) > 1 + self.proposed


@dataclass(frozen=True)
class DecodingStep:
    """Rows that travel through all stages together."""

    number: int
    """Number of the step, from 0 and without gaps."""
    parts: tuple[StepPart, ...]
    layers: LayerRange | None = None
    """Layers that compute the rows, because the others know them; None for all."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(len(part.tokens) for part in self.parts)

    @property
    def is_trial(self) -> bool:
        """Whether it only measures: what its rows write to the cache is nobody's."""
        return all(part.sequence < 0 for part in self.parts)

    @property
    def positions(self) -> int | None:
        """Number of tokens in front of all rows; None if some rows read a prompt."""
        if self.reads_prompt:
            return None
        return sum(sum(range(part.position, part.position + len(part.tokens))) for part in self.parts)

    @property
    def reads_prompt(self) -> bool:
        """Whether some rows read a prompt."""
        return any(part.reads_prompt for part in self.parts)


@dataclass
class _Generated:
    """A sequence: its tokens so far, and how many of them steps have been made for."""

    number: int
    tokens: list[int]
    end: int
    """Number of tokens at which the sequence is as long as it may become."""
    lists: PageLists
    keys: list[bytes] = field(default_factory=list)
    """Keys of the full pages, as far as they have been needed."""
    position: int = 0
    """Number of tokens that steps have been made for and whose pages the sequence has."""
    awaits: bool = False
    """Whether a step in flight decides its next token."""
    since: int = 0
    """Step before which the sequence became ready."""
    yielded: int = 0
    """How often it has yielded its pages."""
    lost: int = 0
    """Number of tokens that were computed when caches were lost; computing them again is not put off for the
    sake of others.
    """
    held: int = 0
    """Number of tokens up to which it has pages that only some layers have to compute again."""
    reused: int = 0
    """Number of tokens that it found computed, before it yielded."""
    lookup: PromptLookup = field(default_factory=PromptLookup)
    drafted: DraftedText | None = None
    proposed: tuple[int, ...] = ()
    """Tokens that the step in flight verifies, while the sequence has its pages."""
    proposer: Proposer | None = None
    """Proposer of those."""

    @property
    def generates(self) -> bool:
        """Whether its prompt is computed, so that it goes on token by token."""
        return len(self.tokens) - self.position <= 1

    @property
    def repeats(self) -> bool:
        """Whether the next token is computed again by those layers alone that have lost it."""
        return self.position < self.held

    @property
    def chunk_end(self) -> int:
        """Number of tokens at which the next chunk ends at the latest."""
        return self.held if self.repeats else len(self.tokens)

    def page_keys(self, page: int, positions: int) -> list[bytes]:
        """Return the keys of the full pages among the first ``positions`` positions."""
        for index in range(len(self.keys), positions // page):
            tokens = self.tokens[index * page : (index + 1) * page]
            self.keys.append(page_key(self.keys[-1] if self.keys else b"", tokens))
        return self.keys[: positions // page]


@dataclass
class _StepInFlight:
    scored: tuple[int, ...]
    """Sequences whose next token it decides."""
    cost: float
    """Cost of the rows of sequences that generate, without proposals."""
    rows_cost: float | None
    """Cost of all rows; None if it reads a prompt, or is not for all layers."""
    groups: int
    """Number of groups that sequences were dealt to, each of which has a step in flight."""
    lone: bool
    """Whether it is the only one in flight."""
    since: float | None
    """Time at which it began, if known."""


class StepScheduler:
    """Decides the rows of every step.

    Args:
        limits: Bounds of steps.
        cache: Pages of every block.
    """

    def __init__(self, limits: StepLimits, cache: CacheSize) -> None:
        self.limits = limits
        self.cache = cache
        self.reused_tokens = 0
        """Number of tokens that were not computed, because those of an equal beginning were kept."""
        self.yields = 0
        """How often a sequence has yielded its pages."""
        self.repeated_tokens = 0
        """Number of tokens to be computed again, because stages have lost their caches."""
        self.partly_repeated_tokens = 0
        """Number of those that only some layers compute again."""
        self.kept_tokens = 0
        """Number of tokens that no layer has to compute again, though others of their sequences are lost."""
        self.proposed_tokens = 0
        """Number of proposed tokens that were verified."""
        self.accepted_tokens = 0
        """Number of those that were right."""
        self.draft: DraftFigures | None = None
        """Figures of the small model that drafts tokens, or None without one."""
        self.wanted_drafts: list[WantedDraft] = []
        """What is to be drafted, and told to ``drafted``, before there is a next step."""
        self._lone = LoneSteps()
        self._slowest = SlowestPlace()
        self._waiting: OrderedDict[int, _Generated] = OrderedDict()
        self._running: dict[int, _Generated] = {}
        self._next = 0
        self._pool: PagePool | None = None
        self._window_pool: PagePool | None = None
        self._others_wait_s = 0.0
        """Time in which layers compute again what they have lost, before there is a step for others."""
        self._layers = 1
        """Number of layers of the model, once caches were lost."""
        self._forget_pages()

    @property
    def waiting(self) -> int:
        """Number of sequences that wait to run."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of sequences that have pages."""
        return len(self._running)

    @property
    def growing(self) -> int:
        """Number of sequences whose prompts are computed, so that they go on token by token."""
        return sum(one.generates for one in self._running.values())

    @property
    def in_flight(self) -> int:
        """Number of steps in flight."""
        return len(self._flights)

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence refers to, of the scarcer kind."""
        return min(pool.free for pool in (self._pool, self._window_pool) if pool is not None)

    @property
    def kept_pages(self) -> int:
        """Number of those that hold beginnings which a new sequence could use."""
        return min(pool.kept for pool in (self._pool, self._window_pool) if pool is not None)

    def check(self, prompt: int, most_tokens: int) -> None:
        """Refuse a sequence that could never run.

        Args:
            prompt: Number of tokens of the prompt.
            most_tokens: Most tokens to generate.

        Raises:
            InputError: It is empty, or longer than the context or the whole cache.
        """
        if prompt < 1:
            raise InputError("the prompt has no tokens: give at least one")
        end = prompt + most_tokens
        what = f"{count(prompt, 'token')} of the prompt and {most_tokens} more are longer than"
        if end > self.limits.context:
            raise InputError(f"{what} the context of {self.limits.context}")
        whole = self.cache.pages * self.cache.page
        if self._pool is not None and end > whole:
            raise InputError(f"{what} the cache, which holds {whole}: shorten them, or raise --cache-mb")
        if self._window_pool is not None and self._window_need(end) > self.cache.window_pages:
            raise InputError(f"{what} the cache of windows can hold: raise --cache-mb")

    def add(self, sequence: int, tokens: Sequence[int], most_tokens: int) -> None:
        """Take a sequence in; it waits for its turn.

        Args:
            sequence: Number of the sequence, used once.
            tokens: The prompt, at least one token.
            most_tokens: Most tokens to generate, at least one.

        Raises:
            InputError: The sequence can never fit the context or the cache.
        """
        self.check(len(tokens), most_tokens)
        end, drafted = len(tokens) + most_tokens, None
        if self.draft is not None:
            drafted = DraftedText(self.draft, sequence, len(tokens), end)
        self._waiting[sequence] = _Generated(
            sequence, list(tokens), end, self._new_lists(), since=self._next, drafted=drafted
        )

    def next(self, now: float | None = None) -> DecodingStep | None:
        """Return the next step, or None if none can start before a step finishes or a sequence is added.

        There is none either as long as something is to be drafted for it.

        Args:
            now: Time in seconds, by which to measure steps that are alone.
        """
        self.wanted_drafts = []
        costs = self._decode_costs()
        groups = self._best_groups(costs) if costs else self.limits.groups
        # Chunks wait for no token, so there may be one in every place. While others generate, only what is
        # computed again takes the places that their groups leave: it holds up texts that have begun.
        again = any(one.position < one.lost for one in self._running.values())
        places = self.limits.groups if again else groups
        if len(self._flights) >= places:
            return None
        self._admit()
        ready = self._reserve_next_rows()
        if not ready:
            return None
        costs = self._decode_costs()
        usual = sum(costs) / groups
        repeating = [one for one in ready if one.repeats]
        others = [one for one in ready if not one.repeats]
        repeats = bool(repeating) and (not others or self._others_wait_s > 0)
        layers, cost = None, 0.0
        if repeats:
            chosen = self._choose_chunks(repeating, 0, 0.0, usual)
            layers = LayerRange.around(*(self._repeating_layers(one, rows) for one, rows in chosen))
        else:
            prompts = [one for one in others if not one.generates]
            most = self.limits.rows - bool(prompts)
            flights = [flight.cost for flight in self._flights.values()]
            dealt = Deal.among(groups, costs, flights, places)
            chosen = self._choose_decode_rows([one for one in others if one.generates], most, dealt)
            cost = sum(self.limits.cost(one.position, 1) for one, _ in chosen)
            chosen += self._choose_chunks(prompts, len(chosen), cost, usual)
            if not prompts and self.limits.proposals:
                self._propose([one for one, _ in chosen], cost, groups)
                if self.wanted_drafts:
                    return None
        parts = tuple(self._part(one, rows) for one, rows in chosen)
        for one, _ in chosen:
            one.lists.moved(one.page_keys(self.cache.page, one.position), one.position, self._next)
        scored = tuple(part.sequence for part in parts if part.scored)
        step = DecodingStep(self._next, parts, layers)
        for flight in self._flights.values():
            flight.lone = False
        whole_cost = sum(self.limits.cost(part.position, len(part.tokens)) for part in parts)
        if repeating:
            took_s = self.limits.times.of(whole_cost)
            if not repeats:
                self._others_wait_s = _OTHERS_WAIT * took_s
            elif layers is not None:
                self._others_wait_s -= took_s * len(layers) / self._layers
        rows_cost = whole_cost if layers is None and not step.reads_prompt else None
        flying = min(groups, len(costs))
        self._flights[self._next] = _StepInFlight(scored, cost, rows_cost, flying, not self._flights, now)
        self._next += 1
        return step

    def _best_groups(self, costs: Sequence[float]) -> int:
        """Return among how many groups to deal sequences, by the costs of their next rows."""
        busy = self._slowest.share
        if busy is None and self.limits.times is UNMEASURED:  # without seconds, nothing will be known
            busy = 1 / self.limits.stages
        return self.limits.best_groups(sum(costs), len(costs), busy)

    def _propose(self, chosen: Sequence[_Generated], cost: float, groups: int) -> None:
        """Let the step verify proposed tokens of the sequences that generate, as many as pay.

        What pays and has to be drafted is wanted then, instead.

        Args:
            chosen: Sequences of the step, with a row each.
            cost: Cost of those rows.
            groups: Number of groups that all are dealt to.
        """
        limits, page = self.limits, self.cache.page
        left = limits.rows - len(chosen)
        most = min(limits.proposals, _PROPOSALS // len(chosen), left)
        if most < 1:
            return
        # A refused row must not have moved a window, nor taken the page that another sequence waits for.
        stays = self._window_pool is not None or self.free_pages <= len(self._running)
        read = sum(limits.reading * one.position for one in chosen)
        times, row_cost = self._times_of_proposals(groups), (cost - read) / len(chosen)
        offers = []
        for one in chosen:
            end = min(one.position + 1 + most, one.end - 1)
            if stays:
                end = min(end, (one.position // page + 1) * page)
            offers.append(self._choose_offer(one, max(0, end - one.position - 1), row_cost, times))
        counts = best_proposals(offers, cost, times, row_cost)
        for one, offer, number in zip(chosen, offers, counts, strict=True):
            if number and offer.tokens is None and one.drafted is not None:
                self.wanted_drafts += one.drafted.want(one.tokens, number)
        if self.wanted_drafts:
            return
        for one, offer, number in zip(chosen, offers, counts, strict=True):
            end = one.lists.room(one.position + 1 + min(number, left))
            one.lists.reserve(end)
            one.proposed = (offer.tokens or ())[: end - one.position - 1]
            left -= len(one.proposed)

    def _choose_offer(self, one: _Generated, most: int, cost: float, times: StepTimes) -> ProposalOffer:
        """Return the better offer of up to ``most`` tokens for a sequence, and note whose it is."""
        one.proposer, offer = one.lookup, one.lookup.offer(one.tokens, most)
        # Before anything is measured, times are no seconds.
        if one.drafted is not None and (self.limits.times is not UNMEASURED or self._lone.known):
            other = one.drafted.offer(one.tokens, most)
            if best_offer([offer, other], cost, times) is other:
                one.proposer, offer = one.drafted, other
        return offer

    def drafted(self, drafts: Sequence[DraftedTokens]) -> None:
        """Take the tokens that were drafted."""
        for draft in drafts:
            one = self._running.get(draft.sequence) or self._waiting.get(draft.sequence)
            if one is not None and one.drafted is not None:
                one.drafted.take(draft)
            if self.draft is not None:
                self.draft.note_times(draft)

    def _times_of_proposals(self, groups: int) -> StepTimes:
        """Return the times that count for proposals: without links, if the slowest place is always busy."""
        limits, busy = self.limits, self._slowest.share
        times = self._lone.correct(limits.times)
        if busy is None or groups * busy < 1:
            return times
        waits = times.of(1.0) * max(0.0, 1 - limits.stages * busy)
        return StepTimes(tuple((cost, max(0.0, seconds - waits)) for cost, seconds in times.points))

    def _repeating_layers(self, one: _Generated, rows: int) -> LayerRange | None:
        """Return the layers that have to compute the next pages of a sequence again."""
        page = self.cache.page
        return one.lists.repeating_layers(one.position // page, pages_of(one.position + rows, page))

    def finished(
        self,
        step: int,
        drawn: Mapping[int, Sequence[int]],
        ended: Collection[int] = (),
        now: float | None = None,
    ) -> None:
        """Take the result of a step in flight.

        Args:
            step: Number of the step.
            drawn: Next tokens of each sequence whose last rows were scored: proposed ones that were right,
                and one more; of cancelled ones, they are ignored.
            ended: Sequences that end; others end when they are as long as they may become.
            now: Time in seconds.

        Raises:
            ValueError: The step is not in flight, or the token of a sequence is missing.
        """
        if step not in self._flights:
            raise ValueError(f"step {step} is not in flight")
        flight = self._flights.pop(step)
        self._note_time(flight, now)
        for number in flight.scored:
            one = self._running.get(number) or self._waiting.get(number)
            if one is None:
                continue
            if number in drawn:
                self._take(one, drawn[number])
            elif number not in ended:
                raise ValueError(f"step {step} finished without the next token of sequence {number}")
            one.awaits, one.since = False, self._next
            if number in ended or len(one.tokens) >= one.end:
                self.cancel(number)

    def _note_time(self, flight: _StepInFlight, now: float | None) -> None:
        """Note when a step has ended."""
        if flight.rows_cost is None or flight.since is None or now is None:
            self._slowest.pause()
            return
        if flight.lone:
            self._lone.note(flight.rows_cost, now - flight.since)
        if self.limits.times is not UNMEASURED:  # those are no seconds
            self._slowest.note(self.limits.times.of(flight.rows_cost), flight.groups, now)

    def _take(self, one: _Generated, drawn: Sequence[int]) -> None:
        """Append the tokens that a step has decided."""
        one.tokens += drawn
        proposed, accepted = len(one.proposed), min(len(drawn) - 1, len(one.proposed))
        for proposer in (one.lookup, one.drafted):
            if proposer is not None:
                has = proposer is one.proposer
                proposer.note(has * proposed, has * accepted)
        self.proposed_tokens += proposed
        self.accepted_tokens += accepted
        one.position += accepted
        one.proposed = ()

    def begin(self, limits: StepLimits, step: int) -> None:
        """Take other limits before the first step.

        Args:
            limits: The limits.
            step: Number of the first step.
        """
        self.limits = limits
        self._next = step

    def cancel(self, sequence: int) -> None:
        """Forget a sequence, if it is still there; its pages are free at once."""
        one = self._running.pop(sequence, None)
        if one is not None:
            self._release(one)
        else:
            one = self._waiting.pop(sequence, None)
        if one is not None and one.drafted is not None:
            one.drafted.forget()

    def reused_by(self, sequence: int) -> int:
        """Return how many tokens of a running sequence were not computed, as others had done it before."""
        one = self._running.get(sequence)
        return 0 if one is None else one.reused

    def restart(self, limits: StepLimits, cache: CacheSize, lost: LostLayers | None = None) -> None:
        """Forget all steps in flight, and what lost stages had in their caches.

        Sequences go on behind the tokens that were drawn. Full pages are kept if all steps that have filled
        them have results; not where there are windows, as a step in flight may have written what they reach.

        Args:
            limits: Bounds of steps from now on, with the same context.
            cache: Pages of every block from now on.
            lost: Layers that have lost their caches; None if all have.

        Raises:
            InputError: One of the sequences can no longer fit the context or the cache.
        """
        before, flights = self._pool, self._flights
        if cache.window_pages or cache.page != self.cache.page or self._window_pool is not None:
            lost = None
        self.limits, self.cache = limits, cache
        self._lone, self._slowest = LoneSteps(), SlowestPlace()
        self._waiting = OrderedDict(self._running | self._waiting)
        self._running = {}
        for one in self._waiting.values():
            one.lists.give_back()
        self._forget_pages()
        if lost is not None and before is not None and self._pool is not None:
            before.restart(cache.pages, min(flights, default=self._next), lost, cache.outputs)
            self._pool, self._layers = before, lost.layers
        for one in self._waiting.values():
            self.check(len(one.tokens), one.end - len(one.tokens))
            self._count_lost(one)
            one.lost = max(one.lost, one.position)
            one.lists, one.position, one.held, one.awaits = self._new_lists(), 0, 0, False
            one.proposed = ()

    def _count_lost(self, one: _Generated) -> None:
        """Count the tokens of a sequence that are to be computed again, and those that are not."""
        kept = known = 0
        if self._pool is not None:
            keys = one.page_keys(self.cache.page, min(one.position, len(one.tokens) - 1))
            kept, known = (count * self.cache.page for count in self._pool.known(keys))
        self.repeated_tokens += one.position - kept
        self.partly_repeated_tokens += known - kept
        self.kept_tokens += kept

    def _forget_pages(self) -> None:
        self._pool = PagePool(self.cache.pages, self.cache.outputs) if self.cache.pages else None
        self._window_pool = PagePool(self.cache.window_pages) if self.cache.window_pages else None
        self._window_reserved = 0
        self._flights: dict[int, _StepInFlight] = {}
        self._others_wait_s = 0.0
        self._refused: tuple[int, ...] | None = None
        """Sequence that could not run, and what was free then: nothing is tried twice."""

    def _new_lists(self) -> PageLists:
        return PageLists(self._pool, self._window_pool, self.cache.window, self.cache.page)

    def _window_need(self, tokens: int) -> int:
        """Return the number of pages of windows that so many tokens need at a time."""
        if self._window_pool is None:
            return 0
        page = self.cache.page
        return min(pages_of(tokens, page), window_pages_of(self.cache.window, page))

    def _admit(self) -> None:
        """Let sequences run, in the order in which they came, while there are pages for them."""
        while self._waiting and len(self._running) < self.limits.sequences:
            one = next(iter(self._waiting.values()))
            if not self._begin(one):
                return
            self._running[one.number] = self._waiting.pop(one.number)

    def _begin(self, one: _Generated) -> bool:
        """Give a sequence the beginnings it shares, if it can run now; return whether it can.

        Wanted are pages for its tokens, and for everybody who runs a page more than those for known tokens. A
        sequence that has yielded before waits until there are more, twice as many each time, so that it does
        not yield for ever.
        """
        free = 0 if self._pool is None else self._pool.free
        state = (one.number, free, self._window_reserved)
        if self._running and self._refused == state:
            return False
        page, need = self.cache.page, self._window_need(one.end)
        self._share(one)
        expected = min(one.end, len(one.tokens) + page * 2 ** min(one.yielded, 16))
        wanted = pages_of(expected, page) - len(one.lists.pages)
        for other in self._running.values():
            wanted += 1 + max(0, pages_of(len(other.tokens), page) - len(other.lists.pages))
        enough = self._pool is None or wanted <= self._pool.free
        enough = enough and self._window_reserved + need <= self.cache.window_pages
        if self._running and not enough:
            one.lists.give_back()
            one.position = one.held = 0
            self._refused = state
            return False
        self._window_reserved += need
        self._note_reused(one, 0)
        return True

    def _share(self, one: _Generated) -> None:
        """Move a sequence over the pages that others with the same beginning have computed.

        Its last token is computed in any case, since it is scored.
        """
        keys = one.page_keys(self.cache.page, len(one.tokens) - 1)
        one.position, one.held = one.lists.share(keys, one.position)

    def _note_reused(self, one: _Generated, before: int) -> None:
        """Count the tokens over which a sequence has moved since it was at position ``before``."""
        reused = max(0, one.position - max(before, one.lost))
        self.reused_tokens += reused
        if not one.yielded:
            one.reused += reused

    def _release(self, one: _Generated) -> None:
        """Give back what a sequence had while it ran."""
        one.lists.give_back()
        one.position, one.held, one.proposed = 0, 0, ()
        self._window_reserved -= self._window_need(one.end)

    def _yield(self, one: _Generated) -> None:
        """Let a running sequence wait again, in front of all others."""
        del self._running[one.number]
        self._release(one)
        if one.drafted is not None:
            one.drafted.forget()
        one.yielded += 1
        self.yields += 1
        self._waiting[one.number] = one
        self._waiting.move_to_end(one.number, last=False)

    def _reserve_next_rows(self) -> list[_Generated]:
        """Return the sequences that can have a row in the next step, oldest first, with the page for it.

        Where pages are missing, younger sequences yield theirs.
        """
        ready = []
        for one in list(self._running.values()):
            if one.number not in self._running or one.awaits:
                continue
            if one.position % self.cache.page == 0:
                before = one.position
                self._share(one)
                self._note_reused(one, before)
                while not one.lists.room(one.position + 1) > one.position:
                    youngest = next(reversed(self._running.values()))
                    if youngest is one:
                        break
                    self._yield(youngest)
                else:
                    one.lists.reserve(one.position + 1)
                    ready.append(one)
            else:
                ready.append(one)
        return ready

    def _decode_costs(self) -> list[float]:
        """Return the cost of the next row of each sequence that generates, ascending."""
        return sorted(self.limits.cost(one.position, 1) for one in self._running.values() if one.generates)

    def _choose_decode_rows(
        self, ready: Sequence[_Generated], most: int, dealt: Deal
    ) -> list[tuple[_Generated, int]]:
        """Return the sequences that generate a token in the next step, each with one row.

        Those that have waited longest come first, up to an equal share of all that generate. A step exceeds
        it if the groups that follow would otherwise have to.

        Args:
            ready: Sequences that can generate a token.
            most: Most rows.
            dealt: How all that generate are dealt to groups.
        """
        chosen: list[tuple[_Generated, int]] = []
        taken = 0.0
        for one in sorted(ready, key=lambda one: one.since):
            cost = self.limits.cost(one.position, 1)
            if len(chosen) == most or (chosen and not dealt.joins(taken, cost)):
                break
            chosen.append((one, 1))
            taken += cost
        return chosen

    def _choose_chunks(
        self, ready: Sequence[_Generated], parts: int, cost: float, share: float
    ) -> list[tuple[_Generated, int]]:
        """Return chunks of prompts for the step, the oldest first, with their rows.

        A prompt whose next page an older one is about to compute waits for it.

        Args:
            ready: Sequences whose prompts are not yet computed.
            parts: Rows that the step has already.
            cost: Cost of those.
            share: Cost of the rows of an equal share of all sequences that generate; 0 without any.
        """
        if not ready:
            return []
        limits = self.limits
        rows = limits.rows - parts
        budget = min(
            limits.cost(0, limits.rows) - cost, limits.best_chunk([len(one.tokens) for one in ready])
        )
        if share and not any(one.position < one.lost for one in ready):
            usual = limits.times.of(max(share, cost))
            budget = min(budget, max(limits.times.cost_within(limits.slowdown * usual) - cost, 1.0))
        chosen: list[tuple[_Generated, int]] = []
        coming: set[bytes] = set()
        for one in ready:
            keys = one.page_keys(self.cache.page, len(one.tokens) - 1)[one.position // self.cache.page :]
            if coming.intersection(keys[:1]):
                continue
            coming.update(keys)
            wanted = min(rows, one.chunk_end - one.position, limits.rows_for(budget, one.position))
            if not chosen:
                wanted = max(wanted, min(rows, 1))
            wanted = one.lists.room(one.position + max(wanted, 0)) - one.position
            if wanted < 1:
                break
            one.lists.reserve(one.position + wanted)
            chosen.append((one, wanted))
            rows -= wanted
            budget -= limits.cost(one.position, wanted)
        return chosen

    def _part(self, one: _Generated, rows: int) -> StepPart:
        """Return the part of the step with the next rows of a sequence, which are under way from now on."""
        start, one.position = one.position, one.position + rows
        wanted = pages_of(one.position + len(one.proposed), self.cache.page)
        scored = one.position == len(one.tokens)
        one.awaits = scored
        one.since = self._next
        return StepPart(
            one.number,
            start,
            (*one.tokens[start : one.position], *one.proposed),
            tuple(one.lists.pages[:wanted]),
            tuple(one.lists.window_pages[:wanted]),
            scored,
            len(one.proposed),
        )

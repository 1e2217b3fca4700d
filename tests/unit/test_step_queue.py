"""The queue of steps with stages of small decoders: the tokens are those of one process."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from decoder_cases import CASES
from failover_text import Numbers
from places import ROOT
from waiting import LIMIT_S

from pipeedge.base.crew import Closed
from pipeedge.base.errors import InputError, PipeEdgeError
from pipeedge.base.schedule import LayerRange
from pipeedge.data import Microbatch
from pipeedge.data.prompts import open_vocabulary
from pipeedge.data.step_queue import StepQueue
from pipeedge.decoding.drafting import Drafter
from pipeedge.decoding.generation import AnswerTexts, Piece, WrittenAnswer
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.decoding.pages import pages_of, window_pages_of
from pipeedge.decoding.prompt import Prompt
from pipeedge.decoding.sampling import Sampling
from pipeedge.decoding.speculation import DraftedTokens, WantedDraft
from pipeedge.decoding.structure import Structure
from pipeedge.models.decoder import DecoderModel, find_decoder
from pipeedge.models.dtypes import INT4
from pipeedge.models.layers.decoder import PAGE
from pipeedge.models.step_rows import StepBounds
from pipeedge.observe.token_figures import TextState
from pipeedge.run.stage import StepStage
from pipeedge.transport.base import Packet

FAMILIES = ("llama3", "llama-dynamic", "mistral", "ministral", "qwen2-window", "qwen3", "gemma2", "gemma3")
FAMILIES += ("phi3", "olmo2", "smollm3", "granite", "gpt2")
CONTEXT = 128


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

    def __init__(
        self,
        model: DecoderModel,
        cuts: Sequence[int],
        dtype: torch.dtype = torch.float32,
        places: int = 0,
        measures: bool = False,
        proposals: int = 0,
        texts: AnswerTexts | None = None,
        draft: DecoderModel | None = None,
    ) -> None:
        self.model, self.dtype, self.places = model, dtype, places
        # A clock that each look moves: the speed of the machine decides nothing.
        clock = itertools.count(0.0, 0.001).__next__
        # Drafts take no time, so that they always pay.
        drafter = None if draft is None else Drafter(draft, model.config.vocab, CONTEXT, clock=lambda: 0.0)
        self.queue = StepQueue(
            texts or Numbers(), measures=measures, proposals=proposals, drafter=drafter, clock=clock
        )
        self.ends = model.ends(dtype)
        self.plan(cuts, 4)

    def plan(self, cuts: Sequence[int], sequences: int) -> None:
        """Begin an epoch, whose stages have empty pages, as many as so many sequences need."""
        model = self.model
        window = min(window_pages_of(model.window, PAGE), pages_of(CONTEXT, PAGE)) if model.window else 0
        pages = sequences * pages_of(CONTEXT, PAGE) if model.attends_to_all else 0
        bounds = StepBounds(CONTEXT, 40, 4, pages, 4 * window)
        edges = list(itertools.pairwise([0, *cuts, model.n_layers]))
        self.stages = [
            StepStage(
                model.stage(
                    LayerRange(start, stop),
                    self.dtype,
                    pages=pages,
                    window_pages=bounds.window_pages,
                    context=CONTEXT,
                ),
                bounds,
                0,
                is_last=stop == model.n_layers,
            )
            for start, stop in edges
        ]
        self.queue.begin(self.ends, bounds, self.places, model.window)

    def run(self, losses: Sequence[tuple[int, Sequence[int]]] = ()) -> None:
        """Let steps pass, several under way at a time, until the queue is drained.

        Args:
            losses: For each plan that is lost with all that is under way, the number of results that it has
                before, and the cuts of the plan that follows.
        """
        self.queue.drain()
        with self.queue:
            for results, cuts in losses:
                if not self._passes(results):
                    return
                self.plan(cuts, 2)
            self._passes(None)

    def _passes(self, most: int | None) -> bool:
        """Let steps pass until so many have results; return whether there were as many."""
        steps = self.queue.stream()
        under_way: SimpleQueue[tuple[Packet, Microbatch]] = SimpleQueue()

        def collect() -> None:
            for _ in itertools.count() if most is None else range(most):
                packet, batch = under_way.get()
                if not packet.items:
                    return
                self.queue.write(packet.number, packet.payload[0], batch)
            steps.close()

        collector = threading.Thread(target=collect, daemon=True)
        collector.start()
        has_all = False
        with suppress(Closed):
            while (group := steps.next(8)) is not None:
                batch = group.collate(tuple(spec.empty() for spec in group.specs))
                packet = Packet(group.step.number, batch.items, batch.payload)
                for stage in self.stages:
                    packet = stage(packet)
                under_way.put((packet, batch))
            has_all = True
            under_way.put((Packet(0, 0, ()), Microbatch((), (), (), ())))
        collector.join(LIMIT_S)
        return not has_all


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4], ids=str)
@pytest.mark.parametrize("family", ["llama3", "gemma3", "gpt2"])
def test_texts_go_on_behind_losses(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every token is told once, and is that of a run without losses or proposals, whatever decides it.

    Drafts come from another model with the same tokens.
    """
    CASES[family].save(tmp_path / "model")
    CASES["qwen3"].save(tmp_path / "other", seed=1)
    model, other = find_decoder(tmp_path / "model"), find_decoder(tmp_path / "other")
    draw = random.Random(f"{family} {dtype}")
    options = [
        Sampling(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2),
        Sampling(temperature=0.9, top_k=20, max_tokens=30, ignore_eos=True, frequency_penalty=0.5),
        Sampling(temperature=1.2, max_tokens=40, ignore_eos=True, seed=5, n=2, repetition_penalty=1.1),
        Sampling(temperature=0.0, max_tokens=40, ignore_eos=True, presence_penalty=1.0, stop=("3 ",)),
    ]
    words = draw.sample(range(model.config.vocab), 6)
    prompts = [[draw.choice(words) for _ in range(draw.randint(1, 70))] for _ in options]
    asked = [
        (Prompt(tuple(tokens), one, item), choice)
        for item, (tokens, one) in enumerate(zip(prompts, options, strict=True))
        for choice in range(one.n)
    ]

    def told(
        losses: Sequence[tuple[int, Sequence[int]]], proposals: int, draft: DecoderModel | None = None
    ) -> list[Heard]:
        chain = Chain(model, (5,), dtype, places=1, proposals=proposals, draft=draft)
        heard = [Heard() for _ in asked]
        for (prompt, choice), listener in zip(asked, heard, strict=True):
            chain.queue.submit(prompt, listener, choice=choice)
        chain.run(losses)
        state = chain.queue.state()
        assert state.repeated_tokens or not losses
        assert proposals or not state.proposed_tokens
        assert (draft is None) == (not state.drafted_tokens)
        return heard

    usual = told((), 0)
    assert all(one.answer is not None for one in usual)
    losses = [(draw.randint(0, 14), sorted(draw.sample(range(1, model.n_layers), 2))) for _ in range(4)]
    assert told(losses, 6) == usual
    assert told(losses, 6, other) == usual


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_a_model_drafts_for_itself_what_it_would_choose(family: str, tmp_path: Path) -> None:
    CASES[family].save(tmp_path)
    model = find_decoder(tmp_path)
    chain = Chain(model, (5,), torch.int8, places=1, measures=True, proposals=6, draft=model)
    options = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
    draw = random.Random(family)
    heard = [Heard() for _ in range(5)]
    for item, listener in enumerate(heard):
        tokens = tuple(draw.randrange(model.config.vocab) for _ in range(draw.randint(1, 80)))
        chain.queue.submit(Prompt(tokens, options, item), listener)
    chain.run()
    assert all(one.answer is not None for one in heard)
    state = chain.queue.state()
    assert state.accepted_drafted_tokens == state.drafted_tokens > 100


def test_nobody_waits_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While tokens are drafted, sequences come and go, and those that go are drafted for no more."""
    model = find_decoder("llama-puzzles")
    chain = Chain(model, (5,), places=1, measures=True, proposals=6, draft=model)
    options = Sampling(temperature=0.0, max_tokens=30, ignore_eos=True)
    drafts, go_on, draft = SimpleQueue[set[int]](), threading.Event(), Drafter.draft

    def slow(
        drafter: Drafter, wanted: Sequence[WantedDraft], readers: Collection[int]
    ) -> list[DraftedTokens]:
        drafts.put(set(readers))
        assert go_on.wait(LIMIT_S)
        return draft(drafter, wanted, readers)

    monkeypatch.setattr(Drafter, "draft", slow)
    given_up, other = Heard(), Heard()
    first = chain.queue.submit(Prompt((50, 51), options), given_up)
    runs = threading.Thread(target=chain.run, daemon=True)
    runs.start()
    assert drafts.get(timeout=LIMIT_S) == {first}
    second = chain.queue.submit(Prompt((52, 53), options, 1), other)
    chain.queue.cancel(first)
    assert chain.queue.state().waiting == 1
    go_on.set()
    runs.join(LIMIT_S)
    assert given_up.answer is None
    assert other.answer is not None
    assert [one.token for one in other.answer.drawn] == LocalDecoder(model).generate((52, 53), 30)
    assert drafts.get(timeout=LIMIT_S) == {second}


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("Spell aaaaaa. a-a-a-a-a-a Spell aaaaaa. ", Sampling(temperature=0.0)),
        ("Spell house. h-o-u-s-e Spell house. ", Sampling(temperature=1.5, seed=3)),
        ("Spell aaa. ", Sampling(temperature=0.7, structure=Structure("regex", "(a-b-){9}a"))),
        ("Spell aaa. ", Sampling(temperature=0.0, structure=Structure("regex", "(aa-)+b"), logprobs=3)),
        ("Spell abab. ", Sampling(temperature=0.0, structure=Structure("regex", "(ab)+"), stop=("baba",))),
    ],
)
def test_proposals_change_no_answer(prompt: str, options: Sampling) -> None:
    model = find_decoder("llama-puzzles")
    vocabulary = open_vocabulary(model, (ROOT / "pipeedge" / "assets" / "llama-puzzles",))
    asked = Prompt(tuple(vocabulary.encode(prompt)), replace(options, max_tokens=40, n=2))

    def answers(proposals: int, draft: DecoderModel | None = None) -> tuple[list[Heard], TextState]:
        chain = Chain(model, (5,), places=1, proposals=proposals, texts=vocabulary, draft=draft)
        heard = [Heard(), Heard()]
        for choice, listener in enumerate(heard):
            chain.queue.submit(asked, listener, choice=choice)
        chain.run()
        return heard, chain.queue.state()

    usual, _ = answers(0)
    found, state = answers(8)
    assert found == usual
    assert all(one.answer is not None for one in found)
    assert state.proposed_tokens >= state.accepted_tokens > 0
    assert state.drafted_tokens == 0
    found, state = answers(8, model)
    assert found == usual
    assert state.drafted_tokens > 0


@pytest.mark.parametrize("losses", [(), [(3, (4,))], [(9, ())]], ids=["none", "while measured", "later"])
@pytest.mark.parametrize("places", [0, 2])
def test_measuring_steps_at_the_start_changes_no_text(
    places: int, losses: Sequence[tuple[int, Sequence[int]]]
) -> None:
    chain = Chain(find_decoder("llama-puzzles"), (5,), places=places, measures=True)
    options = Sampling(temperature=0.0, max_tokens=9, ignore_eos=True)
    heard = [Heard() for _ in range(3)]
    for number, listener in enumerate(heard):
        chain.queue.submit(Prompt((50 + number, 51), options), listener)
    chain.run(losses)
    alone = LocalDecoder(chain.model, context=CONTEXT)
    for number, listener in enumerate(heard):
        assert listener.answer is not None
        assert [one.token for one in listener.answer.drawn] == alone.generate((50 + number, 51), 9)
    assert chain.queue.figures.completion_tokens == 27


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

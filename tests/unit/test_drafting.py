"""Test the small decoder that drafts tokens against one that generates them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from decoder_cases import CASES

from pipeedge.decoding.drafting import Drafter
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.decoding.speculation import WantedDraft
from pipeedge.models.decoder import DecoderModel, find_decoder

CONTEXT = 250


@pytest.fixture(params=["llama3", "mistral", "gemma2", "gemma3", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> DecoderModel:
    CASES[request.param].save(tmp_path)
    return find_decoder(tmp_path)


def test_drafts_are_what_the_decoder_would_go_on_with(model: DecoderModel) -> None:
    """Four sequences take turns; drafted tokens are refused at any place, and others follow."""
    vocab, draw = model.config.vocab, random.Random(3)
    drafter = Drafter(model, vocab, CONTEXT)
    alone = LocalDecoder(model, torch.int8, context=CONTEXT)
    texts = {number: [draw.randrange(vocab) for _ in range(draw.randint(1, 150))] for number in range(4)}
    for _ in range(14):
        for number, tokens in texts.items():
            most = draw.randint(1, 12)
            if len(tokens) + most > CONTEXT:
                continue
            while not (draft := drafter.draft([WantedDraft(number, tuple(tokens), most)], texts)[0]).tokens:
                assert draft.read < len(tokens)
            assert list(draft.tokens) == alone.generate(tokens, most)
            tokens += draft.tokens[: draw.randint(0, most)]
            tokens.append(draw.randrange(vocab))


def test_places_are_for_others_afterwards(model: DecoderModel) -> None:
    drafter = Drafter(model, model.config.vocab, CONTEXT)
    tokens = tuple(n % model.config.vocab for n in range(CONTEXT - 4))
    for first in range(0, 20, 4):
        wanted = [WantedDraft(number, tokens, 4) for number in range(first, first + 4)]
        for _ in range(5):
            drafts = drafter.draft(wanted, range(first, first + 4))
        assert [len(draft.tokens) for draft in drafts] == [4] * 4
        assert len({draft.tokens for draft in drafts}) == 1


def test_times_are_those_of_the_clock(model: DecoderModel) -> None:
    clock = itertools.count().__next__
    figures = Drafter(model, model.config.vocab, CONTEXT, clock=clock).figures
    assert (figures.token_s, figures.read_s) == (0.5, 1 / 64)
    assert figures.context == CONTEXT


def test_nothing_follows_tokens_that_a_draft_does_not_know(model: DecoderModel) -> None:
    drafter = Drafter(model, 5, CONTEXT)
    (draft,) = drafter.draft([WantedDraft(0, (1, 5, 1), 3)], {0})
    assert draft.tokens == ()
    (draft,) = drafter.draft([WantedDraft(1, (1, 2, 3), 30)], {1})
    assert max(draft.tokens) < 5


def test_nothing_follows_the_end_of_a_text(model: DecoderModel) -> None:
    tokens = [7, 8, 9]
    end = LocalDecoder(model, torch.int8).generate(tokens, 20)
    drafter = Drafter(model, model.config.vocab, CONTEXT, (end[5], end[9]))
    (draft,) = drafter.draft([WantedDraft(0, tuple(tokens), 20)], {0})
    assert list(draft.tokens) == end[: 1 + min(end.index(end[5]), end.index(end[9]))]

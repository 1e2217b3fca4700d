"""One answer as it grows: scores in, tokens and text out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pipeedge.decoding.prompt import Prompt
from pipeedge.decoding.sampler import DrawnToken, Sampler, Scores
from pipeedge.decoding.structure import Structure
from pipeedge.decoding.structure_matching import StructureMatcher
from pipeedge.decoding.text_stream import TextStream, TokenTexts
from pipeedge.decoding.tools import ToolCall, ToolCallReader

__all__ = ["FinishReason", "Generation", "Piece", "WrittenAnswer"]


class AnswerTexts(TokenTexts, Protocol):
    """The texts of tokens, and which of them follow a structure."""

    def matcher(self, structure: Structure, end_tokens: Collection[int]) -> StructureMatcher:
        """Return what follows an answer through a structure."""


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended it, or a stop string or token did."""
    LENGTH = "length"
    """It has as many tokens as it may have."""


@dataclass(frozen=True)
class Piece:
    """What one more token added to an answer."""

    drawn: DrawnToken
    text: str
    """Text that became certain; often empty."""
    finish_reason: FinishReason | None
    """Why the answer ends here, or None if it goes on."""


@dataclass(frozen=True)
class WrittenAnswer:
    """A finished answer."""

    item: int
    """Position of its prompt in the input, from 0."""
    choice: int
    """Number among the answers to this prompt, from 0."""
    text: str
    drawn: tuple[DrawnToken, ...]
    """All tokens, with the one that ended it."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Number of tokens of the prompt."""
    choices: int = 1
    """Number of answers to this prompt."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of functions, which are not part of the text."""
    reused_tokens: int = field(default=0, compare=False)
    """Number of tokens of the prompt that were not computed, as those of an equal beginning were kept.

    Not compared: it depends on who else asks.
    """


@dataclass
class Generation:
    """One answer to a prompt.

    Args:
        prompt: The prompt.
        texts: The texts of tokens.
        context: Longest sequence in tokens, prompt and answer together.
        end_tokens: The model's tokens that end an answer.
        seed: Seed of the run, for prompts without one of their own.
        choice: Number among the answers to this prompt.
    """

    prompt: Prompt
    texts: AnswerTexts
    context: int
    end_tokens: Collection[int] = ()
    seed: int = 0
    choice: int = 0
    finish_reason: FinishReason | None = field(default=None, init=False)
    reused_tokens: int = field(default=0, init=False)
    """Number of tokens of the prompt that were not computed."""
    _drawn: list[DrawnToken] = field(default_factory=list, init=False)
    _pieces: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        options = self.prompt.sampling
        self._ends = frozenset(options.stop_token_ids)
        if not options.ignore_eos:
            self._ends |= frozenset(self.end_tokens)
        self._sampler = Sampler(
            options,
            self.prompt.tokens,
            end_tokens=self._ends,
            seed=self.seed,
            sequence=self.prompt.sequence,
            choice=self.choice,
        )
        self._stream = TextStream(self.texts, options.stop)
        tools = self.prompt.tools
        self._reader = None if tools.form is None else ToolCallReader(tools.form, tools.names)
        self._matcher = None
        if options.structure is not None:
            self._matcher = self.texts.matcher(options.structure, self._ends)
        room = self.context - len(self.prompt.tokens)
        self.most_tokens = room if options.max_tokens is None else min(room, options.max_tokens)
        """Number of tokens after which the answer ends."""

    @property
    def tokens(self) -> list[int]:
        """Tokens of the answer so far."""
        return [one.token for one in self._drawn]

    @property
    def began(self) -> bool:
        """Whether it has a token."""
        return bool(self._drawn)

    def take(self, scores: Scores) -> Piece:
        """Choose the next token.

        Args:
            scores: Scores of all tokens [V].

        Raises:
            RequestError: As ``Sampler.choose``.
        """
        matcher = self._matcher
        drawn = self._sampler.choose(scores, None if matcher is None else matcher.allowed())
        self._drawn.append(drawn)
        text = ""
        if drawn.token in self._ends:
            self.finish_reason = FinishReason.STOP
        else:
            text = self._stream.push(drawn.token)
            if matcher is not None:
                matcher.take(drawn.token)
            if self._stream.stopped or (matcher is not None and matcher.is_complete):
                self.finish_reason = FinishReason.STOP
            elif len(self._drawn) >= self.most_tokens:
                self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            text += self._stream.finish()
            if self._stream.stopped:
                self.finish_reason = FinishReason.STOP
        if self._reader is not None:
            text = self._reader.push(text)
            if self.finish_reason is not None:
                text += self._reader.finish()
        self._pieces.append(text)
        return Piece(drawn, text, self.finish_reason)

    def answer(self) -> WrittenAnswer:
        """Return the finished answer; one that was broken off counts as too long."""
        return WrittenAnswer(
            self.prompt.item,
            self.choice,
            "".join(self._pieces),
            tuple(self._drawn),
            self.finish_reason or FinishReason.LENGTH,
            len(self.prompt.tokens),
            self.prompt.sampling.n,
            () if self._reader is None else tuple(self._reader.calls),
            min(self.reused_tokens, len(self.prompt.tokens)),
        )

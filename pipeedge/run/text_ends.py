"""The ends of a run that generates text: prompts from the command line or files, and their answers.

prompts ──> StepQueue ──> pipeline ──> StepQueue ──pieces──> terminal
^                          └───answers──> AnswerWriter ──> file, in input order
└──────── the next prompt, when one is answered
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import torch

from pipeedge.base.crew import Closed
from pipeedge.base.errors import InputError, RequestError
from pipeedge.base.files import OutputFile
from pipeedge.base.streams import print_result
from pipeedge.base.text_lengths import TextLengths
from pipeedge.data import DataEnds, Microbatch
from pipeedge.data.answers import AnswerWriter
from pipeedge.data.companions import companion_directories
from pipeedge.data.opening import expanded, with_companions
from pipeedge.data.prompts import (
    PromptRows,
    open_vocabulary,
    prompts_fingerprint,
    read_generation_defaults,
    read_prompts,
)
from pipeedge.data.protected_files import check_written_outputs
from pipeedge.data.source import SkippedItem
from pipeedge.data.step_queue import StepQueue
from pipeedge.data.unfinished import Found
from pipeedge.decoding.drafting import Drafter
from pipeedge.decoding.generation import Piece, WrittenAnswer
from pipeedge.decoding.prompt import Prompt, PromptMaker
from pipeedge.decoding.sampling import Sampling
from pipeedge.decoding.vocabulary import Vocabulary
from pipeedge.models.decoder import DecoderModel, find_decoder
from pipeedge.request.config import RunRequest
from pipeedge.request.files import STANDARD_OUTPUT, InputRequest
from pipeedge.request.generation import GenerationRequest
from pipeedge.run.resuming import find_rows, made_with, request_dependencies

__all__ = [
    "TextMaker",
    "for_terminals",
    "open_prompts",
    "open_served_text",
    "open_text_ends",
    "prompt_lengths",
]

_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "logprobs",
    "max_tokens",
)
"""Options of ``GenerationRequest`` that are options of ``Sampling``."""


def open_text_ends(request: RunRequest, model: DecoderModel, metrics: Sequence[OutputFile]) -> DataEnds:
    """Open the prompts, and check that all outputs can be written.

    Args:
        request: The request of the data rank.
        model: The decoder.
        metrics: Files that this rank's metrics go to.

    Raises:
        PipeEdgeError: One of the files cannot be used, or a prompt cannot be run.
    """
    replaced = check_written_outputs(request, model, metrics)
    results = request.results
    maker = TextMaker.open(request, model)
    rows = open_prompts(request, model, maker)
    found: Found | None = None
    note: str | None = None
    depends_on: Mapping[str, str] = {}
    if results not in (None, STANDARD_OUTPUT):
        found, note = find_rows(results, resume=request.output.resume)
        depends_on = request_dependencies(
            request, model, prompts_fingerprint(rows.prompts, request.input.seed)
        )
    kept = frozenset() if found is None else found.numbers
    prompts = tuple(prompt for prompt in rows.prompts if prompt.item not in kept)
    writer = AnswerWriter(results, prompts, maker.prompts.vocabulary, depends_on, found, made_with())
    queue = maker.queue()
    queue.total = sum(prompt.sampling.n for prompt in prompts)
    queue.measures = queue.total > 1
    queue.streams = request.generation.prompt is not None
    queue.skipped = rows.skipped
    queue.keeps = frozenset(prompt.item for prompt in prompts[: request.output.check_items])
    sink = _PromptSink(queue, prompts, writer, shows=request.generation.prompt is not None, request=request)
    notes = () if note is None else (note,)
    return DataEnds(
        queue,
        sink,
        replaced=replaced,
        notes=notes,
        lengths=prompt_lengths(prompts, maker.prompts.context),
        text=queue.state,
        coming_bytes=queue.coming_bytes,
    )


def prompt_lengths(prompts: Sequence[Prompt], context: int) -> TextLengths | None:
    """Return the lengths of prompts and their answers, or None without any."""
    known = [
        (
            len(one.tokens),
            max(1, min(one.sampling.max_tokens or context, context - len(one.tokens))),
            one.sampling.n,
        )
        for one in prompts
    ]
    texts = sum(number for _, _, number in known)
    if not texts:
        return None
    return TextLengths(
        max(1, round(sum(prompt * number for prompt, _, number in known) / texts)),
        max(1, round(sum(answer * number for _, answer, number in known) / texts)),
        max(2, max(prompt + answer for prompt, answer, _ in known)),
        texts,
    )


def open_prompts(request: RunRequest, model: DecoderModel, maker: TextMaker) -> PromptRows:
    """Read the prompts of a run.

    Raises:
        InputError: There are none, or one cannot be run.
    """
    if request.generation.prompt is not None:
        return PromptRows((maker.prompts.from_text(request.generation.prompt),), total=1)
    if not request.input.paths:
        raise InputError(
            f"{model.name} generates text: give --prompt TEXT, or --input with a file of prompts"
        )
    return read_prompts(
        expanded(request.input.paths),
        maker.prompts,
        limit=request.input.max_items,
        skip_bad=request.input.skip_bad_input,
    )


@dataclass(frozen=True)
class TextMaker:
    """Everything that turns what people write into prompts, and tokens into text."""

    prompts: PromptMaker
    end_tokens: frozenset[int]
    """The model's tokens that end an answer."""
    seed: int
    """Seed of the run."""
    proposals: int
    """Most proposed tokens of a sequence in a step."""
    draft: DecoderModel | None = None
    """Small decoder that drafts tokens to propose."""

    @classmethod
    def open(cls, request: RunRequest, model: DecoderModel) -> TextMaker:
        """Read the tokenizer of a model, and its own options of answers.

        Raises:
            RequestError: A file is missing or cannot be used.
        """
        defaults = read_generation_defaults(model)
        directories = companion_directories(with_companions(request), model)
        maker = PromptMaker(
            open_vocabulary(model, directories),
            _requested(request.generation, defaults.sampling),
            request.cache.context or model.max_tokens,
            request.generation.raw,
            model.max_tokens,
        )
        draft = request.generation.draft
        return cls(
            maker,
            defaults.end_tokens,
            request.input.seed,
            request.generation.speculate,
            None if draft is None else _find_draft(draft, maker.vocabulary),
        )

    def queue(self) -> StepQueue:
        """Return a queue for the prompts.

        Raises:
            RequestError: The weights of the draft are missing or damaged.
        """
        drafter = None
        if self.draft is not None:
            vocab, context = self.prompts.vocabulary.tokens, self.prompts.context
            drafter = Drafter(self.draft, vocab, context, self.end_tokens)
        return StepQueue(
            self.prompts.vocabulary,
            end_tokens=self.end_tokens,
            seed=self.seed,
            proposals=self.proposals,
            drafter=drafter,
        )


def _find_draft(name: str, vocabulary: Vocabulary) -> DecoderModel:
    """Return the decoder that drafts tokens.

    Raises:
        RequestError: It is none, or has other tokens.
    """
    try:
        draft = find_decoder(name)
        own = open_vocabulary(draft, companion_directories(InputRequest(), draft))
    except RequestError as error:
        raise RequestError(f"--draft {name}: {error}") from None
    unlike = vocabulary.unlike_token(own)
    if unlike is not None:
        raise RequestError(
            f"--draft {name}: its token {unlike} is another one than that of {vocabulary.model_name}: give a "
            "model with the same tokenizer"
        )
    return draft


def open_served_text(request: RunRequest, model: DecoderModel) -> tuple[PromptMaker, StepQueue]:
    """Open what a decoder needs to answer over HTTP; errors are those of ``TextMaker.open``."""
    maker = TextMaker.open(request, model)
    return maker.prompts, maker.queue()


def _requested(given: GenerationRequest, base: Sampling) -> Sampling:
    """Return ``base`` with the options that were given."""
    found = {name: value for name in _OPTIONS if (value := getattr(given, name)) is not None}
    if given.greedy:
        found["temperature"] = 0.0
    return replace(base, **found)


class _PromptSink:
    """Asks for the answers to prompts, some at a time, and writes or prints them.

    Args:
        queue: Queue to ask.
        prompts: The prompts, in input order.
        writer: Writes the answers.
        shows: Whether to print each answer as it grows.
        request: Request of the data rank.
    """

    def __init__(
        self,
        queue: StepQueue,
        prompts: Sequence[Prompt],
        writer: AnswerWriter,
        *,
        shows: bool,
        request: RunRequest,
    ) -> None:
        self._queue = queue
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._writer = writer
        self._shows = shows
        self._skips = request.input.skip_bad_input
        self._asked = 0
        """Sequences that have no answer yet."""
        self._error: InputError | None = None

    @property
    def items(self) -> int:
        """Number of answers."""
        return self._queue.items

    @property
    def unfinished(self) -> Path | None:
        """Path of the answers that a later run can go on from, or None if there are none."""
        return self._writer.unfinished

    def add_dependencies(self, depends_on: Mapping[str, str]) -> None:
        """Hear what the answers depend on besides the request; errors are those of the writer."""
        self._writer.add_dependencies(depends_on)

    def __enter__(self) -> _PromptSink:
        """Ask for the first answers: the pipeline is ready."""
        self._writer.__enter__()
        self._queue.__enter__()
        self._ask()
        return self

    def _ask(self) -> None:
        """Ask for more answers, as long as not enough sequences wait; end the run after the last."""
        while self._asked < 2 * self._queue.sequences:
            prompt = next(self._prompts, None)
            if prompt is None:
                if not self._asked:
                    self._queue.drain()
                return
            heard = _Heard(self, prompt)
            try:
                for choice in range(prompt.sampling.n):
                    heard.sequences.add(self._queue.submit(prompt, heard, choice=choice))
                    self._asked += 1
            except Closed:
                return
            except RequestError as error:
                self._leave_out(heard, error)

    def write(self, microbatch_number: int, outputs: torch.Tensor, microbatch: Microbatch) -> None:
        """Choose the tokens that a step decides."""
        self._queue.write(microbatch_number, outputs, microbatch)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Complete the file; raise the reason why a prompt has no answer, if one has none."""
        self._queue.__exit__(kind, error, traceback)
        if error is None and self._error is not None:
            kind, error = type(self._error), self._error
            self._writer.__exit__(kind, error, traceback)
            raise error
        self._writer.__exit__(kind, error, traceback)

    # -- heard of one sequence --------------------------------------------------------------------

    def grew(self, piece: Piece) -> None:
        """Print the text that became certain."""
        if self._shows and piece.text:
            print_result(for_terminals(piece.text), end="")

    def ended(self, answer: WrittenAnswer) -> None:
        """Write an answer, and ask for the next one."""
        if self._shows:
            print_result("")
        self._writer.write(answer)
        self._asked -= 1
        self._ask()

    def failed(self, heard: _Heard, error: RequestError) -> None:
        """Keep the reason, and ask for the next answer."""
        self._leave_out(heard, error)
        self._ask()

    def _leave_out(self, heard: _Heard, error: RequestError) -> None:
        """Give up all answers to a prompt."""
        prompt = heard.prompt
        for sequence in heard.sequences:
            self._queue.cancel(sequence)
        self._asked -= len(heard.sequences)
        heard.sequences.clear()
        line = f"{prompt.source}: {error}"
        if not self._skips or self._shows:
            hint = "" if self._shows else "; --skip-bad-input leaves such rows out"
            self._error = self._error or InputError(f"{line}{hint}")
            return
        self._queue.skipped = (*self._queue.skipped, SkippedItem(prompt.source, line))
        self._writer.leave_out(prompt.item)


@dataclass(frozen=True)
class _Heard:
    """Listener of the answers to one prompt."""

    sink: _PromptSink
    prompt: Prompt
    sequences: set[int] = field(default_factory=set)
    """Sequences that have no answer yet."""

    def grew(self, sequence: int, piece: Piece) -> None:
        """Take another token."""
        self.sink.grew(piece)

    def ended(self, sequence: int, answer: WrittenAnswer) -> None:
        """Take the whole answer, unless the prompt was given up."""
        if sequence in self.sequences:
            self.sequences.remove(sequence)
            self.sink.ended(answer)

    def failed(self, sequence: int, error: RequestError) -> None:
        """Hear why there is no answer."""
        if sequence in self.sequences:
            self.sink.failed(self, error)

    def broke(self, error: BaseException) -> None:
        """Do nothing: the run says why it ends."""


def for_terminals(text: str) -> str:
    """Return text without characters that would control a terminal."""
    return "".join(one if one in "\n\t" or one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)

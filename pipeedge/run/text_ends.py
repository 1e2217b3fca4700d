"""The ends of a run that generates text: prompts from the command line, and answers.

prompts ──> StepQueue ──> pipeline ──> StepQueue ──pieces──> terminal
^                          │
└──────── the next prompt, when one is answered
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from pipeedge.base.crew import Closed
from pipeedge.base.errors import InputError, ModelError, PipeEdgeError, RequestError
from pipeedge.base.files import OutputFile, check_writable
from pipeedge.base.json_file import find_json
from pipeedge.base.streams import print_result
from pipeedge.data import DataEnds, Microbatch
from pipeedge.data.companions import companion_directories, companion_file
from pipeedge.data.opening import with_companions
from pipeedge.data.protected_files import check_run_outputs
from pipeedge.data.tokenizer_files import TOKENIZER_FILES, read_backend
from pipeedge.decoding.generation import Piece, WrittenAnswer
from pipeedge.decoding.prompt import Prompt, PromptMaker
from pipeedge.decoding.sampling import GenerationDefaults, Sampling, read_generation_config
from pipeedge.decoding.vocabulary import Vocabulary
from pipeedge.models.decoder import DecoderModel
from pipeedge.request.config import RunRequest
from pipeedge.request.generation import GenerationRequest
from pipeedge.run.step_queue import StepQueue

__all__ = ["Asked", "open_text_ends", "read_defaults", "requested_sampling"]

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
    replaced = check_run_outputs(request, model, metrics)
    for option, path in (("--report", request.output.report), ("--trace", request.output.trace)):
        if path is not None:
            check_writable(path, option)
    asked = Asked.open(request, model)
    if request.generation.prompt is None:
        raise RequestError(f"{model.name} generates text: give --prompt TEXT")
    prompt = asked.maker.from_text(request.generation.prompt)
    queue = asked.queue()
    queue.total = 1
    return DataEnds(queue, _PromptSink(queue, [prompt]), replaced=replaced)


class Asked:
    """Everything that turns what people write into prompts, and tokens into text.

    Args:
        maker: Makes prompts.
        defaults: What the model's own file says of its answers.
        seed: Seed of the run.
    """

    def __init__(self, maker: PromptMaker, defaults: GenerationDefaults, seed: int) -> None:
        self.maker = maker
        self._defaults = defaults
        self._seed = seed

    @classmethod
    def open(cls, request: RunRequest, model: DecoderModel) -> Asked:
        """Read the tokenizer of a model, and its own options of answers.

        Raises:
            RequestError: A file is missing or cannot be used.
        """
        defaults = read_defaults(model)
        maker = PromptMaker(
            _open_vocabulary(request, model),
            requested_sampling(request.generation, defaults.sampling),
            request.cache.context or model.max_tokens,
            request.generation.raw,
        )
        return cls(maker, defaults, request.input.seed)

    def queue(self) -> StepQueue:
        """Return a queue for the prompts."""
        ends = self._defaults.end_tokens
        return StepQueue(self.maker.vocabulary, end_tokens=ends, seed=self._seed)


def _open_vocabulary(request: RunRequest, model: DecoderModel) -> Vocabulary:
    directories = companion_directories(with_companions(request), model)
    path = companion_file(model.name, directories, TOKENIZER_FILES)
    if path is None:
        where = " or ".join(map(str, directories)) or "a model directory and name that with -m"
        raise InputError(f"{model.name} has no tokenizer here: put its tokenizer.json into {where}")
    return Vocabulary(read_backend(path), path, model.name, model.config.vocab)


def read_defaults(model: DecoderModel) -> GenerationDefaults:
    """Return what the generation_config.json of a model says of its answers.

    Raises:
        ModelError: It has nonsense.
    """
    directory = model.directory
    path = Path("generation_config.json") if directory is None else directory / "generation_config.json"
    found: list[dict[str, Any]] = [
        find_json(one, dict, ModelError) or {} for one in (path, path.with_name("config.json"))
    ]
    return read_generation_config(found[0], found[1], str(path), model.config.vocab)


def requested_sampling(given: GenerationRequest, base: Sampling) -> Sampling:
    """Return ``base`` with the options that were given."""
    found = {name: value for name in _OPTIONS if (value := getattr(given, name)) is not None}
    if given.greedy:
        found["temperature"] = 0.0
    return replace(base, **found)


class _PromptSink:
    """Asks for the answers to prompts, one after the other, and prints them as they grow."""

    unfinished: Path | None = None

    def __init__(self, queue: StepQueue, prompts: Sequence[Prompt]) -> None:
        self._queue = queue
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._error: PipeEdgeError | None = None

    @property
    def items(self) -> int:
        """Number of answers."""
        return self._queue.items

    def add_dependencies(self, depends_on: Mapping[str, str]) -> None:
        """Do nothing: what is printed is not kept."""

    def __enter__(self) -> _PromptSink:
        """Ask for the first answer: the pipeline is ready."""
        self._queue.__enter__()
        self._ask()
        return self

    def _ask(self) -> None:
        prompt = next(self._prompts, None)
        if prompt is None:
            self._queue.drain()
            return
        try:
            self._queue.submit(prompt, self)
        except Closed:
            return
        except RequestError as error:
            self.failed(error)

    def write(self, microbatch_number: int, outputs: torch.Tensor, microbatch: Microbatch) -> None:
        """Choose the tokens that a step decides."""
        self._queue.write(microbatch_number, outputs, microbatch)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the run; raise the reason why a prompt has no answer, if one has none."""
        self._queue.__exit__(kind, error, traceback)
        if error is None and self._error is not None:
            raise self._error

    # -- the listener of each sequence -----------------------------------------------------------

    def grew(self, piece: Piece) -> None:
        """Print the text that became certain."""
        if piece.text:
            print_result(_for_terminals(piece.text), end="")

    def ended(self, answer: WrittenAnswer) -> None:
        """End the line, and ask for the next answer."""
        print_result("")
        self._ask()

    def failed(self, error: RequestError) -> None:
        """Keep the reason, and ask for the next answer."""
        self._error = self._error or error
        self._ask()


def _for_terminals(text: str) -> str:
    """Return text without characters that would control a terminal."""
    return "".join(one if one in "\n\t" or one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)

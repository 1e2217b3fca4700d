"""The pipeline as an object of Python.

with Pipeline(model) as pipeline:    rank 0 runs in a thread of this process, the others in processes of
    pipeline(images)                 their own: started here, or anywhere with the same options

caller ──item──> RequestQueue ──> [feed] ──> stages ──> [collect] ──> Future ──> caller

Python ends the threads of a process wherever they are, which aborts it if one is in native code, and the
other ranks would see a loss. So a pipeline that nobody has closed is closed before: its ranks say goodbye,
and its threads end.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from pipeedge.api.answering import Sequences, answers_in_order
from pipeedge.api.generating import GeneratedText, QueuedText
from pipeedge.api.ranks import LocalRanks
from pipeedge.base.crew import Threads
from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.base.machine import processors
from pipeedge.base.ports import free_port
from pipeedge.data import DataEnds
from pipeedge.data.step_queue import StepQueue
from pipeedge.launch.commands import RUNTIME_MODULE, local_commands, threads_each
from pipeedge.models import Model
from pipeedge.models.decoder import DecoderModel, find_runnable
from pipeedge.plan.model_limits import fitting_request
from pipeedge.request.config import RunRequest
from pipeedge.request.environment import Environment, inherited_environment
from pipeedge.request.options import RuntimeCommand, options_given, parse_runtime
from pipeedge.run.pipeline import run
from pipeedge.serve.answers import ModelAnswer, check_kind
from pipeedge.serve.pending import AnswerFuture, EndedError
from pipeedge.serve.queued_model import QueuedModel
from pipeedge.serve.requests import RequestQueue

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Input", "Pipeline"]

log = logging.getLogger("pipeedge")

Array: TypeAlias = npt.NDArray[Any] | torch.Tensor
Buffer: TypeAlias = bytes | bytearray | memoryview
Input: TypeAlias = str | tuple[str, str] | Path | Buffer | Image.Image | Array | Mapping[str, Array]
"""One thing to ask about: a sentence or a pair of them; an image as a path, the bytes of a file, a Pillow
image, or an array; or arrays by the names of the model's inputs.
"""

_IMAGE_DIMENSIONS = 3

_SAID_BY = MappingProxyType(
    {
        "-m/--model": "model",
        "-u/--ubatch-size": "microbatch_size",
        "--max-waiting": "max_waiting",
    }
)
"""Options that an argument of ``Pipeline`` stands for."""

_CLOSING_S = 30.0
"""Seconds that a pipeline has to end after an exception, before its ranks are stopped."""
_THREADS_S = 5.0
"""Seconds that its threads have to end after it."""
_READING_S = 1.0
"""Seconds that Python's end waits for a thread that reads what the user gives, which may wait for ever."""
_BEFORE_OTHERS = 100
"""Priority among what ``multiprocessing`` does at the end of a process: before it waits for its children."""


class Pipeline:
    """A model that runs in several processes, and answers one question after the other.

    Use it in a ``with`` or ``async with`` statement: it starts there, and raises what is wrong with the model
    or its ranks. Elsewhere, ``start`` and ``close`` do the same.

    >>> from pipeedge import Pipeline
    >>> digit = np.zeros((8, 8), np.uint8)
    >>> digit[1:7, 3:5] = 255
    >>> with Pipeline("vit-digits") as pipeline:
    ...     answer = pipeline(digit)
    ...     futures = [pipeline.submit(each) for each in (digit, digit.T)]
    ...     same = futures[0].result().best.number == answer.best.number
    ...     answers = list(pipeline([digit, digit.T, digit]))
    >>> answer.best.label, len(answer.top()), same, len(answers)
    ('1', 10, True, 3)

    Args:
        model: A known model, a Hugging Face directory, or a repository of its hub.
        ranks: Number of processes, this one included, which is rank 0.
        microbatch_size: Largest number of items that travel together.
        max_waiting: Largest number of items that wait; ``submit`` blocks while there is no room.
        options: Further options of ``runtime.py``, such as ``["-pt", "1,24,25,48"]``, except those for a
            finished input and its results, ``-D``, ``--serve`` and ``--dry-run``.
        joins: Whether the other ranks are started elsewhere, with ``runtime.py`` and the same options, and
            ``-u`` and ``-c tcp``; ``options`` has the ``--addr`` and ``--port`` where they find this one.
        images_as_bytes: Whether images are sent as bytes, if that is exact. Without it, links carry four
            times as much, and float arrays may hold any values.

    Raises:
        RequestError: An option is invalid.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        ranks: int = 1,
        microbatch_size: int = 8,
        max_waiting: int = 512,
        options: Sequence[str] = (),
        joins: bool = False,
        images_as_bytes: bool = True,
    ) -> None:
        if max_waiting < 1:
            raise RequestError(f"max_waiting {max_waiting}: must be at least 1")
        given = options_given(["0", str(ranks), *options])
        for name, argument in _SAID_BY.items():
            if name in given:
                raise RequestError(f"Pipeline has the argument {argument} for that: leave out {name}")
        self._arguments = ["-m", os.fspath(model), "-u", str(microbatch_size), "--quiet", *options]
        if "-c/--comm" not in given:
            self._arguments += ["-c", "tcp"]
        if not joins and ranks > 1 and "--port" not in given:
            self._arguments += ["--port", str(free_port("127.0.0.1"))]
        argv = ["0", str(ranks), *self._arguments]
        self._request = _request(parse_runtime(argv, Environment()))
        self._starts_ranks = not joins and ranks > 1
        self._max_waiting = max_waiting
        self._images_as_bytes = images_as_bytes
        self._stack = ExitStack()
        self._threads = Threads()
        self._sequences = Sequences()
        self._ended: Future[None] = Future()
        self._error_seen = False
        """Whether the caller knows already why the pipeline has failed."""
        self._service: QueuedModel | QueuedText | None = None
        self._process: int | None = None
        """Id of the process that runs it, or None before it starts."""
        self._with_python: Finalize | None = None
        """Closes it when Python ends, unless it is closed before."""

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> Pipeline:
        """Start the ranks, and return this pipeline when it is ready; ``close`` ends it.

        Raises:
            PipeEdgeError: It cannot run; the message is one line that says why.
            RequestError: It was started before.
        """
        if self._process is not None:
            raise RequestError(
                "the pipeline has ended: make another one"
                if self._service is None or self._ended.done()
                else "the pipeline is running already: ask it, or make another one"
            )
        request = self._request
        model = find_runnable(request.model.name)
        service: QueuedModel | QueuedText
        if isinstance(model, DecoderModel):
            request = fitting_request(request, model)
            service = QueuedText.open(request, model)
        else:
            service = QueuedModel.open(
                request, model, max_waiting=self._max_waiting, images_as_bytes=self._images_as_bytes
            )
        self._process, self._service = os.getpid(), service
        # Not ``atexit``: processes that multiprocessing forks do without it before Python 3.13.
        self._with_python = Finalize(None, self._end_with_python, exitpriority=_BEFORE_OTHERS)
        try:
            if self._starts_ranks:
                self._start_ranks()
            self._threads.start("rank 0", partial(self._take_part, service.queue))
            service.queue.started.wait()
            if self._ended.done():
                self._ended.result()
        except BaseException:
            _abandon(service.queue)
            self._service = None
            self._stack.__exit__(*sys.exc_info())
            self._settle()
            raise
        return self

    def __enter__(self) -> Pipeline:
        """Start the ranks, as ``start`` does."""
        return self.start()

    async def __aenter__(self) -> Pipeline:
        """Start the ranks, as ``start`` does, while other tasks go on."""
        starting = asyncio.get_running_loop().run_in_executor(None, self.start)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with suppress(Exception):
                await starting
            await asyncio.to_thread(self.close, abandon=True)
            raise

    def _start_ranks(self) -> None:
        size, cores = self._request.world.size, processors()
        commands = local_commands(
            size,
            self._arguments,
            python=sys.executable,
            module=RUNTIME_MODULE,
            port=None,
            cores=cores,
        )
        torch.set_num_threads(threads_each(cores, size))
        self._stack.enter_context(LocalRanks(commands[1:], inherited_environment()))

    def _take_part(self, queue: RequestQueue | StepQueue) -> None:
        """Run rank 0, in a thread of its own, until the queue ends or something fails."""
        ends = DataEnds(queue, queue)
        if isinstance(queue, StepQueue):
            ends = DataEnds(queue, queue, text=queue.state, coming_bytes=queue.coming_bytes)
        try:
            run(
                self._request,
                _no_console,
                log.warning,
                lambda request, model: ends,
                threads=self._threads,
            )
        except BaseException as error:
            queue.fail(error)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
        finally:
            queue.started.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Answer what was submitted, then end all ranks; after an exception, give up what waits.

        Raises:
            PipeEdgeError: The pipeline has failed, and no question in the body has said so.
        """
        self.close(abandon=error is not None)
        if error is None and not self._is_copy and not self._error_seen:
            self._ended.result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all ranks, as leaving a ``with`` statement does, while other tasks go on."""
        await asyncio.to_thread(self.__exit__, kind, error, traceback)

    def close(self, *, abandon: bool = False) -> None:
        """End the pipeline: answer what waits, or give it up if ``abandon`` is true."""
        if self._process is None or self._is_copy:  # a copy is another process's to end
            return
        if self._service is not None:
            queue = self._service.queue
            if abandon:
                _abandon(queue)
            else:
                queue.drain()
            try:
                self._ended.exception(_CLOSING_S if abandon else None)
            except TimeoutError:
                queue.fail(EndedError("the pipeline was closed"))
        self._stack.close()
        self._settle()

    def _settle(self) -> None:
        """Wait until all threads have ended."""
        self._sequences.end()
        self._sequences.asking.join(_THREADS_S)
        self._threads.join(_THREADS_S)
        if self._with_python is not None:
            self._with_python.cancel()
        reading = self._sequences.reading
        if not reading.join(0.0):  # one waits for the next value of the user's, maybe for ever
            self._with_python = Finalize(None, reading.join, (_READING_S,), exitpriority=_BEFORE_OTHERS)

    def _end_with_python(self) -> None:
        """End a pipeline that nobody has closed, as in an interactive session."""
        with suppress(PipeEdgeError):
            self.close(abandon=True)

    def _notice(self, error: PipeEdgeError) -> None:
        """Note that the caller is told of ``error``."""
        if self._service is not None and error is self._service.queue.error:
            self._error_seen = True

    # -- questions ---------------------------------------------------------------------------------

    @property
    def model(self) -> Model | DecoderModel:
        """The model."""
        return self._present().model

    @property
    def context(self) -> int:
        """Longest prompt and answer of a decoder together, in tokens.

        Raises:
            RequestError: The model does not generate text.
        """
        return self._generating().queue.context

    def generate(self, prompt: str | Sequence[int], **options: Any) -> GeneratedText:
        """Let a decoder continue a text, and return its answer as it grows.

        >>> with Pipeline("llama-puzzles") as pipeline:  # doctest: +SKIP
        ...     for piece in pipeline.generate("What is 47 + 85?", max_tokens=8):
        ...         print(piece, end="")

        Args:
            prompt: A text, which is continued as it is, or token ids.
            options: Sampling options by the names that a line of a ``.jsonl`` has, such as ``max_tokens``,
                ``temperature``, ``stop`` and ``seed``.

        Raises:
            InputError: The prompt or an option cannot be used.
            EndedError: The pipeline has ended.
        """
        kind = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}
        return self._generating().ask({**options, **kind}, "prompt", self._notice)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> GeneratedText:
        """Let a decoder answer the last message of a conversation, and return its answer as it grows.

        Args:
            messages: The conversation: ``[{"role": "user", "content": "Spell house."}]``.
            options: As for ``generate``, and ``tools``.

        Raises:
            InputError: The model knows no conversations, or a message or an option cannot be used.
            EndedError: The pipeline has ended.
        """
        asked = {**options, "messages": [dict(message) for message in messages]}
        return self._generating().ask(asked, "messages", self._notice)

    async def generate_async(self, prompt: str | Sequence[int], **options: Any) -> GeneratedText:
        """Let a decoder continue a text, as ``generate`` does, while other tasks go on.

        ``async for`` takes the pieces of the result, and ``await text.whole()`` the whole answer. Cancelling
        a task that waits for either gives the answer up.
        """
        return await _in_thread(partial(self.generate, prompt, **options))

    async def chat_async(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> GeneratedText:
        """Let a decoder answer a conversation, as ``chat`` does, while other tasks go on.

        The result is that of ``generate_async``.
        """
        return await _in_thread(partial(self.chat, messages, **options))

    def _generating(self) -> QueuedText:
        service = self._present()
        if not isinstance(service, QueuedText):
            raise RequestError(
                f"{service.model.name} does not generate text: call the pipeline with its input"
            )
        return service

    def submit(self, value: Input, *, timeout_s: float | None = None) -> AnswerFuture:
        """Ask about one thing, and return the future answer; cancel it to give the question up.

        Args:
            value: What to ask about.
            timeout_s: Seconds after which it need not be computed any more.

        Raises:
            InputError: It cannot be read, or does not fit the model.
            EndedError: The pipeline has ended.
        """
        service = self._running()
        item = service.preparation.item(value)
        try:
            pending = service.queue.submit([item], timeout_s=timeout_s, block=True)
        except PipeEdgeError as error:
            self._notice(error)
            raise
        return pending.future(self._notice)

    async def ask(self, value: Input, *, timeout_s: float | None = None) -> ModelAnswer:
        """Ask about one thing, and return the answer; other tasks go on meanwhile.

        Cancelling the task gives the question up.

        Args:
            value: What to ask about.
            timeout_s: Seconds after which it need not be computed any more.

        Raises:
            InputError: It cannot be read, or does not fit the model.
            PipeEdgeError: The pipeline has failed, or ended.
        """
        future = await _in_thread(partial(self.submit, value, timeout_s=timeout_s))
        return await asyncio.wrap_future(future)

    def encode(self, inputs: Input | Iterable[Input]) -> npt.NDArray[np.float32]:
        """Return the vectors of many things as the rows of an array; of one thing, its vector.

        Raises:
            RequestError: The model does not give vectors.
            InputError: Something cannot be read, or does not fit the model.
            PipeEdgeError: The pipeline has failed.
        """
        model = self._running().model
        check_kind(model.output_kind, "vector")
        answers = self(inputs)
        if isinstance(answers, ModelAnswer):
            return answers.outputs
        rows = [answer.outputs for answer in answers]
        return np.stack(rows) if rows else np.empty((0, model.config.output_size), np.float32)

    @overload
    def __call__(self, inputs: Input) -> ModelAnswer: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, inputs: Iterable[Input]) -> Iterator[ModelAnswer]: ...

    def __call__(self, inputs: Input | Iterable[Input]) -> ModelAnswer | Iterator[ModelAnswer]:
        """Ask about one thing, or about many: then the answers are yielded in order, as they come.

        Many things are read in a thread of their own, not far ahead of the answers that were taken. Closing
        the iterator, as leaving its loop does, gives up what was read ahead.

        Raises:
            InputError: Something cannot be read, or does not fit the model; of many, in its turn.
            PipeEdgeError: The pipeline has failed.
        """
        service = self._running()
        if _is_one(inputs, takes_text=service.model.takes_text):
            return self.submit(inputs).result()  # type: ignore[arg-type]
        return answers_in_order(
            service,
            inputs,  # type: ignore[arg-type]
            # Large enough that handing it on costs little, and small enough that it finds room in the queue
            # long before the queue is empty.
            group=max(1, min(16 * self._request.microbatch_size, self._max_waiting // 4)),
            ahead=self._max_waiting,
            sequences=self._sequences,
            report=self._notice,
        )

    def _running(self) -> QueuedModel:
        service = self._present()
        if isinstance(service, QueuedText):
            raise RequestError(f"{service.model.name} generates text: call generate or chat")
        return service

    def _present(self) -> QueuedModel | QueuedText:
        if self._service is None:
            raise EndedError("the pipeline is not running: use it in a with statement, or start it")
        if self._is_copy:
            raise EndedError(
                f"the pipeline runs in process {self._process}, of which this one is a fork: ask it there, "
                "or make another one here"
            )
        return self._service

    @property
    def _is_copy(self) -> bool:
        """Whether another process runs the pipeline: a fork of it has the object, but none of its threads."""
        return self._process not in (None, os.getpid())


def _is_one(inputs: object, *, takes_text: bool) -> bool:
    """Return whether ``inputs`` is one thing to ask about, rather than many.

    What cannot be iterated over is one thing, too, so that the line that refuses it says what the model
    takes. The same goes for an open file, which would give lines.
    """
    if isinstance(inputs, np.ndarray | torch.Tensor):
        return inputs.ndim <= _IMAGE_DIMENSIONS
    if isinstance(inputs, tuple):
        return takes_text and [type(one) for one in inputs] == [str, str]
    if isinstance(inputs, str | Buffer | Image.Image | Mapping | io.IOBase):
        return True
    return not isinstance(inputs, Iterable)


def _request(command: RuntimeCommand) -> RunRequest:
    """Return the request of a command line, which may have any options that make sense in Python.

    Raises:
        RequestError: It has another one.
    """
    request = command.request
    useless = {
        "--dry-run": command.dry_run,
        "--serve": request.serve.listen,
        "-D/--data-rank": request.schedule.data_rank,
    }
    for name, value in useless.items():
        if value:
            raise RequestError(f"Pipeline runs the model, and asks it from rank 0: leave out {name}")
    request.check_endless("Pipeline")
    return request


def _abandon(queue: RequestQueue | StepQueue) -> None:
    """Give up what waits."""
    if isinstance(queue, StepQueue):
        queue.abandon(EndedError("the pipeline was closed"))
    else:
        queue.abandon()


_Asked = TypeVar("_Asked", AnswerFuture, GeneratedText)


async def _in_thread(ask: Callable[[], _Asked]) -> _Asked:
    """Ask in a thread, as reading the question takes a while; a cancelled task gives the question up."""
    asking = asyncio.get_running_loop().run_in_executor(None, ask)
    try:
        return await asyncio.shield(asking)
    except asyncio.CancelledError:
        asking.add_done_callback(_give_up)
        raise


def _give_up(asked: asyncio.Future[AnswerFuture] | asyncio.Future[GeneratedText]) -> None:
    """Give up a question that was asked for a task that no longer waits."""
    if asked.cancelled() or asked.exception() is not None:
        return
    found = asked.result()
    if isinstance(found, GeneratedText):
        found.close()
    else:
        found.cancel()


def _no_console() -> Console:
    raise PipeEdgeError("a quiet run has printed something")

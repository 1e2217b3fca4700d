"""The routes of a decoder, as OpenAI's clients know them.

/v1/chat/completions   a conversation
/v1/completions        a text that is continued as it is
/v1/responses          a conversation, in the newer form

An answer comes at once, or as the events of a stream (text/event-stream). The events of a single answer have
identifiers: a client whose connection broke asks again with the last one that it has. The prompt is kept for
a minute, and since an answer does not depend on who else asks, the events that follow are the same.
"""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pipeedge.base.errors import InputError
from pipeedge.base.wording import excerpt
from pipeedge.decoding.generation import Piece
from pipeedge.decoding.prompt import Prompt
from pipeedge.serve.bodies import decode_body
from pipeedge.serve.replies import HttpError, error_content, json_reply, status_of_error
from pipeedge.serve.text_asking import TextAsker, TextQuestion
from pipeedge.serve.text_bodies import ChatBody, CompletionBody, ResponseBody, StreamOptions, sampling_fields
from pipeedge.serve.text_replies import ChatReply, CompletionReply, ReplyForm, ResponseReply, TextUsage

__all__ = ["TextRoutes"]

_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""No cache keeps a stream, and no proxy holds it back."""


_KEPT_S = 60.0
"""Seconds for which a stream that has ended, however it did, can be asked for again."""
_MOST_KEPT = 1024
_LAST_EVENT_HEADER = "last-event-id"
_LAST_EVENT = re.compile(r"([0-9a-f]{32})-([0-9]{1,9})")


@dataclass
class _Stream:
    """A stream, with what it takes to send it again."""

    prompts: Sequence[Prompt]
    form: Callable[[], ReplyForm]
    ended_at: float = math.inf
    """Time when its last connection ended, in seconds."""


class _Streams:
    """Streams by their identifiers, until they have ended for a while."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    def keep(self, stream: _Stream) -> str:
        """Keep a stream, and return its identifier."""
        now = time.monotonic()
        over = [name for name, one in self._streams.items() if one.ended_at + _KEPT_S < now]
        for name in over or list(self._streams)[: max(0, len(self._streams) + 1 - _MOST_KEPT)]:
            del self._streams[name]
        name = uuid.uuid4().hex
        self._streams[name] = stream
        return name

    def find(self, event: str) -> tuple[str, _Stream, int]:
        """Return the stream of an event, with its identifier, and the number of the next event.

        Raises:
            HttpError: It is not kept.
        """
        match = _LAST_EVENT.fullmatch(event.strip())
        stream = None if match is None else self._streams.get(match[1])
        if match is None or stream is None or stream.ended_at + _KEPT_S < time.monotonic():
            raise HttpError(404, "the stream of Last-Event-ID is not known any more: ask again without it")
        return match[1], stream, int(match[2]) + 1


class TextRoutes:
    """Handlers of the routes for one decoder.

    Args:
        asker: What asks the pipeline.
    """

    def __init__(self, asker: TextAsker) -> None:
        self._asker = asker
        self._model = asker.service.model
        self._prompts = asker.service.prompts
        self._streams = _Streams()

    async def chat(self, request: Request) -> Response:
        """Answer ``POST /v1/chat/completions``."""
        if _LAST_EVENT_HEADER in request.headers:
            return self._again(request)
        body = decode_body(await request.body(), ChatBody)
        self._asker.service.check_name(body.model)
        document = {**body.conversation, **sampling_fields(body)}
        prompts = await self._asker.in_thread(lambda: [self._prompt(document)])
        form = partial(
            ChatReply,
            f"chatcmpl-{uuid.uuid4().hex}",
            self._model.name,
            int(time.time()),
            self._prompts.vocabulary,
            **_wishes(body.stream, body.stream_options),
            wants_logprobs=bool(body.logprobs),
        )
        return await self._reply(request, prompts, form, streams=bool(body.stream))

    async def completions(self, request: Request) -> Response:
        """Answer ``POST /v1/completions``."""
        if _LAST_EVENT_HEADER in request.headers:
            return self._again(request)
        body = decode_body(await request.body(), CompletionBody)
        self._asker.service.check_name(body.model)
        if not body.prompts:
            raise InputError("prompt has no texts")
        options = sampling_fields(body)
        documents = [{"prompt": prompt, **options} for prompt in body.prompts]
        several = len(documents) > 1

        def make() -> list[Prompt]:
            return [
                self._prompt(one, f"prompt[{number}]" if several else "")
                for number, one in enumerate(documents)
            ]

        form = partial(
            CompletionReply,
            f"cmpl-{uuid.uuid4().hex}",
            self._model.name,
            int(time.time()),
            self._prompts.vocabulary,
            **_wishes(body.stream, body.stream_options),
            wants_logprobs=body.logprobs is not None,
        )
        prompts = await self._asker.in_thread(make)
        return await self._reply(request, prompts, form, streams=bool(body.stream))

    async def responses(self, request: Request) -> Response:
        """Answer ``POST /v1/responses``."""
        if _LAST_EVENT_HEADER in request.headers:
            return self._again(request)
        body = decode_body(await request.body(), ResponseBody)
        self._asker.service.check_name(body.model)
        document: dict[str, Any] = {"messages": _conversation(body)}
        for name in ("temperature", "top_p"):
            if getattr(body, name) is not None:
                document[name] = getattr(body, name)
        if body.max_output_tokens is not None:
            document["max_tokens"] = body.max_output_tokens
        (prompt,) = await self._asker.in_thread(lambda: [self._prompt(document)])
        echoed = {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": prompt.sampling.temperature,
            "top_p": prompt.sampling.top_p,
            "presence_penalty": prompt.sampling.presence_penalty,
            "frequency_penalty": prompt.sampling.frequency_penalty,
        }
        form = partial(ResponseReply, uuid.uuid4().hex, self._model.name, int(time.time()), echoed, time.time)
        return await self._reply(request, [prompt], form, streams=bool(body.stream))

    def _prompt(self, document: Mapping[str, Any], name: str = "") -> Prompt:
        """Return a prompt; errors are about the request, or the prompt with this name in it."""
        return self._prompts.from_document(document, self._asker.next_number(), name or "the request")

    async def _reply(
        self, request: Request, prompts: Sequence[Prompt], form: Callable[[], ReplyForm], *, streams: bool
    ) -> Response:
        """Ask, and reply at once or as a stream."""
        if streams:
            stream = _Stream(prompts, form)
            return self._stream(request, stream, lambda: self._streams.keep(stream), 0)
        usage = _usage_of(prompts)
        with self._asker.ask(request, prompts) as question:
            async for _, told in question.told():
                if not isinstance(told, Piece):
                    usage.take(told)
        answers = [question.answers[number] for number in range(question.choices)]
        return json_reply(form().whole(answers, usage))

    def _again(self, request: Request) -> Response:
        """Send a stream from the event behind the one that the client has."""
        name, stream, first = self._streams.find(request.headers[_LAST_EVENT_HEADER])
        return self._stream(request, stream, lambda: name, first)

    def _stream(
        self, request: Request, stream: _Stream, name: Callable[[], str], first: int
    ) -> StreamingResponse:
        """Ask, and reply with the events from number ``first`` on."""
        question = self._asker.ask(request, stream.prompts)
        question.__enter__()  # what is refused has a status of its own, not an event
        stream.ended_at = math.inf
        form = stream.form()
        events = _events(question, form, _usage_of(stream.prompts))

        def ended() -> None:
            question.__exit__()
            stream.ended_at = time.monotonic()

        # The tokens of several answers may come in another order when they are asked for again.
        known_as = name().encode() if question.choices == 1 else None
        return _EventStream(_numbered(events, known_as, first, form.last_event), ended)


def _usage_of(prompts: Sequence[Prompt]) -> TextUsage:
    return TextUsage(sum(len(prompt.tokens) for prompt in prompts))


class _EventStream(StreamingResponse):
    """Events that are sent.

    Args:
        content: The events.
        ended: Called when the stream ends, however it does.
    """

    def __init__(self, content: AsyncIterator[bytes], ended: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._ended = ended

    async def __call__(self, *connection: Any) -> None:
        """Send the stream."""
        try:
            await super().__call__(*connection)
        finally:
            self._ended()


async def _events(
    question: TextQuestion, form: ReplyForm, usage: TextUsage
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the events of a stream as they come; an error in the middle is the last of them."""
    yield list(form.begin(question.choices, usage.prompt_tokens))
    try:
        async for choice, told in question.told():
            if isinstance(told, Piece):
                yield list(form.grew(choice, told))
            else:
                usage.take(told)
                yield list(form.ended(choice, told))
    except Exception as error:
        yield [error_content("/v1/", status_of_error(error))]
        return
    yield list(form.end(usage))


async def _numbered(
    events: AsyncIterator[list[dict[str, Any]]], stream: bytes | None, first: int, last: bytes | None
) -> AsyncIterator[bytes]:
    """Yield the events from number ``first`` on as a client receives them, with identifiers if it has one."""
    number = 0
    encode: Callable[[Any], bytes] = msgspec.json.encode
    async for some in events:
        found = [
            b"%s%sdata: %s\n\n" % (_id_of(stream, place), _kind_of(one), encode(one))
            for place, one in enumerate(some, start=number)
            if place >= first
        ]
        number += len(some)
        if found:
            yield b"".join(found)
    if last is not None:
        yield b"data: %s\n\n" % last


def _id_of(stream: bytes | None, place: int) -> bytes:
    return b"" if stream is None else b"id: %s-%d\n" % (stream, place)


def _kind_of(event: Mapping[str, Any]) -> bytes:
    """Return the line that names the kind of an event, where events have kinds."""
    kind = event.get("type")
    return b"" if kind is None else b"event: %s\n" % str(kind).encode()


def _wishes(stream: bool | None, options: StreamOptions | None) -> dict[str, bool]:
    """Return which numbers of tokens a stream sends, by the arguments of its form.

    Raises:
        InputError: They are asked for without what they need.
    """
    if options is None:
        return {}
    if not stream:
        raise InputError("stream_options needs stream to be true")
    if options.continuous_usage_stats and not options.include_usage:
        raise InputError("stream_options.continuous_usage_stats needs include_usage to be true")
    return {"wants_usage": options.include_usage, "wants_counts": options.continuous_usage_stats}


def _conversation(body: ResponseBody) -> list[dict[str, Any]]:
    """Return the messages of a request in the newer form.

    Raises:
        InputError: Something in it is not a message with text.
    """
    found: list[dict[str, Any]] = []
    if body.instructions is not None:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    for number, one in enumerate(body.input):
        if one.get("type", "message") != "message":
            raise InputError(f"input[{number}] is of type {excerpt(one['type'])}; only message is supported")
        content = one.get("content")
        if isinstance(content, list):
            parts = [part if isinstance(part, dict) else {} for part in content]
            strange = next((p for p in parts if p.get("type") not in ("input_text", "output_text")), None)
            if strange is not None:
                raise InputError(
                    f"input[{number}] has content other than text, which this model does not take"
                )
            content = "\n".join(str(part.get("text", "")) for part in parts)
        found.append({"role": one.get("role"), "content": content})
    return found

"""The routes of a decoder, as OpenAI's clients know them.

/v1/chat/completions   a conversation
/v1/completions        a text that is continued as it is
/v1/responses          a conversation, in the newer form

An answer comes at once, or as the events of a stream (text/event-stream), each with a number of its own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pipeedge.base.errors import InputError
from pipeedge.base.wording import excerpt
from pipeedge.decoding.generation import Piece
from pipeedge.decoding.prompt import Prompt
from pipeedge.serve.bodies import decode_body
from pipeedge.serve.replies import error_content, json_reply, status_of_error
from pipeedge.serve.text_asking import TextAsker, TextQuestion
from pipeedge.serve.text_bodies import ChatBody, CompletionBody, ResponseBody, StreamOptions, sampling_fields
from pipeedge.serve.text_replies import ChatReply, CompletionReply, ReplyForm, ResponseReply, TextUsage

__all__ = ["TextRoutes"]

_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""No cache keeps a stream, and no proxy holds it back."""


class TextRoutes:
    """Handlers of the routes for one decoder.

    Args:
        asker: What asks the pipeline.
    """

    def __init__(self, asker: TextAsker) -> None:
        self._asker = asker
        self._model = asker.service.model
        self._prompts = asker.service.prompts

    async def chat(self, request: Request) -> Response:
        """Answer ``POST /v1/chat/completions``."""
        body = decode_body(await request.body(), ChatBody)
        self._check_model(body.model)
        document = {**body.conversation, **sampling_fields(body)}
        prompts = await self._asker.prepared(lambda: [self._prompt(document)])
        form = ChatReply(
            f"chatcmpl-{uuid.uuid4().hex}",
            self._model.name,
            int(time.time()),
            self._prompts.vocabulary,
            wants_usage=_wants_usage(body.stream, body.stream_options),
            wants_logprobs=bool(body.logprobs),
        )
        return await self._reply(request, prompts, form, streams=bool(body.stream))

    async def completions(self, request: Request) -> Response:
        """Answer ``POST /v1/completions``."""
        body = decode_body(await request.body(), CompletionBody)
        self._check_model(body.model)
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

        form = CompletionReply(
            f"cmpl-{uuid.uuid4().hex}",
            self._model.name,
            int(time.time()),
            self._prompts.vocabulary,
            wants_usage=_wants_usage(body.stream, body.stream_options),
            wants_logprobs=body.logprobs is not None,
        )
        prompts = await self._asker.prepared(make)
        return await self._reply(request, prompts, form, streams=bool(body.stream))

    async def responses(self, request: Request) -> Response:
        """Answer ``POST /v1/responses``."""
        body = decode_body(await request.body(), ResponseBody)
        self._check_model(body.model)
        document: dict[str, Any] = {"messages": _conversation(body)}
        for name in ("temperature", "top_p"):
            if getattr(body, name) is not None:
                document[name] = getattr(body, name)
        if body.max_output_tokens is not None:
            document["max_tokens"] = body.max_output_tokens
        (prompt,) = await self._asker.prepared(lambda: [self._prompt(document)])
        echoed = {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": prompt.sampling.temperature,
            "top_p": prompt.sampling.top_p,
            "store": False,
        }
        form = ResponseReply(uuid.uuid4().hex, self._model.name, int(time.time()), echoed)
        return await self._reply(request, [prompt], form, streams=bool(body.stream))

    def _check_model(self, name: str) -> None:
        """Refuse a request for another model.

        Raises:
            InputError: ``name`` is another one.
        """
        if name and not self._asker.service.is_named(name):
            raise InputError(f"model {excerpt(name)} is not served: ask for {self._model.name}, or for none")

    def _prompt(self, document: Mapping[str, Any], name: str = "") -> Prompt:
        """Return a prompt; errors are about the request, or the prompt with this name in it."""
        return self._prompts.from_document(document, self._asker.next_number(), name or "the request")

    async def _reply(
        self, request: Request, prompts: Sequence[Prompt], form: ReplyForm, *, streams: bool
    ) -> Response:
        """Ask, and reply at once or as a stream."""
        usage = TextUsage(sum(len(prompt.tokens) for prompt in prompts))
        question = self._asker.ask(request, prompts)
        if not streams:
            with question:
                async for _, told in question.told():
                    usage.completion_tokens += isinstance(told, Piece)
            answers = [question.answers[number] for number in range(question.choices)]
            return json_reply(form.whole(answers, usage))
        question.__enter__()  # what is refused has a status of its own, not an event
        events = _events(question, form, usage)
        return _Stream(question, _numbered(events, form.last_event))


class _Stream(StreamingResponse):
    """A stream that gives its question up when it ends, however it does.

    Args:
        question: The question, which has been asked.
        content: The events.
    """

    def __init__(self, question: TextQuestion, content: AsyncIterator[bytes]) -> None:
        super().__init__(content, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._question = question

    async def __call__(self, *connection: Any) -> None:
        """Send the stream."""
        try:
            await super().__call__(*connection)
        finally:
            self._question.__exit__()


async def _events(
    question: TextQuestion, form: ReplyForm, usage: TextUsage
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the events of a stream as they come; an error in the middle is the last of them."""
    yield list(form.begin(question.choices))
    try:
        async for choice, told in question.told():
            if isinstance(told, Piece):
                usage.completion_tokens += 1
                yield list(form.grew(choice, told))
            else:
                yield list(form.ended(choice, told))
    except Exception as error:
        yield [error_content("/v1/", status_of_error(error))]
        return
    yield list(form.end(usage))


async def _numbered(events: AsyncIterator[list[dict[str, Any]]], last: bytes | None) -> AsyncIterator[bytes]:
    """Yield the events as a client receives them, each with its number as its identifier."""
    number = 0
    encode: Callable[[Any], bytes] = msgspec.json.encode
    async for some in events:
        if some:
            yield b"".join(
                b"id: %d\n%sdata: %s\n\n" % (number + place, _kind_of(one), encode(one))
                for place, one in enumerate(some)
            )
        number += len(some)
    if last is not None:
        yield b"data: %s\n\n" % last


def _kind_of(event: Mapping[str, Any]) -> bytes:
    """Return the line that names the kind of an event, where events have kinds."""
    kind = event.get("type")
    return b"" if kind is None else b"event: %s\n" % str(kind).encode()


def _wants_usage(stream: bool | None, options: StreamOptions | None) -> bool:
    if options is None:
        return False
    if not stream:
        raise InputError("stream_options needs stream to be true")
    return options.include_usage


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

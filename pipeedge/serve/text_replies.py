"""Answers in the forms that OpenAI's clients read: at once, and as the events of a stream.

A stream consists of events, each an object of JSON; their texts joined are the text of the answer at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeedge.decoding.answer_documents import logprobs_document, tool_calls_document
from pipeedge.decoding.generation import FinishReason, Piece, WrittenAnswer
from pipeedge.decoding.sampler import DrawnToken
from pipeedge.decoding.vocabulary import Vocabulary

__all__ = ["ChatReply", "CompletionReply", "ReplyForm", "ResponseReply", "TextUsage"]


@dataclass
class TextUsage:
    """Number of tokens of a request and its answers."""

    prompt_tokens: int
    completion_tokens: int = 0
    reused_tokens: int = 0
    """Number of tokens of the prompts that were not computed, as those of an equal beginning were kept."""

    @property
    def total_tokens(self) -> int:
        """Number of tokens of prompts and answers."""
        return self.prompt_tokens + self.completion_tokens

    def take(self, answer: WrittenAnswer) -> None:
        """Count a whole answer; the prompt counts once, however many answers it has."""
        self.completion_tokens += len(answer.drawn)
        if answer.choice == 0:
            self.reused_tokens += answer.reused_tokens

    def counts(self) -> dict[str, Any]:
        """Return the counts by OpenAI's names."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }

    def document(self) -> dict[str, Any]:
        """Return the counts, with how much of the prompts was not computed."""
        return {**self.counts(), "prompt_tokens_details": {"cached_tokens": self.reused_tokens}}


class ReplyForm(Protocol):
    """The form of the replies of a route."""

    last_event: bytes | None
    """Data that end a stream, besides its last event; None for none."""

    def whole(self, answers: Sequence[WrittenAnswer], usage: TextUsage) -> dict[str, Any]:
        """Return the reply that has the answers, in order."""

    def begin(self, choices: int, prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield the first events of a stream."""

    def grew(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the events of one more token."""

    def ended(self, choice: int, answer: WrittenAnswer) -> Iterator[dict[str, Any]]:
        """Yield the events of an answer that is whole."""

    def end(self, usage: TextUsage) -> Iterator[dict[str, Any]]:
        """Yield the last events of a stream."""


class _Offsets:
    """Places of tokens in the text of an answer, in characters.

    Args:
        texts: The bytes of tokens.
    """

    def __init__(self, texts: Vocabulary) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0

    def take(self, token: int) -> int:
        """Return where the next token begins; one within a character begins where that does."""
        begin = self._end
        if not self._texts.is_silent(token):
            self._end += len(self._decoder.decode(self._texts.token_bytes(token)))
        return begin


@dataclass
class _Held:
    """Tokens of an answer whose log probabilities have not been sent."""

    drawn: list[DrawnToken] = field(default_factory=list)

    def take(self) -> list[DrawnToken]:
        """Return them, and forget them."""
        taken, self.drawn = self.drawn, []
        return taken


class _OpenAiReply:
    """What chats and completions have in common.

    Args:
        number: Identifier of the reply.
        model: Name of the model.
        created: Time of the request, in seconds since 1970.
        texts: The texts of tokens.
        wants_usage: Whether a stream ends with the number of tokens.
        wants_counts: Whether each event of a stream has the number of tokens so far.
        wants_logprobs: Whether log probabilities are sent.
    """

    last_event: bytes | None = b"[DONE]"
    _whole = _chunk = ""

    def __init__(
        self,
        number: str,
        model: str,
        created: int,
        texts: Vocabulary,
        *,
        wants_usage: bool = False,
        wants_counts: bool = False,
        wants_logprobs: bool = False,
    ) -> None:
        self._head = {"id": number, "created": created, "model": model}
        self._texts = texts
        self._wants_usage = wants_usage
        self._counted = TextUsage(0) if wants_counts else None
        self._wants_logprobs = wants_logprobs
        self._held: dict[int, _Held] = {}
        self._offsets: dict[int, _Offsets] = {}

    def whole(self, answers: Sequence[WrittenAnswer], usage: TextUsage) -> dict[str, Any]:
        """Return the reply that has the answers, in order."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._head, "object": self._whole, "choices": choices, "usage": usage.document()}

    def grew(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the events of one more token; text that is not certain yet has none."""
        if self._counted is not None:
            self._counted.completion_tokens += 1
        held = self._held.setdefault(choice, _Held())
        held.drawn.append(piece.drawn)
        if piece.text:
            yield self._event([self._grown(choice, piece.text, held.take())])

    def ended(self, choice: int, answer: WrittenAnswer) -> Iterator[dict[str, Any]]:
        """Yield the events of an answer that is whole."""
        drawn = self._held.setdefault(choice, _Held()).take()
        if drawn and self._wants_logprobs:
            yield self._event([self._grown(choice, "", drawn)])
        yield self._event([self._finished(choice, answer)])

    def end(self, usage: TextUsage) -> Iterator[dict[str, Any]]:
        """Yield the last events of a stream."""
        if self._wants_usage:
            yield {**self._event([]), "usage": usage.document()}

    def _count_prompts(self, tokens: int) -> None:
        if self._counted is not None:
            self._counted.prompt_tokens = tokens

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        counts = None if self._counted is None else self._counted.counts()
        usage = {"usage": counts} if self._wants_usage else {}
        return {**self._head, "object": self._chunk, "choices": choices, **usage}

    def _choice(self, index: int, answer: WrittenAnswer) -> dict[str, Any]:
        raise NotImplementedError

    def _grown(self, choice: int, text: str, drawn: Sequence[DrawnToken]) -> dict[str, Any]:
        raise NotImplementedError

    def _finished(self, choice: int, answer: WrittenAnswer) -> dict[str, Any]:
        raise NotImplementedError


class ChatReply(_OpenAiReply):
    """Replies of ``/v1/chat/completions``."""

    _whole, _chunk = "chat.completion", "chat.completion.chunk"

    def begin(self, choices: int, prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield the first events of a stream."""
        self._count_prompts(prompt_tokens)
        for choice in range(choices):
            delta = {"role": "assistant", "content": ""}
            yield self._event([{"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _choice(self, index: int, answer: WrittenAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text,
            "refusal": None,
            "annotations": [],
        }
        if answer.tool_calls:
            message["content"] = answer.text or None
            message["tool_calls"] = self._calls(index, answer)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.drawn),
            "finish_reason": _reason(answer),
        }

    def _calls(self, choice: int, answer: WrittenAnswer) -> list[dict[str, Any]]:
        return tool_calls_document(answer.tool_calls, f"call-{self._head['id']}-{choice}")

    def _grown(self, choice: int, text: str, drawn: Sequence[DrawnToken]) -> dict[str, Any]:
        logprobs = self._logprobs(drawn)
        return {"index": choice, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}

    def _finished(self, choice: int, answer: WrittenAnswer) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if answer.tool_calls:
            calls = self._calls(choice, answer)
            delta = {"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]}
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": _reason(answer)}

    def _logprobs(self, drawn: Sequence[DrawnToken]) -> dict[str, Any] | None:
        return logprobs_document(drawn, self._texts) if self._wants_logprobs else None


class CompletionReply(_OpenAiReply):
    """Replies of ``/v1/completions``."""

    _whole = _chunk = "text_completion"

    def begin(self, choices: int, prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield no events: a stream begins with the first text."""
        self._count_prompts(prompt_tokens)
        yield from ()

    def _choice(self, index: int, answer: WrittenAnswer) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs(index, answer.drawn),
            "finish_reason": str(answer.finish_reason),
        }

    def _grown(self, choice: int, text: str, drawn: Sequence[DrawnToken]) -> dict[str, Any]:
        logprobs = self._logprobs(choice, drawn)
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _finished(self, choice: int, answer: WrittenAnswer) -> dict[str, Any]:
        return {"index": choice, "text": "", "logprobs": None, "finish_reason": str(answer.finish_reason)}

    def _logprobs(self, choice: int, drawn: Sequence[DrawnToken]) -> dict[str, Any] | None:
        """Return log probabilities in the older form, which has lists of equal length."""
        if not self._wants_logprobs:
            return None
        offsets = self._offsets.setdefault(choice, _Offsets(self._texts))
        content = logprobs_document(drawn, self._texts)["content"]
        return {
            "tokens": [one["token"] for one in content],
            "token_logprobs": [one["logprob"] for one in content],
            "top_logprobs": [
                {other["token"]: other["logprob"] for other in one["top_logprobs"]} for one in content
            ],
            "text_offset": [offsets.take(one.token) for one in drawn],
        }


_PLAIN_RESPONSE: dict[str, Any] = {
    "background": False,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": False,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""What clients expect to be told of each response, all of it always the same."""


class ResponseReply:
    """Replies of ``/v1/responses``: one message of one text.

    Args:
        number: Identifier of the reply, without its kind.
        model: Name of the model.
        created: Time of the request, in seconds since 1970.
        echoed: Options of the request that the reply repeats.
        clock: Returns the seconds since 1970.
    """

    last_event: bytes | None = None

    def __init__(
        self, number: str, model: str, created: int, echoed: dict[str, Any], clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._message = f"msg_{number}"
        self._head = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": created,
            "model": model,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            **_PLAIN_RESPONSE,
            **echoed,
        }
        self._texts: list[str] = []
        self._reason: FinishReason | None = None
        self._events = 0

    def whole(self, answers: Sequence[WrittenAnswer], usage: TextUsage) -> dict[str, Any]:
        """Return the reply that has the answer."""
        (answer,) = answers
        return self._document(answer.text, answer.finish_reason, usage)

    def begin(self, choices: int, prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield the first events of a stream."""
        document = {**self._head, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=document)
        yield self._event("response.in_progress", response=document)
        item = {**self._item("", "in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=_part(""))

    def grew(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the events of one more token."""
        if piece.text:
            self._texts.append(piece.text)
            yield self._event("response.output_text.delta", **self._place, delta=piece.text, logprobs=[])

    def ended(self, choice: int, answer: WrittenAnswer) -> Iterator[dict[str, Any]]:
        """Note why the answer ended; its events are the last ones of the stream."""
        self._reason = answer.finish_reason
        yield from ()

    def end(self, usage: TextUsage) -> Iterator[dict[str, Any]]:
        """Yield the last events of a stream."""
        text, reason = "".join(self._texts), self._reason or FinishReason.LENGTH
        document = self._document(text, reason, usage)
        yield self._event("response.output_text.done", **self._place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=document["output"][0])
        yield self._event(f"response.{document['status']}", response=document)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **values}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._message,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }

    def _document(self, text: str, reason: FinishReason, usage: TextUsage) -> dict[str, Any]:
        status = "completed" if reason is FinishReason.STOP else "incomplete"
        return {
            **self._head,
            "status": status,
            "completed_at": int(self._clock()) if status == "completed" else None,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": [self._item(text, status)],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.reused_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
        }


def _reason(answer: WrittenAnswer) -> str:
    """Return why an answer ended, as chats have it."""
    return "tool_calls" if answer.tool_calls else str(answer.finish_reason)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

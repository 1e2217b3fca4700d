"""Answers as objects of JSON: a line of a file, and log probabilities as OpenAI's chats have them. Pure.

{"item": 0, "source": "prompts.txt:1", "text": "132", "token_ids": [53, 55, 54, 3],
 "finish_reason": "stop", "prompt_tokens": 24, "completion_tokens": 4}

"choice": 1                                                       if there are several answers to a prompt
"tool_calls": [{"id": "call-0-0-0", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
"logprobs": {"content": [{"token": "1", "logprob": -0.01, "bytes": [49], "top_logprobs": [...]}, ...]}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeedge.decoding.generation import WrittenAnswer
from pipeedge.decoding.sampler import DrawnToken
from pipeedge.decoding.tools import ToolCall
from pipeedge.decoding.vocabulary import Vocabulary

__all__ = ["answer_document", "logprobs_document", "tool_calls_document"]

_LEAST = -9999.0
"""Log probability of a token that cannot occur; JSON has no infinity."""


def answer_document(answer: WrittenAnswer, source: str, texts: Vocabulary) -> dict[str, Any]:
    """Return an answer as a line of a file.

    Args:
        answer: The answer.
        source: Where its prompt comes from.
        texts: The bytes of tokens.
    """
    document: dict[str, Any] = {"item": answer.item, "source": source}
    if answer.choices > 1:
        document["choice"] = answer.choice
    document |= {
        "text": answer.text,
        "token_ids": [one.token for one in answer.drawn],
        "finish_reason": str(answer.finish_reason),
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.drawn),
    }
    if answer.tool_calls:
        name = f"call-{answer.item}-{answer.choice}"
        document["tool_calls"] = tool_calls_document(answer.tool_calls, name)
    if any(one.logprob is not None for one in answer.drawn):
        document["logprobs"] = logprobs_document(answer.drawn, texts)
    return document


def tool_calls_document(calls: Sequence[ToolCall], name: str) -> list[dict[str, Any]]:
    """Return calls of functions as OpenAI's chats have them.

    Args:
        calls: The calls.
        name: Beginning of their ids, which tells them from the calls of other answers.
    """
    return [
        {
            "id": f"{name}-{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]


def logprobs_document(drawn: Sequence[DrawnToken], texts: Vocabulary) -> dict[str, Any]:
    """Return the log probabilities of tokens as OpenAI's chats have them."""
    return {
        "content": [
            {
                **_entry(one.token, one.logprob, texts),
                "top_logprobs": [_entry(token, logprob, texts) for token, logprob in one.top],
            }
            for one in drawn
        ]
    }


def _entry(token: int, logprob: float | None, texts: Vocabulary) -> dict[str, Any]:
    content = texts.token_bytes(token)
    value = _LEAST if logprob is None else max(logprob, _LEAST)
    return {
        "token": content.decode(errors="replace"),
        "logprob": float(f"{value:.6g}"),
        "bytes": list(content),
    }

"""Bodies of requests for text, as OpenAI's clients send them. Pure.

What a type does not have is refused by its name, as for all bodies.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pipeedge.decoding.sampling import SAMPLING_FIELDS
from pipeedge.serve.bodies import Body

__all__ = ["ChatBody", "CompletionBody", "ResponseBody", "StreamOptions", "sampling_fields"]

_DEFAULT_TOKENS = 16
"""Tokens of a completion that does not say how many, as OpenAI has it."""

Stop = Annotated[str | list[str] | None, Meta(description="texts before which the answer ends")]
ModelName = Annotated[
    str, Meta(description="name of the model that is served, or an empty text for whichever it is")
]
User = Annotated[str | None, Meta(description="who asks; nothing depends on it, nothing is kept")]
NotStored = Annotated[Literal[False] | None, Meta(description="nothing is stored")]


class StreamOptions(Body):
    """How a stream is sent."""

    include_usage: Annotated[bool, Meta(description="send the number of tokens at the end")] = False
    continuous_usage_stats: Annotated[
        bool, Meta(description="send the number of tokens so far with each event, too")
    ] = False


class SamplingBody(Body):
    """How the tokens of an answer are chosen; what is left out is as the model's own file says."""

    model: ModelName
    stream: Annotated[bool | None, Meta(description="send the answer as it grows")] = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Meta(description="0 takes the likeliest token")] = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[
        dict[str, float] | None, Meta(description="added to the scores, by number of the token")
    ] = None
    bad_words: Annotated[
        list[str | list[int]] | None, Meta(description="texts or tokens that the answer does not have")
    ] = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int | None, Meta(description="the same seed gives the same answer")] = None
    n: Annotated[int | None, Meta(description="number of answers")] = None
    max_tokens: Annotated[int | None, Meta(description="most tokens of the answer")] = None
    min_tokens: int | None = None
    response_format: Annotated[
        dict[str, Any] | None, Meta(description="what the answer looks like: text, JSON, a schema, a grammar")
    ] = None
    structured_outputs: Annotated[
        dict[str, Any] | None, Meta(description="the same as vLLM has it: json, regex, grammar or choice")
    ] = None
    user: User = None


class ChatBody(SamplingBody, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[
        list[dict[str, Any]], Meta(min_length=1, description="the conversation: role and content of each")
    ]
    max_completion_tokens: Annotated[int | None, Meta(description="most tokens of the answer")] = None
    logprobs: Annotated[bool | None, Meta(description="send the log probability of each token")] = None
    top_logprobs: Annotated[int | None, Meta(description="and those of the likeliest tokens")] = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="functions that it may call")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, Meta(description="auto, none, required, or the function to call")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="variables of the chat template")
    ] = None
    store: NotStored = None

    @property
    def conversation(self) -> dict[str, Any]:
        """What the chat template is given, by the names in a file of prompts."""
        found = {
            "messages": self.messages,
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return {name: value for name, value in found.items() if value is not None}


class CompletionBody(SamplingBody, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="a text that is continued as it is, token ids, or several of them"),
    ]
    logprobs: Annotated[
        int | None, Meta(description="send the log probability of each token, and this many of the likeliest")
    ] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(one, int) for one in self.prompt):
            return [[one for one in self.prompt if isinstance(one, int)]]
        return [[one] if isinstance(one, int) else one for one in self.prompt]


class ResponseBody(Body, kw_only=True):
    """``POST /v1/responses``."""

    input: Annotated[
        str | Annotated[list[dict[str, Any]], Meta(min_length=1)],
        Meta(description="what is said, or the conversation: role and content of each message"),
    ]
    model: ModelName
    instructions: Annotated[str | None, Meta(description="what the system says first")] = None
    stream: Annotated[bool | None, Meta(description="send the answer as it grows")] = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: Annotated[int | None, Meta(description="most tokens of the answer")] = None
    user: User = None
    store: NotStored = None


def sampling_fields(body: ChatBody | CompletionBody) -> dict[str, Any]:
    """Return the options of a body that say how tokens are chosen, by their names in ``Sampling``."""
    fields = msgspec.structs.asdict(body)
    found = {name: fields[name] for name in SAMPLING_FIELDS if fields.get(name) is not None}
    if isinstance(body, CompletionBody):
        found.setdefault("max_tokens", _DEFAULT_TOKENS)
    return found

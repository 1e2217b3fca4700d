"""Prompts as tokens, from texts, token ids and conversations, checked against the model and its context."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pipeedge.base.errors import InputError, RequestError
from pipeedge.base.wording import count, excerpt, hint, printable
from pipeedge.decoding.sampling import SAMPLING_FIELDS, Sampling, read_sampling
from pipeedge.decoding.tools import ToolRequest, read_tools
from pipeedge.decoding.vocabulary import Message, Vocabulary

__all__ = ["Prompt", "PromptMaker", "read_messages"]

_CHARACTERS_A_TOKEN = 1024
"""No token has more characters."""
_KINDS = ("prompt", "prompt_token_ids", "messages")
_CHAT_FIELDS = ("tools", "tool_choice", "chat_template_kwargs")
_FIELDS = frozenset({*_KINDS, *_CHAT_FIELDS}) | SAMPLING_FIELDS


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, with what is asked of its answers."""

    tokens: tuple[int, ...]
    sampling: Sampling
    """Options of its answers; words in ``bad_words`` are tokens."""
    item: int = 0
    """Position in the input, from 0."""
    source: str = ""
    """Where it comes from: a file and the number of a line."""
    tools: ToolRequest = field(default_factory=ToolRequest)
    """Functions that the answer may call."""

    @property
    def sequence(self) -> int:
        """Number that tells its random numbers from those of other prompts with the same seed.

        A prompt with a seed of its own has the same answer wherever it stands.
        """
        return self.item if self.sampling.seed is None else 0


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts of what people write.

    Raises:
        InputError: From each method, if the prompt cannot be run. The message begins with its source.
    """

    vocabulary: Vocabulary
    sampling: Sampling
    """Options that a prompt does not give itself."""
    context: int
    """Longest sequence in tokens, prompt and answer together."""
    raw: bool = False
    """Whether a plain text is continued as it is, though the model has a chat template."""
    longest: int | None = None
    """Longest context that the model has, or None if it is not known."""

    def from_text(self, text: str, item: int = 0, source: str = "--prompt") -> Prompt:
        """Return a plain text as a prompt: what a user says, if the model knows conversations."""
        with _named(source):
            if not text.strip():
                raise InputError("the prompt is empty")
            if self.raw or not self.vocabulary.has_template:
                return self._prompt(self._encode(text), self.sampling, item, source)
            return self._prompt(
                self._encode_messages([{"role": "user", "content": text}]), self.sampling, item, source
            )

    def from_document(self, document: object, item: int, source: str) -> Prompt:
        """Return an object of JSON, such as a line of a file, as a prompt.

        It has one of ``prompt``, a text that is continued as it is or a list of token ids;
        ``prompt_token_ids``; and ``messages``, perhaps with ``tools``, ``tool_choice`` and
        ``chat_template_kwargs``, which are further variables of the template. Other keys are
        those of ``read_sampling``.
        """
        with _named(source):
            if not isinstance(document, dict):
                raise InputError("is not an object with prompt, prompt_token_ids or messages")
            strange = next((key for key in document if key not in _FIELDS), None)
            if strange is not None:
                raise InputError(f"unknown field {excerpt(strange)}{hint(strange, sorted(_FIELDS))}")
            kinds = [kind for kind in _KINDS if document.get(kind) is not None]
            if len(kinds) != 1:
                has = " and ".join(kinds) or "none of them"
                raise InputError(f"needs one of prompt, prompt_token_ids and messages; it has {has}")
            sampling = read_sampling(document, self.sampling)
            if kinds[0] != "messages":
                alone = next((name for name in _CHAT_FIELDS if document.get(name) is not None), None)
                if alone is not None:
                    raise InputError(f"{alone} needs messages")
                return self._prompt(self._tokens(kinds[0], document[kinds[0]]), sampling, item, source)
            messages, options = read_messages(document["messages"]), document.get("chat_template_kwargs")
            if options is not None and not isinstance(options, dict):
                raise InputError("chat_template_kwargs is not an object")
            tools = read_tools(document.get("tools"), document.get("tool_choice"), self.vocabulary.template)
            if tools.structure is not None:
                if sampling.structure is not None:
                    raise InputError("tool_choice asks for a call, so there can be no response_format")
                sampling = replace(sampling, structure=tools.structure)
            tokens = self._encode_messages(messages, list(tools.shown) or None, options)
            return replace(self._prompt(tokens, sampling, item, source), tools=tools)

    def _tokens(self, kind: str, value: object) -> list[int]:
        if kind == "prompt" and isinstance(value, str):
            return self._encode(value)
        return _token_ids(kind, value)

    def _encode(self, text: str) -> list[int]:
        self._check_length(text)
        return self.vocabulary.encode(text)

    def _encode_messages(
        self,
        messages: list[Message],
        tools: list[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        text = self.vocabulary.render(messages, tools, options)
        self._check_length(text)
        return self.vocabulary.encode_rendered(text)

    def _check_length(self, text: str) -> None:
        if not text:
            raise InputError("the prompt is empty")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError("the prompt is not valid Unicode: it has a surrogate") from None
        if len(text) > self.context * _CHARACTERS_A_TOKEN:
            raise InputError(
                f"the prompt has {count(len(text), 'character')}, too many for {self.context} tokens"
            )

    def _prompt(self, tokens: list[int], sampling: Sampling, item: int, source: str) -> Prompt:
        if not tokens:
            raise InputError("the prompt is empty")
        last = self.vocabulary.tokens - 1
        strange = next((token for token in tokens if not 0 <= token <= last), None)
        if strange is not None:
            raise InputError(f"the prompt has token {strange}; the model's are 0 to {last}")
        if len(tokens) >= self.context:
            could_grow = self.longest is None or self.context < self.longest
            raise InputError(
                f"the prompt has {count(len(tokens), 'token')}; the context of {self.context} must have room "
                f"for one more: shorten it{', or raise --context' if could_grow else ''}"
            )
        if sampling.structure is not None:
            self.vocabulary.matcher(sampling.structure, ())  # says now what is wrong with it
        return Prompt(tuple(tokens), self.vocabulary.with_tokens(sampling), item, source)


def _token_ids(name: str, value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise InputError(f"{name} is {excerpt(repr(value))}; a list of whole numbers is needed")
    return value


def read_messages(value: object) -> list[Message]:
    """Return the messages of a conversation, each with its content as one text.

    Raises:
        InputError: It is something else, or has contents that are no text.
    """
    if not isinstance(value, list) or not value:
        raise InputError("messages is not a list of one or more messages")
    return [_message(one, f"messages[{number}]") for number, one in enumerate(value)]


def _message(value: object, name: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise InputError(f"{name} is not an object with role and content")
    message = dict(value)
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], name)
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"{name} has content other than text, which this model does not take")
        message["content"] = "\n".join(map(str, texts))
    elif not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
        raise InputError(f"{name}.content is {excerpt(repr(content))}; a text is needed")
    return message


def _tool_calls(value: object, name: str) -> object:
    """Return the calls of a message with their arguments as objects; APIs have them as texts."""
    if value is None:
        return None
    calls = []
    for number, call in enumerate(value if isinstance(value, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InputError(f"{name}.tool_calls[{number}] is not an object with a function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"{name}.tool_calls[{number}] has arguments that are not JSON ({error})"
                ) from None
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Put the source in front of the message about a mistake."""
    try:
        yield
    except RequestError as error:
        raise InputError(f"{printable(source)}: {error}") from None

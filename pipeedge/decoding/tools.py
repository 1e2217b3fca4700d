r"""Functions that a model may call: what a request says of them, and the calls in an answer. Pure.

chat template has    an answer calls a function by
<tool_call>          <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>      Qwen, Hermes
[TOOL_CALLS]         [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]                 Mistral
"parameters" and     {"name": "add", "parameters": {"a": 1}}                               Llama 3
ipython
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pipeedge.base.errors import RequestError
from pipeedge.base.wording import excerpt, hint
from pipeedge.decoding.structure import Structure
from pipeedge.decoding.text_stream import overlap

__all__ = ["CallForm", "ToolCall", "ToolCallReader", "ToolRequest", "call_form", "read_tools"]

_BEGIN, _END = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallForm(Enum):
    """How a model writes a call."""

    TAGS = "tags"
    """JSON between ``<tool_call>`` and ``</tool_call>``, anywhere in the answer."""
    LIST = "list"
    """A list of JSON, which is the whole answer."""
    OBJECT = "object"
    """JSON that is the whole answer."""

    @property
    def arguments(self) -> str:
        """Key of the arguments."""
        return "parameters" if self is CallForm.OBJECT else "arguments"


def call_form(template: str) -> CallForm | None:
    """Return how a model with a chat template writes calls, or None if the template shows no known form."""
    if _BEGIN in template and "<function=" not in template:
        return CallForm.TAGS
    if _MISTRAL in template:
        return CallForm.LIST
    if "parameters" in template and "ipython" in template:
        return CallForm.OBJECT
    return None


@dataclass(frozen=True)
class ToolCall:
    """A call of a function."""

    name: str
    arguments: str
    """Object of JSON."""


@dataclass(frozen=True)
class ToolRequest:
    """What a request says of functions."""

    shown: tuple[Mapping[str, Any], ...] = ()
    """Functions that the template shows to the model."""
    form: CallForm | None = None
    """How calls are found in the answer; None leaves them in its text."""
    structure: Structure | None = None
    """What the answer has to look like, if it must be a call."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(tool["function"]["name"] for tool in self.shown)


def read_tools(tools: object, choice: object, template: str) -> ToolRequest:
    """Return what ``tools`` and ``tool_choice`` of a request mean for a model with a chat template.

    Raises:
        RequestError: They are malformed, or the model does not know functions.
    """
    if tools is None or tools == []:
        if choice in (None, "none", "auto"):
            return ToolRequest()
        raise RequestError(f"tool_choice is {excerpt(repr(choice))}, and there are no tools")
    if not isinstance(tools, list):
        raise RequestError(f"tools is {excerpt(repr(tools))}; a list of functions is needed")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"tools[{number}] is not an object of type function with a function and its name"
            )
        if not isinstance(function.get("parameters", {}), dict | None):
            raise RequestError(f"tools[{number}].function.parameters is not a JSON schema")
    if choice == "none":
        return ToolRequest()
    if "tools" not in template:
        raise RequestError("the model's chat template takes no tools")
    form = call_form(template)
    request = ToolRequest(tuple(tools), form)
    if choice in (None, "auto"):
        return request
    chosen = list(tools)
    if choice != "required":
        name = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
        chosen = [tool for tool in tools if tool["function"]["name"] == name]
        if not chosen:
            known = hint(str(name), sorted(request.names)) if name is not None else ""
            raise RequestError(
                f"tool_choice is {excerpt(repr(choice))}; none, auto, required or one of the functions is "
                f"possible{known}"
            )
    if form is None:
        raise RequestError(
            "tool_choice needs a chat template with calls in a known form: <tool_call>, [TOOL_CALLS], or "
            "that of Llama 3"
        )
    return ToolRequest(tuple(tools), form, _call_structure(form, chosen))


def _call_structure(form: CallForm, tools: Sequence[Mapping[str, Any]]) -> Structure:
    """Return a grammar of one call of one of ``tools``."""
    schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                form.arguments: tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = json.dumps({"x-guidance": _COMPACT, "anyOf": schemas})
    start = {
        CallForm.TAGS: '"<tool_call>\\n" call "\\n</tool_call>"',
        CallForm.LIST: '"[" call "]"',
        CallForm.OBJECT: "call",
    }[form]
    return Structure("lark", f"start: {start}\ncall: %json {schema}\n")


class ToolCallReader:
    """Separates what an answer says from the calls that it makes, as it grows.

    Args:
        form: How calls are written.
        names: Names of the functions; a call of another one is text.
    """

    def __init__(self, form: CallForm, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._held = ""
        """Text that may be, or belong to, a call."""
        self._is_text = False
        """Whether the answer is known to have no call, in forms where one is the whole answer."""
        self.calls: list[ToolCall] = []
        """Calls that are complete."""

    def push(self, piece: str) -> str:
        """Return the text that belongs to no call, as far as that is certain."""
        self._held += piece
        if self._form is CallForm.TAGS:
            return self._outside_tags()
        first = self._held.lstrip()[:1]
        if not self._is_text and first in ("", "{" if self._form is CallForm.OBJECT else "["):
            return ""
        self._is_text = True
        return self._release()

    def finish(self) -> str:
        """Return the text that was held back, since nothing more comes."""
        if self._form is not CallForm.TAGS and not self._is_text:
            found = self._whole_answer()
            if found:
                self.calls += found
                self._held = ""
        if self.calls and not self._held.strip():
            self._held = ""
        return self._release()

    def _release(self) -> str:
        text, self._held = self._held, ""
        return text

    def _outside_tags(self) -> str:
        shown = ""
        while True:
            begin = self._held.find(_BEGIN)
            end = self._held.find(_END, begin) if begin >= 0 else -1
            if end < 0:
                break
            call = self._call(_parsed(self._held[begin + len(_BEGIN) : end]))
            after = end + len(_END)
            if call is None:
                shown += self._held[:after]
            else:
                shown += self._held[:begin].rstrip()
                self.calls.append(call)
            self._held = self._held[after:]
        certain = begin if begin >= 0 else len(self._held) - overlap(self._held, _BEGIN)
        text = self._held[:certain].rstrip()  # blanks before a call belong to it
        self._held = self._held[len(text) :]
        return shown + text

    def _whole_answer(self) -> list[ToolCall]:
        """Return the calls that the whole answer consists of, or none if it is text."""
        text = self._held.strip().removeprefix(_MISTRAL).strip()
        values: list[object] = []
        while text:
            try:
                value, end = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError):
                return []
            values += value if isinstance(value, list) and self._form is CallForm.LIST else [value]
            text = text[end:].lstrip(" \n;")
        calls = [self._call(value) for value in values]
        return [call for call in calls if call is not None] if None not in calls else []

    def _call(self, value: object) -> ToolCall | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get(self._form.arguments, {})
        if not isinstance(arguments, dict):
            return None
        return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

"""Test that chat templates make the same texts as with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pipeedge.decoding.prompt import read_messages
from pipeedge.decoding.vocabulary import Vocabulary

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "x": "<&é>"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, 2]}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "naïve 雪\n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
    {"role": "tool", "content": "3", "tool_call_id": "1"},
    {"role": "user", "content": "and?"},
]
TEMPLATES = [
    # Roles in marks, blocks on lines of their own, tools as JSON, loop controls and a namespace.
    """{{ bos_token }}{% set ns = namespace(system='') %}
{%- if tools %}
    {{- 'Tools: ' + tools | tojson }}
    {{ tools[0] | tojson(indent=2) }}
{% endif %}
{% for message in messages %}
    {% if message.role == 'system' %}{% set ns.system = message.content %}{% continue %}{% endif %}
    <|{{ message['role'] }}|>{{ message.content | default('', true) | trim }}
    {%- for call in message.tool_calls or [] %}
{{ call.function.name }}({% for key, x in call.function.arguments.items() %}{{ key }}={{ x }}{% endfor %})
    {%- endfor %}
    {% generation %}{{ message.reasoning_content or message.thinking }}{% endgeneration %}
    {{ loop.index0 }}{{ loop.last }}
{% endfor %}
{{ ns.system }}{{ dict(a=1, b=none) }}{{ '%s-%d' % ('x', 3) }}{{ 'a b'.split() | join('+') }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}""",
    "{% for m in messages[::-1] %}{{ m.role | upper }}{{ loop.cycle('a', 'b') }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    "{{ messages | length }}{{ documents is none }}{{ eos_token }}",
    "{% macro show(x) %}[{{ x }}]{% endmacro %}{{ show(messages[0].content) }}{{ range(3) | list }}"
    "{{ 'é' | tojson }}",
]


def vocabulary(template: str) -> Vocabulary:
    inner = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, "a"))
    backend = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")  # noqa: S106
    backend.chat_template = template
    return Vocabulary(backend, Path("tokenizer.json"), "small", 3)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_text_is_that_of_transformers(
    template: str, options: dict[str, Any], tools: list[dict[str, Any]] | None
) -> None:
    words = vocabulary(template)
    messages = read_messages(json.loads(json.dumps(MESSAGES)))
    expected = words.backend.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **options
    )
    assert words.render(messages, tools, options) == expected

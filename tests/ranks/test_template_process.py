"""Test what a chat template cannot do: it is a program that came with a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeedge.base.errors import InputError
from pipeedge.decoding.template import TemplateRenderer


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    one = TemplateRenderer()
    yield one
    one.close()


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ ''.__class__ }}", "reads the attribute '__class__' of str, which is not safe"),
        ("{{ messages.append(1) }}", "reads the attribute 'append'"),
        ("{{ '{0.__class__}'.format(messages) }}", "reads the attribute '__class__' of list"),
        ("{{ cycler.__init__.__globals__ }}", "reads the attribute '__init__'"),
        ("{% set ns = namespace(_x=1) %}", "begins with an underline"),
        ("{{ 'a' * 10000000000 }}", "needs more than 512 MB"),
        ("{{ '%1000000000d' % 1 }}", "needs more than 512 MB"),
        ("{{ 'a' * 40000000 }}", "a text of 40,000,000 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without an end"),
        ("{{ range(1000000) }}", "Range too big"),
        ("{% for x in y %}", r"Unexpected end of template.*\(line 1\)"),
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate$"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_a_template_that_does_what_it_must_not_is_one_line(
    renderer: TemplateRenderer, template: str, line: str
) -> None:
    with pytest.raises(InputError, match=f"^the chat template refuses this conversation: .*{line}") as caught:
        renderer.render(template, {"messages": [{"role": "user", "content": "a"}]})
    assert "\n" not in str(caught.value)
    assert renderer.render("{{ x }}", {"x": "\ud800é"}) == "\ud800é"


def test_a_template_that_does_not_end_is_stopped_and_the_next_one_runs() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    impatient = TemplateRenderer(seconds=2)
    with pytest.raises(InputError, match="has not finished after 2 seconds"):
        impatient.render(endless, {})
    assert impatient.render("{{ 1 + 1 }}", {}) == "2"
    impatient.close()

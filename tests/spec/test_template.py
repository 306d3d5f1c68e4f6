from __future__ import annotations

import pytest
from jinja2 import TemplateError

from runner.core.errors import BadTemplate
from runner.spec import template

VALUES = {
    "run": {"id": "7k3q", "name": "fix", "flag": True, "parts": ["a", "é"]},
    "task": {"branch": 'x";touch pwn;"'},
    "list": ["a", "b"],
}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        pytest.param("plain {text}", "plain {text}", id="no template"),
        pytest.param("run {{ run.id }}", "run 7k3q", id="lookup"),
        pytest.param("{{ task.branch }}", 'x";touch pwn;"', id="values are data"),
        pytest.param("{{ list | join(', ') }}", "a, b", id="filter"),
        pytest.param("{{ list[1] }}", "b", id="item"),
        pytest.param("{{ list }}", '["a", "b"]', id="a list"),
        pytest.param("{{ run.parts }} {{ run.flag }}", '["a", "é"] true', id="a list and a truth without jinja"),
        pytest.param("ends\n{{ run.name }}\n", "ends\nfix\n", id="the last line break stays"),
    ],
)
def test_values_are_looked_up(text: str, result: str) -> None:
    assert template.check(text) is None
    assert template.render(text, VALUES) == result


@pytest.mark.parametrize(
    "text",
    [
        "a {{ run.id }} b {{task.branch}}\n",
        "{{ run.number }} {{ run.nothing }} {{ run.parts }}",
        "{ {{ run.id }} } }} {% % #}",
        "{{{ run.id }}",
        "{{ run.id }}}",
        "{{{{ run.id }}}}",
        "{{ run.id }}{{ run.id",
        "{{- run.id }} {{ run.id -}} x",
        "{# {{ run.id }} #}",
        "{% raw %}{{ run.id }}{% endraw %}",
        "a\r\n{{ run.id }}\r",
        "{{ run.items }}",
        "{{ run.id.upper }}",
        "{{ run.gone }}",
        "{{ gone.id }}",
        "{{ run._private }}",
        "{{ run .id }}",
        "{{ run.\n id }}",
        "{{ run.é }}",
        *(f"{{{{ {word}.id }}}}" for word in ("and", "else", "if", "in", "is", "none", "not", "or", "true")),
        *(f"{{{{ run.{word} }}}}" for word in ("and", "else", "if", "in", "is", "none", "not", "or", "true")),
    ],
)
def test_a_lookup_means_what_jinja_says(text: str) -> None:
    """Most templates never reach jinja; each row is one that it reads like us, or that must be left to it."""
    values = {"run": {"id": "7k3q", "number": 1, "nothing": None, "parts": ["a", {"b": 1}]}, "task": {"branch": "x"}}
    try:
        expected: str | None = template._environment().from_string(text).render(values)
    except TemplateError:
        expected = None

    if expected is None or template.check(text):
        with pytest.raises(BadTemplate):
            template.render(text, values)
    else:
        assert template.render(text, values) == expected


def test_a_value_that_looks_like_a_template_is_not_rendered_again() -> None:
    assert template.render("{{ x }}", {"x": "{{ run.id }}"}) == "{{ run.id }}"


@pytest.mark.parametrize(
    "text",
    [
        "{% for x in list %}{{ x }}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 2 ** 10 ** 8 }}",
        "{{ run.__class__.__mro__ }}",
        "{{ run['__class__'] }}",
        "{{ ''.join(list) }}",
        "{{ run | attr('id') }}",
        "{{ range(100000) }}",
        "{{ '%s' | format(run) }}",
        "{% set x = 1 %}",
        "{% include '/etc/passwd' %}",
        "{{ run.id",
        "{{ run.id if true else 1 }}",
    ],
)
def test_anything_but_a_lookup_is_refused(text: str) -> None:
    refused = template.check(text)
    if refused is None:  # a lookup by form, refused by the sandbox when it is filled
        with pytest.raises(BadTemplate):
            template.render(text, VALUES)


def test_an_unknown_name_says_what_is_known() -> None:
    with pytest.raises(BadTemplate) as caught:
        template.render("{{ runs.id }}", VALUES)

    assert caught.value.message == "`runs` is not known to the template"
    assert caught.value.hint == "did you mean `run`?"


def test_a_result_is_bounded() -> None:
    with pytest.raises(BadTemplate, match="more than 8 Mi"):
        template.render("{{ x }}" * 1000, {"x": "a" * 100_000})


@pytest.mark.parametrize("character", ["\0", "\ud800"], ids=["NUL", "half a pair"])
def test_a_value_that_no_command_can_take_is_refused(character: str) -> None:
    """Behind a NUL in a variable, the rest would be read as arguments of the sandbox."""
    with pytest.raises(BadTemplate, match=f"U\\+{ord(character):04X}"):
        template.render("{{ x }}", {"x": f"a{character}b"})

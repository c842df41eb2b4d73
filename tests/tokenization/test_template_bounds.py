"""The work of a chat template is bounded, and whatever it raises is its refusal of the conversation."""

from __future__ import annotations

import pytest

from rookery.errors import UserError
from rookery.simulation.fakes.text import byte_tokenizer
from rookery.tokenization import template_bounds
from rookery.tokenization.chat import LONGEST_REFUSAL, Chat

WRITTEN = "{% for message in messages %}{{ message.content }};{% endfor %}"
ENDLESS = "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"
"""A million steps: enough to see the bound, which one with a thousand times as many meets as soon."""


def chat(work: str) -> Chat:
    """A template that does the ``work`` for conversations that begin with "work"."""
    template = f"{WRITTEN}{{% if messages[0].content == 'work' %}}{work}{{% endif %}}"
    return Chat(byte_tokenizer(), template, special={}, ends=[], context=100)


def turns(text: str, count: int = 1) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}] * count


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (ENDLESS, "too much work"),
        (
            "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}"
            "{{ twice(20) }}",
            "too much work",
        ),
        (
            "{% for a in range(100) recursive %}{% if loop.depth0 < 2 %}{{ loop(range(100)) }}{% endif %}{% endfor %}",
            "too much work",
        ),
        ("{% macro deeper() %}{{ deeper() }}{% endmacro %}{{ deeper() }}", "maximum recursion depth"),
        ("{{ 'x' * 100000000 }}", "too long"),
        ("{{ 100000000 * [1] }}", "too long"),
        ("{{ 10 ** 100000 }}", "too large"),
        (
            "{% set all = namespace(n=3) %}{% for a in range(20) %}{% set all.n = all.n * all.n %}{% endfor %}",
            "too large",
        ),
        ("{{ 'x'.ljust(100000000) }}", "too large"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ '{}'.format() }}", "index"),
        ("{{ raise_exception('no ' * 100000) }}", "no no no"),
    ],
)
def test_work_without_a_bound_is_refused(work: str, reason: str) -> None:
    loaded = chat(work)
    assert loaded.render(turns("rest")) == "rest;"
    with pytest.raises(UserError, match=f"the chat template refuses messages .*{reason}") as refused:
        loaded.render(turns("work"))
    assert len(str(refused.value)) < 2 * LONGEST_REFUSAL
    assert loaded.render(turns("rest")) == "rest;", "the next conversation has its whole bound"


@pytest.mark.parametrize(
    "work",
    [
        "{% macro shown(n) %}{{ n }}{% endmacro %}{{ shown(100000000) }}", "{{ '{}'.format(100000000) }}",
        "{{ namespace(n=100000000).n }}", "{{ dict(n=100000000).n }}",
    ],
)  # fmt: skip
def test_large_numbers_of_a_conversation_are_passed_on(work: str) -> None:
    """As the arguments of a tool are, which some templates write with macros."""
    assert chat(work).render(turns("work")) == "work;100000000"


def test_a_template_that_never_ends_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(UserError, match="too much work"):
        Chat(byte_tokenizer(), ENDLESS, special={}, ends=[], context=100)


def test_steps_that_take_long_have_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = chat("{% for a in range(100) %}{% endfor %}")
    assert loaded.render(turns("work")) == "work;"
    monkeypatch.setattr(template_bounds, "SECONDS", -1.0)
    with pytest.raises(UserError, match="too much work"):
        loaded.render(turns("work"))


def test_a_long_conversation_may_look_at_all_messages_for_each() -> None:
    loaded = chat("{% for one in messages %}{% for other in messages %}{% endfor %}{% endfor %}")
    assert loaded.render(turns("work", 500)) == "work;" * 500


def test_loops_macros_and_operators_keep_their_meaning() -> None:
    loaded = chat(
        "{% macro shown(x) %}[{{ x }}{{ caller() if caller else '' }}]{% endmacro %}"
        "{{ shown(1) }}{% call shown(2) %}!{% endcall %}{{ 'ab' * 2 }}{{ 2 ** 5 }}{{ 3 * 4 }}{{ 'a'.rjust(3) }}"
        "{% for x in [1, [2, 3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
        "{% for x in [5, 6, 7] if x > 5 %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}"
        "{% for x in [] %}{% else %}none{% endfor %}{% for x in [1, 2] %}{% continue %}{% endfor %}"
    )
    assert loaded.render(turns("work")) == "work;[1][2!]abab3212  a1231False22True2none"

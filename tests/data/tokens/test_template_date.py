"""A chat template that asks for the time is told one date."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tests.data.tokens.test_template import SOURCE, answer, turns
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.template import render
from tuningfork.data.tokens.template_date import prints_the_date, with_fixed_date
from tuningfork.records import Example

SAYS = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
DATED = (
    """{% if strftime_now is defined %}{{ strftime_now("%d.%m.%Y") + '|' + strftime_now( '%H h "%M"' ) }}|{% endif %}"""
    + SAYS
)


def printed(template: str) -> str:
    """A question and its answer on the 5th of February 2024."""
    tokenizer = with_fixed_date(byte_bpe(chat_template=template), "2024-02-05")
    return render(Example(SOURCE, turns("q"), (answer("a"),)), tokenizer).texts[0]


def test_a_template_that_prints_the_time_prints_the_date_that_it_is_given() -> None:
    example = Example(SOURCE, turns("q"), (answer("a"), answer("b")))
    for template in (DATED, {"default": DATED, "tool_use": DATED}):
        tokenizer = byte_bpe()
        tokenizer.chat_template = template
        dated = with_fixed_date(tokenizer, "2024-02-29")
        assert render(example, dated).texts == ('29.02.2024|00 h "00"|q;a;', '29.02.2024|00 h "00"|q;b;')
        assert tokenizer.chat_template == template
        assert f".{datetime.now().year}|" in render(example, tokenizer).texts[0]


@pytest.mark.parametrize(
    ("template", "date"),
    [
        ("{{ strftime_now('%Y') }}", "2024"),
        ("{% set form = '%Y' %}{{ strftime_now(form) }}", "2024"),
        ("{{ strftime_now('%Y' + '%d') }}", "202405"),
        ("{{ strftime_now(format='%Y') | int + 1 }}", "2025"),
        ("{% set now = strftime_now %}{{ now('%Y') }}", "2024"),
        ("{% macro today() %}{{ strftime_now('%Y') }}{% endmacro %}{{ today() }}", "2024"),
        ("{{ strftime_now('%A, %d %B %Y; %a %-d %b %y; %F %T %I %p %j %%Y 5%') }}",
         "Monday, 05 February 2024; Mon 5 Feb 24; 2024-02-05 00:00:00 12 AM 036 %Y 5%"),
        ("{{ strftime_now('%A, %d %B %Y; %a %-d %b %y;' + ' %F %T %I %p %j %%Y') }}",
         "Monday, 05 February 2024; Mon 5 Feb 24; 2024-02-05 00:00:00 12 AM 036 %Y"),
        ("{{ strftime_now('%_d %^a\\n\\'%d\\' ü') }}", " 5 MON\n'05' ü"),
        ("{{ strftime_now('%d\n%m') }}", "05\n02"),
        ("It's {{ strftime_now(\"%d'\") }}", "It's 05'"),
    ],
)  # fmt: skip
def test_whatever_way_a_template_asks_for_the_time(template: str, date: str) -> None:
    assert prints_the_date(byte_bpe(chat_template=template))
    assert printed(template + SAYS) == f"{date}q;a;"


def test_a_format_that_cannot_be_told_is_refused() -> None:
    for format in ("'%_' + 'd'", "'%' + '_' + 'd'", "m['content'] ~ '%_d' ~ 'x'"):
        with pytest.raises(Unusable, match=r"no known format of a date: q?%_d"):
            printed("{% for m in messages %}{{ strftime_now(" + format + ") }}{{ m['content'] }};{% endfor %}")


def test_what_stands_first_in_a_template_is_printed_as_before() -> None:
    """White space in front of a block and behind it goes by the block's own line."""
    year = "{{ strftime_now('%Y') }}"
    for first in ("  x", "\nx", "  {% if true %}x{% endif %}", "{%- if true %}\n  x{% endif %}", "{# #}\n x"):
        assert printed(f"{first}{year}{SAYS}") == printed(f"{first}2024{SAYS}")


@pytest.mark.parametrize(
    "template", [CHATML, None, "{% if strftime_now is defined or strftime_now is not defined %}x{% endif %}"]
)
def test_a_template_that_does_not_ask_is_left_as_it_is(template: str | None) -> None:
    tokenizer = byte_bpe(chat_template=template)
    assert not prints_the_date(tokenizer) and with_fixed_date(tokenizer, "2024-02-29") is tokenizer

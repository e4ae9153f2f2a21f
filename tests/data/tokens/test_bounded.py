"""Chat templates are programs of others: one that does not end, takes all memory or fails is named, soon."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bounds import within, without_much_memory
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tests.repeated import slow
from tuningfork.data.config import DataConfig
from tuningfork.data.examples.values import Unusable
from tuningfork.data.prepare import prepare_examples
from tuningfork.data.tokens import bounded as bounds
from tuningfork.data.tokens.bounded import OutOfTime, bounded, renew
from tuningfork.data.tokens.printing import message_fields
from tuningfork.data.tokens.template import check_template, render
from tuningfork.errors import DataError
from tuningfork.records import Example, Message, Source

SECONDS, MEMORY = 1.5, 100 << 20
EXAMPLE = Example(
    Source("pairs.jsonl", 7),
    (Message("user", "hello"),),
    ((Message("assistant", "yes"),), (Message("assistant", "no"),)),
)
# What a template says only of a row, so that none of it is found at the start.
OF_A_ROW = "{{% if messages[0].content == 'hello' %}}\n{}\n{{% endif %}}"
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "power": "{% set n = 9 %}{{ n ** (n ** n) > 1 }}",
    "constant power": "{{ 9 ** (9 ** 9) > 1 }}",
    "nested lists": "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x }}",
}
GREEDY = {
    "product": "{{ messages[0].content * 10 ** 10 }}",
    "constant product": "{{ 'a' * 10 ** 10 }}",
    "doubled text": "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled list": "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "center": "{{ messages[0].content | center(10 ** 10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "method": "{{ '{:>10000000000}'.format(messages | length) }}",
    "indent": "{{ messages[0].content | indent(10 ** 10, true) }}",
    "replace": "{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}",
    "batch": "{{ [1] | batch(10 ** 9, 1) | list }}",
}
FAILING = {
    "{{ 1 // 0 }}": "ZeroDivisionError: integer division or modulo by zero (line 2 of the template)",
    "{{ 1.5 * 10 ** 400 }}": "OverflowError: int too large to convert to float (line 2 of the template)",
    "{{ 1 + 'a' }}": "TypeError: unsupported operand type(s) for +: 'int' and 'str' (line 2 of the template)",
    "{{ dict(a=1).popitem(1) }}": "access to attribute 'popitem' of 'dict' object is unsafe. (line 2 of the template)",
    "{{ 'a'.index('b') }}": "ValueError: substring not found (line 2 of the template)",
    "{{ 'a'.encode('no') }}": "LookupError: unknown encoding: no (line 2 of the template)",
    "{{ 9 ** 9999 }}": "ValueError: Exceeds the limit (4300 digits) for integer string conversion",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: maximum recursion depth exceeded",
    "{% include 'other' %}": "TypeError: no loader for this environment specified (line 2 of the template)",
    "{{ raise_exception('not so') }}": "not so",
}
UNREADABLE = {
    "{% if %}": "Expected an expression, got 'end of statement block' (line 1 of the template)",
    "\n\n{{ '\\x' }}": "truncated \\xXX escape (line 3 of the template)",
    "{% for a in [] %}": "Unexpected end of template",
    "{% for a in [] %}" * 30 + "{% endfor %}" * 30: "too many statically nested blocks",
}


@pytest.fixture(autouse=True)
def _ceiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bounds, "SECONDS", SECONDS)
    monkeypatch.setattr(bounds, "MEMORY", MEMORY)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with within(90), without_much_memory():
        yield
    assert resource.getrlimit(resource.RLIMIT_AS) == before and signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


@pytest.mark.parametrize("name", [name if name in {"loops", "constant power"} else slow(name) for name in ENDLESS])
def test_a_template_that_does_not_end_for_a_row_stops_with_the_row(name: str) -> None:
    tokenizer = byte_bpe(chat_template=OF_A_ROW.format(ENDLESS[name]) + CHATML)
    with pytest.raises(DataError, match=r"^pairs.jsonl:7: the chat template does not come to an end within 1.5 s"):
        render(EXAMPLE, tokenizer)


@pytest.mark.parametrize("name", GREEDY)
def test_a_template_that_takes_all_memory_costs_the_row(name: str) -> None:
    tokenizer = byte_bpe(chat_template=OF_A_ROW.format(GREEDY[name]) + CHATML)
    with pytest.raises(Unusable) as raised:
        render(EXAMPLE, tokenizer)
    assert raised.value.reason == "too large to be printed"
    assert raised.value.detail.startswith("more than 100 MiB of memory")
    tokenizer.chat_template = CHATML
    render(EXAMPLE, tokenizer)


@pytest.mark.parametrize("wrong", [ENDLESS["loops"], GREEDY["doubled text"], "{{ 'a' * 10000000 }}"])
def test_a_template_that_does_so_for_any_row_stops_at_the_start(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}))
    tokenizer = byte_bpe(chat_template=wrong + CHATML)
    tokenizer.name_or_path = "./model"
    with pytest.raises(DataError, match=r"^./model: the chat template (does not come|takes more|prints 1).*template:"):
        prepare_examples(tmp_path / "rows.jsonl", tokenizer, DataConfig(), 260)


@pytest.mark.parametrize("wrong", FAILING)
def test_whatever_a_template_fails_with_costs_the_row_and_names_the_line(wrong: str) -> None:
    tokenizer = byte_bpe(chat_template=OF_A_ROW.format(wrong) + CHATML)
    check_template(tokenizer)
    with pytest.raises(Unusable) as raised:
        render(EXAMPLE, tokenizer)
    assert raised.value.reason == "the chat template refuses the conversation"
    assert raised.value.detail.startswith(FAILING[wrong])


def test_lines_are_the_templates_own_where_a_date_stands_in_front(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "hello", "chosen": "a", "rejected": "b"}))
    tokenizer = byte_bpe(chat_template=OF_A_ROW.format("{{ 1 // 0 }}") + "{{ strftime_now('%d') }}" + CHATML)
    with pytest.raises(DataError, match=r"ZeroDivisionError: .* \(line 2 of the template\)"):
        prepare_examples(tmp_path / "rows.jsonl", tokenizer, DataConfig(), 260)


@pytest.mark.parametrize("wrong", UNREADABLE)
def test_a_template_that_is_none_stops_at_the_start(wrong: str) -> None:
    tokenizer = byte_bpe(chat_template=wrong)
    tokenizer.name_or_path = "./model"
    with pytest.raises(DataError) as raised:
        check_template(tokenizer)
    assert str(raised.value).startswith("./model: the chat template cannot be read: ")
    assert UNREADABLE[wrong] in str(raised.value)


def test_a_format_of_a_date_that_python_cannot_write_is_left_to_the_template(tmp_path: Path) -> None:
    """What stands in a template is looked at before any of it is run."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "hello", "chosen": "a", "rejected": "b"}))
    for text in ("%\\ud800", "%\\x00"):
        template = f"{{% set unused = '{text}' %}}{{{{ strftime_now('%Y') }}}}" + CHATML
        used, _ = prepare_examples(tmp_path / "rows.jsonl", byte_bpe(chat_template=template), DataConfig(), 260)
        assert len(used) == 1
    with pytest.raises(DataError, match="cannot be read: truncated"):
        template = "{{ strftime_now('%Y') }}{{ '\\x' }}" + CHATML
        prepare_examples(tmp_path / "rows.jsonl", byte_bpe(chat_template=template), DataConfig(), 260)


def test_many_spaces_in_a_template_are_looked_through_at_once() -> None:
    template = "{# {% for " + "a " * 20_000 + " " * 20_000 + "#}{# " + "{% set a =" * 5_000 + " #}" + CHATML
    render(EXAMPLE, byte_bpe(chat_template=template))
    with within(20):
        assert "content" in message_fields(byte_bpe(chat_template=template))


def test_a_row_may_take_so_long_over_all_of_its_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of very many turns is printed up to each of them, and each print takes longer."""
    monkeypatch.setattr(bounds, "WHOLE", 0.5)
    said = tuple(Message(("assistant", "user")[place % 2], "a") for place in range(3001))
    with pytest.raises(
        DataError, match=r"^pairs.jsonl:7: the chat template does not come .* within 0.5 s of processor"
    ):
        render(replace(EXAMPLE, answers=(said, EXAMPLE.answers[1])), byte_bpe(chat_template=CHATML))
    render(EXAMPLE, byte_bpe(chat_template=CHATML))


def test_renewed_time_is_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "WHOLE", 0.4)

    def work() -> None:
        for _ in range(100):
            _work(0.05)
            renew()

    with pytest.raises(OutOfTime, match=r"0\.4 s"):
        bounded(work)


def test_a_row_whose_words_take_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.3)
    rows = [{"prompt": "q", "chosen": said, "rejected": "no"} for said in ("yes", "<" * 200_000)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_bpe(chat_template=CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<<{'<' * place}|" for place in range(300)]})
    with pytest.raises(DataError, match=r"rows.jsonl:2: the row is not read within 0.3 s of processor time\. Look"):
        prepare_examples(tmp_path / "rows.jsonl", tokenizer, DataConfig(), 1000)


@pytest.mark.parametrize(
    "again", ["{%set a=", "role in [", "{%set a%d=tools%}", "{%for a in b%}", "a[", "'a' in ", "role'] == ", "message."]
)
def test_what_a_template_says_again_and_again_is_looked_through_once(again: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "hello", "chosen": "a", "rejected": "b"}))
    said = "".join(again.replace("%d", str(place)) for place in range(600_000 // len(again)))
    with within(20):
        used, _ = prepare_examples(
            tmp_path / "rows.jsonl", byte_bpe(chat_template=f"{{# {said} #}}{CHATML}"), DataConfig(), 260
        )
    assert len(used) == 1


def test_a_template_longer_than_any_is_not_looked_through(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "hello", "chosen": "a", "rejected": "b"}))
    tokenizer = byte_bpe(chat_template=CHATML + "{# " + "a" * (1 << 20) + " #}")
    with pytest.raises(DataError, match=r"the chat template has 1,048,\d+ characters, 1,048,576 at most\. Mend"):
        prepare_examples(tmp_path / "rows.jsonl", tokenizer, DataConfig(), 260)


def test_renewed_time_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.2)

    def turns_of_work() -> int:
        for _ in range(5):
            _work(0.06)
            renew()
        return 5

    assert bounded(turns_of_work) == 5
    with pytest.raises(OutOfTime):
        bounded(lambda: _work(20))


def test_a_failure_that_a_library_swallows_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.2)
    monkeypatch.setattr(bounds, "_AGAIN", 0.1)

    def swallows() -> None:
        try:
            _work(20)
        except OutOfTime:
            _work(20)

    with pytest.raises(OutOfTime):
        bounded(swallows)


def test_signals_and_limits_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.2)
    seen: list[int] = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: seen.append(1))
    try:
        bounded(lambda: None)
        with pytest.raises(OutOfTime):
            bounded(lambda: _work(20))
        signal.raise_signal(signal.SIGVTALRM)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert seen == [1]


def test_another_thread_than_the_main_one_prints_without_a_bound() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(bounded(lambda: 3)))
    thread.start()
    thread.join()
    assert found == [3]


NEVER_BACK = "{{ [[[[1]*1000]*1000]*1000]*1000 == [[[[1]*1000]*1000]*1000]*1000 }}"  # one call, of hours
SCRIPT = """
import sys
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tuningfork.data.tokens import bounded
from tuningfork.data.tokens.template import check_template, render
from tests.data.tokens.test_bounded import EXAMPLE
bounded.SECONDS, bounded.LAST = 0.5, 2
render(EXAMPLE, byte_bpe(chat_template=sys.argv[1] + CHATML))
"""


def test_a_call_that_never_comes_back_ends_the_process_and_names_the_template() -> None:
    """Python hears neither of time nor of Ctrl-C before it does."""
    command = [sys.executable, "-c", SCRIPT, NEVER_BACK]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGPROF
    assert "jinja2" in done.stderr and "in at_work" in done.stderr  # here it is at work before the template runs


def test_the_last_resort_is_put_back() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGPROF, lambda *_: seen.append(1))
    try:
        bounded(lambda: None)
        signal.raise_signal(signal.SIGPROF)
    finally:
        signal.signal(signal.SIGPROF, before)
    assert seen == [1] and signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def _work(seconds: float) -> None:
    """Use processor time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

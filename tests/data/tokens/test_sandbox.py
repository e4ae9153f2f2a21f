"""Chat templates are programs that a model folder brings: they may put texts together, and nothing else."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.control_tokens import ControlTokens
from tuningfork.data.tokens.printing import REFUSES, Printer
from tuningfork.records import Message

REACHING_OUT = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir(MARK) }}",
    "{{ lipsum.__globals__['os'].mkdir(MARK) }}",
    "{{ self.__init__.__globals__.os }}",
    "{{ raise_exception.__globals__.json }}",
    "{{ strftime_now.__globals__.datetime.sys }}",
    "{{ (messages | attr('__class__')).__base__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ namespace.__init__.__globals__['__builtins__']['__import__']('os').mkdir(MARK) }}",
    "{{ messages.append({'role': 'user', 'content': 'one more'}) }}",
    "{{ messages[0].update({'content': 'another'}) }}",
    "{% include '/etc/hostname' %}",
    "{% import '/etc/hostname' as other %}",
]
TURNS = (Message("user", "question"), Message("assistant", "answer"))


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Is there once a template has reached out."""
    return tmp_path / "ran"


@pytest.mark.parametrize("reaching", REACHING_OUT)
@pytest.mark.parametrize("silence", ["", None])  # the two ways in which conversations are printed
def test_a_template_that_reaches_out_is_refused(ran: Path, reaching: str, silence: str | None) -> None:
    tokenizer = byte_bpe(chat_template=reaching.replace("MARK", repr(str(ran))) + CHATML)
    for open_turn in (True, False):
        with pytest.raises(Unusable, match=REFUSES):
            Printer(tokenizer, {}, silence)(TURNS, open_turn)
    ControlTokens(tokenizer, chat=True)  # which prints conversations of its own, and passes over what is refused
    assert not ran.exists()


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tokenizer_kwargs", "continue_final_message"])
def test_a_row_cannot_say_how_its_template_is_run(name: str) -> None:
    with pytest.raises(Unusable, match=f"chat_template_kwargs.{name} is no argument of a template"):
        Printer(byte_bpe(chat_template=CHATML), {name: "x"})


@pytest.mark.parametrize("reaching", REACHING_OUT[1:3])
def test_outside_of_the_sandbox_it_would_reach_out(ran: Path, reaching: str) -> None:
    """Guards the guard."""
    jinja2.Environment().from_string(reaching).render(MARK=str(ran))
    assert ran.exists()

"""docs/models.md is what the sweep over all causal language models says, here checked for a few of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.sweep_models import Verdict, judge, row

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
TRAINED, REFUSED = PAGE.split("## Refused")
# One of each way there is to be refused, and of each way to be unusual and trained.
FEW = ["bart", "blt", "doge", "falcon", "fuyu", "gpt_oss", "mamba", "moshi", "roberta", "rwkv"]
FEW += ["gemma4_text", "gptj", "minicpm3", "nemotron"]

same_version = pytest.mark.skipif(
    f"transformers {transformers.__version__}," not in PAGE, reason="docs/models.md is of another transformers"
)


@same_version
def test_every_class_is_on_the_page_once():
    assert re.findall(r"^\| `(\S+)` \| (\w+) \|", PAGE, re.MULTILINE) == [
        *sorted((kind, name) for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if f"| `{kind}` " in TRAINED),
        *sorted(
            (kind, name) for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if f"| `{kind}` " not in TRAINED
        ),
    ]


@same_version
@pytest.mark.parametrize("kind", FEW)
def test_the_page_says_what_a_few_classes_get_today(kind):
    verdict = judge(kind)
    assert (row(verdict) in REFUSED) if verdict.refused else (f"| `{kind}` | {verdict.name} |" in TRAINED)


def test_every_reason_is_a_sentence_and_no_error_of_python():
    reasons = re.findall(r"^\| `\S+` \| \w+ \| (.+) \|$", REFUSED, re.MULTILINE)
    assert len(reasons) == int(re.match(r" \((\d+)\)", REFUSED)[1])
    for reason in reasons:
        assert re.match(r"[A-Z]", reason)
        assert reason.endswith(".")
        assert not re.search(r"\w(Error|Exception)\b|NoneType|object has|argument|unexpected|not built", reason)


def test_a_reason_that_holds_a_bar_stays_in_its_cell():
    assert row(Verdict("some", "SomeForCausalLM", "has a | b.")) == r"| `some` | SomeForCausalLM | Has a \| b. |"

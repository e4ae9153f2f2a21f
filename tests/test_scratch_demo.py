"""The demo of models from nothing: its text, and the yardstick beside it."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from demo.scratch import texts
from tuningfork.recipe.load import load_run_config

ROOT = Path(__file__).parents[1]


def _script() -> Any:
    """The demo as a module: it lies beside its text as a script does."""
    place = ROOT / "demo" / "scratch"
    spec = importlib.util.spec_from_file_location("scratch_demo", place / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(place))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(place))
    return module


run = _script()


def test_every_20th_module_is_held_out_and_each_lies_in_one_file(tmp_path: Path) -> None:
    train, held_out = texts.write(tmp_path)
    everything = [text for _, text in texts.modules()]
    rows = {
        path: [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()] for path in (train, held_out)
    }
    assert rows[held_out] == everything[::20]
    assert len(rows[train]) + len(rows[held_out]) == len(everything) > 300
    names = [name for name, _ in texts.modules()]
    assert names == sorted(names, key=Path) and "json/decoder.py" in names
    assert not any(part in name.split("/") for name in names for part in ("test", "site-packages"))


def test_gzip_is_measured_on_the_same_bytes(tmp_path: Path) -> None:
    rows = ["naïve " * 50, "another text", "another text"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    whole = "".join(rows).encode()
    assert texts.gzip_bits_a_byte(path) == 8 * len(gzip.compress(whole, 9)) / len(whole)


def test_held_out_text_is_the_beginning_of_each_file(tmp_path: Path) -> None:
    whole = texts.write(tmp_path / "whole")[1].read_text("utf-8").splitlines()
    cut = texts.write(tmp_path / "cut", 100)[1].read_text("utf-8").splitlines()
    assert [json.loads(row)["text"] for row in cut] == [json.loads(row)["text"][:100] for row in whole]


def test_each_twin_has_about_as_many_parameters_as_the_recipe() -> None:
    sizes = {}
    for name, changes in run.TWINS.items():
        settings = {"vocab_size": 320, **load_run_config(run.RECIPE, [], "demo").model.init, **changes}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
        sizes[name] = sum(weight.numel() for weight in model.parameters())
    assert {"dense", "nsa", "ccgqa"} <= sizes.keys()
    assert max(sizes.values()) < 1.05 * min(sizes.values()) and abs(sizes["dense"] - 1e6) < 1e5


def test_each_line_of_a_twin_stands_behind_its_name() -> None:
    stream = io.StringIO()
    named = run._Named("nsa", stream)
    print("one\ntwo", file=named)
    named.write("not yet a line")
    assert stream.getvalue() == "    nsa | one\n    nsa | two\n"


def test_the_page_has_a_line_and_samples_of_each_twin_and_gzip_beside() -> None:
    dense = run.Trained("dense", 1_000_000, 300, 90.4, 5600.0, 8.1, 2.75, ("be\x00fore", "after"))
    text = run.page([dense, replace(dense, name="other", after=2.5)], 2.381)
    lines = [line.split() for line in text.splitlines()]
    assert ["dense", "1,000,000", "300", "90", "5,600", "8.100", "2.750"] in lines
    assert ["other", "1,000,000", "300", "90", "5,600", "8.100", "2.500"] in lines
    assert ["gzip", "-9", "2.381"] in lines
    assert text.count("be·fore") == 2 and "other, after:" in text


def test_the_recipe_is_of_a_million_parameters_and_takes_the_demos_flags() -> None:
    flags = ["--data.train=t.jsonl", "--data.eval=h.jsonl", "--train.max_steps=7"]
    config = load_run_config(ROOT / "recipes" / "scratch-tiny.yaml", flags, "demo/scratch/run.py")
    assert isinstance(config.model.init, dict) and config.train.max_steps == 7
    width, hidden, layers = (config.model.init[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    size = 320 * width + layers * (4 * width**2 + 3 * width * hidden + 2 * width) + width
    assert 0.9e6 < size < 1.1e6

"""The demo of models from nothing: its text, and the yardstick beside it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from demo.scratch import texts
from tuningfork.recipe.load import load_run_config

ROOT = Path(__file__).parents[1]


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


def test_the_recipe_is_of_a_million_parameters_and_takes_the_demos_flags() -> None:
    flags = ["--data.train=t.jsonl", "--data.eval=h.jsonl", "--train.max_steps=7"]
    config = load_run_config(ROOT / "recipes" / "scratch-tiny.yaml", flags, "demo/scratch/run.py")
    assert isinstance(config.model.init, dict) and config.train.max_steps == 7
    width, hidden, layers = (config.model.init[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    size = 320 * width + layers * (4 * width**2 + 3 * width * hidden + 2 * width) + width
    assert 0.9e6 < size < 1.1e6

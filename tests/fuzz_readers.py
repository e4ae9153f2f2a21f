"""Damaged preference files of every kind, fed to the whole way from file to tokens.

    python -m tests.fuzz_readers --seconds 600 [--seed 0] [--start 0] [--keep folder]

A file may be used, or be refused by an error of ours that names it. Anything else is a finding: it is printed with the
input, which is kept, and the exit status is 1. A case depends on its seed and number alone: --start goes back to it.
"""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import io
import json
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tests.data.tiny_tokenizers import CHATML, INST, REWRITING, byte_bpe
from tuningfork.data.config import DataConfig
from tuningfork.data.prepare import prepare_examples
from tuningfork.errors import DataError, TuningforkError

VOCAB = 260
SURROGATE = re.compile("[\ud800-\udfff]")
SLOW = 10.0  # seconds for one small file; longer is a finding

Row = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """What went wrong with which case; `key` is the same for the same fault."""

    case: int
    file: Path
    key: str
    report: str


# ---- valid rows, in every format


def pair(rng: random.Random) -> Row:
    return {"prompt": text(rng), "chosen": text(rng), "rejected": text(rng)}


def messages(rng: random.Random) -> Row:
    return {"prompt": [turn("user", rng)], "chosen": [turn("assistant", rng)], "rejected": answers(rng)}


def conversations(rng: random.Random) -> Row:
    start = [turn("system", rng), turn("user", rng)]
    return {"chosen": [*start, *answers(rng)], "rejected": [*start, turn("assistant", rng)]}


def transcripts(rng: random.Random) -> Row:
    start = f"\n\nHuman: {text(rng)}\n\nAssistant:"
    return {"chosen": f"{start} {text(rng)}", "rejected": f"{start} {text(rng)}"}


def sharegpt(rng: random.Random) -> Row:
    said = [{"from": "human", "value": text(rng)}]
    return {"conversations": said, "chosen": {"from": "gpt", "value": text(rng)}, "rejected": gpt(rng)}


def labelled(rng: random.Random) -> Row:
    return {"input": text(rng), "output_1": text(rng), "output_2": text(rng), "label": rng.choice((1, 2, "1", None))}


def instruction(rng: random.Random) -> Row:
    asked = {"instruction": text(rng), "input": rng.choice(("", text(rng))), "history": rng.choice(([], [["a", "b"]]))}
    return {**asked, "chosen": text(rng), "rejected": text(rng), "system": text(rng)}


def judged(rng: random.Random) -> Row:
    fields = rng.choice(
        (
            ("prompt", "response_1", "response_2", "preference_strength"),
            ("context", "response1", "response2", "overall_preference"),
            ("prompt", "response_0", "response_1", "better_response_id"),
            ("history", "human_ref_A", "human_ref_B", "labels"),
        )
    )
    return dict(zip(fields, (text(rng), text(rng), text(rng), rng.choice((-2, 0, 1, None))), strict=True))


def repeated(rng: random.Random) -> Row:
    """Answers that hold the prompt, as text, as messages, or as the JSON text of messages."""
    prompt = rng.choice((text(rng), f"\n\nHuman: {text(rng)}\n\nAssistant:"))
    if rng.random() < 0.5:
        return {"prompt": prompt, "chosen": f"{prompt} {text(rng)}", "rejected": f"{prompt} {text(rng)}"}
    written = rng.choice((list, json.dumps))
    both = {key: written([{"role": "user", "content": prompt}, *answers(rng)]) for key in ("chosen", "rejected")}
    return {rng.choice(("prompt", "question", "input")): prompt, **both}


def message_lists(rng: random.Random) -> Row:
    start = [{**turn("user", rng), "content": [{"type": "text", "value": text(rng)}], "loss_weight": 0.0}]
    return {"chosen_messages": [*start, *answers(rng)], "rejected_messages": [*start, turn("assistant", rng)]}


def openai(rng: random.Random) -> Row:
    arguments = rng.choice(("{}", '{"x": "\\ud800"}', "[", {"x": None}))
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    given = {"messages": [turn("user", rng)], "tools": rng.choice(([], [{"name": "f"}], "[]"))}
    return {"input": given, "preferred_output": [rng.choice((call, gpt(rng)))], "non_preferred_output": answers(rng)}


def single(rng: random.Random) -> Row:
    return {"prompt": text(rng), "completion": text(rng), **rng.choice(({}, {"label": rng.choice((True, False, 1))}))}


def ranking(rng: random.Random) -> Row:
    found: list[Any] = [text(rng) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.3:
        found = [{"answer": answer, "rank": rng.randint(1, 9)} for answer in found]
    return {"prompt": text(rng), "answers": found, **rng.choice(({}, {"scores": [rng.random() for _ in found]}))}


def conversation(rng: random.Random) -> Row:
    return {"messages": [turn("user", rng), *answers(rng)], "weight": rng.choice((1, 0.5, None)), "tools": odd(rng)}


def document(rng: random.Random) -> Row:
    return {"text": text(rng), "chat_template_kwargs": rng.choice((None, {}, "{}", odd(rng)))}


def after_messages(rng: random.Random) -> Row:
    """A prompt as messages with two answers, or a whole conversation with another end, or with a label."""
    start: list[Row] = [turn(rng.choice(OTHERS), rng), turn("user", rng)][rng.randint(0, 1) :]
    end, written = rng.choice((spoken, dict_parts, called))(rng), rng.choice((list, list, json.dumps))
    whole = {"messages": written([*start, end]), **rng.choice(({}, {"system": text(rng)}))}
    return rng.choice(
        (
            {"messages": written(start), "chosen": end, "rejected": rng.choice((gpt(rng), text(rng)))},
            {**whole, "rejected_response": rng.choice((text(rng), answers(rng)))},
            {**whole, "rejected_messages": [*start, spoken(rng)], "rejected_tools": rng.choice((None, "null", "[]"))},
            {**whole, "label": rng.choice((True, False, 1))},
        )
    )


def objects(rng: random.Random) -> Row:
    """Answers that are objects with messages, as such or as text, and tools that may be nothing in words."""
    start, key = [turn("user", rng)], rng.choice(("messages", "conversations", "conversation"))
    tools = {"tools": rng.choice(("null", "[]", "", None, [{"name": "f"}]))}
    written = rng.choice((json.dumps, str, dict))
    both = {name: written({key: [*start, called(rng)], **tools}) for name in ("chosen", "rejected")}
    return {**both, **rng.choice(({}, tools))}


def ranked(rng: random.Random) -> Row:
    """Completions with ranks, or responses under longer names."""
    items = [{"rank": rng.choice((0, 1, 2, "1", None)), "completion": answers(rng)} for _ in range(rng.randint(1, 3))]
    context = rng.choice((text(rng), [turn("user", rng)]))
    both = {"chosen_response": text(rng), "rejected_response": text(rng), "rejected_system": rng.choice((None, "yes"))}
    asked = rng.choice(({"prompt": text(rng)}, {"instruction": text(rng), "input": text(rng)}))
    return rng.choice(({"context": context, "completions": items}, {**asked, **both, "system": text(rng)}))


def own_names(rng: random.Random) -> Row:
    """Fields and roles that only data.columns and data.roles tell."""
    said = {"role": "customer", "content": text(rng)}
    return {"asked": rng.choice((text(rng), [said])), "better": [turn("agent", rng)], "worse": text(rng)}


def spoken(rng: random.Random) -> Row:
    return turn(rng.choice(("assistant", "gpt", "model", "bot")), rng)


def dict_parts(rng: random.Random) -> Row:
    """An assistant's turn in parts."""
    kinds = ("reasoning", "thinking", "text", "tool_call", "think", "tool_use", "output_text")
    call: Row = {"name": "f", "arguments": rng.choice(({}, "{}", "["))}
    parts: list[Row] = [
        {"type": kind, rng.choice((kind, "text", "value")): call if kind == "tool_call" else text(rng)}
        for kind in (kinds if rng.random() < 0.5 else rng.choices(kinds, k=2))
    ]
    return {"role": "assistant", "content": parts}


def called(rng: random.Random) -> Row:
    """A call as a turn of its own, or one within the words of a message."""
    call = rng.choice(('{"name": "f", "arguments": {}}', {"name": "f", "arguments": "{}"}, '[{"name": "f"}]', "f()"))
    role = rng.choice(("tool_call", "function_call"))
    return rng.choice(({"role": role, "content": call}, {"from": role, "value": call}, turn(rng.choice(OTHERS), rng)))


OTHERS = ("environment", "function", "developer", "human", "tool", "ipython", "system", "stranger")


def other(rng: random.Random) -> Row:
    """Fields of several formats, with values of any kind."""
    names = (
        "text",
        "messages",
        "completion",
        "label",
        "answers",
        "scores",
        "instruction",
        "input",
        "output_1",
        "tools",
        "rejected_response",
        "kto_tag",
        "completions",
        "asked",
    )
    return {name: rng.choice([text, answers, odd])(rng) for name in rng.sample(names, 3)}


def gpt(rng: random.Random) -> Row:
    return {"from": "gpt", "value": text(rng)}


def turn(role: str, rng: random.Random) -> Row:
    return {"role": role, "content": text(rng)}


def answers(rng: random.Random) -> list[Row]:
    roles = ("assistant", "user") * rng.randint(0, 1)
    return [turn(role, rng) for role in (*roles, "assistant")]


def text(rng: random.Random) -> str:
    return rng.choice(
        ("yes", "no", "Why?", "é\U0001f600", " ", "<|im_end|>", "a\u2028b\x85c", "2020-01-01", "12", "</s>")
    )


FORMATS: tuple[Callable[[random.Random], Row], ...] = (
    *(pair, messages, conversations, transcripts, sharegpt, labelled, instruction, message_lists, openai),
    *(single, ranking, conversation, document, judged, repeated, after_messages, objects, ranked, own_names),
)


def rows(rng: random.Random) -> list[Row]:
    format = rng.choice(FORMATS)
    return [(format if rng.random() < 0.9 else rng.choice((*FORMATS, other)))(rng) for _ in range(rng.randint(1, 5))]


# ---- damage to values


def odd(rng: random.Random) -> Any:
    """A value that is not what a field should hold."""
    return rng.choice(
        (
            *(None, True, 0, -1, 1.5, 10**400, 1e999, float("nan"), "", "\ud800", "\udfff x", "\x00", "x" * 100_000),
            *([], {}, [[]], [None], {"role": "user"}, {"role": 3, "content": []}, {"content": "x"}, [{"from": "gpt"}]),
            *({"role": "tool", "content": "x"}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}),
            *({"": ""}, {"a": {"b": {"c": None}}}, ["a", 1, {}], {"role": "assistant", "content": "x", "weight": 0}),
            nested(rng.choice((10, 150))),
        )
    )


def nested(depth: int) -> Any:
    value: Any = "x"
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value within rows, as deep as valid rows go."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


def damaged(made: list[Row], rng: random.Random) -> list[Any]:
    """The rows with a few of their values replaced, removed or added to, in place."""
    for _ in range(rng.choice((1, 1, 1, 3))):
        container, key = rng.choice(list(places(made)))
        what = rng.randrange(8)
        if what >= 4 and isinstance(container[key], str):
            container[key] += rng.choice(
                ("\ud800", "\udc00\ud800", "\0", "\ufeff", "\U0010ffff", "\u202e", "\n\nHuman: x")
            )
        elif what == 0 and isinstance(container, dict):
            del container[key]
        elif what == 1 and isinstance(container, dict):
            container[rng.choice(("Prompt", "chosen ", "weight", "system", "images", "\ud800", "from"))] = odd(rng)
        else:
            container[key] = odd(rng)
        if not any(True for _ in places(made)):
            break
    return made


# ---- files


def json_lines(made: list[Any], rng: random.Random) -> str:
    return "".join(dumped(row) + "\n" for row in made)


def json_array(made: list[Any], rng: random.Random) -> str:
    return dumped(made, indent=rng.choice((None, 1)))


def dumped(value: Any, indent: int | None = None) -> str:
    """JSON in plain letters; half of a surrogate pair can be written as an escape only."""
    said = json.dumps(value, indent=indent, ensure_ascii=False)
    return json.dumps(value, indent=indent) if SURROGATE.search(said) else said


def spoiled(said: str, rng: random.Random) -> str:
    """Text that is no longer what a JSON writer makes."""
    depth, digits = rng.choice((900, 5_000, 100_000)), rng.choice((20, 400, 5_000))
    lines = said.split("\n")
    strays = ("", "  ", "null", "[]", "{}", "3", '"x"', "{", "]", "NaN", "Infinity", "// x", '{"chosen": 1e999}')
    lines.insert(rng.randint(0, len(lines)), rng.choice(strays))
    return rng.choice(
        (
            said.replace("{", '{"chosen": "x", ', 1),  # a field given twice
            said.replace('"yes"', "[" * depth + "]" * depth),
            said.replace('"no"', "9" * digits),
            said.replace('"no"', '"' + "x" * 300_000 + '"'),
            said.replace("no", rng.choice(("\0", "\t", "\\ud800", "\\u0000", "\\x41", "\x1e", "\ufeff"))),
            said.replace("\n", rng.choice(("\r\n", "\r", "\n\n", ",\n", " ", "\x0b", "\u2028"))),
            said.replace('"', "'"),
            "\n".join(lines),
            said.rstrip("\n"),
            rng.choice((" \n", "[", "\ufeff\ufeff", ",")) + said,
            said + rng.choice(("]", ",", "[]", "\x1a", "\0")),
            f'{{"rows": {said}}}',
        )
    )


def encoded(said: str, rng: random.Random) -> bytes:
    """Text as bytes, in something else than UTF-8 that editors write."""
    codec = rng.choice(("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "shift_jis"))
    return said.encode(codec, "replace")


def parquet(made: list[Any], rng: random.Random, strange: bool) -> bytes:
    """A table of the rows; a strange one may have columns of any type, a name twice, or no rows."""
    try:
        table = pa.Table.from_pylist([row for row in made if isinstance(row, dict)])
    except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError):
        table = pa.table({"chosen": ["a"], "rejected": ["b"]})  # types that no column can hold together
    if strange and rng.random() < 0.6 and table.num_rows and table.num_columns:
        table = table.set_column(
            rng.randrange(table.num_columns), rng.choice(NAMES), strange_column(table.num_rows, rng)
        )
    if strange and rng.random() < 0.1:
        table = table.append_column(rng.choice(NAMES), strange_column(table.num_rows, rng))  # a name given twice
    out = io.BytesIO()
    try:
        compression = rng.choice(("snappy", "gzip", "zstd", "none"))
        pyarrow.parquet.write_table(
            table.slice(0, 0 if strange and rng.random() < 0.1 else None), out, compression=compression
        )
    except (pa.ArrowException, ValueError, TypeError):
        return b"PAR1PAR1"
    return out.getvalue()


NAMES = ("prompt", "chosen", "rejected", "conversations", "messages", "meta", "asked", "", "a.b")
COLUMNS = {"asked": "prompt", "better": "chosen", "worse": "rejected"}
ROLES = {"customer": "user", "agent": "assistant"}


def strange_column(n: int, rng: random.Random) -> pa.Array:
    kinds: tuple[tuple[Any, pa.DataType], ...] = (
        (b"\xff\xfe", pa.binary()),
        ("x", pa.large_string()),
        ("x", pa.dictionary(pa.int32(), pa.string())),
        (None, pa.null()),
        (1, pa.timestamp("ns", "UTC")),
        (10**18, pa.date64()),
        (2**64 - 1, pa.uint64()),
        (float("nan"), pa.float16()),
        ([("role", "x")], pa.map_(pa.string(), pa.string())),
        ([[1.5]], pa.list_(pa.list_(pa.float64()))),
        ({"role": "assistant", "content": None}, pa.struct([("role", pa.string()), ("content", pa.string())])),
        ([1, 2], pa.list_(pa.int8(), 2)),
        (True, pa.bool_()),
        (b"yes", pa.binary()),
        (b"ab", pa.binary(2)),
        ([b"yes", None], pa.list_(pa.large_binary())),
        ([("chosen", [("role", "x")])], pa.map_(pa.string(), pa.map_(pa.string(), pa.binary()))),
        ([(1, None)], pa.map_(pa.int32(), pa.string())),
        ([("k", "x"), ("k", "y")], pa.map_(pa.string(), pa.string())),
        ({"bytes": b"\xff", "path": None}, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        (1, pa.duration("s")),
    )
    value, kind = rng.choice(kinds)
    return pa.array([np.float16(value) if kind == pa.float16() else value] * n, kind)


def bad_utf8(data: bytes) -> bytes:
    """A string column in a table is not checked when it is written; here its text is broken."""
    return data.replace(b"yes", b"y\xffs").replace(b"Why?", b"\xed\xa0\x80?")


def struck(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut out, put in, cut short, doubled."""
    for _ in range(rng.choice((1, 1, 3))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 4, 64))
        before, there, behind = data[:at], data[at : at + length], data[at + length :]
        data = rng.choice(
            (
                before + bytes(byte ^ (1 << rng.randrange(8)) for byte in there) + behind,
                before + behind,
                before
                + rng.choice((rng.randbytes(length), b"\0" * length, b"\xef\xbb\xbf", b"\n", b"\x1a"))
                + there
                + behind,
                before,
                before + there * 2 + behind,
                bad_utf8(data),
            )
        )
    return data


def file_of(case: int, seed: int, folder: Path) -> tuple[Path, DataConfig, str]:
    """Write the file of a case; also how it is read: the settings and a chat template.

    Most files are damaged in one way only, for the first damage that is met hides the others.
    """
    rng = random.Random(f"{seed}:{case}")
    damage = rng.choice(("values", "values", "values", "values", "text", "encoding", "bytes", "gzip", "suffix", "all"))
    suffix, zipped = rng.choice((".jsonl", ".json", ".parquet")), damage == "gzip" or rng.random() < 0.1
    made: list[Any] = rows(rng)
    if damage in ("values", "all"):
        made = damaged(made, rng)
    if suffix == ".parquet":
        data = parquet(made, rng, strange=damage in ("values", "all"))
    else:
        said = (json_array if suffix == ".json" and rng.random() < 0.7 else json_lines)(made, rng)
        if damage in ("text", "all"):
            said = spoiled(said, rng)
        data = encoded(said, rng) if damage in ("encoding", "all") else said.encode("utf-8", "surrogatepass")
    if damage in ("bytes", "all"):
        data = struck(data, rng)
    if zipped:
        data = gzip.compress(data, mtime=0)
    if damage == "gzip":
        data = rng.choice((struck(data, rng), data + b"tail", data + gzip.compress(b"\n{", mtime=0), data[:18]))
    if damage == "suffix":
        suffix, zipped = rng.choice((".jsonl", ".json", ".parquet")), rng.random() < 0.5
    path = folder / f"case-{case}{suffix}{'.gz' if zipped else ''}"
    path.write_bytes(data)
    config = DataConfig(template=rng.choice(("chat", "chat", "none")), max_length=rng.choice((2, 40, 2048, 2048)))
    if rng.random() < 0.5:
        config = replace(config, columns=rng.choice((COLUMNS, dict(list(COLUMNS.items())[:1]))), roles=ROLES)
    return path, config, rng.choice((CHATML, INST, REWRITING))


# ---- the run


def fuzz(
    folder: Path, seed: int, start: int = 0, cases: int | None = None, seconds: float = 0.0
) -> tuple[int, list[Finding]]:
    """Run so many cases, or so many seconds. Returns how many cases ran and the first finding of each kind."""
    tokenizer = byte_bpe(adds_bos=True)
    begun, case, found = time.monotonic(), start, dict[str, Finding]()
    while case < start + cases if cases is not None else time.monotonic() - begun < seconds:
        path, config, tokenizer.chat_template = file_of(case, seed, folder)
        finding = tried(case, path, tokenizer, config)
        if finding is None or finding.key in found:
            path.unlink()
        else:
            found[finding.key] = finding
            print(f"case {case}, {path}, {config}\n{finding.report}\n", flush=True)
        case += 1
    return case - start, list(found.values())


def tried(case: int, path: Path, tokenizer: Any, config: DataConfig) -> Finding | None:
    begun = time.monotonic()
    try:
        used, report = prepare_examples(path, tokenizer, config, VOCAB)
    except DataError as error:
        if str(path) not in str(error):
            return Finding(
                case, path, f"unnamed {str(error)[:30]}", f"a DataError that does not name the file: {error}"
            )
    except TuningforkError:
        pass
    except (Exception, pa.ArrowException) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Finding(case, path, f"{type(error).__name__} {where.filename}:{where.lineno}", traceback.format_exc())
    else:
        ids = [i for example in used for answer in example.answers for i in (*example.prompt_ids, *answer.ids)]
        if report.rows_read != report.used + sum(report.dropped.values()) or report.used != len(used):
            return Finding(case, path, "account", f"the account does not add up: {report}")
        if not all(0 <= i < VOCAB for i in ids):
            return Finding(case, path, "ids", f"ids out of range: {ids}")
    took = time.monotonic() - begun
    return Finding(case, path, "slow", f"took {took:.1f} s") if took > SLOW else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Feed damaged preference files to the reader.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs of findings")
    args = parser.parse_args()
    faulthandler.enable()  # a library that crashes leaves its input as the last file of the folder
    folder = args.keep or Path(tempfile.mkdtemp(prefix="fuzz-readers-"))
    folder.mkdir(parents=True, exist_ok=True)
    ran, found = fuzz(folder, args.seed, args.start, seconds=args.seconds)
    print(f"{ran} cases, {len(found)} kinds of finding{f', inputs in {folder}' if found else ''}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()

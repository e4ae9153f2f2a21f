"""From a file of conversations to tokens and packs, beside TRL's preparation of the same file; JSON lines. No GPU.

The rows of --data, in any form, are written as conversations once (prompt, chosen and rejected as messages), repeated
until there are --rows of them, each time with another word in front, so that no two are alike. Then every way reads
that file, in a process of its own:

    tuningfork      read, printed by the chat template, encoded, checked, kept; with one process, and with one for each
                    core. "kept": the same again, from the token cache
    trl             `datasets` reads the file, DPOTrainer prepares it, with one process and with one for each core;
                    its own caches are empty. Needs `pip install trl`

    seconds         from the file to tokens that can be trained on, imports not counted
    rows_s          rows a second
    pack_seconds    from there to full packs
    peak_gib        of memory, of the largest process

    python -m bench.preparation --data pairs.jsonl --tokenizer ./smollm2
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tuningfork.data.config import DataConfig
from tuningfork.data.examples.infer_format import open_table
from tuningfork.data.examples.values import Unusable
from tuningfork.records import Example, Message

# More is imported where it is needed: processes that make tokens import this file again, and PyTorch takes seconds.

COLUMNS = {
    "trainer": "trainer",
    "workers": "processes",
    "kept": "kept",
    "rows": "rows",
    "used": "used",
    "seconds": "seconds",
    "rows_s": "rows/s",
    "pack_seconds": "packing",
    "peak_gib": "peak GiB",
    "times": "x TRL",
    "status": "status",
}
MAX_LENGTH = 1024
TOKENS = 16384


def write_conversations(source: str, path: Path, rows: int) -> None:
    """The pairs of a file as conversations, again and again until there are `rows`."""
    pairs: list[Example] = []
    found, _, reader = open_table(source, as_text=False)
    for place, row in found:
        with suppress(Unusable):
            pairs.append(reader(place, row).example)
    pairs = [pair for pair in pairs if len(pair.answers) == 2 and isinstance(pair.prompt, tuple)]

    def said(turns: Any, word: str = "") -> list[dict[str, str]]:
        return [{"role": t.role, "content": f"{word}{t.content}"} for t in turns if isinstance(t, Message)]

    with path.open("w") as file:
        for number in range(rows):
            pair, turn = pairs[number % len(pairs)], number // len(pairs)
            row = {"prompt": said(pair.prompt, f"{turn} " if turn else "")}
            row |= {name: said(answer) for name, answer in zip(("chosen", "rejected"), pair.answers, strict=True)}
            file.write(json.dumps(row) + "\n")


def ours(path: str, tokenizer: str, workers: int, cache: str) -> dict[str, Any]:
    from tuningfork.data.packing.pack import PackLimits, pack_examples, portions_of, split_fitting
    from tuningfork.data.prepare import prepare_examples
    from tuningfork.models.hf.load import load_tokenizer

    loaded, config = load_tokenizer(tokenizer), DataConfig(max_length=MAX_LENGTH, workers=workers)
    start = time.perf_counter()
    examples, report = prepare_examples(path, loaded, config, 10**9, cache=Path(cache))
    seconds = time.perf_counter() - start
    fitting, _ = split_fitting(examples, TOKENS, "prompt")
    start = time.perf_counter()
    limits = PackLimits.plan(TOKENS, "prompt", compiled=True)
    pack_examples(portions_of(fitting, limits), limits)
    return {"rows": report.rows_read, "used": report.used, "seconds": seconds, "packed": time.perf_counter() - start}


def trl(path: str, tokenizer: str, workers: int, cache: str) -> dict[str, Any]:
    os.environ["HF_DATASETS_CACHE"] = cache
    import datasets
    from trl import DPOConfig, DPOTrainer

    from tuningfork.models.hf.load import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    options = DPOConfig(
        output_dir=cache, max_length=MAX_LENGTH, dataset_num_proc=workers if workers > 1 else None, bf16=False
    )
    start = time.perf_counter()
    read = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
    # Preparing asks the trainer for its tokenizer and nothing else, so no model is needed.
    prepared = DPOTrainer._prepare_dataset(SimpleNamespace(_tokenizer=loaded), read, loaded, options, "train")
    return {"rows": len(read), "used": len(prepared), "seconds": time.perf_counter() - start}


def measured(way: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What a way gives in a process of its own, with its peak memory; or how it failed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, way, args))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = {"status": "failed: its process ended"}
    process.join()
    return found


def _measure(pipe: Any, way: Callable[..., dict[str, Any]], args: tuple) -> None:
    try:
        found = way(*args)
        used = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        pipe.send({"status": "ok", "peak_gib": used / 2**20, **found})
    except Exception as error:
        from bench.output import failure

        pipe.send({"status": failure(error)})


def main(argv: list[str] | None = None) -> None:
    from bench.output import emit, environment, parser, rounded, table

    options = parser(__doc__)
    options.add_argument("--data", required=True, help="a file of pairs, in any form")
    options.add_argument("--tokenizer", required=True, help="a folder with a tokenizer and a chat template")
    options.add_argument("--rows", type=int, default=20_000)
    options.add_argument("--workers", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    args = options.parse_args(argv)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "conversations.jsonl"
        write_conversations(args.data, path, args.rows)
        about = {"bench": "preparation", "megabytes": round(path.stat().st_size / 1e6, 1), **environment("trl")}
        caches = (str(Path(folder) / f"cache-{number}") for number in count())
        for workers in args.workers:
            cache = next(caches)
            runs = [("tuningfork", ours, cache, "no"), ("tuningfork", ours, cache, "yes")]
            if find_spec("trl"):
                runs.append(("trl", trl, next(caches), "no"))
            for trainer, way, where, kept in runs:
                found = measured(way, str(path), args.tokenizer, workers, where)
                lines.append({"trainer": trainer, "workers": workers, "kept": kept, **_line(found), **about})
    best = min((line["seconds"] for line in lines if line["trainer"] == "trl" and line["seconds"]), default=None)
    for line in lines:
        line["times"] = rounded(best / line["seconds"]) if best and line["seconds"] else None
        emit(line, args.out)
    print(table(lines, COLUMNS))
    if not find_spec("trl"):
        print("not installed: trl")


def _line(found: dict[str, Any]) -> dict[str, Any]:
    from bench.output import rounded

    seconds = found.get("seconds")
    return {
        "rows": found.get("rows"),
        "used": found.get("used"),
        "seconds": rounded(seconds),
        "rows_s": rounded(found["rows"] / seconds, 0) if seconds else None,
        "pack_seconds": rounded(found.get("packed")),
        "peak_gib": rounded(found.get("peak_gib")),
        "status": found["status"],
    }


if __name__ == "__main__":
    main()

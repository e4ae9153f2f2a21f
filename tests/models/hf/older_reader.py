"""Read model folders with whatever transformers Python finds first: python older_reader.py JOBS.json FOUND.json

A job is a folder, with sequences of token ids to score and a conversation to print; it needs nothing of this project.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def log_probs(folder: str, sequences: list[tuple[list[int], list[int]]]) -> list[float]:
    """Of each answer behind its prompt, summed; in the dtype and with the settings that config.json says."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    sums = []
    for prompt, answer in sequences:
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logps = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        rows = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        sums.append(logps[rows, ids[0, rows + 1]].double().sum().item())
    return sums


def read(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        if "sequences" in job:
            found["log_probs"] = log_probs(job["folder"], job["sequences"])
        if "turns" in job:
            tokenizer = transformers.AutoTokenizer.from_pretrained(job["folder"])
            found["text"] = tokenizer.apply_chat_template(job["turns"], tokenize=False)
            found["ids"] = tokenizer(found["text"]).input_ids
            found["back"] = tokenizer.decode(found["ids"], skip_special_tokens=True)
            found["special"] = sorted(tokenizer.all_special_tokens)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs, answer = (Path(path) for path in sys.argv[1:])
    results = {name: read(job) for name, job in json.loads(jobs.read_text()).items()}
    answer.write_text(json.dumps({"version": transformers.__version__, "jobs": results}))

"""Ask a model folder something, with plain transformers: what the demo exports works without tuningfork.

python demo/ask.py runs/demo/model "What does a clown do?" "What is a zoo?"
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads sleep: much faster beside other busy programs
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 48


def answers(folder: Path, prompts: list[str]) -> list[str]:
    """Greedy answers of the model in a folder, in the order of the prompts; one cut off at MAX_NEW_TOKENS ends in …"""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).eval()
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    ).to(device)
    with torch.inference_mode():
        outputs = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    answered = outputs[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(answered, skip_special_tokens=True)
    ended = (answered == tokenizer.eos_token_id).any(dim=1).tolist()
    return [
        text.strip() if end else text.rstrip("\ufffd").strip() + "…" for text, end in zip(texts, ended, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model folder something.")
    parser.add_argument("folder", type=Path, help="a Hugging Face folder, such as runs/demo/model")
    parser.add_argument("prompts", nargs="+", help="each is asked on its own", metavar="prompt")
    args = parser.parse_args()
    if not (args.folder / "config.json").is_file():
        parser.error(f"{args.folder} holds no model: it has no config.json. `make demo` makes runs/demo/model.")
    for prompt, answer in zip(args.prompts, answers(args.folder, args.prompts), strict=True):
        print(f"{prompt}\n    {answer}")


if __name__ == "__main__":
    main()

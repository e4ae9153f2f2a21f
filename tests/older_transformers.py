"""The last transformers before version 5, in a folder of its own: many servers read model folders as it does.

It shares torch, numpy and most else with this environment; only what must be older, or is not here, lies there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.real_tokenizers import CACHE, Unavailable, fetching, missing, run_client

RELEASE = "transformers==4.57.6"
_NEEDS = ("tokenizers==0.22.2", "huggingface_hub==0.36.2", "requests", "urllib3", "certifi", "charset_normalizer")
_READER = Path(__file__).parent / "models" / "hf" / "older_reader.py"


def read_by_older_transformers(jobs: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """What `tests/models/hf/older_reader.py` finds of each job, all in one process. Raises Unavailable."""
    environment = {**os.environ, "PYTHONPATH": str(_fetched()), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    (scratch / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-P", str(_READER), "jobs.json", "found.json"]
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads((scratch / "found.json").read_text())


def _fetched() -> Path:
    """The folder that Python is to look for packages in first, fetched now if need be; it is whole or absent."""
    folder = CACHE / RELEASE.replace("==", "-")
    if folder.is_dir():
        return folder
    if RELEASE in missing:
        raise Unavailable(missing[RELEASE])
    with fetching(folder) as aside:
        if aside is None:
            return folder
        install = ("pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "0", "--no-deps")
        binary = ("--only-binary", ":all:", "--target", "packages")
        try:
            run_client([sys.executable, "-m", *install, *binary, RELEASE, *_NEEDS], aside, RELEASE, "pip")
        except Unavailable as error:
            missing[RELEASE] = str(error)
            raise
        (aside / "packages").rename(folder)
    return folder

"""A model folder laid into a cache as the hub's library does: a reference, a snapshot by commit, links to blobs."""

from __future__ import annotations

from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_in_cache(cache: Path, name: str, model: Path, commit: str = COMMIT) -> Path:
    """Copy a folder's files there as `main` of ``owner/name``; returns the snapshot."""
    place = cache / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / commit
    for folder in (snapshot, place / "blobs", place / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(sorted(path for path in model.iterdir() if path.is_file())):
        blob = place / "blobs" / f"{commit[:8]}{number:032x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (place / "refs" / "main").write_text(commit)
    return snapshot

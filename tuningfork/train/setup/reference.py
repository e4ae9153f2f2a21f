"""The reference of a run: which model it is, by content, and its log-probs of every example that the run uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.token_table import Subset
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.distributed.rows import rows_to_count
from tuningfork.models.policy import Policy
from tuningfork.recipe.run_config import RunConfig
from tuningfork.records import TokenExample
from tuningfork.reference.build import check_rescored, fill, to_rescore
from tuningfork.reference.code import model_code_digest
from tuningfork.reference.entries import open_entry
from tuningfork.reference.fingerprint import fingerprint, tensors_of, text_digest, weights_digest
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.console import Console
from tuningfork.train.session import Session
from tuningfork.train.setup.device import device_name, dtype_name


def open_reference(
    config: RunConfig,
    session: Session,
    examples: Sequence[TokenExample],
    limits: PackLimits,
    console: Console,
    held_out: Sequence[TokenExample] = (),
    weights: str | None = None,
) -> ReferenceStore:
    """The entry of the reference cache that is the *starting* model's, filled for these examples and the held-out ones.

    `weights` is the hash of its weights, where that is known already. Some of what the entry had before is scored
    again, and must come to the same bits. Raises ReferenceMismatch.
    """
    policy, ranks = session.policy, session.ranks
    facts = fingerprint(
        weights or starting_weights(policy, console, session.ranks),
        config=policy.config_digest(),
        dtype=dtype_name(policy.dtype),
        **{f"{kind} kernel": name for kind, name in policy.kernels.names.items()},
        compiled=str(session.compiled),
        device=device_name(policy.device),
        threads=str(torch.get_num_threads() if policy.device.type == "cpu" else "any"),
        transformers=transformers.__version__,
        **{"model code": model_code_digest(policy.model)},
        **({"float32 products": "TF32"} if config.model.tf32 else {}),
        **({"tensor": str(ranks.tensor)} if ranks.tensor > 1 else {}),  # sums of parts have other bits
    )
    with console.startup.time("reference"):
        with ranks.first_of_each_node():
            store = open_entry(Path(config.reference.cache), facts, console.print)
        parts = [Subset([examples]), Subset([held_out])]
        again = Subset([parts[part].take(places) for part, places in to_rescore(store, parts)])
        if again:
            console.print(
                f"{len(again):,} of the cached examples, some of every file, are scored again: log-probs of other code "
                "or of another machine would differ, and spoil every margin"
            )
            with console.phase("checking the reference cache", total=len(again), unit="examples") as phase:
                check_rescored(
                    store, session.packs(again, limits), session.scorer.score, session.counting(phase.advance)
                )
        missing = store.missing(Subset(parts))
        ranks.barrier()  # each has seen what is there before one adds to it
        if missing:
            with console.phase("scoring the reference", total=len(missing), unit="examples") as phase:
                packs, counting = session.packs(missing, limits), session.counting(phase.advance)
                fill(store, packs, session.scorer.score, counting, keep=ranks.speaks)
            if ranks.size > 1:  # each has written its own
                ranks.barrier()
                store.reopen()
    return store


def starting_weights(policy: Policy, console: Console, ranks: Ranks = ONE_PROCESS) -> str:
    """The hash of the weights as they are: to be asked for before they move, by all ranks together."""
    if policy.spread is not None:
        policy.spread.release()
    with console.stage("weights digest", "hashing the weights"):
        return weights_digest(tensors_of(policy.model), rows_to_count, ranks.all)


def model_digest(policy: Policy, weights: str) -> str:
    """A content hash of a model: of its weights, by their own hash, and of what its config decides of its numbers."""
    return text_digest(f"{weights} {policy.config_digest()}")

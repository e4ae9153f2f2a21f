"""What two public reports say of their models, claim by claim, and what we ask of ourselves: see bench.scratch."""

from __future__ import annotations

from typing import Any, NamedTuple

SPREAD_MOST = 1.35  # times: beyond it tokens/s fall with the length


class Claim(NamedTuple):
    """A row of a report: what it says, what we ask of ourselves, and the unit of what is measured here."""

    row: str
    report: str
    target: str
    unit: str


CLAIMS = {
    "spread": Claim("N3", "15", f"<= {SPREAD_MOST}", "x"),
    "twin": Claim("N3", "-", "NSA >= 1.1 at 32k", "x"),
    "made": Claim("N7", "'dominates'", "<= 2 for m7c-125m", "s"),
    "moved": Claim("N7", "'dominates'", "<= 1 for m7c-125m", "s"),
    "start": Claim("N7", "'dominates'", "first step <= 90 in all", "s"),
    "memory": Claim("H5", "0.07 of a micro model", "block <= 0.15", "of none"),
    "speed": Claim("H5", "0.7", "block >= 0.75", "of none"),
    "bits": Claim("H5", "difference 0", "block, on a CPU", ""),
    "loss error": Claim("H3", "1.9e-6", "<= 1e-6", "relative"),
    "gradient error": Claim("H3", "7.5e-9 absolute", "<= 1e-6", "relative"),
    "logits": Claim("H3", "4 to 8", ">= 8", "x"),
    "head time": Claim("H9", "-", ">= 1", "x"),
    "elementwise": Claim("H2", "1.3 to 2", ">= 2", "x"),
    "layer": Claim("H18", "1.3 to 1.7", ">= 1.5", "x"),
    "moments": Claim("H10", "-50 %", "2.03 beside 8", "bytes a weight"),
    "learning": Claim("H10", "-", "as of adamw", "nats"),
    "compiled": Claim("H8", "-", "-", "tokens/s"),
    "tuned": Claim("H8", "-", "-", "x"),
    "graph": Claim("H12", "1.2", ">= 1.05 to be kept", "x"),
    "graph bits": Claim("H12", "-", "True", ""),
    "tf32": Claim("H1", "1.1 to 1.3", "-", "x"),
    "tf32 loss": Claim("H1", "-", "beside that without", "nats"),
}
RATES = {
    "m7c-125m": Claim("N3", "260 at 512 and 17 at 2,048 of two models; 9,400 mended", ">= 100,000", "tokens/s"),
    "nsa-toy": Claim("N4", "260 to 410", ">= 10,000 at 128 on 2 CPU cores", "tokens/s"),
    "hydra-100m": Claim("H17", "41,300 on an RTX 5090; readme 30,000", ">= 150,000", "tokens/s"),
    "hydra-220m": Claim("H17", "-", ">= 80,000", "tokens/s"),
}
"""Of models by the names of their recipes."""
NO_CLAIM = Claim("-", "-", "-", "tokens/s")


def line(claim: Claim, what: str, model: str, ours: Any, **rest: Any) -> dict[str, Any]:
    """A line of results: what was measured of a model, beside the claim that it stands for."""
    return {"bench": "scratch", "what": what, "model": model, "ours": ours, **claim._asdict(), "note": "", **rest}

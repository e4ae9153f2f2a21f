"""The losses: pure functions of one example's summed answer log-probs. docs/glossary.md writes the formulas out.

Every preference loss here is a function of the reward margin alone, r(chosen) - r(rejected), where an answer's reward r
is what the policy is taken to value it at:

    dpo, ipo_sum   r = beta · (log pi(y|x) - log ref(y|x))
    dpo_norm, ipo  r = beta · (log pi(y|x) - log ref(y|x)) / |y|
    simpo          r = beta · log pi(y|x) / |y|

|y| is the number of counted tokens of the answer. All arguments and results are float tensors on one device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it takes seconds to import, and objectives are known before anything is computed
    from torch import Tensor


def log_ratio_rewards(logps: Tensor, reference_logps: Tensor, beta: float) -> Tensor:
    """beta · log(pi / ref), element-wise: DPO's implicit reward (Rafailov et al. 2023, eq. 5, without Z)."""
    return beta * (logps - reference_logps)


def sigmoid_loss(margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """DPO (Rafailov et al. 2023, eq. 7): -log sigmoid(margin).

    With label smoothing e the label is taken to be wrong with probability e (conservative DPO, Mitchell 2023):
    -(1-e)·log sigmoid(margin) - e·log sigmoid(-margin).
    """
    from torch.nn.functional import logsigmoid

    loss = -(1 - label_smoothing) * logsigmoid(margins)
    return loss if label_smoothing == 0 else loss - label_smoothing * logsigmoid(-margins)


def identity_loss(margins: Tensor, beta: float) -> Tensor:
    """IPO (Azar et al. 2023, eq. 17): (h - 1/(2·beta))^2, where the margin is beta·h."""
    return (margins / beta - 1 / (2 * beta)) ** 2


def target_margin_loss(margins: Tensor, gamma: float) -> Tensor:
    """SimPO (Meng et al. 2024, eq. 6): -log sigmoid(margin - gamma)."""
    from torch.nn.functional import logsigmoid

    return -logsigmoid(margins - gamma)

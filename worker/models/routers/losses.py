"""The losses of a router, of one block and one micro-batch, and how many tokens each expert got.

Owns the formulas: the load-balancing loss of the Switch Transformer (Fedus et al., 2021, equation 4), as
GShard and Megatron take it for several experts a token, and the z-loss of ST-MoE (Zoph et al., 2022, equation
5). In float32 and outside of autocast, all tokens of the micro-batch alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oobleckd.worker.models.routers.find import Scores

NUM_LOSSES = 2
"""The load-balancing loss and the z-loss, in this order."""


class Coefficients(NamedTuple):
    """What each loss is multiplied by, in every block; 0: it is not computed."""

    aux: float = 0.0
    z: float = 0.0


def tokens_by_expert(chosen: Tensor, num_experts: int) -> Tensor:
    """How often each expert was chosen, int64 (``num_experts``,). ``chosen``: int64 (tokens, top_k)."""
    flat = chosen.reshape(-1)
    # Not bincount, for which the host waits for the GPU, to know how long the result is.
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))


def load_balancing_loss(logits: Tensor, counts: Tensor, scores: Scores) -> Tensor:
    """Over experts the sum of its share of the choices times its mean score, times the number of experts: 1
    where all are chosen equally often, up to ``num_experts / top_k``; a float32 scalar.

    ``logits``: (tokens, experts); ``counts``: of ``tokens_by_expert``, through which no gradient goes.
    """
    shares = logits.softmax(-1) if scores == "softmax" else _normalized(logits.sigmoid())
    chosen = counts.to(torch.float32) / counts.sum()
    return (shares.mean(0) * chosen).sum() * counts.numel()


def z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of the square of log sum exp of ``logits`` (tokens, experts): a float32 scalar."""
    return logits.logsumexp(-1).square().mean()


def _normalized(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)

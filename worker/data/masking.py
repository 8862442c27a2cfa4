"""Chooses the tokens of a micro-batch that a masked language model has to name: a pure function of (seed,
step, micro-batch).

The recipe of BERT (Devlin et al. 2018, 3.1): of 15 % of the positions, chosen anew in every step, the model
is shown the mask token in 80 % of the cases, a token at random in 10 %, and the token itself in the rest.
Every sequence has the same number of chosen positions, so that the mean over micro-batches is the mean over
all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oobleckd.worker.models.layer import Batch, hash63

SHARE = 0.15
NOT_ASKED = -100
"""The label of a position that does not count; transformers' losses leave it out."""

_SHOWN_MASK, _SHOWN_ANY = 0.8, 0.9


@dataclass(frozen=True, slots=True)
class Masking:
    """``mask_token`` stands in for what is hidden; ``vocab_size`` bounds what is drawn at random."""

    seed: int
    mask_token: int
    vocab_size: int

    def __call__(self, tokens: Tensor, step: int, micro_batch: int) -> Batch:
        """``tokens`` (batch, sequence) with some of them hidden, and those as labels."""
        generator = torch.Generator().manual_seed(hash63(f"mask:{self.seed}:{step}:{micro_batch}"))
        num_chosen = max(1, round(SHARE * tokens.shape[1]))
        chosen = torch.rand(tokens.shape, generator=generator).argsort(dim=1)[:, :num_chosen]
        shown = torch.rand(chosen.shape, generator=generator)
        drawn = torch.randint(self.vocab_size, chosen.shape, generator=generator)
        hidden = tokens.gather(1, chosen)
        stand_in = torch.where(shown < _SHOWN_ANY, drawn, hidden)
        stand_in = torch.where(shown < _SHOWN_MASK, self.mask_token, stand_in)
        labels = torch.full_like(tokens, NOT_ASKED).scatter(1, chosen, hidden)
        return Batch(tokens.scatter(1, chosen, stand_in), labels)

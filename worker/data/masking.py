"""Chooses the tokens of a micro-batch that a masked language model has to name: a pure function of (seed,
step, micro-batch).

The recipe of BERT (Devlin et al. 2018, 3.1): of 15 % of the positions, chosen anew in every step, the model
is shown the mask token in 80 % of the cases, a token at random in 10 %, and the token itself in the rest.
What fills a row up is never chosen. Every row that is full has the same number of chosen positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oobleckd.worker.models.layer import Batch, hash63

SHARE = 0.15
NOT_ASKED = -100
"""The label of a position that does not count; transformers' losses leave it out."""
OF_EVALUATION = -1
"""In place of a step: what is hidden is the same in every evaluation."""

_SHOWN_MASK, _SHOWN_ANY = 0.8, 0.9


@dataclass(frozen=True, slots=True)
class Masking:
    """``mask_token`` stands in for what is hidden; ``vocab_size`` bounds what is drawn at random."""

    seed: int
    mask_token: int
    vocab_size: int

    def __call__(self, tokens: Tensor, num_tokens: Sequence[int], step: int, micro_batch: int) -> Batch:
        """``tokens`` (batch, sequence) with some of them hidden, and those as labels. ``num_tokens``: how
        many each row has before what fills it up.
        """
        generator = torch.Generator().manual_seed(hash63(f"mask:{self.seed}:{step}:{micro_batch}"))
        size = tokens.shape[1]
        lengths, counts = torch.tensor(num_tokens), torch.tensor([num_chosen(each) for each in num_tokens])
        places = torch.rand(tokens.shape, generator=generator)
        places[torch.arange(size) >= lengths[:, None]] = torch.inf
        chosen = places.argsort(dim=1)[:, : int(counts.max())]
        shown = torch.rand(chosen.shape, generator=generator)
        drawn = torch.randint(self.vocab_size, chosen.shape, generator=generator)
        hidden = tokens.gather(1, chosen)
        stand_in = torch.where(shown < _SHOWN_ANY, drawn, hidden)
        stand_in = torch.where(shown < _SHOWN_MASK, self.mask_token, stand_in)
        beyond = torch.arange(chosen.shape[1]) >= counts[:, None]  # of a row that has fewer than another
        labels = torch.full_like(tokens, NOT_ASKED).scatter(1, chosen, hidden.masked_fill(beyond, NOT_ASKED))
        inputs = tokens.scatter(1, chosen, torch.where(beyond, hidden, stand_in))
        return Batch(inputs, labels)


def num_chosen(num_tokens: int) -> int:
    """How many positions of a row of ``num_tokens`` are chosen."""
    return max(1, round(SHARE * num_tokens))

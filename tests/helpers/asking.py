"""Micro-batches that ask for very different numbers of tokens, in any job of the tests: of four one asks for
none, one for a single token, one for some and one for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from oobleckd.protocol.jobdata import Data
from oobleckd.worker.data.corpus import Corpus
from oobleckd.worker.data.masking import NOT_ASKED
from oobleckd.worker.models import Batch

SHARES = (0.0, 0.0, 0.3, 1.0)


def labels_of(tokens: Tensor, step: int, micro_batch: int) -> Tensor:
    """What is asked of ``tokens``, by step and micro-batch alone."""
    number = (step + micro_batch) % len(SHARES)
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    asked = torch.rand(tokens.shape, generator=generator) < SHARES[number]
    asked[-1, -1] |= number == 1
    asked[:, 0] = False
    return torch.where(asked, tokens, NOT_ASKED)


def _batch(corpus: Corpus, step: int, micro_batch: int, **_: object) -> Batch:
    tokens = corpus.tokens(step, micro_batch)
    labels = labels_of(tokens, step, micro_batch)
    return Batch(tokens, labels, num_targets=int((labels != NOT_ASKED).sum()))


def _targets_of(corpus: Corpus, step: int) -> tuple[int, ...]:
    return tuple(_batch(corpus, step, mb).num_targets for mb in range(len(corpus.of_step(step))))


@contextmanager
def asking_unequally() -> Iterator[None]:
    """Every corpus does so, and every job weighs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Data, "weighs_targets", True)
        patch.setattr(Corpus, "batch", _batch)
        patch.setattr(Corpus, "targets_of", _targets_of)
        yield

"""Rows into a micro-batch: what a model is shown, what it is asked for, and where documents begin.

Owns labels, positions and documents of rows of which not every token is asked for. Which rows a micro-batch
has ``corpus`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oobleckd.worker.data.masking import NOT_ASKED
from oobleckd.worker.data.rows import DataRow
from oobleckd.worker.models.layer import Batch

Starts = Sequence[npt.NDArray[np.int32]]
_NO_TOKENS = torch.zeros(0, dtype=torch.int64)


def tokens_of(rows: Sequence[DataRow]) -> Tensor:
    """Int64 (rows, sequence)."""
    return torch.from_numpy(np.stack([row.tokens for row in rows]).astype(np.int64))


def causal_batch(rows: Sequence[DataRow]) -> Batch:
    """Of a model that names the next token: nobody asks for the first of a document, which has none before
    it, nor of a row.
    """
    inputs = tokens_of(rows)
    asked = np.ones(inputs.shape, np.bool_)
    asked[:, 0] = False
    for number, row in enumerate(rows):
        if row.asked is not None:
            asked[number] &= row.asked
        asked[number, row.starts] = False
    labels = inputs.masked_fill(torch.from_numpy(~asked), NOT_ASKED)
    positions, documents = borders([row.starts for row in rows], inputs.shape[1])
    return Batch(inputs, labels, positions, documents, int(asked.sum()))


def joined_batch(rows: Sequence[DataRow]) -> Batch:
    """The same of rows that are asked for all their tokens but the first: the head asks for none of that."""
    tokens = tokens_of(rows)
    return Batch(tokens, tokens)


def masked_batch(
    rows: Sequence[DataRow], hide: Callable[[Tensor, Sequence[int]], Batch], *, weighs: bool
) -> Batch:
    """Of a model that names what ``hide`` hides; ``weighs``: rows may have different numbers of targets."""
    tokens = tokens_of(rows)
    sizes = [len(row.tokens) if row.asked is None else int(row.asked.sum()) for row in rows]
    hidden = hide(tokens, sizes)
    positions, documents = borders([row.starts for row in rows], tokens.shape[1])
    num_targets = int((hidden.labels != NOT_ASKED).sum()) if weighs else 0
    return Batch(hidden.inputs, hidden.labels, positions, documents, num_targets)


def borders(starts: Starts, sequence: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """``Batch.positions`` and ``Batch.documents`` of rows whose documents begin at ``starts``; None where
    they are joined.
    """
    if not len(starts[0]):
        return None, None
    places = np.arange(sequence)
    documents = np.zeros((len(starts), sequence), np.int64)
    for of_row, begins in zip(documents, starts, strict=True):
        of_row[begins[1:]] = 1
    documents = documents.cumsum(axis=1)
    firsts = np.stack([begins[of_row] for of_row, begins in zip(documents, starts, strict=True)])
    return torch.from_numpy(places - firsts), torch.from_numpy(documents)


def without_tokens(starts: Starts, sequence: int) -> Batch:
    """Positions and documents alone."""
    return Batch(_NO_TOKENS, _NO_TOKENS, *borders(starts, sequence))

"""Micro-batches whose documents are kept apart, and models in which a leak between them would show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oobleckd.worker.models import Batch, ModelSpec, load_spec
from oobleckd.worker.models.config import TIED
from tests.helpers.models import all_params, small_config, small_job

SEQUENCE = 12
BESIDE_EACH_OTHER = ((5, 4, 1, 2), (9, 3))
"""Lengths of the documents of each row: longer than a window of 3, and one of a single token."""
_WINDOWS = {"sliding_window": 3, "use_sliding_window": True, "local_attention": 4, "max_window_layers": 0}
_LAYER_TYPES = ("sliding_attention", "full_attention", "sliding_attention")


def separate_spec(family: str, precision: str = "fp32", backward: str = "fused", **config: Any) -> ModelSpec:
    """Three small blocks of ``family``, with sliding windows of 3 where it has any, of a job that keeps
    documents apart.
    """
    data = {"source": "jsonl", "path": "text.jsonl", "tokenizer": "tokenizer.json", "sequences": "packed"}
    more = {"num_hidden_layers": 3, "tie_word_embeddings": family in TIED, **_WINDOWS, **config}
    fields = small_config(family, **more)
    if "layer_types" in small_config(family, layer_types=None):
        fields["layer_types"] = list(_LAYER_TYPES)
    train = {"sequence": SEQUENCE, "precision": precision}
    schedule = {"backward": backward}
    return load_spec(small_job(family, fields, data=data, train=train, schedule=schedule))


def loud_params(spec: ModelSpec) -> dict[str, Tensor]:
    """Fresh weights, three times as large: with those of a fresh model every token sees all others alike, so
    that a leak hardly shows.
    """
    params = all_params(spec)
    with torch.no_grad():
        for param in params.values():
            if param.dim() > 1:
                param.mul_(3)
    return params


def packed_batch(
    tokens: Tensor, rows: Sequence[Sequence[int]] = BESIDE_EACH_OTHER, labels: Tensor | None = None
) -> Batch:
    """``tokens`` (batch, sequence) as documents of the lengths that ``rows`` say."""
    positions = [torch.cat([torch.arange(length) for length in row]) for row in rows]
    documents = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    return Batch(tokens, tokens if labels is None else labels, torch.stack(positions), torch.stack(documents))


def places_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Positions and documents of one whose documents are apart."""
    assert batch.positions is not None
    assert batch.documents is not None
    return batch.positions, batch.documents


def some_tokens(spec: ModelSpec, seed: int = 3) -> Tensor:
    """Of two rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, spec.config.vocab_size, (2, SEQUENCE), generator=generator)

"""Jobs on a prepared folder of short documents, in every way in which rows are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from oobleckd.protocol.job import Job
from tests.helpers.models import small_config, small_job
from tests.helpers.prepared import planned, prepared

SEQUENCE, VOCAB = 16, 257
WAYS: dict[str, dict[str, Any]] = {
    "packed": {"sequences": "packed"},
    "padded": {"sequences": "padded"},
    "windows": {"documents": "separate"},
    "padded, joined": {"sequences": "padded", "documents": "joined"},
    "chats": {"format": "chat"},
    "chats, padded": {"format": "chat", "sequences": "padded"},
}


def model_of(family: str) -> dict[str, Any]:
    """Weights are large, so that who sees what he must not is found."""
    more = {"initializer_range": 0.1, "init_std": 0.1, "max_position_embeddings": 2 * SEQUENCE}
    return small_config(family, vocab_size=VOCAB, **more)


def data_of(tmp_path: Path, way: str, sequence: int = SEQUENCE, vocab: int = VOCAB) -> dict[str, Any]:
    """The table [data] of a job: documents of up to 24 tokens, chats of up to a row. No token is 0, which
    some families fill up with.
    """
    dice, has_chats = np.random.default_rng(0), "chats" in way
    sizes = dice.integers(1, min(sequence, 24) + 1 if has_chats else 25, 60)
    documents = [dice.integers(1, vocab - 1, size) for size in sizes]
    asked = [dice.random(size) < dice.random() / 2 for size in sizes if has_chats]
    folder = prepared(tmp_path / ("0" * 32), documents, "uint16", asked=asked)
    return {"source": "jsonl", "path": "/nowhere.jsonl", "prepared": str(folder), **WAYS[way]}


def job_on_documents(family: str, tmp_path: Path, way: str, **train: Any) -> Job:
    """A job on those; ``train`` besides micro-batches of 2 rows of ``SEQUENCE``."""
    job = small_job(
        family, model_of(family),
        data=data_of(tmp_path, way),
        train={"micro_batch": 2, "sequence": SEQUENCE, **train},
        checkpoint={"dir": str(tmp_path)},
    )  # fmt: skip
    return with_plan(job)


def with_plan(job: Job) -> Job:
    """``job``, whose plan is made."""
    if job.data.row_kind != "windows":
        planned(job)
    return job

"""One step against a plain loop of transformers and torch on the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oobleckd.protocol.job import Job
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.models import FAMILIES, MASKED
from oobleckd.worker.models.config import JOINED_ONLY
from tests.helpers.asking import asking_unequally
from tests.helpers.models import small_config, small_job
from tests.helpers.plain import assert_same, engine_step, plain_step
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


def job_of(family: str, tmp_path: Path, **data: Any) -> Job:
    """A step of 4 micro-batches. Weights are large, so that who sees what he must not is found."""
    more = {"initializer_range": 0.1, "init_std": 0.1, "max_position_embeddings": 2 * SEQUENCE}
    config = small_config(family, vocab_size=VOCAB, **more)
    train = {"steps": 1, "global_batch": 8, "sequence": SEQUENCE}
    return small_job(family, config, train=train, checkpoint={"dir": str(tmp_path)}, data=data)


def job_on_documents(family: str, tmp_path: Path, way: str) -> Job:
    """On documents of 1 to 24 tokens, none of them 0, with which some families fill up."""
    dice = np.random.default_rng(0)
    longest = SEQUENCE if "chats" in way else 24
    documents = [dice.integers(1, VOCAB - 1, size) for size in dice.integers(1, longest + 1, 60)]
    asked = [dice.random(len(each)) < dice.random() / 2 for each in documents if "chats" in way]
    folder = prepared(tmp_path / ("0" * 32), documents, "uint16", asked=asked)
    data = {"source": "jsonl", "path": "/nowhere.jsonl", "prepared": str(folder), **WAYS[way]}
    job = job_of(family, tmp_path, **data)
    if job.data.row_kind != "windows":
        planned(job)
    return job


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rows_of_documents(family: str, way: str, tmp_path: Path) -> None:
    """Each document in a row of its own, in the plain loop, where they are separate."""
    job = job_on_documents(family, tmp_path, way)
    assert len(set(open_corpus(job).targets_of(0))) > 1 or family in MASKED
    assert_same(engine_step(job, tmp_path), plain_step(job))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["packed", "padded"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in JOINED_ONLY])
def test_rows_of_documents_in_every_family(family: str, way: str, tmp_path: Path) -> None:
    test_rows_of_documents(family, way, tmp_path)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_rows_that_ask_for_little(family: str, tmp_path: Path) -> None:
    """As chats do: for some tokens of a row, for a single one of a micro-batch, for none."""
    job = job_of(family, tmp_path)
    with asking_unequally():
        assert_same(engine_step(job, tmp_path), plain_step(job))

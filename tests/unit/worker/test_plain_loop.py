"""One step against a plain loop of transformers and torch on the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor
from transformers.models.phimoe import modeling_phimoe

from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.models import FAMILIES, MASKED
from oobleckd.worker.models.config import JOINED_ONLY
from tests.helpers.asking import asking_unequally
from tests.helpers.documents import SEQUENCE, WAYS, job_on_documents, model_of
from tests.helpers.models import small_job
from tests.helpers.plain import assert_same, engine_step, plain_step

STEP = {"steps": 1, "global_batch": 8}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rows_of_documents(family: str, way: str, tmp_path: Path) -> None:
    """Each document in a row of its own, in the plain loop, where they are separate."""
    job = job_on_documents(family, tmp_path, way, **STEP)
    assert len(set(open_corpus(job).targets_of(0))) > 1 or family in MASKED
    assert_same(engine_step(job, tmp_path), plain_step(job))


def test_rows_of_documents_in_a_step_of_a_batch_that_is_ramped_up(tmp_path: Path) -> None:
    """The mean is over what the first micro-batches ask for, which are all that there are."""
    ramp = {"start": 4, "increment": 2, "samples": 100}
    job = job_on_documents("gpt2", tmp_path, "packed", **STEP, batch_ramp=ramp)
    assert len(open_corpus(job).targets_of(0)) < job.num_micro_batches
    assert_same(engine_step(job, tmp_path), plain_step(job))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["packed", "padded"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in JOINED_ONLY])
def test_rows_of_documents_in_every_family(
    family: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "phimoe":
        leave_experts_undrawn(monkeypatch)
    test_rows_of_documents(family, way, tmp_path)


def leave_experts_undrawn(patch: pytest.MonkeyPatch) -> None:
    """A router of phimoe draws its experts in training, by the shape of what it is given: documents in rows
    of their own would get others. Without dice it takes those of the largest scores.
    """
    routed = modeling_phimoe.sparsemixer

    def undrawn(scores: Tensor, *, jitter_eps: float, training: bool, top_k: int) -> tuple[Tensor, Tensor]:
        assert training
        return routed(scores, jitter_eps=jitter_eps, training=False, top_k=top_k)

    patch.setattr(modeling_phimoe, "sparsemixer", undrawn)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_rows_that_ask_for_little(family: str, tmp_path: Path) -> None:
    """For some tokens of a row, for a single one of a micro-batch, for none."""
    train = {**STEP, "micro_batch": 2, "sequence": SEQUENCE}
    job = small_job(family, model_of(family), train=train, checkpoint={"dir": str(tmp_path)})
    with asking_unequally():
        assert_same(engine_step(job, tmp_path), plain_step(job))

"""Nobody waits for samples: those of the next step are drawn while there is time, and targets with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from oobleckd.protocol.job import Job, parse_job
from oobleckd.worker.data.corpus import Corpus, open_corpus
from oobleckd.worker.tools import reference
from tests.helpers import engine_jobs
from tests.helpers.engine import World
from tests.helpers.prepared import planned, prepared

STEPS = 200


@pytest.fixture
def corpora(monkeypatch: pytest.MonkeyPatch) -> list[Corpus]:
    """All that are opened."""
    found: list[Corpus] = []

    def opened(job: Job) -> Corpus:
        found.append(open_corpus(job))
        return found[-1]

    monkeypatch.setattr("tests.helpers.engine.open_corpus", opened)
    monkeypatch.setattr(reference, "open_corpus", opened)
    return found


def packed_job(tmp_path: Path, **train: Any) -> Job:
    dice = np.random.default_rng(0)
    documents = [dice.integers(0, 128, size) for size in dice.integers(2, 30, 100)]
    folder = prepared(tmp_path / "x", documents, "uint16")
    table = msgspec.to_builtins(engine_jobs.job(tmp_path, global_batch=2, micro_batch=1, **train))
    table["data"] = {"source": "jsonl", "path": "/t", "prepared": str(folder), "sequences": "packed"}
    job = parse_job(table)
    planned(job)
    return job


class OwnCorpora(World):
    """Each device reads for itself."""

    def _add(self, device: str) -> None:
        self.corpus = self.open()
        super()._add(device)

    def open(self) -> Corpus:
        from tests.helpers import engine

        return engine.open_corpus(self.job)


def test_no_device_waits_in_200_steps(tmp_path: Path, corpora: list[Corpus]) -> None:
    world = OwnCorpora(packed_job(tmp_path, steps=STEPS), {"a": [(0, 2), (2, 4)]}, 0, tmp_path)
    world.run()
    assert sorted(world.losses) == list(range(STEPS))
    assert [corpus.num_waits for corpus in corpora] == [0, 0, 0]


def test_nor_does_one_that_has_nobody_to_wait_for(tmp_path: Path, corpora: list[Corpus]) -> None:
    reference.run(packed_job(tmp_path), tmp_path, lambda _message: None)
    assert [corpus.num_waits for corpus in corpora] == [0]


def test_who_has_another_epoch_draws_before_it_begins(tmp_path: Path, corpora: list[Corpus]) -> None:
    """Also after a death, where a step is begun anew."""
    world = OwnCorpora(packed_job(tmp_path), engine_jobs.STAGES, 1, tmp_path)
    world.nodes["a0/0"].faults.arm("backward", 2)
    world.run()
    assert world.fired
    assert sum(corpus.num_waits for corpus in corpora) == 0

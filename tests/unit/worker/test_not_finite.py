"""Steps whose loss or gradients are not finite, in the real engine: they make no update, and the third in a
row is the last.
"""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oobleckd.ctl.compare import read_steps
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.parts import Outcome, outcome_of
from oobleckd.worker import sums
from oobleckd.worker.round.means import NO_MEANS
from oobleckd.worker.round.reduce import ReadFigures, Reduced, Reducer
from oobleckd.worker.round_machine.exchange import Exchange
from oobleckd.worker.tools.reference import ReferenceRecorder, run


def hot(tmp_path: Path, **train: Any) -> Job:
    """A job whose first update ends all: its learning rate is absurd."""
    tokens = tmp_path / "t.bin"
    np.random.default_rng(0).integers(0, 64, 2000).astype("<u2").tofile(tokens)
    return parse_job({
        "name": "hot",
        "model": {"family": "gpt2", "config": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16,
        "vocab_size": 64}},
        "data": {"source": "tokens", "path": str(tokens)},
        "train": {"steps": 6, "global_batch": 4, "micro_batch": 2, "sequence": 16, **train},
        "optimizer": {"lr": 1e9, "clip_norm": 0.0},
        "checkpoint": {"dir": str(tmp_path), "every": 0},
    })  # fmt: skip


def outcomes(job: Job, out: Path) -> list[str]:
    with closing(ReferenceRecorder(job, out)) as recorder:
        recorder.complete(run(job, out, recorder))
    return [fact.outcome for fact in read_steps(out / "steps.jsonl")]


@pytest.mark.parametrize("exact", [True, False])
def test_the_third_in_a_row_is_the_last(tmp_path: Path, exact: bool) -> None:
    assert outcomes(hot(tmp_path, exact=exact), tmp_path) == ["applied", "skipped", "skipped", "skipped"]
    assert not list(tmp_path.glob("**/manifest.json"))


def test_who_wants_to_goes_on_to_the_end(tmp_path: Path) -> None:
    assert outcomes(hot(tmp_path, on_nan="skip"), tmp_path) == ["applied", *["skipped"] * 5]
    assert list(tmp_path.glob("**/manifest.json"))


@pytest.mark.parametrize(
    ("loss", "outcome"), [(2.0, "applied"), (math.inf, "skipped"), (math.nan, "skipped")]
)
def test_a_loss_that_is_not_finite_skips_a_step_whose_gradients_are(loss: float, outcome: Outcome) -> None:
    nothing: Any = None
    reducer = Reducer(Exchange("n0/0", [(0,)], [(1,)], 1), nothing, nothing, nothing, exact=True)
    figures = sums.BucketFigures(nan=False, overflow=False, changed=False, norms=(0.0,), exponents=(0,))
    reducer.reduced = {0: Reduced(NO_MEANS, ReadFigures(figures, {0: loss}))}
    assert outcome_of(reducer.vote()) == outcome

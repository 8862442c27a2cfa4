"""What an evaluation comes to: against a plain loop of transformers, documents apart, nothing asked for; and
what stands around it.
"""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from oobleckd.protocol.job import Job
from oobleckd.protocol.jobeval import EvalSource
from oobleckd.protocol.jobparts import jobs_of_evaluation
from oobleckd.protocol.parts import Counters, EvalSum, Vote
from oobleckd.worker.checkpointing.snapshot import Due
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.data.evaluation import EvalCorpus
from oobleckd.worker.data.masking import NOT_ASKED
from oobleckd.worker.models import Batch, load_spec
from oobleckd.worker.tools.reference import ReferenceRecorder, run
from oobleckd.worker.training.report import eval_sums
from tests.helpers.documents import VOCAB, job_on_documents
from tests.helpers.due import due_of
from tests.helpers.engine import World
from tests.helpers.engine_jobs import job as tiny
from tests.helpers.evaluations import means, on_texts, sums_told, with_eval
from tests.helpers.models import all_layers, all_params, some_batch
from tests.helpers.plain import plain_evaluation
from tests.helpers.prepared import planned, prepared

CUT = {"a": [(0, 2), (2, 4)], "b": [(0, 1), (1, 3), (3, 4)]}
NO_VOTE = Vote({}, {})


def on_documents(family: str, folder: Path, way: str) -> Job:
    """A job on documents in rows, evaluated before its first step on others."""
    job = job_on_documents(family, folder, way, steps=1, global_batch=4)
    dice = np.random.default_rng(1)
    documents = [dice.integers(1, VOCAB - 1, size) for size in dice.integers(1, 25, 40)]
    held = prepared(folder / ("1" * 32), documents, "uint16")
    source = EvalSource(name="held", kind="jsonl", path="/elsewhere.jsonl", prepared=str(held))
    found = with_eval(job, sequences=10, at_start=True, at_end=False, source=(source,))
    for _, part in jobs_of_evaluation(found) if way == "packed" else ():
        planned(part)
    return found


def test_as_transformers_has_it_with_dropout_off(tmp_path: Path) -> None:
    job = on_texts(tiny(tmp_path, steps=1), tmp_path)
    wanted = plain_evaluation(job)
    assert list(wanted) == ["letters", "digits"]
    assert means(sums_told(job, tmp_path), 0) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("way", ["packed", "windows"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_as_transformers_has_it_with_documents_apart(tmp_path: Path, family: str, way: str) -> None:
    """Of a causal model, and of one that names what is hidden; micro-batches ask for unequally many."""
    job = on_documents(family, tmp_path, way)
    found = sums_told(job, tmp_path)
    assert means(found, 0) == pytest.approx(plain_evaluation(job), abs=1e-6)
    world = World(job, CUT, 1, tmp_path)
    world.nodes["b2/0"].faults.arm("forward", 1)
    world.run()
    assert world.fired == [("b2/0", "forward")]
    assert world.evaluations == found


def test_a_micro_batch_that_asks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = on_texts(tiny(tmp_path, steps=1), tmp_path)
    whole, batch, made = sums_told(job, tmp_path), EvalCorpus.batch, EvalCorpus.__init__

    def asking(self: EvalCorpus, number: int, **more: Any) -> Batch:
        found = batch(self, number, **more)
        nothing = torch.full_like(found.labels, NOT_ASKED)
        return Batch(found.inputs, nothing if number == 5 else found.labels)

    def counted(self: EvalCorpus, *args: Any) -> None:
        made(self, *args)
        self.targets = (*self.targets[:5], 0)

    monkeypatch.setattr(EvalCorpus, "batch", asking)
    monkeypatch.setattr(EvalCorpus, "__init__", counted)
    found = sums_told(job, tmp_path)
    assert found[0, 0] == whole[0, 0]
    ((rest,), (both,)) = found[0, 1], whole[0, 1]
    assert (rest.targets, both.targets) == (30, 60)
    assert 0 < rest.loss_sum < both.loss_sum


def test_sums_are_by_source_and_exact(tmp_path: Path) -> None:
    evaluation = open_corpus(on_texts(tiny(tmp_path), tmp_path)).evaluation
    assert evaluation is not None
    found = eval_sums(evaluation, {4: 1e16, 2: 0.5, 1: 1e-3, 3: 1.0, 5: -1e16})
    assert found == (EvalSum("letters", 0.501, 60), EvalSum("digits", 1.0, 90))
    (broken,) = eval_sums(evaluation, {0: math.inf, 1: math.nan})
    assert math.isnan(broken.loss_sum)


@pytest.mark.parametrize("every", [1, 5, 0])
def test_an_evaluation_has_no_step_written_twice(tmp_path: Path, every: int) -> None:
    """By the clock in front of it; behind it the last one of all, and at the last step that one alone."""
    job = on_texts(tiny(tmp_path), tmp_path)
    job = msgspec.structs.replace(job, checkpoint=msgspec.structs.replace(job.checkpoint, every=every))
    rounds, counters, begun = job.eval_rounds, Counters(), []
    while not rounds.finished(counters):
        due = due_of(job, NO_VOTE, counters)
        assert not due.skipped
        counters = counters.after("evaluated" if rounds.evaluates(counters) else "applied")
        if due.begins:
            begun.append((counters.step, counters.evaluated))
    assert begun == [*([(step, 0) for step in range(1, 5)] if every == 1 else []), (5, 2)]
    assert due_of(job, NO_VOTE, Counters(10, 4, 4)) == Due()


def test_a_layer_is_back_in_training_whatever_comes(tmp_path: Path) -> None:
    spec = load_spec(tiny(tmp_path))
    layers, batch = all_layers(spec, all_params(spec)), some_batch(spec)
    torch.manual_seed(0)
    embedded = layers[0].evaluate(None, batch)
    assert not embedded.requires_grad
    assert torch.equal(embedded, layers[0].evaluate(None, batch))
    assert not torch.equal(embedded, layers[0](None, batch)), "dropout is on in training"
    with pytest.raises(RuntimeError):
        layers[-1].evaluate(embedded[:, :, :3], batch)
    assert all(module.training for layer in layers for module in layer.module.modules())


def test_a_reference_run_writes_them_down(tmp_path: Path) -> None:
    job = on_texts(tiny(tmp_path, steps=1), tmp_path)
    with closing(ReferenceRecorder(job, tmp_path)) as recorder:
        run(job, tmp_path, recorder)
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["round"], line["source"], line["targets"]) for line in lines] == [
        (step, *rest)
        for step in (0, 1)
        for rest in ((0, "letters", 90), (0, "digits", 30), (1, "digits", 60))
    ]
    assert all(float.fromhex(line["loss_sum_hex"]) == line["loss_sum"] > 0 for line in lines)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1

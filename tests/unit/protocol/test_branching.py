"""What a job changes that goes on from another one's checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from oobleckd.protocol.branching import changes, keeps_alike, same_rates
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.joboptimizer import Optimizer, OptimizerGroup

TRAIN = {"steps": 200, "global_batch": 4, "micro_batch": 2, "sequence": 8}
GPT2 = {"family": "gpt2", "config": {"n_embd": 16, "resid_pdrop": 0.0}}


def job_of(train: dict[str, Any] | None = None, **tables: Any) -> Job:
    return parse_job({"name": "j", "model": GPT2, "train": TRAIN | (train or {})} | tables)


@pytest.mark.parametrize(
    ("changed", "text", "effect"),
    [
        (job_of({"steps": 300}), "train.steps 200 -> 300", "rate"),
        (job_of(optimizer={"schedule": "wsd"}), "optimizer.schedule cosine -> wsd", "rate"),
        (job_of(optimizer={"weight_decay": 0.1}), "optimizer.weight_decay 0.01 -> 0.1", "bits"),
        (job_of({"micro_batch": 1}), "train.micro_batch 2 -> 1", "bits"),
        (job_of({"exact": False}), "train.exact true -> false", "bits"),
        (job_of({"seed": 7}), "train.seed 0 -> 7", "order"),
        (job_of({"global_batch": 8}), "train.global_batch 4 -> 8", "order"),
        (job_of(data={"source": "text", "path": "/a"}), "data.source stdlib -> text", "order"),
        (job_of(fault_tolerance={"f": 2}), "fault_tolerance.f 1 -> 2", "none"),
        (job_of(checkpoint={"keep": 9}), "checkpoint.keep 2 -> 9", "none"),
        (
            job_of(model={"family": "gpt2", "config": {"n_embd": 32, "resid_pdrop": 0.0}}),
            "model.config.n_embd 16 -> 32",
            "model",
        ),
        (
            job_of(model={"family": "gpt2", "config": {"n_embd": 16, "resid_pdrop": 0.1}}),
            "model.config.resid_pdrop 0.0 -> 0.1",
            "bits",
        ),
        (job_of(model={"family": "llama", "config": GPT2["config"]}), "model.family gpt2 -> llama", "model"),
    ],
)
def test_what_follows_of_a_key(changed: Job, text: str, effect: str) -> None:
    found = changes(job_of(), changed)
    assert (str(found[0]), found[0].effect) == (text, effect)


def test_a_name_is_no_change() -> None:
    assert changes(job_of(), parse_job({"name": "k", "model": GPT2, "train": TRAIN})) == ()


def test_several_are_in_the_order_of_the_file() -> None:
    found = changes(job_of(), job_of({"steps": 9, "seed": 1}, checkpoint={"every": 5}))
    assert [each.key for each in found] == ["train.steps", "train.seed", "checkpoint.every"]


@pytest.mark.parametrize(
    ("said", "longer", "same"),
    [
        ({"schedule": "wsd"}, {"schedule": "wsd", "decay_steps": 100}, True),
        ({"schedule": "wsd"}, {"schedule": "wsd", "decay_steps": 101}, False),
        ({"schedule": "constant"}, {"schedule": "wsd", "decay_steps": 100}, True),
        ({"schedule": "cosine"}, {"schedule": "cosine"}, False),
    ],
)
def test_whether_the_steps_before_had_the_same_rates(
    said: dict[str, Any], longer: dict[str, Any], same: bool
) -> None:
    assert same_rates(job_of(optimizer=said), job_of({"steps": 300}, optimizer=longer), 200) == same


@pytest.mark.parametrize(
    ("was", "now", "alike"),
    [
        ({}, {"lr": 0.1, "decay": "matrices", "betas": (0.9, 0.95)}, True),
        ({}, {"name": "adam"}, True),
        ({}, {"name": "muon"}, False),
        ({}, {"state": "bf16"}, False),
        ({"name": "sgd"}, {"name": "sgd", "momentum": 0.9}, False),
        ({"name": "sgd", "momentum": 0.8}, {"name": "sgd", "momentum": 0.9}, True),
        ({"name": "mine"}, {"name": "mine", "options": {"a": 1}}, True),
        ({"name": "mine"}, {"name": "yours"}, False),
        ({}, {"group": (OptimizerGroup(match="a", lr_scale=2.0),)}, True),
        ({}, {"group": (OptimizerGroup(match="a", frozen=True),)}, False),
    ],
)
def test_what_an_optimizer_keeps(was: dict[str, Any], now: dict[str, Any], alike: bool) -> None:
    assert keeps_alike(Optimizer(**was), Optimizer(**now)) == alike

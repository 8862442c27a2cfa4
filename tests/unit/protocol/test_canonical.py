"""Digests of jobs: keys that came later leave no trace where a job does not say them."""

from __future__ import annotations

from typing import Any

import pytest

from oobleckd.ctl.reference import training
from oobleckd.protocol.canonical import digest
from oobleckd.protocol.job import Job, parse_job

TRAIN = {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 8}


def job_of(**more: Any) -> Job:
    return parse_job({"name": "a", "train": TRAIN} | more)


EVALUATED = {
    "optimizer": {"lr": 0.1, "warmup_steps": 2},
    "eval": {"held_out": 0.5, "every": 1, "sequences": 2},
}


def test_digests_are_those_that_jobs_had_before() -> None:
    """Written down when there was half a cosine alone."""
    assert digest(job_of()).startswith("77e13465bc339680")
    assert training(job_of()).startswith("21d0cad92066a8f3")
    assert digest(job_of(**EVALUATED)).startswith("23e52096c5e10001")
    assert training(job_of(**EVALUATED)).startswith("c26a724f8fcd0c00")


@pytest.mark.parametrize(
    "said", [{"schedule": "linear"}, {"schedule": "wsd", "decay_steps": 1}, {"warmup_tokens": 9}]
)
def test_what_is_said_shows(said: dict[str, Any]) -> None:
    other = job_of(optimizer=said)
    assert digest(other) != digest(job_of())
    assert training(other) != training(job_of())


def test_what_says_the_default_is_the_same_job() -> None:
    assert digest(job_of(optimizer={"schedule": "cosine"})) == digest(job_of())


def test_a_compiled_job_is_another_one() -> None:
    compiled = job_of(train=TRAIN | {"compile": True})
    assert digest(compiled) != digest(job_of())
    assert training(compiled) != training(job_of())
    assert digest(job_of(train=TRAIN | {"compile": False})) == digest(job_of())
    assert compiled.costs_depend_on != job_of().costs_depend_on


def test_who_computes_what_again_is_no_other_training() -> None:
    """The job has another digest, its bits are the same, and old jobs' digests too."""
    again = job_of(schedule={"recompute": "auto"})
    assert digest(again) != digest(job_of())
    assert training(again) == training(job_of())
    assert digest(job_of(schedule={"recompute": "none"})) == digest(job_of())


def test_devices_a_stage_are_no_other_training() -> None:
    shared = job_of(resources={"devices_per_stage": 2})
    assert digest(shared) != digest(job_of())
    assert training(shared) == training(job_of())
    assert digest(job_of(resources={"devices_per_stage": 1})) == digest(job_of())

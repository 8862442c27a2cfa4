"""How many sequences each step takes while the batch is ramped up, and what is refused of the key."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.protocol.batchramp import BatchRamp, BatchSizes, sizes_of
from oobleckd.protocol.branching import changes
from oobleckd.protocol.canonical import canonical
from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.job import Job, parse_job, table_of
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.learningrate import lr_at

TRAIN = {"steps": 12, "global_batch": 8, "micro_batch": 2, "sequence": 16}
RAMP = {"start": 2, "increment": 2, "samples": 9}
SIZES = [2, 2, 4, 6, 8, 8, 8, 8, 8, 8, 8, 8]


def job_with(ramp: Any, optimizer: Any = None, **train: Any) -> Job:
    table = {**TRAIN, **train} | ({} if ramp is None else {"batch_ramp": ramp})
    return parse_job({"name": "one", "train": table, "optimizer": optimizer or {}})


def sizes(found: BatchSizes, steps: int) -> list[int]:
    return [found.size(step) for step in range(steps)]


def megatron(final: int, ramp: BatchRamp, steps: int) -> list[int]:
    """Step by step, as Megatron's ``RampupBatchsizeNumMicroBatchesCalculator`` counts."""
    found, consumed, increments = [], 0, (final - ramp.start) // ramp.increment
    for _ in range(steps):
        level = consumed * increments // ramp.samples
        found.append(final if consumed > ramp.samples else ramp.start + level * ramp.increment)
        consumed += found[-1]
    return found


def test_a_ramp_goes_up_with_the_samples() -> None:
    found = job_with(RAMP).batch_sizes
    assert sizes(found, 12) == SIZES
    assert [found.before(step) for step in range(6)] == [0, 2, 4, 8, 14, 22]
    assert [found.micro_batches(step) for step in range(5)] == [1, 1, 2, 3, 4]
    assert found.ramp_steps == 4
    assert [found.grown(step) for step in range(6)] == [0, 0, 2, 4, 6, 0]


def test_a_job_without_a_ramp_takes_its_global_batch_in_every_step() -> None:
    found = job_with(None).batch_sizes
    assert sizes(found, 3) == [8, 8, 8]
    assert (found.before(5), found.step_of(39), found.steps_for(40), found.ramp_steps) == (40, 4, 5, 0)
    assert job_with(None).eval_rounds.sizes is None


def test_what_one_step_goes_beyond_is_left_out() -> None:
    assert sizes(job_with({"start": 2, "increment": 2, "samples": 1}).batch_sizes, 4) == [2, 8, 8, 8]
    assert sizes(job_with({"start": 6, "increment": 2, "samples": 13}).batch_sizes, 5) == [6, 6, 6, 8, 8]


@given(
    start=st.integers(1, 9), increment=st.integers(1, 9), increments=st.integers(1, 9),
    samples=st.integers(1, 2000),
)  # fmt: skip
def test_it_is_megatrons_function_and_every_sample_is_of_one_step(
    start: int, increment: int, increments: int, samples: int
) -> None:
    final, ramp = (
        start + increment * increments,
        BatchRamp(start=start, increment=increment, samples=samples),
    )
    found, steps = sizes_of(final, 1, ramp), 60
    assert sizes(found, steps) == megatron(final, ramp, steps)
    total = 0
    for step in range(steps):
        assert found.before(step) == total
        assert {found.step_of(total), found.step_of(total + found.size(step) - 1)} == {step}
        assert (found.steps_for(total), found.steps_for(total + 1)) == (step, step + 1)
        total += found.size(step)


def test_a_known_ramp() -> None:
    """1,000 sequences in 32s, as a large run has them; the numbers by hand."""
    found = sizes_of(128, 8, BatchRamp(start=32, increment=32, samples=960))
    assert sizes(found, 10) == [32] * 10
    assert sizes(found, 19)[10:] == [64] * 5 + [96] * 4
    assert (found.ramp_steps, found.before(19), found.size(19)) == (19, 1024, 128)


@pytest.mark.parametrize(
    ("ramp", "path", "problem", "hint"),
    [
        ({**RAMP, "start": 3}, "train.batch_ramp.start", "3 is no multiple of train.micro_batch = 2",
         "make it 4"),
        ({**RAMP, "increment": 1}, "train.batch_ramp.increment", "1 is no multiple", "make it 2"),
        ({**RAMP, "start": 8}, "train.batch_ramp.start", "8 is not less than train.global_batch = 8",
         "leave"),
        ({**RAMP, "increment": 4}, "train.batch_ramp.increment", "no step has train.global_batch = 8",
         "a divisor of 6, or make train.global_batch 10"),
        ({**RAMP, "samples": 0}, "train.batch_ramp.samples", "from 1 to", "docs/job-toml.md"),
        ({**RAMP, "end": 1}, "train.batch_ramp.end", "unknown key", "known keys: start, increment, samples"),
        ({"start": 2, "increment": 2}, "train.batch_ramp.samples", "is missing", "docs/job-toml.md"),
        ([2, 2, 9], "train.batch_ramp", "", ""),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(ramp: Any, path: str, problem: str, hint: str) -> None:
    with pytest.raises(JobError) as caught:
        job_with(ramp)
    assert caught.value.path.startswith(path)
    assert problem in caught.value.problem
    assert hint in caught.value.hint


@pytest.mark.parametrize("key", ["rampup_batch_size", "batch_size_warmup", "batch_warmup"])
def test_what_others_call_it_is_named(key: str) -> None:
    with pytest.raises(JobError) as caught:
        job_with(None, **{key: [2, 2, 9]})
    assert "train.batch_ramp" in caught.value.problem
    assert caught.value.hint == "see docs/recipe.md#batch-ramp"


def test_a_job_without_one_leaves_no_trace_of_the_key() -> None:
    assert b"batch_ramp" not in canonical(job_with(None))
    assert "batch_ramp" not in table_of(job_with(None))["train"]
    assert b"batch_ramp" in canonical(job_with(RAMP))
    assert parse_job(table_of(job_with(RAMP))) == job_with(RAMP)


def test_another_ramp_is_other_samples() -> None:
    was, now = job_with(RAMP), job_with({**RAMP, "samples": 10})
    assert [(each.key, each.effect) for each in changes(was, now)] == [("train.batch_ramp.samples", "order")]
    assert {each.effect for each in changes(was, job_with(None))} == {"order"}


def test_a_warm_up_in_tokens_counts_the_tokens_of_smaller_steps() -> None:
    """The first four steps have 14 sequences of 16 tokens."""
    for tokens, steps in ((14 * 16, 4), (14 * 16 + 1, 5), (1, 1), (2 * 16, 1)):
        said = job_with(RAMP, {"warmup_tokens": tokens})
        assert said.warmup_steps == steps
        assert lr_at(steps, said) == said.optimizer.lr
    assert job_with(RAMP).tokens_before(5) == 22 * 16


def test_rounds_have_the_micro_batches_of_their_step() -> None:
    rounds = job_with(RAMP).eval_rounds
    assert [rounds.of_step(step) for step in range(6)] == [1, 1, 2, 3, 4, 4]
    assert math.isclose(rounds.whole_steps, sum(SIZES) / 8)
    assert EvalRounds(12, 4).whole_steps == 12

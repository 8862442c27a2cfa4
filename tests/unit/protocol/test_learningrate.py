"""The learning rate of every schedule: by formulas of its own, and as transformers' and torch's have it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.learningrate import lr_at

STEPS, WARMUP, DECAY, PEAK = 60, 9, 20, 3e-3
Make = Callable[[torch.optim.Optimizer], LRScheduler]


def job_of(steps: int = STEPS, **optimizer: Any) -> Job:
    train = {"steps": steps, "global_batch": 4, "micro_batch": 2, "sequence": 8}
    return parse_job({"name": "j", "train": train, "optimizer": {"lr": PEAK, **optimizer}})


def rates(steps: int = STEPS, **optimizer: Any) -> list[float]:
    job = job_of(steps, **optimizer)
    return [lr_at(step, job) for step in range(steps)]


def theirs(make: Make, *, skip: int) -> list[float]:
    """The rates of a scheduler's steps. A warm-up of theirs begins with a step at 0, which ours leaves out:
    it is one step longer, and its first one is not made.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler, found = make(optimizer), []
    for _ in range(STEPS + skip):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found[skip:]


W = WARMUP + 1
SAME: dict[str, tuple[dict[str, Any], Make]] = {
    "cosine": (
        {"min_lr_ratio": 0.0},
        lambda o: get_cosine_schedule_with_warmup(o, num_warmup_steps=W, num_training_steps=STEPS),
    ),
    "linear": (
        {"schedule": "linear", "min_lr_ratio": 0.0},
        lambda o: get_linear_schedule_with_warmup(o, num_warmup_steps=W, num_training_steps=STEPS),
    ),
    "constant": (
        {"schedule": "constant"},
        lambda o: get_constant_schedule_with_warmup(o, num_warmup_steps=W),
    ),
    "inverse-sqrt": (
        {"schedule": "inverse-sqrt", "min_lr_ratio": 0.0},
        lambda o: get_inverse_sqrt_schedule(o, num_warmup_steps=W),
    ),
    **{
        f"wsd, {decay_type}": (
            {"schedule": "wsd", "decay_steps": DECAY, "decay_type": decay_type, "min_lr_ratio": 0.05},
            lambda o, decay_type=decay_type: get_wsd_schedule(
                o, W, DECAY, num_training_steps=STEPS, decay_type=decay_type, min_lr_ratio=0.05
            ),
        )
        for decay_type in ("linear", "cosine", "1-sqrt")
    },
}


@pytest.mark.parametrize("name", SAME)
def test_transformers_has_the_same(name: str) -> None:
    said, make = SAME[name]
    got, expected = rates(warmup_steps=WARMUP, **said), theirs(make, skip=1)
    if name.startswith("wsd"):  # theirs rises from the least rate, ours from 0
        assert got[:WARMUP] == [PEAK * (step + 1) / W for step in range(WARMUP)]
        got, expected = got[WARMUP:], expected[WARMUP:]
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_torch_has_the_same_line() -> None:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        rise = LinearLR(optimizer, 1 / W, 1.0, WARMUP)
        fall = LinearLR(optimizer, 1.0, 0.1, STEPS - 1 - WARMUP)
        return SequentialLR(optimizer, [rise, fall], [WARMUP])

    got = rates(schedule="linear", warmup_steps=WARMUP, min_lr_ratio=0.1)
    assert got == pytest.approx(theirs(make, skip=0), rel=1e-12)


def test_by_formulas() -> None:
    """Of steps behind the warm-up, s from 1 at its end; L the least share."""
    least, last = 0.2, STEPS - 1
    said: dict[str, Any] = {"warmup_steps": WARMUP, "min_lr_ratio": least}
    for step in range(WARMUP, STEPS):
        x = (step - WARMUP) / (last - WARMUP)
        of = {
            "cosine": least + (1 - least) * (math.cos(math.pi * x) + 1) / 2,
            "linear": 1 - (1 - least) * x,
            "constant": 1.0,
            "inverse-sqrt": max(least, (W / (step + 1)) ** 0.5),
        }
        for schedule, share in of.items():
            got = lr_at(step, job_of(schedule=schedule, **said))
            assert got == pytest.approx(PEAK * share, rel=1e-12), schedule
        y = max(0, step - (last - DECAY)) / DECAY
        got = lr_at(step, job_of(schedule="wsd", decay_steps=DECAY, **said))
        assert got == pytest.approx(PEAK * (1 - (1 - least) * y), rel=1e-12)


def test_the_ends_of_a_stable_run() -> None:
    found = rates(schedule="wsd", warmup_steps=WARMUP, decay_steps=DECAY, min_lr_ratio=0.1)
    assert found[WARMUP : STEPS - DECAY] == [PEAK] * (STEPS - DECAY - WARMUP)
    assert found[STEPS - DECAY] < PEAK
    assert found[-1] == pytest.approx(0.1 * PEAK, rel=1e-15)
    assert rates(schedule="wsd", warmup_steps=WARMUP)[WARMUP:] == [PEAK] * (STEPS - WARMUP)


def test_a_longer_stable_run_has_the_same_rates_until_the_decay() -> None:
    """So a run without a decay can be branched; half a cosine is another one from the start."""
    long = rates(200, schedule="wsd", warmup_steps=WARMUP)
    assert rates(schedule="wsd", warmup_steps=WARMUP, decay_steps=DECAY)[:-DECAY] == long[: STEPS - DECAY]
    assert rates(warmup_steps=WARMUP)[WARMUP + 1] != rates(200, warmup_steps=WARMUP)[WARMUP + 1]


def test_a_warm_up_in_tokens_is_rounded_up_to_steps() -> None:
    # 32 tokens a step
    for tokens, steps in ((1, 1), (32, 1), (33, 2), (320, 10)):
        assert rates(warmup_tokens=tokens) == rates(warmup_steps=steps)


def test_a_job_that_says_nothing_has_the_bits_of_before() -> None:
    digits = [rate.hex() for rate in rates(7, warmup_steps=2)]
    assert digits == [
        (PEAK * 1 / 3).hex(),
        (PEAK * 2 / 3).hex(),
        *((PEAK * (0.1 + 0.9 * (0.5 * (1.0 + math.cos(math.pi * (k / 4)))))).hex() for k in range(5)),
    ]


@pytest.mark.parametrize(
    ("said", "path", "words"),
    [
        ({"warmup_steps": 2, "warmup_tokens": 2}, "optimizer.warmup_tokens", "in steps, too"),
        ({"schedule": "inverse-sqrt"}, "optimizer.schedule", "needs a warm-up"),
        ({"decay_steps": 5}, "optimizer.decay_steps", 'schedule = "wsd" alone'),
        ({"schedule": "linear", "decay_type": "1-sqrt"}, "optimizer.decay_type", 'schedule = "wsd" alone'),
        (
            {"schedule": "wsd", "decay_steps": 55, "warmup_steps": 6},
            "optimizer.decay_steps",
            "55 and 6 steps of warm-up are more than train.steps = 60",
        ),
        ({"schedule": "polynomial"}, "optimizer.schedule", "polynomial"),
    ],
)
def test_what_makes_no_sense_is_refused(said: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        job_of(**said)
    assert caught.value.path == path
    assert words in str(caught.value)
    assert caught.value.hint

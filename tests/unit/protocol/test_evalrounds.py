"""Which rounds evaluate, and what is refused of `[eval]`."""

from __future__ import annotations

from typing import Any

import pytest

from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.parts import Counters


def job_with(**table: Any) -> Job:
    train = {"steps": 10, "global_batch": 8, "micro_batch": 2, "sequence": 16}
    return parse_job({"name": "one", "train": train, "eval": table})


def walk(rounds: EvalRounds) -> list[tuple[int, list[int]]]:
    """Step and micro-batches of every round that evaluates, in a run in which all steps are applied."""
    found, counters = [], Counters()
    while not rounds.finished(counters):
        if rounds.evaluates(counters):
            found.append((counters.step, list(rounds.micro_batches(counters))))
            counters = counters.after("evaluated")
        else:
            counters = counters.after("applied")
    assert counters.step == counters.applied == rounds.steps
    return found


def test_an_evaluation_has_the_rounds_that_its_micro_batches_need() -> None:
    rounds = EvalRounds(5, per_step=4, total=6, every=2, at_end=True)
    both = [[0, 1, 2, 3], [4, 5]]
    assert walk(rounds) == [(step, part) for step in (2, 4, 5) for part in both]


@pytest.mark.parametrize("every", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("edges", [(True, True), (False, True), (True, False), (False, False)])
def test_how_many_are_to_come_is_what_comes(every: int, edges: tuple[bool, bool]) -> None:
    rounds, left = EvalRounds(7, 4, 6, every, *edges), []
    counters = Counters()
    while not rounds.finished(counters):
        began = rounds.evaluates(counters) and not counters.evaluated
        left.append((rounds.num_left(counters), began))
        counters = counters.after("evaluated" if rounds.evaluates(counters) else "applied")
    total = sum(began for _, began in left)
    assert rounds.num_evaluations == total
    assert rounds.num_left(counters) == 0
    for place, (number, _) in enumerate(left):
        under_way = rounds.num_rounds > 1 and place and left[place - 1][1]
        assert number == sum(began for _, began in left[place:]) + bool(under_way)


def test_at_start_and_end_are_asked_for_apart() -> None:
    assert [step for step, _ in walk(EvalRounds(4, 4, 4, every=2))] == [2]
    assert [step for step, _ in walk(EvalRounds(4, 4, 4, at_start=True))] == [0]
    assert walk(EvalRounds(4, 4, 0, every=1, at_start=True, at_end=True)) == []


def test_a_try_that_is_repeated_evaluates_nothing_again() -> None:
    rounds = EvalRounds(4, 4, 4, every=2)
    after = Counters(3, 2, 2).after("evaluated")
    assert after == Counters(4, 2, 2, evaluated=1)
    assert not rounds.evaluates(after.after("repeated"))
    assert after.after("applied") == Counters(5, 3, 3)
    assert after.after("skipped") == Counters(5, 3, 2, 1)


def test_a_job_says_how_many_micro_batches_it_evaluates() -> None:
    sources = [{"name": "news", "kind": "text", "path": "a"}, {"name": "code", "kind": "text", "path": "b"}]
    job = job_with(source=sources, every=5, sequences=7)
    assert (job.eval_sources, job.eval_micro_batches) == (("news", "code"), 3)
    assert job.eval_rounds == EvalRounds(10, 4, 6, 5, at_end=True)
    assert job_with(held_out=0.01).eval_sources == ("held-out",)
    assert job_with().eval_rounds.total == 0


@pytest.mark.parametrize(
    ("table", "path"),
    [
        ({"every": 5}, "eval"),
        ({"held_out": 0.1, "sequences": 1}, "eval.sequences"),
        ({"held_out": 0.1, "at_end": False}, "eval"),
        ({"held_out": 0.1234567}, "eval.held_out"),
        ({"held_out": 0.6}, "eval.held_out"),
        ({"source": [{"name": "a", "kind": "text"}] * 2}, "eval.source[1].name"),
        ({"evry": 5, "held_out": 0.1}, "eval.evry"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(table: dict[str, Any], path: str) -> None:
    with pytest.raises(JobError) as found:
        job_with(**table)
    assert found.value.path == path
    assert found.value.hint

"""Many runs: every policy through the same failures, seed by seed, on as many processes as are wanted.

Owns the pairing and the processes. The answers do not depend on how many processes there are.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from oobleckd.orphans import end_with_parent
from oobleckd.protocol.job import Schedule
from oobleckd.simulator.outcome import Outcome, Question, SimulationError, Unable
from oobleckd.simulator.planning import Planner
from oobleckd.simulator.world import simulate

Answer = Outcome | Unable
Each = TypeVar("Each", Outcome, Unable, Answer)
Told = Callable[[float], None]
"""Hears how many runs are done, the present one in part."""


def run_all(questions: Sequence[Question], num_jobs: int, told: Told | None = None) -> tuple[Answer, ...]:
    """The answers, in the order of ``questions``. A run that cannot begin keeps no other from it."""
    told = told or (lambda _done: None)
    if num_jobs <= 1 or len(questions) == 1:
        return tuple(_here(questions, told))
    context = multiprocessing.get_context("spawn")
    found: dict[int, Answer] = {}
    # A process keeps what it planned: runs of one policy have the same templates, so they stay together.
    parts = _parts(questions, num_jobs)
    num_processes = min(num_jobs, len(parts))
    with ProcessPoolExecutor(num_processes, mp_context=context, initializer=end_with_parent) as pool:
        waiting = {pool.submit(_all_of, [questions[n] for n in part]): part for part in parts}
        for future in as_completed(waiting):
            found.update(zip(waiting[future], future.result(), strict=True))
            told(float(len(found)))
    return tuple(found[number] for number in range(len(questions)))


def _here(questions: Sequence[Question], told: Told) -> Iterator[Answer]:
    planner = Planner()
    for number, question in enumerate(questions):
        yield _answer(question, planner, lambda share, done=number: told(done + share))  # type: ignore[misc]
        told(number + 1.0)


def _all_of(questions: Sequence[Question]) -> list[Answer]:
    planner = Planner()
    return [_answer(question, planner) for question in questions]


def _answer(question: Question, planner: Planner, told: Told | None = None) -> Answer:
    try:
        return simulate(question, planner, told)
    except SimulationError as error:
        return Unable(question.policy, question.costs_name, question.seed, error.problem, error.hint)


def _parts(questions: Sequence[Question], num_jobs: int) -> list[list[int]]:
    """Numbers of questions: of one job, policy and costs together, split until there is enough for all processes."""
    kinds: dict[tuple[str, Schedule, str, str], list[int]] = {}
    for number, question in enumerate(questions):
        job = question.job
        kind = (job.name, job.schedule, question.policy, question.costs_name)
        kinds.setdefault(kind, []).append(number)
    parts = list(kinds.values())
    while len(parts) < num_jobs and (largest := max(parts, key=len)) and len(largest) > 1:
        parts.remove(largest)
        half = len(largest) // 2
        parts += [largest[:half], largest[half:]]
    return parts


def paired(answers: Iterable[Each]) -> dict[tuple[str, str], list[Each]]:
    """(policy, costs) -> its runs by seed."""
    found: dict[tuple[str, str], list[Each]] = {}
    for answer in answers:
        found.setdefault((answer.policy, answer.costs), []).append(answer)
    return {key: sorted(each, key=lambda answer: answer.seed) for key, each in found.items()}


def apart(answers: Iterable[Answer]) -> tuple[tuple[Outcome, ...], tuple[Unable, ...]]:
    """The runs of policies that can run; and of each other one the first that cannot begin. One is enough: its means would not be of the same failures."""
    ran: list[Outcome] = []
    unable: list[Unable] = []
    for runs in paired(answers).values():
        failed = [run for run in runs if isinstance(run, Unable)]
        unable += failed[:1]
        if not failed:
            ran += [run for run in runs if isinstance(run, Outcome)]
    return tuple(ran), tuple(unable)

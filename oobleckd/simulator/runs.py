"""Many runs: every policy through the same failures, seed by seed, on as many processes as are wanted.

Owns the pairing and the processes. The answers do not depend on how many processes there are.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import TypeVar

from oobleckd.host.orphans import end_with_parent
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.simulator.outcome import Outcome, Question, SimulationError, Unable
from oobleckd.simulator.planning import Planner
from oobleckd.simulator.world import simulate

Answer = Outcome | Unable
Each = TypeVar("Each", Outcome, Unable, Answer)
Told = Callable[[float], None]
"""Hears how many runs are done, those under way in part."""

_LOOK_S = 0.2
_shares: list[MutableSequence[float]] = []
"""In a process of the pool: how many runs of each part are done."""


def run_all(questions: Sequence[Question], num_jobs: int, told: Told | None = None) -> tuple[Answer, ...]:
    """The answers, in the order of ``questions``. A run that cannot begin keeps no other from it."""
    told = told or (lambda _done: None)
    if num_jobs <= 1 or len(questions) == 1:
        return tuple(_here(questions, told))
    context = multiprocessing.get_context("spawn")
    # A process keeps what it planned: runs of one policy have the same templates, so they stay together.
    parts = _parts(questions, num_jobs)
    shares = context.RawArray("d", len(parts))
    with ProcessPoolExecutor(
        min(num_jobs, len(parts)), mp_context=context, initializer=_begin, initargs=(shares,)
    ) as pool:
        futures = [
            pool.submit(_all_of, number, [questions[n] for n in part]) for number, part in enumerate(parts)
        ]
        waiting: set[Future[list[Answer]]] = set(futures)
        while waiting:
            ended, waiting = wait(waiting, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in ended:
                future.result()  # one that failed ends all
            told(sum(shares))
    found = {
        n: answer
        for part, future in zip(parts, futures, strict=True)
        for n, answer in zip(part, future.result(), strict=True)
    }
    return tuple(found[number] for number in range(len(questions)))


def _here(questions: Sequence[Question], told: Told) -> Iterator[Answer]:
    planner = Planner()
    for number, question in enumerate(questions):
        yield _answer(question, planner, lambda share, done=number: told(done + share))  # type: ignore[misc]
        told(number + 1.0)


def _begin(shares: MutableSequence[float]) -> None:
    end_with_parent()
    _shares.append(shares)


def _all_of(part: int, questions: Sequence[Question]) -> list[Answer]:
    def told(done: float) -> None:
        _shares[0][part] = done

    return list(_here(questions, told))


def _answer(question: Question, planner: Planner, told: Told | None = None) -> Answer:
    try:
        return simulate(question, planner, told)
    except SimulationError as error:
        return Unable(question.policy, question.costs_name, question.seed, error.problem, error.hint)


def _parts(questions: Sequence[Question], num_jobs: int) -> list[list[int]]:
    """Numbers of questions: of one job, policy and costs together, split until there is enough for all
    processes.
    """
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


# A policy that cannot begin with one of the seeds has no means at all: they would be of other failures than
# those of the others. (D-simulator-008)
def apart(answers: Iterable[Answer]) -> tuple[tuple[Outcome, ...], tuple[Unable, ...]]:
    """The runs of policies that can run; and of each other one the first that cannot begin. One is enough:
    its means would not be of the same failures.
    """
    ran: list[Outcome] = []
    unable: list[Unable] = []
    for runs in paired(answers).values():
        failed = [run for run in runs if isinstance(run, Unable)]
        unable += failed[:1]
        if not failed:
            ran += [run for run in runs if isinstance(run, Outcome)]
    return tuple(ran), tuple(unable)

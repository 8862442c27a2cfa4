"""Jobs that are evaluated while they train, on the exact engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from oobleckd.protocol.job import Job, check_job
from oobleckd.protocol.jobeval import Eval, EvalSource
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.messages import StepDone
from oobleckd.protocol.parts import EvalSum
from oobleckd.worker.tools import reference
from tests.helpers.engine import World
from tests.helpers.engine_jobs import SCHEDULES, STAGES, Reference, check

ROUNDS = (0, 1, 4, 5, 8, 9, 11, 12)
"""Those of a job with ``on_texts`` that evaluate: after 0, 2, 4 and 5 steps, of 6 micro-batches 4, then 2."""
HEADS = ("a1/0", "b2/0")

Sums = dict[tuple[int, int], tuple[EvalSum, ...]]
"""What was found, by steps done and round of the evaluation."""
Evaluated = tuple[Job, Reference, Sums]
"""A job with evaluations, what it trains to without them, and what they come to."""


def on_texts(job: Job, folder: Path) -> Job:
    """``job``, evaluated on two texts after every second step, and at both ends."""
    sources = []
    for name, text in (("letters", bytes(range(97, 123)) * 20), ("digits", b"0123456789" * 50)):
        (folder / name).write_bytes(text)
        sources.append(EvalSource(name=name, kind="text", path=str(folder / name)))
    return with_eval(job, every=2, sequences=6, at_start=True, source=tuple(sources))


def with_eval(job: Job, **table: Any) -> Job:
    """``job``, with that table [eval]."""
    found = msgspec.structs.replace(job, eval=Eval(**table))
    check_job(found)
    return found


def world_of(evaluated: Evaluated, tmp_path: Path, seed: int, schedule: str = "fused", **more: Any) -> World:
    """The job on two pipelines, under one of ``SCHEDULES``."""
    changed = msgspec.structs.replace(evaluated[0], schedule=Schedule(**SCHEDULES[schedule]))
    return World(changed, STAGES, seed, tmp_path, **more)


def check_all(world: World, evaluated: Evaluated) -> None:
    """Evaluations have the bits that they have on one device, training those that it has without them; and
    dropout is on again.
    """
    check(world, evaluated[1])
    assert world.evaluations == evaluated[2]
    stores = [world.nodes[device].executor.store for device in world.live()]
    layers = [layer for store in stores for layer in store.layers.values()]
    assert all(module.training for layer in layers for module in layer.module.modules())


def sums_told(job: Job, out: Path) -> Sums:
    """What ``job`` finds, trained by one process alone."""
    told: list[Any] = []
    reference.run(job, out, told.append)
    return {
        (each.counters.step, each.counters.evaluated): each.evaluated
        for each in told
        if isinstance(each, StepDone) and each.outcome == "evaluated"
    }


def means(sums: Sums, step: int) -> dict[str, float]:
    """Source -> its loss after ``step`` steps."""
    losses: dict[str, float] = {}
    targets: dict[str, int] = {}
    for (at, _), found in sums.items():
        for each in found if at == step else ():
            losses[each.source] = losses.get(each.source, 0.0) + each.loss_sum
            targets[each.source] = targets.get(each.source, 0) + each.targets
    return {source: losses[source] / targets[source] for source in losses}

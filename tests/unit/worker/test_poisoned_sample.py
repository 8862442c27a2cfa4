"""A sample that spoils a step, in the real engine: the step is skipped, and with deaths the bits are those
without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.messages import StepDone
from oobleckd.worker.runtime.faults import POINTS
from oobleckd.worker.tools import reference as reference_run
from tests.helpers.engine import World
from tests.helpers.engine_jobs import STAGES, random_deaths, told_by

SEQUENCE, BAD = 16, 7
"""``BAD``: the step that has the sample, from 0."""
SAID: dict[str, Any] = {"steps": 10, "on_spike": "skip", "spike_factor": 2.0, "spike_window": 4}
SCHEDULES: tuple[dict[str, Any], ...] = (
    {},
    {"update": "staggered"},
    {"update": "staggered", "backward": "decoupled"},
)


class Alone(NamedTuple):
    """A job, and what it comes to without deaths: of its steps all that is told, and its weights."""

    job: Job
    told: list[StepDone]
    weights: dict[str, Tensor]


def poisoned_job(folder: Path, **train: Any) -> Job:
    """The same token everywhere, which is learnt at once, and in one place noise of others."""
    tokens = np.full(SEQUENCE * 80, 7)
    tokens[SEQUENCE * 9 : SEQUENCE * 10] = np.random.default_rng(0).integers(64, 128, SEQUENCE)
    tokens.astype("<u2").tofile(folder / "tokens.bin")
    config = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 128}
    return parse_job({
        "name": "poisoned",
        "model": {"family": "gpt2", "config": config | {"bos_token_id": 0, "eos_token_id": 0}},
        "data": {"source": "tokens", "path": str(folder / "tokens.bin")},
        "train": {"global_batch": 8, "micro_batch": 2, "sequence": SEQUENCE, "seed": 6, **SAID, **train},
        "optimizer": {"lr": 0.05},
        "checkpoint": {"dir": str(folder / "ckpt")},
    })  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("poisoned")
    job, told = poisoned_job(folder), []
    reference_run.run(job, folder, told.append)
    world = World(job, STAGES, 0, folder)
    world.run()
    steps = [message for message in told if isinstance(message, StepDone) and message.outcome != "repeated"]
    assert world.losses == {message.counters.step: message.loss for message in steps}
    return Alone(job, steps, world.weights())


def test_the_step_makes_no_update_and_says_why(alone: Alone) -> None:
    said = [(message.outcome, message.cause) for message in alone.told]
    assert said == [("skipped", "loss-spike") if step == BAD else ("applied", "") for step in range(10)]
    bad, before = alone.told[BAD], [message.loss for message in alone.told[BAD - 4 : BAD]]
    assert bad.counters.recent == tuple(before)
    assert bad.loss > 2 * sorted(before)[2]
    assert bad.grad_norm > 0
    assert (alone.told[-1].counters.spiked, alone.told[-1].counters.applied) == (1, 8)


def test_it_is_as_if_the_step_had_made_no_update(alone: Alone, tmp_path: Path) -> None:
    """The step before it is as good as where nobody looks, and all behind it are others."""
    ignored = told_by(poisoned_job(tmp_path, on_spike="ignore", spike_factor=2.0, spike_window=32), tmp_path)
    losses = [message.loss for message in alone.told]
    assert [ignored[step] == losses[step] for step in range(10)] == [step <= BAD for step in range(10)]


@pytest.mark.thin(8)
@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_deaths_do_not_show(alone: Alone, tmp_path: Path, seed: int, go_on: bool) -> None:
    schedule = Schedule(**SCHEDULES[seed % len(SCHEDULES)])
    world = World(msgspec.structs.replace(alone.job, schedule=schedule), STAGES, seed, tmp_path, go_on=go_on)
    random_deaths(world)
    world.run()
    check(world, alone)


@pytest.mark.thin(6)
@pytest.mark.parametrize("update", ["flushed", "staggered"])
@pytest.mark.parametrize("point", ["reduce", "reduced", "commit", "updated"])
def test_a_death_in_the_very_round_does_not_show(
    alone: Alone, tmp_path: Path, point: str, update: str
) -> None:
    job = msgspec.structs.replace(alone.job, schedule=Schedule(update=update))
    world = World(job, STAGES, POINTS.index(point), tmp_path)
    world.nodes["b1/0"].faults.arm(point, BAD)
    world.run()
    assert ("b1/0", point) in world.fired
    check(world, alone)


def check(world: World, alone: Alone) -> None:
    assert world.losses == {message.counters.step: message.loss for message in alone.told}
    found = world.weights()
    assert found.keys() == alone.weights.keys()
    assert all(torch.equal(found[key], alone.weights[key]) for key in found)
    after = {world.nodes[device].executor.counters for device in world.live()}
    assert {(counters.spiked, counters.applied) for counters in after} == {(1, 9)}


def test_three_in_a_row_end_it_where_the_job_says_so(tmp_path: Path) -> None:
    """Every step is beyond so small a limit, in any order of work."""
    said = {"on_spike": "stop", "spike_factor": 0.0, "spike_grad_norm": 1e-6}
    world = World(poisoned_job(tmp_path, **said), STAGES, 0, tmp_path)
    executors = [node.executor for node in world.nodes.values()]
    while not all(executor.holding for executor in executors):
        for executor in executors:
            executor.advance()
        world.deliver_late()
    assert {executor.counters.spiked_in_row for executor in executors} == {3}
    assert {executor.counters.step for executor in executors} == {3}

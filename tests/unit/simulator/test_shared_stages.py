"""Whole runs of jobs whose stages several devices share: what one device would do for as many turns, and what
holds of every run.

Four nodes of two devices, four layers, memory for two of them on two devices (and gathers that take no time):
two pipelines of two stages, two turns of two micro-batches each, as in ``test_world``.
"""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from oobleckd.planner.policy import WITH_REDUNDANT_LAYERS
from oobleckd.protocol.job import Job, PolicyName
from oobleckd.simulator.failures import memoryless
from oobleckd.simulator.traces import TraceEvent
from oobleckd.simulator.world import World, simulate
from tests.unit.simulator.build import FREE, job_of, question, trace_of

# A layer's state is 100 bytes, of which each has half; a whole layer's weights and gradients lie gathered.
LIMIT = 220


def of_two(num_micro_batches: int = 8, **changes: int) -> Job:
    return job_of(num_micro_batches, limit_bytes=LIMIT, devices_per_stage=2, **changes)


def test_two_devices_do_in_turns_what_one_does_in_micro_batches() -> None:
    alone, shared = simulate(question()), simulate(question(job=of_two(), devices_per_node=2))
    assert shared.steps == alone.steps
    assert shared.samples == 2 * alone.samples
    assert shared.live_device_s == 2 * alone.live_device_s


def test_what_is_deployed_is_lanes() -> None:
    world = World(question(job=of_two(7), devices_per_node=2))
    world.run()
    layout = world.training.layout
    assert layout is not None
    assert layout.devices_per_stage == 2
    assert len(layout.holdings) == 8
    assert layout.copies() == (2, 2, 2, 2)
    assert [route.micro_batch for route in layout.routes] == list(range(7))
    ranks = [{layout.rank(segment.device) for segment in route.segments} for route in layout.routes]
    assert ranks == [{number % 2} for number in range(7)]


@pytest.mark.parametrize("policy", ["oobleck", "slipstream"])
def test_the_loss_of_a_node_is_that_of_its_stages(policy: str) -> None:
    loss = trace_of(4, TraceEvent(10.0, "fail", "node-2"))
    alone = simulate(question(policy, loss))
    shared = simulate(question(policy, loss, job=of_two(), devices_per_node=2))
    assert (shared.losses, shared.rollbacks, shared.plans) == (alone.losses, alone.rollbacks, alone.plans)
    assert shared.steps == alone.steps


def test_the_number_of_devices_is_chosen_where_the_job_leaves_it_open() -> None:
    """A layer of one device needs 104 bytes, one that two share 114, for what lies gathered; of four 87."""
    job = job_of(8, f=0, limit_bytes=100, devices_per_stage="auto")
    world = World(question(job=job, devices_per_node=4))
    assert world.run().steps > 0
    assert world.training.layout is not None
    assert world.training.layout.devices_per_stage == 4


@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("devices", [2, 4])
def test_storms(policy: str, devices: int) -> None:
    trace = memoryless(6, 30.0, 60.0, 150.0, devices)
    limit = 2 * LIMIT if policy in WITH_REDUNDANT_LAYERS else LIMIT
    job = job_of(9 * devices - 1, every=20, limit_bytes=limit, devices_per_stage=devices)  # type: ignore[arg-type]
    costs = msgspec.structs.replace(FREE, detect_s=0.1, deploy_s=0.5)
    run = simulate(question(policy, trace, job=job, costs=costs, devices_per_node=devices))
    booked = run.useful_device_s + sum(run.lost_device_s.values())
    assert booked == pytest.approx(run.live_device_s, abs=1e-6)
    assert min(run.lost_device_s.values()) >= -1e-9
    assert 0 < run.samples <= 1.05 * run.oracle_samples
    assert run.losses > 0

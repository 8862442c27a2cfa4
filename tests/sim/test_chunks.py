"""Devices with two chunks of a pipeline, followed from a loss to the end of the job under both policies."""

from __future__ import annotations

import pytest

from oobleckd.planner.policy import WITH_REDUNDANT_LAYERS
from oobleckd.protocol.job import PolicyName
from oobleckd.protocol.jobschedule import Schedule
from tests.helpers.manners import KEEPING
from tests.helpers.world import World

TWO = Schedule("decoupled", chunks=2)
POLICIES = [policy for policy in KEEPING if policy not in WITH_REDUNDANT_LAYERS]


def running(policy: PolicyName, seed: int, num_nodes: int = 6, **config: int) -> World:
    """350 bytes a device make n0 = 2 where it has one device a node."""
    world = World(seed, num_nodes, **config)
    world.run_for(3.0)
    world.submit(steps=30, memory=350, policy=policy, schedule=TWO)
    world.until_step(3)
    return world


def forms(world: World) -> set[int]:
    """Chunks a device in the pipelines of the plan."""
    return {pipeline.chunks for pipeline in world.job().plan.pipelines}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("victim", ["n01", "n02", "n06"])
def test_a_loss(policy: PolicyName, victim: str) -> None:
    world = running(policy, 1)
    assert forms(world) == {2}
    held = world.job().layout.holdings
    assert {len(layers.ranges) for layers in held.values()} == {2}
    assert len(set(world.job().layout.copies())) == 1
    world.kill(victim)
    world.until_state("done")
    world.check_done()
    assert len(world.incidents()) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_losses_one_after_the_other_and_a_return(policy: PolicyName, seed: int) -> None:
    world = running(policy, seed)
    victims = world.random.sample(world.live(), 3)
    for count, victim in enumerate(victims):
        world.kill(victim)
        world.until_step(world.job().counters.step + 2 + count)
    world.add(victims[0])
    world.until_state("done")
    assert world.checks.last_copy_lost or world.job().steps_lost == 0
    world.check_done()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_devices", [1, 2])
def test_pipelines_of_two_and_of_three_side_by_side(policy: PolicyName, num_devices: int) -> None:
    """With two devices a node, templates of two nodes and more have too few layers: after losses both forms
    may run.
    """
    world = running(policy, 3, 7, num_devices=num_devices)
    assert forms(world) == {2}
    for victim in ("n02", "n05"):
        world.kill(victim)
        world.until_step(world.job().counters.step + 3)
    world.until_state("done")
    world.check_done()


def test_people_see_both_ranges_of_a_device() -> None:
    world = running("oobleck", 2, 4)
    shown = [(part.start, part.stop) for part in world.node("n01").layers]
    assert shown == [(held.start, held.stop) for held in world.job().layout.holdings["n01/0"].ranges]
    assert len(shown) == 2
    pipeline = world.view().pipelines[0]
    assert [stage.device for stage in pipeline.stages] == ["n01/0", "n02/0", "n02/0", "n01/0"]

"""A checkpoint that the disk has changed: the job rolls back to the one before it, and says how far; the end
is that of a run without failures.
"""

from __future__ import annotations

import random

import pytest

from oobleckd.core.entries import Released, RolledBack
from oobleckd.protocol.changes import CheckpointDamaged, JobWentBack
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def running(
    num_nodes: int = 6, seed: int = 0, *, policy: str = "varuna", checkpoints: int = 2, **spec
) -> World:
    """A world whose job has written so many checkpoints; 350 bytes a device make n0 = 2."""
    config = {key: spec.pop(key) for key in ("grace_s", "lease_s") if key in spec}
    world = World(seed, num_nodes, **config)
    world.run_for(3.0)
    world.submit(make_job(**{"steps": 30, "memory": 350, "every": 4, "policy": policy} | spec))
    world.run(lambda: len(world.job().kept) >= checkpoints)
    return world


def damage(world: World, number: int = 1, bucket: int = 0) -> list[str]:
    """The ``number`` newest checkpoints are damaged, in one file each: their folders, oldest first."""
    newest = [kept.directory for kept in world.job().kept[-number:]]
    world.damaged |= dict.fromkeys(newest, bucket)
    return newest


def ways_back(world: World) -> list[RolledBack]:
    return [entry for entry in world.daemon.disk.entries() if isinstance(entry, RolledBack)]


def finish(world: World) -> None:
    world.until_state("done")
    world.check_done()


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(8))
def test_the_newest_is_damaged_and_the_one_before_it_whole(seed: int) -> None:
    world = running(seed=seed)
    older = world.job().kept[-2]
    (newest,) = damage(world, bucket=seed % 3)
    world.kill("n02")
    finish(world)
    first, second = ways_back(world)
    assert (first.source, second.source) == (newest, older.directory)
    assert second.steps_lost == first.counters.step - older.counters.step == 4
    (incident,) = world.incidents()
    assert incident.steps_lost == world.job().steps_lost == first.steps_lost + 4
    assert incident.parts.back
    (found,) = world.told(CheckpointDamaged)
    assert (found.step, found.directory) == (first.counters.step, newest)
    assert found.device.endswith("/0"), "who found it"


def test_several_are_damaged() -> None:
    world = running(checkpoints=3, keep=3)
    oldest = world.job().kept[0]
    damage(world, 2)
    world.kill("n02")
    finish(world)
    assert [back.source for back in ways_back(world)][-1] == oldest.directory
    (incident,) = world.incidents()
    assert incident.steps_lost == sum(back.steps_lost for back in ways_back(world))
    told = world.told(JobWentBack)
    assert [back.cause for back in told] == ["policy"] + ["checkpoint-damaged"] * (len(told) - 1)
    assert [back.steps_lost for back in told] == [back.steps_lost for back in ways_back(world)]


def test_none_is_whole_any_more() -> None:
    world = running()
    oldest, _ = damage(world, 2)
    world.kill("n02")
    world.until_state("failed")
    assert world.view().cause == "checkpoint-damaged"
    assert oldest in world.complete, "the last one is left as it is"
    assert world.machine.core.run is None


def test_a_policy_that_needs_the_checkpoint_only_when_a_last_copy_is_gone() -> None:
    world = running(2, policy="oobleck", f=0)
    damage(world)
    world.kill("n02")
    world.until_state("waiting")
    world.add("n02")
    finish(world)
    assert len(ways_back(world)) == 2


def test_nobody_was_lost() -> None:
    """Nodes that join are taken in by way of a checkpoint: it is written, and damaged before it is loaded."""
    world = running(4, steps=60)
    for name in ("n05", "n06"):
        world.add(name)
    world.run(lambda: any(isinstance(entry, Released) for entry in world.daemon.disk.entries()))
    damage(world)
    finish(world)
    (incident,) = world.incidents()
    (back,) = ways_back(world)
    assert incident.nodes == ()
    assert incident.steps_lost == back.steps_lost > 0


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(20))
def test_while_other_things_fail(seed: int) -> None:
    """The daemon or another node dies, some time between the first rollback and the end of the second."""
    dice = random.Random(f"damaged {seed}")
    world = running(6, seed, grace_s=1.0, lease_s=1.5, steps=40)
    damage(world, bucket=dice.randrange(6))
    world.kill("n02")
    world.run(lambda: bool(ways_back(world)))
    world.run_for(dice.uniform(0.0, 0.6))
    world.daemon.restart() if seed % 2 else world.kill("n05")
    finish(world)
    assert len(world.told(CheckpointDamaged)) == 1

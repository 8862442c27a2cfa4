"""Policy varuna, followed to its end: rollback to the checkpoint after every loss, and by way of one for
every other change.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from oobleckd.core.entries import Released, RolledBack
from oobleckd.protocol.incidentviews import RollbackView
from oobleckd.protocol.requests import Control, Drain
from tests.helpers.simjobs import make_job
from tests.helpers.storm import Storm, Strikes
from tests.helpers.world import World

POINTS = ("checkpoint-write", "checkpoint", "deploy", "ready")


def running(num_nodes: int = 6, seed: int = 0, step: int = 6, **spec) -> World:
    """A world whose job has committed a few steps; 350 bytes a device make n0 = 2."""
    config = {key: spec.pop(key) for key in ("num_devices", "grace_s", "lease_s") if key in spec}
    world = World(seed, num_nodes, **config)
    world.run_for(3.0)
    world.submit(make_job(**{"steps": 20, "memory": 350, "every": 4, "policy": "varuna"} | spec))
    world.until_step(step)
    return world


def of_kind(world: World, kind: type) -> list:
    return [entry for entry in world.daemon.disk.entries() if isinstance(entry, kind)]


def shape(world: World) -> tuple[int, int]:
    """Depth and width of the plan in force."""
    pipelines = world.job().plan.pipelines
    assert len({len(pipeline.nodes) for pipeline in pipelines}) == 1
    return len(pipelines[0].nodes), len(pipelines)


def finish(world: World) -> None:
    world.until_state("done")
    world.check_done()


def test_f_is_not_needed_to_begin():
    world = running(2, f=3, every=0, step=2)
    assert shape(world) == (2, 1)
    assert world.view().tolerance == 0
    finish(world)
    assert world.job().steps_lost == 0


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("silent", [False, True])
def test_a_loss_goes_back_to_the_checkpoint_and_says_how_far(seed, silent):
    world = running(seed=seed, step=7)
    assert shape(world) == (2, 3)
    world.kill("n02", silent=silent)
    world.run(lambda: of_kind(world, RolledBack))
    (back,) = of_kind(world, RolledBack)
    assert back.source.endswith(f"step-{back.counters.step:08d}")
    assert back.counters.step % 4 == 0
    assert back.steps_lost >= 0
    world.until_state("running")
    assert shape(world) == (2, 2)
    (idle,) = world.job().plan.idle
    assert world.node(idle).cause == "no-place"
    finish(world)
    (incident,) = world.incidents()
    assert incident.nodes == ("n02",)
    assert incident.steps_lost == back.steps_lost == world.job().steps_lost
    assert incident.parts.rollback == RollbackView(back.counters.step, back.steps_lost, back.source, "policy")
    assert incident.parts.way == "morph"
    assert [phase.phase for phase in incident.phases] == ["detect", "reconfigure", "copy", "resume"]
    assert incident.copied_bytes == 0


def test_without_a_checkpoint_it_begins_anew():
    world = running(every=0, step=5)
    world.kill("n03")
    world.run(lambda: of_kind(world, RolledBack))
    assert of_kind(world, RolledBack)[0].source == "init"
    assert world.job().counters.step == 0
    finish(world)


@pytest.mark.thin(8)
@pytest.mark.parametrize("phase", ["off", "deploy"])
@pytest.mark.parametrize("seed", range(6))
def test_a_second_loss_in_every_phase(phase, seed):
    world = running(7, seed)
    world.kill("n02")
    world.until_state("recovering")
    world.run(lambda: world.machine.core.run.phase == phase)
    world.kill("n05")
    finish(world)
    assert {node for incident in world.incidents() for node in incident.nodes} >= {"n02"}


@pytest.mark.parametrize("seed", range(4))
def test_a_device_process_dies_and_its_node_comes_back(seed):
    world = running(seed=seed, steps=30)
    world.kill_device("n03", restart_s=0.4)
    world.until_state("recovering")
    world.run(lambda: "n03" in world.view().nodes)
    finish(world)
    assert len(of_kind(world, RolledBack)) == 1
    assert len(of_kind(world, Released)) == 1, "it came back by way of a checkpoint"


def test_a_spare_takes_the_place_of_a_device():
    world = running(4, num_devices=2, step=6)
    before = world.job().plan.pipelines
    world.spare_takes_place("n01", index=1)
    world.run(lambda: of_kind(world, RolledBack))
    world.until_state("running")
    assert world.job().plan.pipelines == before
    finish(world)


@pytest.mark.parametrize("seed", range(6))
def test_nodes_that_join_are_taken_in_without_a_step_lost(seed):
    world = running(4, seed, steps=30)
    assert shape(world) == (2, 2)
    for name in ("n05", "n06"):
        world.add(name)
    world.run(lambda: {"n05", "n06"} <= set(world.view().nodes))
    assert shape(world) == (2, 3)
    finish(world)
    assert world.job().steps_lost == 0
    assert of_kind(world, Released)
    assert not of_kind(world, RolledBack)
    assert world.incidents() == []


def test_a_node_that_makes_no_better_shape_stands_by():
    world = running(4, steps=40)
    epoch = world.job().epoch
    world.add("n05")
    world.until_step(20)
    assert world.job().epoch == epoch
    assert world.node("n05").state == "standby"
    finish(world)


@pytest.mark.parametrize("seed", range(6))
def test_a_drained_node_leaves_without_a_step_lost(seed):
    world = running(6, seed, steps=25)
    world.ask(Drain("n02"))
    world.run(lambda: world.node("n02").state == "drained")
    world.run(lambda: world.state() == "running")
    assert shape(world) == (2, 2)
    finish(world)
    assert world.job().steps_lost == 0


def test_drained_below_what_is_needed_it_waits_in_its_checkpoint():
    world = running(2, steps=40)
    world.ask(Drain("n02"))
    world.until_state("waiting")
    assert (world.view().cause, world.job().n0) == ("too-few-nodes", 2)
    assert world.view().checkpoint_step == world.view().step
    world.run_for(2.0)
    world.ask(Drain("n02", undo=True))
    finish(world)
    assert world.job().steps_lost == 0


def test_a_writer_that_dies_while_all_hold_for_a_morph():
    world = running(4, 3, steps=60, step=9)
    strikes = Strikes(world, random.Random(3), [])
    strikes.points, strikes.visits = ["checkpoint-write"], 0
    strikes.due = world.strikes = lambda d, point, _: (
        point == "checkpoint-write" and not strikes.struck and holds(world, strikes)
    )
    for name in ("n05", "n06"):
        world.add(name)
    world.run(lambda: strikes.struck)
    finish(world)


def holds(world: World, strikes: Strikes) -> bool:
    """Once, while everybody holds at the boundary."""
    devices = [d for node in world.nodes.values() for d in node.devices.values() if d.alive and d.job]
    if devices and all(device.holding for device in devices):
        strikes.struck.append("checkpoint-write")
        return True
    return False


def test_paused_in_between():
    world = running(4, steps=40)
    world.ask(Control("job-1", "pause"))
    world.until_state("paused")
    world.add("n05")
    world.add("n06")
    world.run_for(2.0)
    assert world.state() == "paused"
    world.ask(Control("job-1", "resume"))
    world.run(lambda: {"n05", "n06"} <= set(world.view().nodes))
    finish(world)
    assert world.job().steps_lost == 0


@pytest.mark.thin(8)
@pytest.mark.parametrize("phase", ["off", "deploy", "run"])
@pytest.mark.parametrize("seed", range(8))
def test_the_daemon_dies_in_the_middle_of_a_recovery(phase, seed):
    world = running(seed=seed, grace_s=1.0, lease_s=1.5, steps=25)
    world.kill("n03")
    world.until_state("recovering")
    world.run(lambda: world.machine.core.run.phase == phase)
    world.daemon.restart()
    world.run_for(0.1)
    finish(world)


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(12))
def test_the_daemon_dies_in_the_middle_of_a_morph(seed):
    world = running(4, seed, grace_s=1.0, lease_s=1.5, steps=40)
    for name in ("n05", "n06"):
        world.add(name)
    world.run_for(0.3 + 0.02 * seed)  # when the batch is over they are counted on
    world.daemon.restart()
    world.run_for(0.1)
    world.run(lambda: world.machine is not None and {"n05", "n06"} <= set(world.view().nodes))
    finish(world)
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_node_dies_while_the_daemon_is_away(seed):
    world = running(seed=seed, grace_s=1.0, lease_s=1.5, steps=25)
    world.daemon.stop()
    world.run_for(0.1)
    world.kill("n03")
    world.run_for(0.05 * seed)
    world.daemon.start()
    finish(world)
    assert len(of_kind(world, RolledBack)) == 1


def test_what_an_agent_said_of_another_job_is_not_counted_as_lost():
    """Hellos say how far the devices are, and come when incarnations change: the last one may be of the job
    before.
    """
    world = running(4)
    node = world.machine.core.members.nodes["n01"]
    node.devices = tuple(msgspec.structs.replace(info, layout=999, step=999) for info in node.devices)
    world.kill("n02")
    world.run(lambda: of_kind(world, RolledBack))
    assert world.job().steps_lost < 20


def struck(seed: int) -> None:
    dice = random.Random(f"varuna {seed}")
    world = World(seed, dice.randrange(4, 9), lease_s=1.5, grace_s=1.0, num_devices=dice.choice([1, 1, 2]))
    world.layer_s = 0.005
    world.run_for(1.0)
    world.submit(steps=25, memory=350, every=dice.choice([2, 3]), policy="varuna")
    points = [dice.choice(POINTS) for _ in range(dice.choice([1, 2, 3]))]
    strikes = Strikes(world, dice, list(points))
    storm = Storm(world, dice, 2)
    world.until_step(2)

    def come_back() -> None:
        storm.revive()
        if strikes.points:
            world.after(dice.uniform(0.2, 0.6), come_back)

    come_back()
    world.run(lambda: bool(strikes.struck) or world.state() == "done")
    storm.blow(dice.randrange(3))
    world.run(lambda: world.state() in {"done", "failed"}, limit_s=120)
    world.check_done()


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(60))
def test_deaths_in_the_middle_of_a_checkpoint_and_of_a_deployment(seed):
    try:
        struck(seed)
    except AssertionError as error:
        name = "test_deaths_in_the_middle_of_a_checkpoint_and_of_a_deployment"
        command = f".venv/bin/pytest 'tests/sim/test_varuna.py::{name}[{seed}]'"
        raise AssertionError(f"{error}\nrepeat with: {command}") from error

"""Device processes that die in nodes that live on: the spare takes the place, only that device's state is
lost.
"""

import pytest

from oobleckd.planner import policies
from oobleckd.planner.policy import PlanError
from oobleckd.protocol.changes import PlanDeployed
from oobleckd.protocol.incidentviews import LossView
from oobleckd.protocol.messages import LinkDown
from oobleckd.protocol.requests import Control
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def running(num_nodes=4, seed=0, step=3, num_devices=2, **spec):
    """A world whose job has committed a few steps; 350 bytes a device make one node of two devices enough."""
    world = World(seed, num_nodes, num_devices=num_devices)
    world.run_for(1.0)
    world.submit(make_job(**{"steps": 16, "f": 1, "memory": 350} | spec))
    world.until_step(step)
    return world


def until_full(world, num_incidents):
    """So many incidents are over, and the plan has every device again."""

    def full():
        incidents = world.incidents()
        whole = set(world.view().nodes) == set(world.nodes) and not world.job().dead
        return whole and len(incidents) == num_incidents and not incidents[-1].open

    world.run(full)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_node_is_not_lost_and_gets_back_what_the_device_held(seed, num_devices):
    world = running(6, seed, num_devices=num_devices)
    others = [n.devices[d].incarnation for n in world.nodes.values() for d in n.devices if d != "n02/0"]
    plan = world.view().pipelines
    world.spare_takes_place("n02")
    world.until_state("recovering")
    assert world.node("n02").state != "lost"
    until_full(world, 1)
    (incident,) = world.incidents()
    assert incident.nodes == ("n02",)
    assert incident.losses == (LossView("n02", "device-replaced", "n02/0"),)
    assert incident.steps_lost == 0
    assert 0 < incident.copied_bytes <= 6  # the layers of one device and no more: the sim counts layers
    assert world.view().pipelines == plan  # nobody else had to move, and it was planned once
    assert others == [
        n.devices[d].incarnation for n in world.nodes.values() for d in n.devices if d != "n02/0"
    ]
    world.until_state("done")
    world.check_done()
    assert len(world.incidents()) == 1


def test_four_nodes_of_two_devices_survive_one_process_after_the_other():
    world = running(4, f=3, steps=30)
    assert world.view().tolerance == 3
    for count, victim in enumerate(("n01", "n03", "n04"), 1):
        world.spare_takes_place(victim, index=count % 2)
        until_full(world, count)
    assert world.view().tolerance == 3
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


def test_the_same_place_falls_twice_and_the_second_time_there_is_no_spare():
    world = running(5, f=2, steps=40)
    world.spare_takes_place("n02", index=1)
    until_full(world, 1)
    world.kill_device("n02", restart_s=0.4, index=1)
    world.run(lambda: world.node("n02").state == "lost")
    until_full(world, 2)
    world.until_state("done")
    world.check_done()
    assert world.incidents()[1].losses == (LossView("n02", "device-lost"),)


def test_a_spare_that_falls_before_it_is_up_costs_the_node():
    world = running(5, f=2, steps=20)
    world.spare_takes_place("n02", up_s=0.2)
    world.run_for(0.1)
    world.kill("n02")
    world.run(lambda: len(world.view().nodes) == 4 and not world.incidents()[0].open)
    world.until_state("done")
    world.check_done()


@pytest.mark.parametrize("seed", range(4))
def test_a_fall_while_the_daemon_is_away(seed):
    world = running(4, seed, steps=20)
    world.daemon.stop()
    world.spare_takes_place("n03", index=1)
    world.after(0.3, world.daemon.start)
    world.run(lambda: world.machine is not None and bool(world.incidents()))
    assert world.incidents()[0].losses == (LossView("n03", "device-renewed"),)
    until_full(world, 1)
    world.until_state("done")
    world.check_done()


def test_a_fall_before_training_begins():
    for state in ("profiling", "deploying"):
        world = World(1, 4, num_devices=2)
        world.run_for(1.0)
        world.submit(steps=8, f=1, memory=350)
        world.until_state(state)
        victim = world.machine.core.run.measuring or "n01/0"
        world.spare_takes_place(victim.partition("/")[0])
        world.until_state("done")
        world.check_done()
        assert world.node("n01").state == "standby"


def test_a_last_copy_that_falls_with_its_device_goes_back():
    world = running(1, f=0, every=4, step=7)
    world.spare_takes_place("n01", index=1)
    world.run(lambda: world.job().steps_lost > 0)
    assert world.job().counters.step == 4
    world.until_state("done")
    world.check_done()


def test_a_fall_in_a_pause():
    world = running(4, steps=20)
    world.ask(Control("job-1", "pause"))
    world.until_state("paused")
    world.spare_takes_place("n01")
    world.run(lambda: bool(world.incidents()))
    world.until_state("paused")
    world.ask(Control("job-1", "resume"))
    world.until_state("done")
    world.check_done()


def break_a_copy(world, earlier=0):
    """In a deployment of a later epoch than ``earlier``: a peer gives up on its link, what it
    sent is lost.
    """

    def deploying():
        joining = world.nodes["n02"].devices["n02/0"]
        return joining.deployment is not None and joining.deployment.message.epoch > earlier

    world.run(deploying)
    joining = world.nodes["n02"].devices["n02/0"]
    joining.deployment.awaited.add(-1)
    joining.deployment.coming[-1] = "n01/0"
    world.nodes["n01"].devices["n01/0"].tell(LinkDown("n01/0", "n02/0", "timed out"))
    return joining.deployment.message.epoch


def test_a_copy_that_breaks_off_is_made_again():
    world = running(4, steps=25)
    world.spare_takes_place("n02")
    break_a_copy(world)
    until_full(world, 1)
    assert len(world.view().nodes) == 4
    world.until_state("done")
    world.check_done()


def test_a_copy_that_breaks_off_twice_goes_on_without_the_node():
    world = running(4, steps=30)
    world.spare_takes_place("n02")
    break_a_copy(world, earlier=break_a_copy(world))
    world.run(lambda: world.node("n02").state == "drained")
    assert world.node("n02").cause == "evicted"
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


def test_late_news_of_broken_links_evict_nobody():
    world = running(4, steps=150)
    world.spare_takes_place("n02")
    until_full(world, 1)
    world.run_for(2 * world.config.link_grace_s)
    assert world.node("n02").state == "active"
    assert len(world.incidents()) == 1


@pytest.mark.parametrize("seed", range(4))
def test_who_is_back_before_the_boundary_is_in_the_plan_that_follows(seed):
    world = running(seed=seed, num_devices=1, steps=30)
    before = len(world.told(PlanDeployed))
    world.kill_device("n02", restart_s=0.05)
    until_full(world, 1)
    (deployed,) = world.told(PlanDeployed)[before:]
    assert "n02" in {node for nodes in deployed.pipelines for node in nodes}
    world.until_state("done")
    world.check_done()


@pytest.mark.parametrize("restart_s", [0.01, 0.05])
def test_no_plan_with_who_is_back_leaves_the_one_without(monkeypatch, restart_s):
    world = running(num_devices=1, steps=30)
    adapt = policies.adapt

    def refuse(policy, setup, templates, situation, *rest):
        if situation.holdings and "n02" not in situation.holdings and "n02" in situation.nodes:
            raise PlanError("no", "why")
        return adapt(policy, setup, templates, situation, *rest)

    monkeypatch.setattr(policies, "adapt", refuse)
    world.kill_device("n02", restart_s=restart_s)
    world.run(lambda: bool(world.incidents()) and not world.incidents()[0].open)
    assert set(world.view().nodes) == set(world.nodes) - {"n02"}
    monkeypatch.undo()
    world.until_state("done")
    world.check_done()

"""Losses one by one, each followed to its end: the job must end as one without failures does."""

import pytest

from oobleckd.planner.plan import node_of
from oobleckd.protocol.changes import JobWentBack, NodeLost
from oobleckd.protocol.incidentviews import LossView
from oobleckd.protocol.messages import LinkDown
from oobleckd.protocol.requests import Drain
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def running(num_nodes=6, seed=0, step=3, **spec):
    """A world whose job has committed a few steps; 350 bytes a device make n0 = 2."""
    config = {
        key: spec.pop(key) for key in ("num_devices", "overflows", "nans", "link_grace_s") if key in spec
    }
    world = World(seed, num_nodes, **config)
    world.run_for(3.0)  # long enough for leases to be learned
    world.submit(make_job(**{"steps": 12, "f": 1, "memory": 350} | spec))
    world.until_step(step)
    return world


def test_the_cap_gives_pipelines_of_two_nodes_and_more():
    world = running()
    assert world.job().n0 == 2
    assert all(len(pipeline.nodes) >= 2 for pipeline in world.view().pipelines)
    assert world.view().tolerance >= 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("silent", [False, True])
def test_one_node_lost(seed, silent):
    world = running(seed=seed)
    world.kill("n02", silent=silent)
    world.until_state("recovering")
    world.until_state("running")
    world.until_state("done")
    world.check_done()
    (incident,) = world.incidents()
    assert not incident.open
    assert incident.nodes == ("n02",)
    assert [phase.phase for phase in incident.phases] == ["detect", "plan", "reconfigure", "copy", "resume"]
    assert (incident.phases[0].duration_s > 0.9) == silent  # a lease against a closed link
    assert incident.phases[0].duration_s < 1.2  # and one that was learned
    assert sum(phase.duration_s for phase in incident.phases) == pytest.approx(incident.total_s)
    assert incident.steps_lost == 0
    assert 0 < incident.committed_s < incident.total_s
    assert incident.layer_gradients < incident.step_layer_gradients
    assert incident.copied_bytes > 0
    sent = [source.num_bytes for source in incident.sources]
    assert sent
    assert sent == sorted(sent, reverse=True)
    assert "n02" not in {node_of(source.device) for source in incident.sources}
    assert (incident.parts.way, incident.parts.rollback) == ("re-instantiate", None)
    assert "n02" not in world.view().nodes


def test_two_at_once_with_f_two():
    world = running(7, f=2)
    assert world.view().tolerance == 2
    world.kill("n02")
    world.kill("n05")
    world.until_state("done")
    world.check_done()
    assert not world.job().steps_lost
    assert sorted(node for incident in world.incidents() for node in incident.nodes) == ["n02", "n05"]


@pytest.mark.parametrize("phase", ["report", "run", "deploy"])
@pytest.mark.parametrize("seed", range(6))
def test_a_second_loss_in_every_phase_of_a_recovery(phase, seed):
    world = running(7, seed, f=2)
    world.kill("n02")
    world.until_state("recovering")
    world.run(lambda: world.machine.core.run.phase == phase)
    world.kill("n05")
    world.until_state("done")
    world.check_done()
    (incident,) = world.incidents()
    assert incident.nodes == ("n02", "n05")
    assert not world.job().steps_lost


@pytest.mark.parametrize("seed", range(4))
def test_a_device_process_dies_and_its_node_comes_back(seed):
    world = running(seed=seed, steps=30)
    world.kill_device("n03", restart_s=0.4)
    world.until_state("recovering")
    world.run(lambda: "n03" in world.view().nodes)
    world.until_state("done")
    world.check_done()
    assert len(world.incidents()) == 1
    assert world.incidents()[0].losses == (LossView("n03", "device-lost"),)


def test_a_last_copy_lost_goes_back_to_the_checkpoint_and_says_how_far():
    world = running(2, f=0, every=4, step=7)
    assert world.view().tolerance == 0
    world.kill("n02")
    world.until_state("waiting")
    job = world.job()
    assert job.counters.step == 4
    assert job.steps_lost in {3, 4}  # the step under way at the kill may have committed
    assert (job.cause, job.n0) == ("too-few-nodes", 2)
    (back,) = world.told(JobWentBack)
    assert (back.cause, back.step, back.steps_lost) == ("last-copy-lost", 4, job.steps_lost)
    assert back.source.endswith("step-00000004")
    world.add("n02")
    world.until_state("done")
    world.check_done()
    assert world.incidents()[0].steps_lost == job.steps_lost


def test_without_a_checkpoint_the_rollback_leads_to_fresh_weights():
    world = running(2, f=0, step=3)
    world.kill("n01")
    world.run(lambda: world.job().steps_lost > 0)
    assert world.job().counters.step == 0
    (back,) = world.told(JobWentBack)
    assert (back.cause, back.step, back.source) == ("last-copy-lost", 0, "init")
    world.add("n01")
    world.until_state("done")
    world.check_done()


def test_too_few_wanted_nodes_but_live_copies_wait_and_go_on():
    world = running(4, f=1, steps=20)
    world.kill("n04")
    world.until_state("recovering")
    for name in ("n01", "n02", "n03"):
        world.ask(Drain(name))
    world.until_state("waiting")
    assert world.job().cause == "too-few-nodes"
    assert len(world.view().nodes) == 3, "who hold the step"
    assert world.node("n01").state == "draining"
    world.run_for(2.0)
    for name in ("n01", "n02"):
        world.ask(Drain(name, undo=True))
    world.until_state("done")
    world.check_done()
    assert not world.job().steps_lost


def test_a_loss_at_the_last_step():
    world = running(steps=6)
    world.kill("n01")
    world.run(lambda: world.job().counters.step == 6)
    world.kill("n04")
    world.until_state("done")
    world.check_done()


def test_a_node_that_falls_silent_and_returns_is_a_fresh_one():
    world = running(steps=200)
    node = world.nodes["n03"]
    node.connected = False  # a partition: the agent lives, nothing arrives
    world.run(lambda: world.node("n03").state == "lost")
    world.run(lambda: "n03" not in world.view().nodes)
    node.connected = True
    world.run(lambda: "n03" in world.view().nodes)
    assert node.alive
    world.until_step(60)
    assert world.job().steps_lost == 0


def test_a_link_that_stays_down_between_live_devices_evicts_one_end():
    world = running(steps=400, link_grace_s=1.0)
    device = world.nodes["n01"].devices["n01/0"]
    peer = "n02/0"
    device.tell(LinkDown("n01/0", peer, "reset"))
    world.run(lambda: world.node("n02").state == "drained")
    assert world.node("n02").cause == "evicted"
    assert [(told.node, told.code) for told in world.told(NodeLost)] == [("n02", "links-down")]
    world.until_state("running")
    assert "n02" not in world.view().nodes


def test_a_link_that_broke_before_its_end_was_given_up_accuses_nobody_when_that_is_back():
    """Both ends lost it, and one is evicted. It joins anew, with new links."""
    world = running(5, steps=400, link_grace_s=1.0)
    ends = ("n01/0", "n02/0")
    for device, peer in (ends, ends[::-1]):
        world.nodes[node_of(device)].devices[device].tell(LinkDown(device, peer, "reset"))
    world.run(lambda: world.node("n02").state == "drained")
    world.ask(Drain("n02", undo=True))
    world.run(lambda: "n02" in world.view().nodes and world.state() == "running")
    world.run_for(2.0)
    assert {"n01", "n02"} <= set(world.view().nodes)
    assert not world.machine.core.state.drained


def test_overflow_and_nan_rounds():
    world = running(overflows=(4, 6), nans=(8,), steps=12)
    world.kill("n01")
    world.until_state("done")
    world.check_done()
    job = world.job()
    assert len(job.losses) == 14
    assert job.steps[8].outcome == "skipped"

"""Policy slipstream, followed to its end: peers compute for the dead, nothing is deployed,
nothing is lost.
"""

import pytest

from oobleckd.core.entries import AnyEntry, LayoutDeployed
from oobleckd.core.machine import Machine
from oobleckd.planner.policy import Action
from oobleckd.protocol.changes import JobWentBack, PlanChosen
from oobleckd.protocol.incidentviews import ReasonView
from oobleckd.protocol.requests import Control, Drain
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def running(num_nodes=6, seed=0, step=3, **spec):
    """A world whose job has committed a few steps; 350 bytes a device make n0 = 2."""
    config = {
        key: spec.pop(key)
        for key in ("num_devices", "overflows", "nans", "lease_s", "grace_s")
        if key in spec
    }
    world = World(seed, num_nodes, **config)
    world.run_for(3.0)
    world.submit(make_job(**{"steps": 20, "f": 1, "memory": 350, "policy": "slipstream"} | spec))
    world.until_step(step)
    return world


def written(world: World, kind: type[AnyEntry]) -> list[AnyEntry]:
    return [entry for entry in world.daemon.disk.entries() if isinstance(entry, kind)]


def until_closed(world, num_incidents=1):
    def closed():
        found = world.incidents() if world.machine is not None else ()
        return len(found) == num_incidents and not any(incident.open for incident in found)

    world.run(closed)


def detoured(world):
    """Whether micro-batches of the present layout go around the dead."""
    job = world.job()
    return bool(job.dead) and not job.unsettled


def peer_of(world, *others):
    """A victim in another pipeline than ``others`` where there is one, after which every layer
    has a holder.
    """
    job, pipelines = world.job(), world.view().pipelines
    nodes = [n for p in sorted(pipelines, key=lambda p: bool({*p.nodes} & {*others})) for n in p.nodes]
    for node in nodes:
        gone = {*job.dead, *(f"{name}/0" for name in (*others, node))}
        if node not in others and min(job.layout.copies(gone)) > 0:
            return node
    raise AssertionError(pipelines)


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("silent", [False, True])
def test_a_loss_costs_no_deployment(seed, silent):
    world = running(seed=seed)
    pipelines = world.view().pipelines
    epoch = world.job().layout.epoch
    world.kill("n02", silent=silent)
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    assert world.state() == "running"
    assert detoured(world)
    assert world.job().layout.epoch == epoch
    assert [p.nodes for p in world.view().pipelines] == [p.nodes for p in pipelines]
    (incident,) = world.incidents()
    assert [phase.phase for phase in incident.phases] == ["detect", "plan", "reconfigure", "resume"]
    assert incident.copied_bytes == 0
    (action,) = incident.parts.actions
    assert (incident.parts.way, action.kind, action.whose) == ("re-route", "re-route", ("n02",))
    assert 0 < incident.committed_s <= incident.total_s
    assert "n02" not in world.view().nodes
    world.until_state("done")
    world.check_done()
    assert len(written(world, LayoutDeployed)) == 1
    assert world.job().steps_lost == 0


def test_what_is_shown_of_a_vacant_place():
    world = running()
    before = world.view().tolerance
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    vacant = {device for pipeline in world.view().pipelines for device in pipeline.vacant}
    assert vacant == {"n02/0"}
    assert world.view().tolerance == before - 1


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(8))
def test_one_after_the_other(seed):
    world = running(8, seed, f=2, steps=25)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.kill(peer_of(world, "n02"))
    world.run(lambda: len(world.incidents()) == 2)
    until_closed(world, 2)
    assert not world.job().unsettled
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("apart_s", [0.0, 0.005, 0.02, 0.05])
def test_two_at_nearly_the_same_time(seed, apart_s):
    world = running(8, seed, f=2, steps=20)
    second = peer_of(world, "n02")
    world.kill("n02")
    world.after(apart_s, world.kill, second)
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0
    assert sorted(node for incident in world.incidents() for node in incident.nodes) == sorted(
        ["n02", second]
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_third_loss_while_the_second_is_mended(seed):
    world = running(9, seed, f=2, steps=25)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    second = peer_of(world, "n02")
    world.kill(second)
    world.run(lambda: world.machine.core.run.phase == "report")
    world.kill(peer_of(world, "n02", second))
    world.until_state("done")
    world.check_done()


def test_a_pipeline_that_is_gone_whole_is_planned_without():
    world = running(6, f=2, steps=40)
    nodes = world.view().pipelines[0].nodes
    for node in nodes:
        world.kill(node)
    world.run(lambda: len(written(world, LayoutDeployed)) == 2)
    world.until_state("done")
    world.check_done()
    assert world.incidents()[0].parts.actions == (Action("drop", nodes),)


@pytest.mark.parametrize("seed", range(6))
def test_a_node_that_comes_back_fills_its_place(seed):
    world = running(seed=seed, steps=25)
    pipelines = world.view().pipelines
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.add("n02")
    world.run(lambda: "n02" in world.view().nodes)
    assert world.view().pipelines == pipelines
    job = world.job()
    assert (job.dead, job.settled, job.detours) == ((), (), None)
    world.until_state("done")
    world.check_done()
    assert len(world.incidents()) == 1


@pytest.mark.parametrize("seed", range(4))
def test_another_node_fills_the_place(seed):
    world = running(seed=seed, steps=25)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.add("n99")
    world.run(lambda: "n99" in world.view().nodes)
    assert any(
        Action("take-place", ("n99",), ("n02",)) in chosen.actions for chosen in world.told(PlanChosen)
    )
    world.until_state("done")
    world.check_done()


@pytest.mark.parametrize("seed", range(4))
def test_a_standby_takes_the_place_at_once(seed):
    world = running(7, seed, max_nodes=6, steps=20)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    (incident,) = world.incidents()
    assert incident.parts.actions == (Action("take-place", ("n07",), ("n02",)),)
    assert [phase.phase for phase in incident.phases][-2:] == ["copy", "resume"]
    assert 0 < incident.copied_bytes <= 3
    assert "n07" in world.view().nodes
    world.until_state("done")
    world.check_done()


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_spare_gets_back_what_its_device_held(seed, num_devices):
    world = running(6, seed, num_devices=num_devices, steps=20)
    pipelines = world.view().pipelines
    world.spare_takes_place("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    (incident,) = world.incidents()
    assert incident.parts.actions == (Action("copy-back", ("n02",)),)
    assert incident.copied_bytes > 0
    assert world.view().pipelines == pipelines
    assert not world.job().dead
    world.until_state("done")
    world.check_done()


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(10))
def test_the_daemon_restarts_while_re_routed(seed):
    world = running(seed=seed, steps=35, lease_s=1.5, grace_s=2.0)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.daemon.restart(down_s=0.1 + 0.05 * seed)
    world.run_for(0.05)
    world.run(lambda: world.machine is not None and world.machine.core.run.phase == "run")
    assert detoured(world)
    world.run(lambda: world.machine.core.run.satisfied is not None)
    world.until_state("done")
    world.check_done()
    assert len(written(world, LayoutDeployed)) == 1
    assert len(world.incidents()) == 1


@pytest.mark.thin(8)
@pytest.mark.parametrize("phase", ["report", "run"])
@pytest.mark.parametrize("seed", range(10))
def test_the_daemon_restarts_in_the_middle(phase, seed):
    world = running(seed=seed, steps=30, lease_s=1.5, grace_s=2.0)
    world.kill("n02")
    world.run(lambda: world.job().dead != ())
    world.run(lambda: world.machine.core.run.phase == phase)
    world.run_for(0.002 * (seed % 3))
    world.daemon.restart(down_s=0.1)
    world.run_for(0.05)
    if seed % 2:
        world.run(lambda: world.machine is not None and world.machine.core.run.phase == "report")
        world.run_for(0.001 * seed)
        world.daemon.restart(down_s=0.1)
        world.run_for(0.05)
    world.until_state("done")
    world.check_done()
    (incident,) = world.incidents()
    assert not incident.open
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_second_node_dies_while_the_daemon_is_away(seed):
    world = running(8, seed, f=2, steps=25, lease_s=1.5, grace_s=2.0)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    second = peer_of(world, "n02")
    world.daemon.stop()
    world.run_for(0.1)
    world.kill(second)
    world.run_for(0.2)
    world.daemon.start()
    world.until_state("done")
    world.check_done()
    assert [incident.nodes for incident in world.incidents()] == [("n02",), (second,)]


def test_pause_and_resume_while_re_routed():
    world = running(steps=25)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.ask(Control("job-1", "pause"))
    world.until_state("paused")
    world.run_for(1.0)
    assert world.state() == "paused"
    world.ask(Control("job-1", "resume"))
    world.until_state("done")
    world.check_done()
    assert len(written(world, LayoutDeployed)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_while_paused(seed):
    world = running(seed=seed, steps=20)
    world.ask(Control("job-1", "pause"))
    world.until_state("paused")
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    assert world.state() == "paused"
    step = world.job().counters.step
    world.run_for(1.0)
    assert world.job().counters.step == step
    world.ask(Control("job-1", "resume"))
    world.until_state("done")
    world.check_done()
    assert len(written(world, LayoutDeployed)) == 1
    assert world.incidents()[0].parts == ReasonView(rerouted=("n02/0",), way="re-route")


@pytest.mark.parametrize("seed", range(4))
def test_a_drain_while_re_routed(seed):
    world = running(8, seed, f=2, steps=30)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    leaving = peer_of(world, "n02")
    world.ask(Drain(leaving))
    world.run(lambda: leaving not in world.view().nodes)
    assert world.job().detours is None  # a layout of its own, with two vacant places
    assert {d for p in world.view().pipelines for d in p.vacant} == {"n02/0", f"{leaving}/0"}
    world.ask(Drain(leaving, undo=True))
    world.run(lambda: leaving in world.view().nodes)
    world.until_state("done")
    world.check_done()


def test_a_checkpoint_while_re_routed():
    world = running(steps=60)  # so long that it is looked once more whether another plan is better
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.ask(Control("job-1", "checkpoint"))
    world.run(lambda: bool(world.job().checkpoint))
    world.until_state("done")
    world.check_done()


@pytest.mark.thin(8)
@pytest.mark.parametrize("phase", ["report", "deploy"])
@pytest.mark.parametrize("seed", range(8))
def test_a_death_while_a_place_is_filled(phase, seed):
    world = running(8, seed, f=2, steps=30)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.add("n02")
    world.run(lambda: world.machine.core.run.phase == "deploy")
    second = peer_of(world, "n02")
    world.after(0.004 * seed, world.kill, second)
    if phase == "report":
        world.after(0.002 * seed, world.kill, "n02")
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_last_copy_lost_while_re_routed_goes_back_to_the_checkpoint(seed):
    world = running(4, seed, every=4, steps=30, step=7)
    pipelines = world.view().pipelines
    world.kill(pipelines[0].nodes[1])
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.kill(pipelines[1].nodes[1])
    world.run(lambda: world.job().steps_lost > 0 or bool(world.job().reason))
    world.until_state("done")
    world.check_done()
    assert "last-copy-lost" in {back.cause for back in world.told(JobWentBack)}


@pytest.mark.parametrize("seed", range(4))
def test_below_n0_the_job_waits_as_under_oobleck(seed):
    world = running(4, seed, steps=20)
    world.kill("n01")
    for name in ("n02", "n03", "n04"):
        world.ask(Drain(name))
    world.until_state("waiting", limit_s=20)
    for name in ("n02", "n03", "n04"):
        world.ask(Drain(name, undo=True))
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("seed", range(4))
def test_overflow_and_nan_while_re_routed(seed):
    world = running(seed=seed, overflows=(8, 12), nans=(15,), steps=22)
    world.kill("n02")
    world.until_state("done")
    world.check_done()


def test_a_loss_at_the_last_step():
    for seed in range(6):
        world = running(seed=seed, steps=6)
        world.run(lambda w=world: w.job().counters.step == 5)
        world.run_for(0.004 * seed)
        world.kill("n04")
        world.until_state("done")
        world.check_done()


def test_the_journal_builds_the_same_jobs_again():
    world = running(8, f=2, steps=60)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.kill(peer_of(world, "n02"))
    for _ in range(3):
        world.run_for(0.02)
        again = Machine.restore(world.daemon.disk.entries(), world.now, world.config)
        assert again.core.state.jobs == world.machine.core.state.jobs
        assert again.core.state.epoch == world.machine.core.state.epoch + 1, "one may have been told already"
    job = world.job()
    assert job.detours is not None
    assert set(job.settled) == set(job.dead)


@pytest.mark.parametrize("seed", range(6))
def test_an_agent_that_was_away_hears_the_detours_again(seed):
    world = running(seed=seed, steps=20)
    world.kill("n02")
    world.run(lambda: world.machine.core.run.phase == "report")
    world.network.break_link("n05")  # what was on its way to it is lost
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.until_state("done")
    world.check_done()
    assert len(written(world, LayoutDeployed)) == 1


def test_a_device_that_is_slow_is_still_told_while_re_routed():
    world = running(steps=60)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.run_for(0.5)
    job, paces = world.job(), world.machine.core.run.paces
    assert paces.layout == job.epoch  # what is compared is the work of the detours
    assert set(paces.work_s) == set(job.survivors())

"""kill -9 of the daemon at any moment: training goes on, nothing it missed is lost, nobody is mourned
wrongly.
"""

import pytest

from oobleckd.core.events import Record
from oobleckd.protocol.changes import JobWentBack
from oobleckd.protocol.incidentviews import LossView
from oobleckd.protocol.requests import Control
from tests.helpers.world import World


def running(seed, num_nodes=6, **spec):
    world = World(seed, num_nodes, lease_s=1.5, grace_s=2.0)
    world.run_for(1.0)
    world.submit(**{"steps": 25, "f": 1, "memory": 350} | spec)
    world.until_step(5)
    return world


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(20))
def test_training_is_undisturbed(seed):
    world = running(seed)
    epoch = world.job().epoch
    before = world.job().counters.step
    world.daemon.restart(down_s=0.2 + 0.05 * seed)
    world.run(lambda: world.machine is None)
    world.run(lambda: world.machine is not None)
    rounds = max(d.counters.step for node in world.nodes.values() for d in node.devices.values())
    assert rounds > before
    world.until_state("done")
    world.check_done()
    assert world.job().epoch == epoch
    assert world.incidents() == []


@pytest.mark.parametrize("seed", range(10))
def test_a_node_dies_while_it_is_away(seed):
    world = running(seed)
    world.daemon.stop()
    world.run_for(0.1)
    world.kill("n03")
    world.run_for(0.2)
    world.daemon.start()
    world.until_state("done")
    world.check_done()
    (incident,) = world.incidents()
    assert incident.nodes == ("n03",)
    assert incident.losses == (LossView("n03", "not-heard"),)


def started_anew(seed, *missing, **spec):
    """The daemon is ended, then all nodes, as `down` does; then all but ``missing`` are started again."""
    world = running(seed, **spec)
    world.daemon.stop()
    nodes = sorted(world.nodes)
    for name in nodes:
        world.leave(name)
    world.run_for(1.0)
    world.daemon.start()
    for name in nodes:
        if name not in missing:
            world.add(name)
    return world


@pytest.mark.parametrize("spec", [{}, {"f": 0}], ids=["f1", "f0"])
@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_that_was_stopped_and_started_again_had_no_incident(seed, spec):
    world = started_anew(seed, **spec)
    world.until_state("done")
    world.check_done()
    assert world.incidents() == []
    (back,) = world.told(JobWentBack)
    assert back.steps_lost == world.job().steps_lost > 0


def test_one_that_did_not_come_back_is_lost():
    world = started_anew(1, "n03")
    world.until_state("done")
    world.check_done()
    (incident,) = world.incidents()
    assert LossView("n03", "not-heard") in incident.losses


def ended_while_away(seed):
    """A world without a daemon, all of whose devices hold after the last step."""
    world = running(seed)
    world.daemon.stop()
    world.run(
        lambda: all(device.holding for node in world.nodes.values() for device in node.devices.values())
    )
    return world


@pytest.mark.parametrize("seed", range(8))
def test_a_job_that_ended_while_it_was_away_is_done(seed):
    """Devices say that they hold; whoever says it before the last agent is back must be believed, too."""
    world = ended_while_away(seed)
    world.daemon.start()
    world.until_state("done")
    world.check_done()


@pytest.mark.parametrize("seed", range(8))
def test_it_dies_as_it_says_that_a_job_is_over(seed):
    """Devices may have been told to drop what they hold by then: the last commit is in the journal, and that
    is enough.
    """
    world = ended_while_away(seed)
    world.daemon.disk.sync_s = (0.1, 0.1)
    world.daemon.start()
    world.run(lambda: is_syncing(world, "done"))
    world.run_for(0.05)
    world.daemon.restart()
    world.run(lambda: world.machine is not None)
    world.until_state("done")
    world.check_done()
    assert not world.job().steps_lost


def is_syncing(world, state):
    """Whether the word that the job is in ``state`` is on its way to the disk."""
    return any(
        isinstance(command, Record) and getattr(command.entry, "state", "") == state
        for command in (world.daemon.disk.syncing or ((),))[0]
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_grace_that_it_sleeps_through_is_none(seed):
    """It stands still before the agents are back, for longer than the grace: their Hellos are behind its own
    Tick.
    """
    world = running(seed)
    world.daemon.restart(down_s=0.0)
    world.run_for(0.05 * seed)
    assert world.machine.core.run.phase == "adrift"
    world.daemon.process.stop()
    world.run_for(4.0)
    world.daemon.process.go_on()
    world.until_state("done")
    world.check_done()
    assert world.checks.given_up == 0
    assert world.incidents() == []


@pytest.mark.thin(6)
@pytest.mark.parametrize("phase", ["report", "run", "deploy"])
@pytest.mark.parametrize("seed", range(8))
def test_killed_in_the_middle_of_a_recovery(phase, seed):
    world = running(seed)
    world.kill("n03")
    world.until_state("recovering")
    world.run(lambda: world.machine.core.run.phase == phase)
    world.daemon.restart()
    world.run_for(0.1)
    world.until_state("done")
    world.check_done()
    (incident,) = world.incidents()
    assert not incident.open
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("state", ["profiling", "planning", "deploying"])
def test_killed_before_the_first_step(state):
    world = World(2, 4, grace_s=1.0)
    world.run_for(1.0)
    world.submit(steps=6, memory=350)
    world.until_state(state)
    world.daemon.restart()
    world.run_for(0.1)
    world.until_state("done")
    world.check_done()


def test_a_paused_and_a_waiting_job_stay_so():
    world = running(1)
    world.ask(Control("job-1", "pause"))
    world.until_state("paused")
    world.daemon.restart()
    world.run_for(4.0)
    assert world.state() == "paused"
    world.ask(Control("job-1", "resume"))
    world.until_state("done")
    world.check_done()
    assert world.incidents() == []


def test_its_clock_went_back_in_the_middle_of_a_recovery():
    """The wall clock was set while it was down; what began in the future began now."""
    world = running(1)
    world.kill("n03")
    world.until_state("recovering")
    world.daemon.restart(skew_s=-3600.0)
    world.run_for(0.1)
    world.until_state("done")
    world.check_done()
    (incident,) = world.incidents()
    assert 0.0 <= incident.total_s < 60.0

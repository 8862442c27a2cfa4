"""When checkpoints are begun under "auto", by whom one is skipped, and what a daemon that restarts makes of
it.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from oobleckd.core import cadence, failures
from oobleckd.core.entries import CheckpointWritten
from oobleckd.protocol.changes import CheckpointIncomplete, CheckpointSkipped
from oobleckd.protocol.requests import Control
from tests.helpers.simdevice import SimWriter
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def written(world: World) -> list[int]:
    """The steps of all checkpoints, in the order in which they were complete."""
    entries = world.daemon.disk.entries()
    return [entry.counters.step for entry in entries if isinstance(entry, CheckpointWritten)]


def running(seed: int = 0, num_nodes: int = 4, **spec) -> World:
    world = World(seed, num_nodes, lease_s=1.5, grace_s=1.0)
    world.run_for(1.0)
    world.submit(make_job(**{"steps": 40, "memory": 350, "every": "auto"} | spec))
    return world


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval of a few steps: a step says that it takes 0.1 s, and one checkpoint is taken to cost half a
    second.
    """
    monkeypatch.setattr(failures, "PRIOR_S", 0.3)
    monkeypatch.setattr(cadence, "MIN_S", 0.1)


def test_a_short_job_writes_one_at_its_end_alone():
    world = running()
    world.until_state("done")
    world.check_done()
    assert written(world) == [40]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("policy", ["oobleck", "slipstream", "varuna"])
def test_the_core_asks_when_it_is_time(policy):
    world = running(policy=policy)
    world.until_step(10)
    found = world.view().cadence
    assert found is not None
    assert found.mtbf_s >= 0.3
    world.until_state("done")
    world.check_done()
    steps = written(world)
    assert steps[-1] == 40
    assert 4 < len(steps) < 14
    # A daemon hears of a step after it was committed, and asks for the next one or the one after.
    assert all(b - a >= 2 for a, b in pairwise(steps[:-1])), steps


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("seed", range(6))
def test_a_whole_cluster_lost_costs_an_interval_at_most(seed):
    world = running(seed)
    world.until_step(23)
    interval = world.view().cadence.steps
    before = world.job().counters.step
    for name in list(world.nodes):
        world.kill(name)
    world.until_state("waiting")
    assert (
        before - world.job().counters.step <= interval + 3
    )  # what was under way, and what nobody was told of
    for name in list(world.nodes):
        world.add(name)
    world.until_state("done")
    world.check_done()


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("seed", range(6))
def test_a_daemon_that_restarts_goes_on_with_the_same_interval(seed):
    world = running(seed)
    world.until_step(15)
    before = world.view().cadence
    world.daemon.stop()
    world.daemon.start()
    after = world.view().cadence
    assert (after.steps, after.cost_s, after.mtbf_s) == (before.steps, before.cost_s, before.mtbf_s)
    world.until_state("done")
    world.check_done()
    assert len(written(world)) > 3


def test_one_that_is_due_while_another_is_written_is_skipped_by_all_and_said_once(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(SimWriter, "slow", 20.0)
    world = running(every=1)
    world.until_state("done")
    world.check_done()
    skipped = world.told(CheckpointSkipped)
    assert skipped
    assert len(set(skipped)) == len(skipped) <= len(written(world))
    assert skipped[0].step == skipped[0].unfinished + 1
    assert len(written(world)) > 2
    assert not world.told(CheckpointIncomplete)


@pytest.mark.parametrize("every", [0, "auto"])
@pytest.mark.parametrize("seed", range(5))
def test_one_on_demand_is_written_once(every, seed):
    world = running(seed, every=every)
    world.until_step(5)
    world.ask(Control("job-1", "checkpoint"))
    world.until_state("done")
    world.check_done()
    steps = written(world)
    assert len(steps) == 2, steps
    assert 5 < steps[0] < 10


@pytest.mark.parametrize("seed", range(8))
def test_a_writer_that_dies_leaves_the_last_one_in_force(seed):
    """The survivors go on, and write another one as soon as that is known."""
    world = running(seed, 6, every=4, f=1, policy="oobleck")
    victims = []

    def due(device, point, round_):
        if point == "checkpoint-write" and round_ == 8 and not victims:
            victims.append(device.name)
            return True
        return False

    world.strikes = due
    world.until_state("done")
    world.check_done()
    assert victims
    assert world.job().steps_lost == 0
    assert set(written(world)) >= {4, 12, 40}

"""Policy adaptive, followed to its end: what it weighs, what it says of it, and when it thinks again."""

import msgspec
import pytest

from oobleckd.core import failures, view
from oobleckd.core.entries import LayoutDeployed
from oobleckd.core.machine import Machine
from oobleckd.protocol.changes import PlanChosen
from tests.helpers.simjobs import make_job, profile
from tests.helpers.world import World
from tests.sim.test_detours import until_closed, written


def running(*, link_bytes_per_s=1e9, num_nodes=8, seed=0, steps=60, every=0):
    """A job of pipelines of two nodes; copies take as long as the link is slow."""
    world = World(seed, num_nodes)
    world.profile = msgspec.structs.replace(profile(6), link_bytes_per_s=link_bytes_per_s)
    world.run_for(3.0)
    world.submit(make_job(steps=steps, f=1, memory=350, policy="adaptive", every=every))
    world.until_step(3)
    assert [len(p.nodes) for p in world.view().pipelines] == [2] * (num_nodes // 2)
    return world


@pytest.mark.parametrize("seed", range(4))
def test_the_incident_keeps_what_was_rejected_and_what_it_would_have_cost(seed):
    world = running(seed=seed)
    world.kill("n02")
    until_closed(world)
    (incident,) = world.incidents()
    taken = incident.parts.way
    others = [other.way for other in incident.rejected if not other.precopy_s]
    assert {taken, *others} >= {"re-route", "re-instantiate", "rollback"}
    assert taken not in others
    assert incident.cost_s > 0
    assert all(other.cost_s >= incident.cost_s and other.cause == "cost" for other in incident.rejected)
    world.run(lambda: world.state() == "done")
    assert world.job().steps_lost == 0


def test_where_copies_take_longer_than_the_next_loss_is_away_nothing_moves():
    world = running(link_bytes_per_s=1e-4)
    before = len(written(world, LayoutDeployed))
    world.kill("n02")
    until_closed(world)
    (incident,) = world.incidents()
    assert incident.parts.way == "re-route"
    assert (incident.copied_bytes, incident.sources) == (0, ())
    assert all(not entry.layout or not entry.plan.idle for entry in written(world, LayoutDeployed)[before:])
    world.run(lambda: world.state() == "done")


def test_a_join_that_is_not_worth_a_switch_is_told_with_what_was_rejected():
    world = running(link_bytes_per_s=1e-4, steps=1000)
    before = len(written(world, LayoutDeployed))
    world.add("n09")
    world.run(lambda: world.machine.core.run.satisfied is not None)
    assert len(written(world, LayoutDeployed)) == before
    history = view.changes(world.machine.core)
    said = [change for change in history if change.kind == "plan" and "node:n09" in change.story]
    (chosen,) = [change.data for change in said]
    assert isinstance(chosen, PlanChosen)
    assert (chosen.job, chosen.stays, chosen.came, chosen.went) == ("job-1", True, ("n09",), ())
    assert said[0].story == ("job:job-1", "node:n09")
    assert (chosen.way, [other.way for other in chosen.rejected]) == ("stay", ["re-instantiate", "rollback"])
    world.add("n10")
    world.run(lambda: "n10" in world.machine.core.run.satisfied)
    world.kill("n09")
    world.run(lambda: "n09" not in world.machine.core.run.satisfied)
    assert [(each.came, each.went) for each in world.told(PlanChosen)[-2:]] == [
        (("n10",), ()),
        ((), ("n09",)),
    ]
    assert world.incidents() == []


def test_as_the_weather_calms_down_it_is_weighed_anew(monkeypatch):
    monkeypatch.setattr(failures, "PRIOR_S", 2.0)
    world = running(link_bytes_per_s=1000.0, num_nodes=4, steps=1000, every=2)
    world.kill("n02")
    until_closed(world)
    (incident,) = world.incidents()
    assert incident.parts.way == "re-route"
    first = world.machine.core.run.weighed_steps
    moved = len(written(world, LayoutDeployed))
    world.run(lambda: len(written(world, LayoutDeployed)) > moved, limit_s=60.0)
    assert len(world.incidents()) == 1
    assert not world.job().plan.vacant
    assert world.machine.core.run.weighed_steps >= 2 * first


def test_a_restarted_daemon_weighs_from_the_same_history():
    world = running()
    world.kill("n02")
    until_closed(world)
    now, state = world.now, world.machine.core.state
    again = Machine.restore(world.daemon.disk.entries(), now, world.config).core.state
    assert failures.horizon_steps(again, again.jobs["job-1"], now) == failures.horizon_steps(
        state, world.job(), now
    )
    assert failures.redo_s(again.jobs["job-1"]) == failures.redo_s(world.job())

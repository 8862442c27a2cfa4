"""Re-routed, then in an order: what the policy answers is delivered at a boundary, kept to, and forgotten at
the next loss.
"""

from typing import Any

import msgspec
import pytest

from oobleckd.core.entries import LayoutDeployed
from oobleckd.planner import policies
from oobleckd.planner.policies import grid
from oobleckd.planner.policy import Proposal
from oobleckd.planner.schedules import decoupled
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.requests import Control
from tests.helpers import simdaemon
from tests.helpers.world import World
from tests.sim.test_detours import peer_of, running, until_closed, written

DECOUPLED = Schedule(backward="decoupled", chunks=1)
STAGGERED = Schedule(backward="decoupled", chunks=1, update="staggered")


def three_stages(num_nodes: int = 6, seed: int = 0, **spec: object) -> World:
    """250 bytes a device: two layers, so that pipelines of three have enough to gain by an order."""
    return running(num_nodes, seed, **({"memory": 250, "steps": 25} | spec))


def devices(world: World) -> list:
    return [world.device(name) for name in world.job().layout.holdings if world.device(name) is not None]


@pytest.mark.thin(6)
@pytest.mark.parametrize("schedule", [Schedule(), DECOUPLED, STAGGERED])
@pytest.mark.parametrize("seed", range(4))
def test_after_a_loss_an_order_follows(seed: int, schedule: Schedule):
    memory = (
        330 if schedule.update == "staggered" else 250
    )  # a third of the state is kept from before the update
    world = three_stages(seed=seed, schedule=schedule, memory=memory)
    before = world.view().pipelines
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    job = world.job()
    assert (job.dead, job.settled, job.detours) == ((), (), None)
    assert [p.nodes for p in world.view().pipelines] == [p.nodes for p in before]
    (incident,) = world.incidents()
    assert incident.copied_bytes == 0
    (action,) = incident.parts.actions
    assert (incident.parts.way, action.kind, action.whose) == ("re-route", "re-route", ("n02",))
    assert [p.phase for p in incident.phases] == ["detect", "plan", "reconfigure", "resume", "copy", "resume"]
    assert all(device.order for device in devices(world))
    world.run_for(1.0)
    assert all(device.followed > len(device.order) for device in devices(world))
    world.until_state("done")
    world.check_done()
    assert len(written(world, LayoutDeployed)) == 2
    assert world.job().steps_lost == 0


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(6))
def test_the_next_loss_has_it_forgotten_and_another_order_follows(seed: int):
    world = three_stages(9, seed, f=2, steps=25)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.run_for(0.01 * seed)
    world.kill(peer_of(world, "n02"))
    world.run(lambda: world.job().dead != () and not world.job().unsettled)
    assert not any(device.planned for device in devices(world))
    until_closed(world, 2)
    assert not world.job().dead
    assert all(device.order for device in devices(world))
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_loss_while_the_order_is_delivered(seed: int):
    world = three_stages(9, seed, f=2, steps=20)
    world.kill("n02")
    world.run(lambda: world.machine.core.run.phase == "deploy")
    world.after(0.003 * seed, world.kill, peer_of(world, "n02"))
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("seed", range(4))
def test_who_comes_back_takes_its_place_and_ends_the_order(seed: int):
    world = three_stages(seed=seed, steps=25)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.add("n02")
    world.run(lambda: "n02" in world.view().nodes)
    world.run(lambda: not any(device.order for device in devices(world)))  # no route crosses any more
    world.until_state("done")
    world.check_done()


@pytest.mark.parametrize("seed", range(4))
def test_the_daemon_restarts_before_the_order_is_there(seed: int):
    world = three_stages(seed=seed, steps=28, lease_s=1.5, grace_s=2.0)
    world.kill("n02")
    world.run(lambda: bool(world.job().settled))
    world.run_for(0.003 * seed)
    world.daemon.restart(down_s=0.1)
    world.run(lambda: world.machine is not None and len(written(world, LayoutDeployed)) == 2)
    world.until_state("done")
    world.check_done()


def test_a_pause_and_a_loss_and_the_order_comes_when_it_goes_on():
    world = three_stages()
    world.ask(Control("job-1", "pause"))
    world.until_state("paused")
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    assert world.state() == "paused"
    world.ask(Control("job-1", "resume"))
    world.until_state("done")
    world.check_done()
    assert len(written(world, LayoutDeployed)) == 2


@pytest.mark.parametrize("schedule", [Schedule(), DECOUPLED, Schedule(backward="decoupled", chunks=2)])
def test_orders_that_cannot_be_run_reach_no_device_and_training_goes_on(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
):
    adapt, orders, ops_of = policies.adapt, decoupled.best_orders, grid.step_ops
    left_out = []

    def planted(*asked: Any) -> Proposal:
        found = adapt(*asked)
        left_out.append(found.invalid)
        return msgspec.structs.replace(found, invalid="")

    def an_op_less(*asked: Any) -> tuple[str, ...]:
        first, *others = orders(*asked)
        return first[:-1], *others

    monkeypatch.setattr(simdaemon, "_first_plans", {})
    monkeypatch.setattr(policies, "adapt", planted)
    monkeypatch.setattr(decoupled, "best_orders", an_op_less)
    monkeypatch.setattr(grid, "step_ops", lambda *asked: {d: ops[1:] for d, ops in ops_of(*asked).items()})
    world = three_stages(schedule=schedule, memory=350 if schedule.chunks == 2 else 250)
    assert not any(device.order for device in devices(world))
    world.kill("n02")
    world.until_state("done")
    world.check_done()
    assert any(left_out)
    assert world.job().steps_lost == 0

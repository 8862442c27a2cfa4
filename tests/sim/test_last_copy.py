"""A device that holds the last copy of a layer and does not run: woken, waited for while that is cheaper than
the rollback, and no longer.
"""

from __future__ import annotations

import pytest

from oobleckd.core.entries import RolledBack
from oobleckd.planner.plan import device_name, node_of
from oobleckd.protocol.changes import LastCopyAwaited, LastCopyWaitOver
from oobleckd.protocol.requests import Control, Drain, Kill
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def training(seed: int = 0, num_nodes: int = 3, **spec) -> World:
    """A job of which each layer is in one place alone: one pipeline of all nodes."""
    world = World(seed, num_nodes)
    world.run_for(3.0)
    world.submit(make_job(**{"steps": 60, "f": 0, "min_pipeline_nodes": num_nodes} | spec))
    world.until_step(12)
    return world


def who_went_on(world: World) -> list[str]:
    """Who was waited for, and went on."""
    return [said.device or said.node for said in world.told(LastCopyWaitOver) if said.back]


def ways_back(world: World) -> list[RolledBack]:
    return [entry for entry in world.daemon.disk.entries() if isinstance(entry, RolledBack)]


def finish(world: World, limit_s: float = 200.0) -> None:
    world.until_state("done", limit_s=limit_s)
    world.check_done()


def until_waited_for(world: World) -> None:
    world.run(lambda: bool(world.told(LastCopyAwaited)), limit_s=10.0)


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(3))
def test_a_stopped_device_is_woken_and_no_step_is_lost(seed: int) -> None:
    world = training(seed)
    world.stop_device("n02")
    until_waited_for(world)
    assert world.view().cause == "last-copy"
    world.run(lambda: bool(who_went_on(world)), limit_s=5.0)
    (awaited,) = world.told(LastCopyAwaited)
    assert awaited.node == "n02"
    assert awaited.layers
    assert awaited.steps > 0
    assert (world.view().cause, world.view().reason) == ("", "")
    finish(world)
    assert (world.job().steps_lost, ways_back(world)) == (0, [])
    (incident,) = world.incidents()
    assert (incident.nodes, incident.steps_lost, incident.open) == (("n02",), 0, False)
    assert incident.phases[0].phase == "detect"
    assert incident.phases[0].duration_s > 1.0, "the wait shows"


def test_it_is_woken_again_when_it_is_stopped_again() -> None:
    world = training()
    for count in (1, 2, 3):
        world.stop_device("n02")
        world.run(lambda count=count: len(who_went_on(world)) == count, limit_s=5.0)
    finish(world)
    assert world.job().steps_lost == 0


def test_what_sigcont_does_not_wake_is_waited_for_and_then_ended() -> None:
    """A debugger, a frozen cgroup: as long as the rollback costs, and no longer."""
    world = training()
    world.held = True
    began = world.now
    world.stop_device("n02")
    world.run(lambda: bool(ways_back(world)), limit_s=90.0)
    (over,) = world.told(LastCopyWaitOver)
    assert (over.device, over.back) == ("n02/0", False)
    assert 1.0 + 5.0 < over.after_s <= 1.0 + 60.0 + 2.0
    assert 1.0 + 5.0 < world.now - began < 1.0 + 60.0 + 2.0
    world.held = False
    finish(world)
    assert world.job().steps_lost > 0
    (incident,) = world.incidents()
    assert incident.phases[0].duration_s > 6.0, "the wait is a part of what it cost"


def test_nobody_waits_longer_than_a_minute() -> None:
    world = training(num_nodes=3, steps=60)
    world.machine.core.run.job.step_s.extend([60.0] * 20)  # a rollback of an hour
    world.held = True
    began = world.now
    world.stop_device("n02")
    until_waited_for(world)
    assert world.told(LastCopyAwaited)[0].wait_s == 60.0
    world.run(lambda: bool(ways_back(world)), limit_s=90.0)
    assert 60.0 < world.now - began < 63.0


def test_with_a_copy_elsewhere_it_is_ended_at_once() -> None:
    world = training(num_nodes=6, f=1, memory=350, min_pipeline_nodes=1)
    world.held = True
    began = world.now
    world.stop_device("n02")
    world.run(lambda: world.node("n02").state != "active", limit_s=5.0)
    assert world.now - began < 1.5
    assert not world.told(LastCopyAwaited)
    finish(world)
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("gap_s", [0.0, 0.001, 0.3, 2.0])
def test_of_two_that_hold_both_copies_one_is_waited_for(gap_s: float) -> None:
    world = training(num_nodes=4, f=1, memory=350, min_pipeline_nodes=1)
    layout = world.job().layout
    one, other = next(
        (a, b) for a in layout.holdings for b in layout.holdings
        if a != b and layout.holdings[a] == layout.holdings[b]
    )  # fmt: skip
    world.stop_device(node_of(one))
    world.after(gap_s, world.stop_device, node_of(other))
    finish(world)
    assert (world.job().steps_lost, ways_back(world)) == (0, [])


def test_a_copy_that_has_become_the_last_one_counts() -> None:
    world = training(num_nodes=4, f=1, memory=350, min_pipeline_nodes=1, policy="slipstream")
    layout = world.job().layout
    one, other = next(
        (a, b) for a in layout.holdings for b in layout.holdings
        if a != b and layout.holdings[a] == layout.holdings[b]
    )  # fmt: skip
    world.kill(node_of(one))
    world.run_for(0.2)
    world.stop_device(node_of(other))
    finish(world)
    assert world.job().steps_lost == 0


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(3))
def test_a_silent_node_is_waited_for_where_it_holds_the_last_copy(seed: int) -> None:
    """SIGSTOP of its agent as well: nobody there can send anything, nor be asked."""
    world = training(seed)
    node = world.nodes["n02"]
    for process in (node.agent, node.host):
        process.stop()
        world.after(8.0, process.go_on)
    until_waited_for(world)
    assert world.told(LastCopyAwaited)[0].node == "n02"
    world.run(lambda: "n02" in who_went_on(world), limit_s=20.0)
    finish(world)
    assert (world.job().steps_lost, ways_back(world)) == (0, [])


def test_a_silent_node_that_comes_back_as_another_one_is_lost_at_once() -> None:
    world = training()
    world.kill("n02", silent=True)
    until_waited_for(world)
    world.add("n02")
    world.run(lambda: bool(ways_back(world)), limit_s=2.0)
    assert not who_went_on(world)
    finish(world)


def test_a_network_that_is_gone_and_comes_back_costs_no_step() -> None:
    world = training()
    for other in ("daemon", "n01", "n03"):
        for ends in (("n02", other), (other, "n02")):
            world.network.cut(*ends, 6.0)
    world.run_for(9.0)
    finish(world)
    assert world.job().steps_lost == 0


def test_a_node_that_died_is_waited_for_by_nobody() -> None:
    world = training()
    began = world.now
    world.kill("n02")
    world.run(lambda: bool(ways_back(world)), limit_s=5.0)
    assert world.now - began < 1.0
    assert not world.told(LastCopyAwaited)
    world.add("n02")
    finish(world)


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("injection", [True, False])
def test_kill_node_ends_the_wait_at_once(silent: bool, injection: bool) -> None:
    """Also where the daemon does not allow failures on demand: it ends nothing but the wait."""
    world = training()
    world.held = True
    if not injection:
        core = world.machine.core
        core.config = core.config.__class__(
            **{f: getattr(core.config, f) for f in core.config.__struct_fields__ if f != "allow_injection"}
        )
    world.stop_device("n02")
    if silent:
        world.nodes["n02"].agent.stop()
    until_waited_for(world)
    world.checks.excuse("n02", 100.0)
    answer = world.ask(Kill("n02", how="sigkill"))
    assert answer.id == "n02"
    world.run(lambda: bool(ways_back(world)), limit_s=1.0)
    world.held = False
    world.kill("n02")
    world.add("n02")
    finish(world)


@pytest.mark.parametrize("act", ["cancel", "pause"])
def test_people_may_act_meanwhile(act: str) -> None:
    world = training()
    world.held = True
    world.stop_device("n02")
    until_waited_for(world)
    world.ask(Drain("n03"))
    world.ask(Drain("n03", undo=True))
    world.ask(Control("job-1", act, discard=act == "cancel"))
    if act == "cancel":
        assert world.state() == "cancelled"
        world.run(lambda: world.node("n02").state == "joining", limit_s=3.0)
        return
    world.held = False
    world.until_state("paused", limit_s=5.0)
    world.ask(Control("job-1", "resume"))
    finish(world)
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("silent", [True, False])
def test_a_daemon_that_restarts_meanwhile_goes_on_waiting(silent: bool) -> None:
    world = training()
    world.held = True
    world.stop_device("n02")
    node = world.nodes["n02"]
    if silent:
        node.agent.stop()
    until_waited_for(world)
    world.daemon.restart(0.5)
    world.after(9.0, setattr, world, "held", False)
    if silent:
        world.after(9.0, node.host.go_on)
        world.after(9.0, node.agent.go_on)
    finish(world)
    assert (world.job().steps_lost, ways_back(world)) == (0, [])
    assert not any(incident.open for incident in world.incidents())


@pytest.mark.parametrize("down_s", [0.5, 1.5])
def test_of_two_that_hold_both_copies_a_daemon_that_just_starts_keeps_one(down_s: float) -> None:
    """Whom it had ended is not known to be dead yet: losses are looked at when all are back."""
    world = training(num_nodes=4, f=1, memory=350, min_pipeline_nodes=1)
    layout = world.job().layout
    one = next(iter(layout.holdings))
    world.daemon.restart(down_s)
    for device in layout.holdings:
        if layout.holdings[device] == layout.holdings[one]:
            world.stop_device(node_of(device))
    finish(world)
    assert (world.job().steps_lost, ways_back(world)) == (0, [])


def test_where_nothing_trains_a_stopped_device_is_ended() -> None:
    world = World(0, 2)
    world.run_for(3.0)
    incarnation = world.device(device_name("n01", 0)).incarnation
    world.held = True
    world.stop_device("n01")
    world.run(
        lambda: (device := world.device("n01/0")) is not None and device.incarnation != incarnation,
        limit_s=5.0,
    )

"""Copies made while training goes on, followed to their end: the stop is short, nothing is lost, and whatever
goes wrong costs a copy.
"""

from __future__ import annotations

import math
import random
import sys

import msgspec
import pytest

from oobleckd.core import precopy
from oobleckd.core.entries import LayoutDeployed
from oobleckd.core.events import Tell
from oobleckd.planner import policies
from oobleckd.planner.plan import node_of
from oobleckd.planner.policies import adaptive
from oobleckd.protocol.changes import PlanDeployed
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.messages import Deploy, PreCopy
from oobleckd.protocol.requests import Control, Drain
from tests.helpers.simdevice import SimDevice
from tests.helpers.simjobs import make_job, profile
from tests.helpers.simtext import WRONG
from tests.helpers.storm import Storm
from tests.helpers.world import World
from tests.sim.test_detours import until_closed, written

LINK_BYTES_PER_S = 5000.0
"""A stage of three layers, 225 bytes, takes 45 ms, as long as a step."""


@pytest.fixture(autouse=True)
def whatever_it_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world this small a node that is missing makes steps so long that copies are better made in the
    stop.
    """
    monkeypatch.setattr(policies, "lost_s", lambda *_: 0.0)


def running(policy="slipstream", num_nodes=4, seed=0, steps=40, schedule=None, **config) -> World:
    """Pipelines of two nodes, as much memory as anybody wants, and links on which a copy takes
    about a step.
    """
    world = World(seed, num_nodes, **config)
    world.profile = msgspec.structs.replace(profile(6), link_bytes_per_s=LINK_BYTES_PER_S)
    world.run_for(1.0)
    world.submit(
        make_job(steps=steps, f=1, policy=policy, min_pipeline_nodes=2, schedule=schedule or Schedule())
    )
    world.until_step(3)
    assert [len(p.nodes) for p in world.view().pipelines] == [2] * (num_nodes // 2)
    return world


def pre_copy(world: World):
    run = world.machine.core.run if world.machine is not None else None
    return run.pre_copy if run is not None else None


def until_begun(world: World) -> None:
    world.run(lambda: pre_copy(world) is not None)


def joining(policy="slipstream", **more) -> World:
    """A node was lost and comes back: its layers are on their way to it."""
    world = running(policy, **more)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.add("n02")
    until_begun(world)
    return world


def finish(world: World) -> None:
    """To the end of the job, with every step once and the bits of a run without failures; nobody keeps
    anything of it.
    """
    world.until_state("done", limit_s=120.0)
    world.check_done()
    assert world.job().steps_lost == 0
    world.run_for(1.0)
    assert all(device.precopy_target is None and device.executor is None for device in world.devices())


def deployments(world: World) -> list[tuple[int, int]]:
    """Layers that were copied in the stop, and before it, of every deployment after the first."""
    plans = [change.data for change in world.daemon.changes if isinstance(change.data, PlanDeployed)]
    return [(plan.copied_bytes, plan.staged_bytes) for plan in plans][1:]


@pytest.mark.thin(6)
@pytest.mark.parametrize("policy", ["slipstream", "bamboo", "oobleck"])
@pytest.mark.parametrize("seed", range(4))
def test_training_goes_on_while_layers_are_copied_to_whoever_joins(policy: str, seed: int) -> None:
    world = running(policy, seed=seed)
    if policy != "oobleck":
        world.kill("n02")
        world.run(lambda: bool(world.incidents()))
        until_closed(world)
        world.add("n02")
    else:
        world.add("n05")
        world.add("n06")
    deployed = len(written(world, LayoutDeployed))
    until_begun(world)
    begun = world.job().counters.step
    world.run(lambda: world.machine.core.run.phase == "deploy")
    assert world.job().counters.step > begun
    assert pre_copy(world) is None
    world.run(lambda: len(written(world, LayoutDeployed)) > deployed)
    copied, staged = deployments(world)[-1]
    assert copied == 0
    assert staged >= 3
    assert world.told(PlanDeployed)[-1].staged_bytes > 0
    finish(world)


def stricken(monkeypatch: pytest.MonkeyPatch, seed: int, waiting_loses_s: float) -> tuple[World, int]:
    """A node was lost, and copies for the next plan have begun; and the step in which that was."""
    monkeypatch.setattr(adaptive, "lost_s", lambda *_: waiting_loses_s)
    monkeypatch.setattr(sys.modules[__name__], "LINK_BYTES_PER_S", 3000.0)  # one layer is to be copied
    world = running("adaptive", num_nodes=6, seed=seed)
    world.run_for(0.01 * seed)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    struck = world.job().counters.step
    until_begun(world)
    assert world.job().counters.step == struck
    return world, struck


@pytest.mark.parametrize("seed", range(6))
def test_after_a_loss_layers_are_copied_while_the_step_is_mended(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whom the next plan moves has its layers before all stop for it, and that is the step that lost
    somebody, or the one after it.
    """
    world, struck = stricken(monkeypatch, seed, waiting_loses_s=0.0)
    world.run(lambda: world.machine.core.run.phase == "deploy")
    assert struck < world.job().counters.step <= struck + 2
    until_closed(world)
    copied, staged = deployments(world)[-1]
    assert copied == 0
    assert staged > 0
    assert "n02" not in world.view().nodes
    finish(world)


@pytest.mark.parametrize("seed", range(6))
def test_copies_that_begin_after_a_loss_are_not_waited_for(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stop at the end of the step that is mended, with what is there by then: all of it or nothing, or
    something in between.
    """
    world, struck = stricken(monkeypatch, seed, waiting_loses_s=math.inf)
    number = pre_copy(world).number
    assert number > 0
    world.run(lambda: world.machine.core.run.phase == "deploy")
    assert world.job().counters.step == struck + 1
    (precopied,) = {each.precopied for each in world.machine.core.run.candidate.deploys.values()}
    assert precopied == number
    until_closed(world)
    copied, staged = deployments(world)[-1]
    assert copied + staged > 0
    assert "n02" not in world.view().nodes
    finish(world)


@pytest.mark.parametrize("seed", range(6))
def test_rounds_of_all_kinds_come_in_between(seed: int) -> None:
    """Staggered updates that are taken back, clipped, skipped and repeated rounds while the copies are kept
    current.
    """
    schedule = Schedule(backward="decoupled", chunks=1, update="staggered")
    steps = range(4, 60)
    kinds = {"overflows": tuple(steps[::5]), "nans": tuple(steps[2::7]), "clips": tuple(steps[1::3])}
    world = joining(seed=seed, steps=60, schedule=schedule, **kinds)
    world.run(lambda: pre_copy(world) is None)
    world.until_step(40)
    assert deployments(world)[-1][0] == 0
    finish(world)


@pytest.mark.thin(8)
@pytest.mark.parametrize("who", ["source", "target", "other"])
@pytest.mark.parametrize("seed", range(10))
def test_deaths_while_copies_are_made(who: str, seed: int) -> None:
    world = joining(num_nodes=6, seed=seed)
    dice, found = random.Random(seed), pre_copy(world)
    sources = {node_of(device) for device in found.incarnations if device not in found.targets}
    names = {
        "source": sorted(sources),
        "target": sorted({node_of(device) for device in found.targets}),
        "other": sorted(set(world.live()) - sources - {node_of(device) for device in found.targets}),
    }[who]
    world.run_for(dice.uniform(0.0, 0.2))
    victim = dice.choice(names)
    how = dice.choice([world.kill, world.kill_device, world.spare_takes_place])
    how(victim)
    world.after(0.5, world.add, victim) if how == world.kill else None
    finish(world)


@pytest.mark.parametrize("seed", range(8))
def test_the_daemon_dies_while_copies_are_made(seed: int) -> None:
    world = joining(seed=seed, lease_s=1.5, grace_s=2.0)
    before = len(written(world, LayoutDeployed))
    world.run_for(0.02 * seed)
    world.daemon.restart(down_s=0.1)
    world.run(lambda: world.machine is not None and len(written(world, LayoutDeployed)) > before)
    assert "n02" in world.view().nodes
    finish(world)


@pytest.mark.parametrize("seed", range(12))
def test_links_break_while_copies_are_made(seed: int) -> None:
    world = joining(seed=seed, steps=30)
    dice = random.Random(seed)
    world.run_for(dice.uniform(0.0, 0.15))
    links = [
        link
        for device in world.devices()
        for peer, link in sorted(device.transport.links.items())
        if "n02" in {device.node.name, node_of(peer)} and not link.closed
    ]
    for link in links[:1]:
        for end in (link.source, link.target):
            world.checks.excuse(end.sim.node.name, 5.0)
        world.network.reset_devices(link, dice.uniform(0.0, 1.0), dice.uniform(0.0, 1.0))
    finish(world)


def test_what_is_not_wanted_any_more_is_dropped() -> None:
    world = joining()
    devices = [world.device(name) for name in pre_copy(world).incarnations]
    world.run_for(0.03)
    assert any(device.precopy_target is not None for device in devices)
    world.ask(Drain("n02"))
    world.run(lambda: pre_copy(world) is None)
    world.run_for(0.1)
    assert all(device.precopy_target is None for device in devices)
    assert all(device.executor is None or device.executor.precopy_source is None for device in devices)
    world.ask(Drain("n02", undo=True))
    world.run(lambda: "n02" in world.view().nodes)
    finish(world)


def test_a_target_with_another_text_may_be_used_once_the_right_one_is_back() -> None:
    """It had opened the wrong one for the copies, and said so for ever."""
    world = running(steps=80)
    right = world.texts.at("n02")
    world.texts.put(WRONG)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.add("n02")
    world.run(lambda: "n02" in world.machine.core.run.kept_out)
    world.texts.put_back(right)
    world.run(lambda: "n02" in world.view().nodes)
    assert deployments(world)[-1][1] > 0
    finish(world)


def test_a_pause_does_not_wait_for_copies() -> None:
    world = joining()
    world.ask(Control("job-1", "pause"))
    world.until_state("paused")
    step = world.job().counters.step
    world.run_for(1.0)
    assert world.job().counters.step == step
    world.ask(Control("job-1", "resume"))
    world.run(lambda: "n02" in world.view().nodes)
    finish(world)


def test_a_target_that_never_says_that_it_keeps_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precopy, "MIN_S", 0.0)
    monkeypatch.setattr("oobleckd.worker.device.device.DeviceProcess._stage", lambda _: False)
    world = joining(steps=40)
    world.run(lambda: "n02" in world.view().nodes)
    assert deployments(world)[-1] == (0, 3)  # what had arrived is replayed in the stop
    finish(world)


def test_numbers_are_not_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    world = running(lease_s=1.5, grace_s=2.0, steps=40)
    tell = world.network.tell

    def heard(command: Tell) -> None:
        told.append(command.message)
        tell(command)

    monkeypatch.setattr(world.network, "tell", heard)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.add("n02")
    until_begun(world)
    world.daemon.restart(down_s=0.1)
    world.run(lambda: world.machine is not None and "n02" in world.view().nodes)
    numbers = {message.number for message in told if isinstance(message, PreCopy) and message.transfers}
    used = {message.precopied for message in told if isinstance(message, Deploy)}
    assert len(numbers) == 2
    assert used <= {0, max(numbers)}
    finish(world)


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(40))
def test_storms_on_slow_links(seed: int) -> None:
    dice = random.Random(f"precopy {seed}")
    policy = dice.choice(["slipstream", "bamboo", "adaptive", "oobleck"])
    world = running(policy, 6, seed, steps=60, lease_s=1.5, grace_s=dice.choice([1.0, 3.0]))
    storm = Storm(world, dice, 4)
    storm.blow(dice.randrange(4, 14))
    world.run(lambda: world.state() in {"done", "failed"}, limit_s=200)
    world.check_done()


@pytest.mark.thin(8)
@pytest.mark.parametrize("point", ["ahead", "stage"])
@pytest.mark.parametrize("policy", ["slipstream", "bamboo"])
@pytest.mark.parametrize("seed", range(8))
def test_deaths_at_the_points_of_a_precopy(policy: str, point: str, seed: int) -> None:
    world = joining(
        policy, num_nodes=4 if policy == "bamboo" else 6, seed=seed
    )  # its copies are twice as long
    visits, wanted = [], random.Random(seed).randrange(3)

    def strikes(device: SimDevice, at: str, _round: int) -> bool:
        if at != point:
            return False
        visits.append(device.node.name)
        return len(visits) == wanted + 1

    world.strikes = strikes
    world.run(lambda: bool(world.fired))
    assert world.fired == [(f"{visits[wanted]}/0", point)]
    world.after(0.5, world.add, visits[wanted])
    finish(world)

"""Stages whose number of devices is left open: another one where nodes come and go, with the state that
there is.
"""

from __future__ import annotations

import random
from typing import get_args

import msgspec
import pytest

from oobleckd.core import watching
from oobleckd.core.impact import impact_view
from oobleckd.protocol.job import PolicyName
from oobleckd.protocol.requests import Drain
from tests.helpers.manners import KEPT, SUM_COPIES, UPDATES, Manner, forms_of
from tests.helpers.simdevice import SimDevice
from tests.helpers.world import World

SEEDS = 100


def running(num_nodes: int, memory: int = 150, **spec: object) -> World:
    """Stages of four devices need three nodes, and are faster than those of one, which need two."""
    world = World(1, num_nodes, num_devices=4)
    world.run_for(1.0)
    world.submit(**({"devices_per_stage": "auto", "steps": 60, "memory": memory} | spec))
    world.until_step(3)
    return world


def each(world: World) -> int:
    """How many devices share a stage."""
    layout, setup = world.job().layout, world.job().setup
    assert layout.devices_per_stage == setup.profile.devices_per_stage
    return layout.devices_per_stage


def until_each(world: World, number: int) -> None:
    world.run(lambda: world.job().layout is not None and each(world) == number)


def finish(world: World) -> None:
    world.run(lambda: world.machine is not None and world.state() in {"done", "failed"}, limit_s=60)
    world.check_done()


@pytest.mark.parametrize("policy", ["oobleck", "slipstream"])
def test_where_too_few_are_left_for_two_pipelines_of_large_stages(policy: PolicyName) -> None:
    """And back, when a node comes."""
    world = running(6, policy=policy)
    assert each(world) == 4
    world.kill("n06")
    until_each(world, 1)
    assert min(world.job().layout.copies()) == 2
    world.run_for(0.2)
    world.add("n06")
    until_each(world, 4)
    finish(world)
    assert world.checks.rollbacks == 0


@pytest.mark.parametrize(("asked", "number"), [(4, 4), ("auto", 1)])
def test_devices_that_are_gpus_share_stages_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str | int, number: int
) -> None:
    monkeypatch.setattr(SimDevice, "kind", "cuda")
    world = running(6, devices_per_stage=asked, steps=8)
    assert each(world) == number
    finish(world)


def test_a_policy_that_rolls_back_goes_by_a_checkpoint() -> None:
    world = running(2, policy="varuna")
    assert each(world) == 1
    world.add("n03")
    until_each(world, 4)
    finish(world)
    assert world.checks.rollbacks == 0


def test_nodes_that_are_too_few_for_the_number_that_there_is() -> None:
    """The last copy of a layer is gone, so that the job begins anew; with stages of one device it can."""
    world = running(3, f=0)
    assert (each(world), world.job().n0) == (4, 3)
    world.kill("n03")
    until_each(world, 1)
    assert world.job().n0 == 2
    finish(world)


def test_a_drained_node_gives_its_shards_to_stages_that_need_fewer_nodes() -> None:
    """Nothing goes by a checkpoint, and nothing is lost."""
    world = running(3, f=0)
    world.ask(Drain("n03"))
    until_each(world, 1)
    assert not any(device.startswith("n03/") for device in world.job().layout.holdings)
    finish(world)
    assert world.checks.rollbacks == 0


def test_a_loss_that_fewer_devices_a_stage_survive_does_not_stop_the_job() -> None:
    """As what-if says it beforehand."""
    world = running(3, f=0)
    core = world.machine.core
    question = watching.loss_of(core, core.run, ["n03"])
    found = impact_view(question, world.job().setup, world.job().templates)
    assert not found.stops
    assert found.lost_layers
    alone = msgspec.structs.replace(question, others=())
    assert impact_view(alone, world.job().setup, world.job().templates).stops
    world.kill("n03")
    until_each(world, 1)
    shown = world.view().pipelines
    assert [p.nodes for p in shown] == [p.nodes for p in found.plan]
    assert [p.stages for p in shown] == [p.stages for p in found.plan]


def test_a_node_that_is_back_before_the_answer_changes_nothing() -> None:
    world = running(6)
    world.daemon.plan_s = (0.5, 0.5)
    world.kill("n06")
    world.run_for(0.3)
    world.add("n06")
    finish(world)
    assert each(world) == 4


@pytest.mark.parametrize("who", ["source", "target", "daemon"])
def test_a_death_in_the_middle_of_it(who: str) -> None:
    """What there is stays in force until all have what they need, and has more than one copy."""
    world = running(9, f=2)
    assert each(world) == 4
    struck: list[str] = []

    def strikes(device: SimDevice, point: str, _round: int) -> bool:
        deployment = device.deployment
        if point != "copy" or struck or deployment is None or not deployment.message.held_per_stage:
            return False
        if (who == "source") != (deployment.reshard is not None and bool(deployment.awaited)):
            struck.append(device.name)
            if who == "daemon":
                world.daemon.restart()
                return False
            return True
        return False

    world.strikes = strikes
    world.kill("n09")
    world.run(lambda: bool(struck))
    finish(world)
    assert world.checks.rollbacks == 0


@pytest.mark.thin(25)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nodes_come_and_go(seed: int) -> None:
    dice = random.Random(f"open {seed}")
    policy = get_args(PolicyName)[seed % len(get_args(PolicyName))]
    world = World(
        seed,
        dice.randrange(5, 9),
        num_devices=4,
        overflows=(5, 9) if dice.random() < 0.3 else (),
        codec=dice.random() < 0.2,
    )
    world.run_for(1.0)
    forms = forms_of(policy)
    manner = Manner(policy, *forms[seed % len(forms)], UPDATES[seed // 3 % 2], dice.choice(SUM_COPIES))
    more = manner.simulated(dice.choice(KEPT))
    if more["memory"]:
        more["memory"] = dice.choice([200, 300])
    world.submit(steps=60, f=1, every=dice.choice([0, 4]), devices_per_stage="auto", **more)
    world.until_step(1)
    for _ in range(dice.randrange(2, 7)):
        world.run_for(dice.choice([0.02, 0.2, 0.5, 1.0]))
        live, what = world.live(), dice.choice(["kill", "kill", "join", "spare", "daemon"])
        dead = sorted(world.nodes.keys() - set(live))
        if what == "kill" and len(live) > 4:
            world.kill(dice.choice(live))
        elif what == "join" and dead:
            world.add(dice.choice(dead))
        elif what == "spare" and live:
            world.spare_takes_place(dice.choice(live), dice.randrange(4))
        elif what == "daemon":
            world.daemon.restart()
    finish(world)

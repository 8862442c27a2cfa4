"""Survivors are asked before the journal knows of a loss: a daemon that dies in between asks again, and
nothing differs.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from oobleckd.core import machine
from oobleckd.core.context import Core
from oobleckd.core.entries import Restarted
from oobleckd.planner.plan import node_of
from oobleckd.protocol.messages import Report
from tests.helpers.storm import Storm
from tests.helpers.world import World

SYNC_S = (0.001, 0.004)


def running(seed: int, policy: str = "oobleck", num_devices: int = 1, steps: int = 100) -> World:
    world = World(seed, 6, num_devices=num_devices, num_layers=8, lease_s=1.5, grace_s=2.0)
    world.daemon.disk.sync_s = SYNC_S
    world.run_for(1.0)
    world.submit(steps=steps, f=1, memory=350, policy=policy)
    world.until_step(5)
    return world


def whole(world: World) -> bool:
    """Whether every node is in the plan of a job that runs, and no recovery is under way."""
    if world.machine is None or world.state() != "running" or any(i.open for i in world.incidents()):
        return False
    return {node_of(device) for device in world.job().survivors()} == set(world.live()) == set(world.nodes)


def struck(world: World, back: int) -> bool:
    """Whether a strike shows: in devices that are missing, in more steps lost than ``back``, or not at all,
    as the job is done.
    """
    return world.job().unsettled or world.job().steps_lost > back or world.state() == "done"


def strike(world: World, how: str) -> None:
    """A device process ends at a moment at which survivors are asked ahead of the journal."""
    while True:
        asked, back = len(world.daemon.disk.told_ahead), world.job().steps_lost
        world.run(lambda: world.daemon.disk.syncing is None and whole(world))
        victim = node_of(world.random.choice(world.job().survivors()))
        if how == "spare":
            world.spare_takes_place(victim, world.random.randrange(world.num_devices))
        else:
            world.kill_device(victim)
        world.run(partial(struck, world, back))
        if len(world.daemon.disk.told_ahead) > asked:
            return
        world.run_for(0.3)  # somebody was about to be told something: all have to wait for the disk


@pytest.mark.thin(8)
@pytest.mark.parametrize("how", ["spare", "device"])
@pytest.mark.parametrize("policy", ["oobleck", "slipstream"])
@pytest.mark.parametrize("seed", range(8))
def test_the_daemon_dies_before_its_journal_knows(seed: int, policy: str, how: str) -> None:
    world = running(seed, policy, num_devices=1 + seed % 2, steps=40)
    strike(world, how)
    lost, known = world.job().dead, len(world.daemon.disk.journal)
    world.run_for(world.random.uniform(0.0, 0.004))
    if seed % 3 == 0:  # and another loss while it is away
        world.spare_takes_place(world.random.choice(world.live()))
    world.daemon.restart(world.random.uniform(0.0, 0.3))
    assert lost
    assert len(world.daemon.disk.journal) <= known + 12
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0 or world.checks.last_copy_lost


def tell_and_die(seed: int, how: str) -> set[tuple[int, tuple[str, ...]]]:
    """Epochs with the dead that survivors were told of, by daemons whose successors' journals may know
    nothing of it.
    """
    world = running(seed, steps=60)
    for _ in range(3):
        strike(world, how)
        world.daemon.restart(0.0)
        world.run(lambda: world.machine is not None)
    told = {
        (message.epoch, message.dead)
        for message in world.daemon.disk.told_ahead
        if isinstance(message, Report)
    }
    world.until_state("done", limit_s=200.0)
    world.check_done()
    return told


@pytest.mark.thin(6)
@pytest.mark.parametrize("how", ["spare", "device"])
@pytest.mark.parametrize("seed", range(5))
def test_no_epoch_is_told_twice(seed: int, how: str) -> None:
    told = tell_and_die(seed, how)
    assert len(told) == len({epoch for epoch, _ in told}) >= 3


@pytest.mark.parametrize("seed", range(10))
def test_random_failures_with_a_slow_disk(seed: int) -> None:
    world = running(seed, ("oobleck", "slipstream")[seed % 2])
    Storm(world, random.Random(seed), copies=2).blow(25)
    world.until_state("done", limit_s=200.0)
    world.check_done()


def test_nobody_is_asked_ahead_where_the_dead_may_live() -> None:
    """A whole node that is gone may come back in the same incarnation: the journal has to know first whom
    others take for dead.
    """
    world = running(0, steps=30)
    world.kill("n03", silent=True)
    world.until_state("recovering")
    assert not world.daemon.disk.told_ahead
    world.until_state("done")
    world.check_done()


def test_they_would_be_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: no gap after a restart. Whatever comes of it, some epoch is told with different dead, or
    a run is stuck.
    """
    monkeypatch.setattr(machine, "Restarted", lambda _, at: Restarted(0, at))
    monkeypatch.setattr(Core, "next_epoch", lambda core: core.state.epoch + 1)
    for seed in range(30):
        try:
            told = tell_and_die(seed, "spare")
        except AssertionError:
            return
        if len(told) > len({epoch for epoch, _ in told}):
            return
    pytest.fail("not found")

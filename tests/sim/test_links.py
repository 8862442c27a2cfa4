"""Connections that break at bad moments: each of these had a job stand still for ever (found by
the weather).
"""

from __future__ import annotations

import random

import msgspec
import pytest

from oobleckd.core.events import Heard
from tests.helpers.simtransport import Link
from tests.helpers.world import World


def running(seed: int = 0, num_nodes: int = 6, steps: int = 25) -> World:
    world = World(seed, num_nodes, grace_s=1.0)
    world.run_for(3.0)
    world.submit(steps=steps, f=1, memory=350)
    world.until_step(3)
    return world


def phase(world: World) -> str:
    return world.machine.core.run.phase


@pytest.mark.parametrize("what", ["Deploy", "Report", "Decide", "Resume"])
@pytest.mark.parametrize("name", ["n02", "n07"])
def test_an_agent_is_back_before_the_daemon_has_seen_its_connection_break(what: str, name: str) -> None:
    """What was on its way is gone; nothing but the new connection says so."""
    world = running()
    tell, struck = world.network.tell, []

    def breaks(command) -> None:
        tell(command)
        if type(command.message).__name__ == what and command.node == name and not struck:
            struck.append(world.now)
            world.network.break_link(name, agent_s=0.0, daemon_s=30.0)

    world.network.tell = breaks
    world.add("n07")
    world.run_for(0.05)
    world.kill("n03")
    world.run(lambda: bool(struck) or world.state() == "done")
    world.until_state("done", limit_s=20.0)
    world.check_done()


def test_a_link_between_devices_that_breaks_while_the_daemon_is_away() -> None:
    world = running(steps=60)
    world.daemon.stop()
    link = _link(world, "n01/0")
    world.network.reset_devices(link, 0.01, 0.02)
    world.run_for(1.5)
    world.daemon.start()
    world.until_state("done", limit_s=20.0)
    world.check_done()
    assert "evicted" in world.machine.core.state.drain_causes.values()


def test_a_link_between_devices_that_breaks_while_an_agent_reconnects() -> None:
    world = running(steps=60)
    link = _link(world, "n01/0")
    for end in (link.source, link.target):
        world.network.break_link(end.sim.node.name)
    world.network.reset_devices(link, 0.01, 0.02)
    world.until_state("done", limit_s=20.0)
    world.check_done()


def test_a_hello_that_was_said_before_a_deployment_takes_nothing_back() -> None:
    """An agent that waits for its Welcome says Hello again: what it says of its devices is older than what
    they are told.
    """
    world = running()
    world.kill("n03")
    world.add("n03")
    world.run(lambda: phase(world) == "deploy")
    device = world.nodes["n03"].devices["n03/0"]
    assert not device.layout.epoch
    hello = []
    to_daemon, world.network.to_daemon = world.network.to_daemon, lambda node, message: hello.append(message)
    device.known = msgspec.structs.replace(device.known, job="job-1", layout=1)
    world.nodes["n03"].hello()
    world.network.to_daemon = to_daemon
    world.daemon.feed_now(Heard("n03", hello[0]))
    world.until_state("done", limit_s=20.0)
    world.check_done()


def _link(world: World, device: str) -> Link:
    """An open link of ``device`` to a device of another node."""
    links = world.device(device).transport.links
    return next(link for _, link in sorted(links.items()) if link.is_open)


def test_what_is_due_at_one_time_happens_in_the_order_in_which_it_was_asked_for():
    """Tensor messages that a cut held back: whenever each was sent, none overtakes another."""
    world, happened, dice = World(1, 0), [], random.Random(1)
    for number, sent_at in enumerate(sorted(dice.uniform(0.0, 4.0) for _ in range(200))):
        world.at(sent_at, world.at, 4.999, happened.append, number)
    world.run_for(10.0)
    assert happened == list(range(200))

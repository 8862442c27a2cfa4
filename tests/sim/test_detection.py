"""Who is given up and who is not: late heartbeats, deaf daemons, starved agents, stopped nodes
(docs/mechanisms/detection.md).
"""

import random

import pytest

from oobleckd.protocol.changes import NodeLost
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def training(seed=0, num_nodes=6, **spec):
    """Leases are learned, and a job has committed a few steps."""
    world = World(seed, num_nodes)
    world.run_for(3.0)
    world.submit(make_job(**{"steps": 400, "f": 1, "memory": 350} | spec))
    world.until_step(3)
    return world


@pytest.mark.parametrize("seed", range(10))
def test_late_heartbeats_are_no_deaths(seed):
    """Two minutes of six nodes without a job: nothing but their heartbeats speaks for them."""
    dice = random.Random(f"late {seed}")
    world = World(seed, 6)
    world.lateness_s = lambda: (
        dice.expovariate(1 / 0.02) + (dice.uniform(0, 0.7) if dice.random() < 0.02 else 0)
    )
    world.run_for(120.0)
    assert world.told(NodeLost) == []


def test_an_agent_without_a_processor_is_not_given_up_while_its_devices_train():
    world = training()
    node, step = world.nodes["n03"], world.job().counters.step
    node.connected = False  # nothing that it says leaves it
    world.run_for(4.0)
    assert world.node("n03").state == "disconnected"
    assert world.node("n03").cause == "silent"
    assert world.told(NodeLost) == []
    assert world.job().counters.step > step
    node.connected = True
    world.run_for(1.0)
    assert world.node("n03").state == "active"


@pytest.mark.parametrize("seed", range(5))
def test_a_node_that_stands_still_is_given_up_within_a_second_and_a_bit(seed):
    world = training(seed)
    began = world.now
    world.kill("n03", silent=True)
    world.run(lambda: world.node("n03").state == "lost")
    assert world.now - began < 1.2
    step = world.job().counters.step
    world.until_step(step + 1)
    assert world.now - began < 2.0


def test_a_network_that_is_gone_for_all_gives_up_nobody():
    world = training()
    for node in world.nodes.values():
        node.connected = False
    world.run_for(4.0)
    assert world.told(NodeLost) == []
    for node in world.nodes.values():
        node.connect()
    world.until_step(10)
    assert world.told(NodeLost) == []


def test_silence_that_never_ends_is_one_even_if_it_is_everybody_s():
    world = training()
    for name in list(world.nodes):
        world.kill(name, silent=True)
    world.run_for(world.config.lease_s + 1.0)
    assert len(world.told(NodeLost)) == 6

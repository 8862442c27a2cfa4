"""Gray failures: a node that works, slowly, is named within 20 steps, and the job does not run at its pace
for ever.
"""

from __future__ import annotations

import pytest

from oobleckd.protocol.changes import DevicePace
from tests.helpers.simjobs import make_job
from tests.helpers.world import World

STEPS = 120
NAMED_WITHIN = 20


def running(seed: int, num_nodes: int = 8, *, slow: str = "drain", **spec) -> World:
    world = World(seed, num_nodes)
    world.run_for(3.0)
    world.submit(make_job(**{"steps": STEPS, "memory": 350, "f": 1, "slow": slow} | spec))
    world.until_step(12)
    return world


def pace_s(world: World, steps: int) -> float:
    """Seconds of virtual time a step, over so many steps from now."""
    began, first = world.now, world.job().counters.step
    world.until_step(first + steps)
    return (world.now - began) / (world.job().counters.step - first)


def news(world: World) -> list[DevicePace]:
    return [said for said in world.told(DevicePace) if said.slow]


@pytest.mark.thin(6)
@pytest.mark.parametrize("policy", ["oobleck", "slipstream", "adaptive"])
@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_takes_three_times_as_long_is_named_and_drained(seed: int, policy: str) -> None:
    world = running(
        seed, 9, policy=policy
    )  # pipelines of 2, 2, 2 and 3, and then four of 2: 8 micro-batches divide as well
    healthy_s = pace_s(world, 10)
    world.nodes["n03"].slow = 3.0
    step = world.job().counters.step
    world.run(lambda: news(world))
    assert world.job().counters.step - step <= NAMED_WITHIN
    assert news(world) == [DevicePace("n03", "n03/0", slow=True, fate="drained")]
    world.run(lambda: "n03" not in world.job().plan.nodes() and world.state() == "running")
    assert (world.node("n03").state, world.node("n03").cause) == ("drained", "slow")
    world.until_step(world.job().counters.step + 2)
    live = 8 + 1 / 3  # of 9 nodes
    assert healthy_s / pace_s(world, 20) >= 0.85 * live / 9
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_is_needed_for_the_promise_stays(seed: int) -> None:
    world = running(seed, 4)  # n0 = 2 and f = 1
    world.nodes["n03"].slow = 3.0
    world.run(lambda: news(world))
    assert news(world) == [DevicePace("n03", "n03/0", slow=True, fate="needed")]
    assert world.node("n03").cause == "slow"
    world.until_state("done")
    world.check_done()


def test_it_is_only_said_where_the_job_does_not_ask_for_more() -> None:
    world = running(0, slow="report")
    world.nodes["n03"].slow = 3.0
    world.run(lambda: news(world))
    assert news(world)[0].fate == "reported"
    world.until_state("done")
    assert "n03" in world.machine.core.members.nodes
    assert world.machine.core.state.drained == {}


def test_one_slow_moment_is_nothing() -> None:
    world = running(0)
    world.nodes["n03"].slow = 10.0
    world.until_step(world.job().counters.step + 2)
    world.nodes["n03"].slow = 1.0
    world.until_state("done")
    assert news(world) == []

"""Nodes that have notice of their end: out of the plan before it comes, with nothing computed twice."""

from __future__ import annotations

from typing import get_args

import pytest

from oobleckd.protocol.agentmessages import Dismiss
from oobleckd.protocol.changes import NodeDismissed, NodeEnding
from oobleckd.protocol.incidentviews import LossView
from oobleckd.protocol.job import PolicyName
from oobleckd.protocol.requests import Drain
from tests.helpers.world import World

STEPS = 40


def running(seed: int = 1, nodes: int = 6, *, codec: bool = False, **spec) -> World:
    world = World(seed, nodes, codec=codec)
    world.run_for(1.0)
    world.submit(**{"steps": STEPS, "f": 1, "memory": 350, **spec})
    world.until_step(5)
    return world


def done_in_order(world: World) -> None:
    """The job ends as one without failures does, and nothing had to be recovered on the way."""
    world.until_state("done")
    world.check_done()
    assert world.incidents() == []
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_a_noticed_node_is_out_of_the_plan_before_it_goes(policy: PolicyName) -> None:
    # Two copies under bamboo take eight nodes: every device holds its neighbour's layers, too.
    world = running(nodes=9 if policy == "bamboo" else 6, policy=policy, every=20, codec=True)
    leaving = world.view().nodes[1]
    world.nodes[leaving].noticed("AWS announced: spot instance terminate", 20.0)
    world.run(lambda: world.node(leaving).state == "draining")
    assert world.node(leaving).cause == "notice"
    (ending,) = world.told(NodeEnding)
    assert (ending.node, ending.left_s) == (leaving, 20.0)
    world.run(lambda: world.node(leaving).state == "left")
    assert world.node(leaving).cause == "left"
    assert leaving not in world.view().nodes
    assert world.now < 15.0, "it was let go as soon as nothing of it was needed"
    done_in_order(world)


def test_a_node_that_nobody_needs_may_leave_at_once() -> None:
    world = running(nodes=6, max_nodes=4)
    began = world.now
    world.nodes["n06"].noticed("SIGTERM", 20.0)
    world.run(lambda: world.node("n06").state == "left")
    assert world.now - began < 0.1
    assert world.told(NodeDismissed) == [NodeDismissed("n06")]
    done_in_order(world)


def test_two_at_once_are_let_go_together() -> None:
    world = running(nodes=6)
    for name in ("n02", "n05"):
        world.nodes[name].noticed("SIGTERM", 20.0)
    world.run(lambda: {world.node(name).state for name in ("n02", "n05")} == {"left"})
    assert not {"n02", "n05"} & set(world.view().nodes)
    done_in_order(world)


def test_all_at_once_leave_their_state_in_a_checkpoint() -> None:
    """What a batch system does that wants its machines back."""
    world = running(nodes=4)
    names = world.live()
    for name in names:
        world.nodes[name].noticed("preempted", 20.0)
    world.run(lambda: not world.live())
    assert world.state() == "waiting"
    assert world.view().cause == "too-few-nodes"
    assert world.view().checkpoint_step == world.job().counters.step
    assert world.job().counters.step < STEPS
    for name in names:
        world.add(name)
    done_in_order(world)


def test_a_node_that_is_back_after_its_notice_is_used_without_a_word() -> None:
    world = running(nodes=4, steps=40)
    world.nodes["n03"].noticed("SIGTERM", 20.0)
    world.run(lambda: world.node("n03").state == "left")
    world.add("n03")
    world.run(lambda: "n03" in world.view().nodes and world.state() == "running")
    assert not world.machine.core.members.leaving
    done_in_order(world)


def test_a_daemon_that_restarts_hears_of_the_notice_again() -> None:
    for seed in range(6):
        world = running(seed, nodes=5)
        world.nodes["n02"].noticed("SIGTERM", 20.0)
        world.daemon.restart(0.3)
        world.run(lambda: world.machine is not None and world.node("n02").state == "left")  # noqa: B023
        done_in_order(world)


def test_a_dismissal_that_is_lost_with_its_connection_is_said_again() -> None:
    world = running(nodes=5)
    lost = []
    tell = world.network.tell

    def lose_the_first(command) -> None:
        if isinstance(command.message, Dismiss) and not lost:
            lost.append(command)
            world.network.break_link(command.node)
        tell(command)

    world.network.tell = lose_the_first
    world.nodes["n02"].noticed("SIGTERM", 20.0)
    world.run(lambda: world.node("n02").state == "left")
    assert lost
    assert world.now < 15.0
    done_in_order(world)


def test_a_notice_that_comes_too_late_is_a_loss_and_nothing_worse() -> None:
    world = running(nodes=6)
    leaving = world.view().nodes[0]
    world.nodes[leaving].noticed("Google Cloud announced: preempted", 0.001)
    world.until_state("done")
    world.check_done()
    assert [incident.nodes for incident in world.incidents()] == [(leaving,)]
    assert world.incidents()[0].losses == (LossView(leaving, "left"),)


def test_what_a_user_drained_stays_drained_when_the_node_is_back() -> None:
    world = running(nodes=5, steps=40)
    world.ask(Drain("n02", "old-disk"))
    world.nodes["n02"].noticed("SIGTERM", 20.0)
    world.run(lambda: world.node("n02").state == "left")
    world.add("n02")
    world.run(lambda: world.node("n02").state == "drained")
    assert (world.node("n02").cause, world.node("n02").reason) == ("operator", "old-disk")
    done_in_order(world)

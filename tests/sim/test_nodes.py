"""Nodes that come and go: every number of them from twelve to n0 and back, drains, joins, too few."""

import pytest

from oobleckd.core import view
from oobleckd.core.entries import NodeJoined, NodeOver
from oobleckd.core.events import Planned
from oobleckd.core.machine import Machine
from oobleckd.protocol.changes import Audited, CheckpointIncomplete
from oobleckd.protocol.job import PolicyName
from oobleckd.protocol.requests import Accepted, Control, Drain, Forget, Submit
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def settled(world, names):
    """Whether the plan uses exactly ``names`` and runs."""
    return world.state() == "running" and set(world.view().nodes) == set(names)


def test_twelve_down_to_n0_and_back_up():
    world = World(3, 12)
    world.run_for(1.0)
    world.submit(steps=5000, f=2, memory=350, every=50)
    names = sorted(world.nodes)
    world.run(lambda: settled(world, names))
    gone = []
    while len(names) > world.job().n0:
        victim = names.pop(len(names) // 2)
        gone.append(victim)
        copies = world.view().tolerance
        if copies >= 1:
            world.kill(victim)
        else:
            world.ask(Drain(victim))  # a single copy is handed over, not killed
        world.run(lambda: settled(world, names))
        most = min(2, len(names) // 2 - 1)
        assert world.view().tolerance >= most, (len(names), world.view().tolerance)
    assert world.job().steps_lost == 0
    assert world.job().n0 == 2
    # One fewer: the job waits with its state in a checkpoint, and nothing is lost.
    world.ask(Drain(names[0]))
    world.until_state("waiting")
    step = world.job().counters.step
    assert (world.view().cause, world.view().checkpoint_step) == ("too-few-nodes", step)
    assert world.job().layout is None
    assert world.node(names[0]).state == "drained"
    world.kill(names[0])
    world.ask(Drain(names[0], undo=True))
    for name in [names[0], *reversed(gone)]:
        if not world.nodes[name].alive:
            world.add(name)
        else:
            world.ask(Drain(name, undo=True))
        if name != names[0]:
            names.append(name)
        world.run(lambda: settled(world, names))
    assert len(world.view().nodes) == 12
    assert world.job().steps_lost == 0
    assert world.job().counters.step > step


def test_joins_are_batched_and_training_goes_on_meanwhile():
    world = World(1, 3)
    world.run_for(1.0)
    world.submit(steps=400, f=0, memory=350)
    world.until_step(3)
    epoch = world.job().epoch
    for name in ("n04", "n05", "n06"):
        world.add(name)
    world.run(lambda: settled(world, sorted(world.nodes)))
    assert world.job().epoch == epoch + 1
    assert world.incidents() == []


def test_max_nodes_leaves_the_others_on_standby():
    world = World(1, 6)
    world.run_for(1.0)
    world.submit(steps=30, f=1, memory=350, max_nodes=4)
    world.until_step(5)
    assert len(world.view().nodes) == 4
    assert world.node("n06").state == "standby"
    assert world.node("n06").cause == "max-nodes"
    world.kill("n01")
    world.until_state("recovering")
    world.until_state("done")
    world.check_done()


def test_a_standby_takes_a_dead_node_s_place_and_one_that_is_back_is_the_next_standby():
    world = World(1, 6)
    world.run_for(1.0)
    world.submit(steps=400, f=1, memory=350, max_nodes=4)
    world.until_step(5)
    inside = set(world.view().nodes)
    assert inside == {"n01", "n02", "n03", "n04"}
    for count, (dead, standby) in enumerate((("n02", "n05"), ("n05", "n02"), ("n01", "n05")), 1):
        world.kill(dead)
        inside = inside - {dead} | {standby}
        world.run(lambda: settled(world, inside) and not world.incidents()[-1].open)  # noqa: B023
        incident = world.incidents()[-1]
        assert len(world.incidents()) == count  # one plan led there: nothing was shrunk in between
        (action,) = incident.parts.actions
        assert (action.kind, action.nodes) == ("replace", (standby,))
        assert incident.copied_bytes > 0
        assert [len(pipeline.nodes) for pipeline in world.view().pipelines] == [2, 2]
        world.add(dead)
        world.run(lambda: world.node(dead).state == "standby")  # noqa: B023
        assert world.node(dead).cause == "max-nodes"


def test_a_drained_node_serves_as_a_source_and_leaves():
    world = World(1, 2)
    world.run_for(1.0)
    world.submit(steps=60, f=0, memory=350)
    world.until_step(3)
    world.add("n03")
    world.ask(Drain("n01", "old-disk"))
    assert world.node("n01").state == "draining"
    world.run(lambda: world.node("n01").state == "drained")
    assert (world.node("n01").cause, world.node("n01").reason) == ("operator", "old-disk")
    world.leave("n01")
    world.until_state("done")
    world.check_done()
    assert world.node("n01").state == "left"
    assert world.incidents() == []


def test_pause_resume_and_a_loss_in_between():
    world = World(1, 6)
    world.run_for(1.0)
    world.submit(steps=12, f=1, memory=350)
    world.until_step(3)
    world.ask(Control("job-1", "pause", "kim"))
    world.until_state("paused")
    step = world.job().counters.step
    world.run_for(3.0)
    assert world.job().counters.step == step
    world.kill("n02")
    world.run(lambda: bool(world.incidents()))
    world.until_state("paused")
    world.ask(Control("job-1", "resume"))
    world.until_state("done")
    world.check_done()
    assert Audited("kim", "pause", "job-1") in world.told(Audited)


def test_a_checkpoint_on_demand():
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(steps=12, f=1, memory=350)
    world.until_step(3)
    world.ask(Control("job-1", "checkpoint"))
    world.run(lambda: bool(world.job().checkpoint))
    assert world.job().counters.step < 12
    step = world.job().checkpoint_counters.step
    assert {state[0] for state in world.complete[world.job().checkpoint].values()} == {step}
    world.until_state("done")
    world.check_done()


def test_the_queue():
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(make_job("one", steps=4, memory=350))
    world.submit(make_job("two", steps=4, memory=350))
    assert world.job("two-2").state == "queued"
    assert world.view("two-2").cause == "job-ahead"
    world.until_state("done", job_id="two-2")
    world.check_done("one-1")
    world.check_done("two-2")
    assert len(world.machine.core.state.profiles) == 1  # measured once
    assert len(view.job_views(world.machine.core)) == 2


def test_jobs_of_the_queue_say_what_they_wait_for_by_now():
    world = World(1, 2)
    world.run_for(1.0)
    for name in ("one", "two", "three"):
        world.submit(make_job(name, steps=400, f=0, memory=350))
    for waiting in ("two-2", "three-3"):
        assert world.job(waiting).cause == "job-ahead"
        assert "one-1" in world.job(waiting).reason
    world.ask(Control("one-1", "cancel"))
    assert (world.job("two-2").state, world.job("two-2").cause) == ("profiling", "")
    assert world.job("three-3").cause == "job-ahead"
    assert "two-2" in world.job("three-3").reason
    for node in ("n01", "n02"):
        world.ask(Drain(node))
    world.ask(Control("two-2", "cancel"))
    assert world.job("three-3").cause == "nodes-not-ready"
    for node in ("n01", "n02"):
        world.kill(node)
    world.run(lambda: not any(node.alive for node in world.machine.core.members.nodes.values()))
    assert world.job("three-3").cause == "no-nodes"
    again = Machine.restore(world.daemon.disk.entries(), world.now, world.config)
    assert again.core.state.jobs == world.machine.core.state.jobs
    world.add("n03")
    world.run(lambda: world.job("three-3").state == "profiling")


def test_cancel_gives_the_place_to_the_next():
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(make_job("one", steps=400, memory=350))
    world.submit(make_job("two", steps=4, memory=350))
    world.until_step(2, "one-1")
    world.ask(Control("one-1", "cancel"))
    world.until_state("cancelled", job_id="one-1")
    world.until_state("done", job_id="two-2")
    world.check_done("two-2")


def test_a_job_that_comes_before_any_node():
    world = World(1, 0)
    world.run_for(0.1)
    world.submit(steps=4, f=0, memory=350)
    assert world.job().cause == "no-nodes"
    world.add("n01")
    world.until_state("waiting")
    assert (world.job().cause, world.job().n0) == ("too-few-nodes", 2)
    world.add("n02")
    world.until_state("done")
    assert world.job().cause == ""
    world.check_done()


def test_too_few_nodes_for_f_wait_at_the_start_and_not_later():
    world = World(1, 3)
    world.run_for(1.0)
    world.submit(steps=400, f=1, memory=350)
    world.until_state("waiting")
    assert (world.job().cause, world.job().n0) == ("too-few-for-f", 2)
    world.add("n04")
    world.until_step(3)
    world.kill("n04")
    step = world.job().counters.step
    world.until_step(step + 5)
    assert world.view().tolerance == 0


def test_a_model_that_fits_nowhere_fails_with_a_hint():
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(steps=4, memory=50)
    world.until_state("failed")
    assert world.job().cause == "no-plan"
    assert world.machine.core.run is None


def test_resume_from_a_checkpoint_of_an_older_job():
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(steps=4, memory=350)
    world.until_state("done")
    world.ask(Submit(make_job(steps=9, memory=350), resume="latest"))
    world.until_state("done", job_id="job-2")
    job = world.job("job-2")
    assert [step.step for step in job.steps] == [4, 5, 6, 7, 8]
    assert {state[0] for state in world.complete[job.checkpoint].values()} == {9}


def test_a_joining_node_that_dies_on_the_way_costs_a_new_plan_only():
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(steps=200, f=1, memory=350)
    world.until_step(3)
    world.add("n05")
    world.run(lambda: world.machine.core.run.candidate is not None)
    world.kill("n05")
    world.run(lambda: bool(world.incidents()))
    world.run(lambda: not world.incidents()[0].open)
    assert world.incidents()[0].nodes == ("n05",)
    assert world.incidents()[0].layer_gradients == 0
    assert settled(world, ["n01", "n02", "n03", "n04"])


def test_a_node_that_dies_in_the_first_deployment():
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(steps=12, f=1, memory=350)
    world.until_state("deploying")
    world.kill("n01")
    world.until_state("done")
    world.check_done()
    assert world.incidents() == []


def test_a_node_without_use_stays_on_standby_and_training_is_not_stopped():
    world = World(1, 3, num_layers=3)
    world.run_for(1.0)
    world.submit(steps=200, f=0, memory=130)
    world.until_step(3)
    assert world.job().n0 == 3
    epoch = world.job().epoch
    world.add("n04")
    world.until_step(60)
    assert world.job().epoch == epoch
    assert world.node("n04").state == "standby"
    assert world.node("n04").cause == "no-place"


def test_a_checkpoint_that_cannot_become_whole_is_given_up():
    world = World(1, 6)
    world.run_for(1.0)
    world.submit(steps=20, f=1, memory=350, every=4)
    world.until_step(2)
    device = world.nodes["n01"].devices["n01/0"]
    device.executor.write_checkpoint = lambda: None  # as if killed between the commit and the writing
    world.until_step(4)
    world.run_for(0.01)
    world.kill("n01")
    world.until_state("done")
    world.check_done()
    (told,) = world.told(CheckpointIncomplete)
    assert told.step == 4
    assert told.directory.endswith("job-1/step-00000004.partial")
    assert told.num_written < told.num_parts


def test_a_job_that_the_policy_refuses_waits_with_its_reason():
    world = World(1, 3)
    world.run_for(1.0)
    plan = world.daemon.plan

    def refuse(incarnation, command):
        if command.situation is None or len(command.situation.nodes) > 3:
            plan(incarnation, command)
        else:
            world.daemon.feed(incarnation, Planned(command.ticket, error="no plan for three", hint="add one"))

    world.daemon.plan = refuse
    world.submit(steps=8, f=0, memory=350)
    world.until_state("waiting")
    world.run_for(5.0)
    assert (world.state(), world.job().cause) == ("waiting", "no-plan")
    world.add("n04")
    world.until_state("done")
    world.check_done()


def test_links_to_agents_that_break_at_every_stage():
    for stage in ("profiling", "planning", "deploying", "running", "recovering"):
        for seed in range(4):
            world = World(seed, 4)
            world.run_for(1.0)
            world.submit(steps=15, f=1, memory=350)
            if stage == "recovering":
                world.until_step(4)
                world.kill("n04")
            world.until_state(stage)
            for name in ("n01", "n02"):
                world.network.break_link(name)
            world.until_state("done")
            world.check_done()


@pytest.mark.parametrize("policy", ["oobleck", "varuna", "adaptive"])
def test_a_planner_slower_than_steps_and_checkpoints_is_heard_to_the_end(policy: PolicyName) -> None:
    """What a plan is weighed by, such as the time since the last checkpoint, is another one after
    every step.
    """
    world = World(2, 5)
    world.daemon.plan_s = (0.8, 0.8)
    world.run_for(1.0)
    world.submit(steps=80, f=0, memory=350, every=3, policy=policy)
    world.until_step(10)
    used = world.view().nodes
    world.ask(Drain(used[0]))
    world.run(lambda: used[0] not in world.view().nodes, limit_s=15.0)
    assert world.job().counters.step < 400
    world.until_state("done", limit_s=120.0)
    world.check_done()


# ---------------------------------------------------------------------- who should be here


def states_of(world):
    return {node.name: node.state for node in view.node_views(world.machine.core)}


def test_a_daemon_that_is_started_anew_knows_who_is_missing():
    """One died before it ended, one while it was away, one left in order, and one is forgotten by a user."""
    world = World(2, 7)
    world.run_for(1.0)
    world.kill("n01")
    world.kill("n02")
    world.leave("n03")
    world.run(lambda: states_of(world)["n02"] == "lost")
    assert view.status(world.machine.core).line.startswith("4 of 6 nodes, 2 lost, ")
    why = world.node("n01").cause
    assert why
    assert isinstance(world.ask(Forget("n02", "root")), Accepted)
    assert "n02" not in states_of(world)
    world.daemon.stop()
    world.kill("n04")
    world.daemon.start()
    assert states_of(world)["n04"] == "disconnected", "it may be about to say so"
    assert "n03" not in states_of(world)
    assert "n02" not in states_of(world)
    world.run(lambda: states_of(world)["n04"] == "lost")
    status = view.status(world.machine.core)
    assert (status.nodes, status.expected, status.lost) == (3, 5, 2)
    assert status.line == "3 of 5 nodes, 2 lost, no job"
    assert (world.node("n01").state, world.node("n01").cause) == ("lost", why)
    assert world.node("n04").cause == "not-heard"
    world.add("n04")
    world.run(lambda: states_of(world)["n04"] == "standby")
    assert view.status(world.machine.core).line == "4 of 5 nodes, 1 lost, no job"
    again = Machine.restore(world.daemon.disk.entries(), world.now, world.config)
    assert again.core.state.nodes == world.machine.core.state.nodes


def test_one_whose_link_closed_is_not_counted_as_here():
    """Whether it is lost its lease tells, later; who is back is here again."""
    world = World(2, 3)
    world.run_for(1.0)
    assert view.status(world.machine.core).line == "3 nodes, no job"
    world.network.break_link("n01", agent_s=0.5)
    world.run(lambda: states_of(world)["n01"] == "disconnected")
    status = view.status(world.machine.core)
    assert (status.nodes, status.expected, status.lost) == (2, 3, 0)
    assert status.line.startswith("2 of 3 nodes, 1 not heard of for ")
    world.run(lambda: states_of(world)["n01"] == "standby")
    assert view.status(world.machine.core).line == "3 nodes, no job"
    world.kill("n01")
    world.run(lambda: states_of(world)["n01"] == "disconnected")
    assert view.status(world.machine.core).nodes == 2
    world.run(lambda: states_of(world)["n01"] == "lost")
    assert view.status(world.machine.core).line == "2 of 3 nodes, 1 lost, no job"


def test_who_is_here_or_has_a_place_is_not_forgotten():
    world = World(4, 4)
    world.run_for(1.0)
    world.submit(steps=400, memory=350)
    world.until_step(2)
    refused = world.ask(Forget("n01"))
    assert (refused.kind, refused.problem) == ("conflict", "n01 is here")
    assert world.ask(Forget("n99")).kind == "not-found"
    inside = world.view().nodes[0]
    world.daemon.stop()
    world.kill(inside)
    world.daemon.start()
    assert "has a place" in world.ask(Forget(inside)).problem
    world.run(lambda: states_of(world)[inside] == "lost" and world.state() == "running")
    assert isinstance(world.ask(Forget(inside)), Accepted)
    assert inside not in states_of(world)
    assert world.ask(Forget(inside)).kind == "not-found"
    world.add(inside)
    world.run(lambda: states_of(world).get(inside) in {"standby", "active"})
    assert view.status(world.machine.core).expected == 4


def test_one_that_had_notice_of_its_end_is_not_expected_back():
    world = World(2, 3)
    world.run_for(1.0)
    world.submit(steps=400, f=0, memory=350)
    world.until_step(2)
    world.nodes["n01"].noticed("maintenance", 30.0)
    world.run(lambda: states_of(world)["n01"] == "draining")
    world.kill("n01")
    world.run(lambda: states_of(world)["n01"] == "lost")
    assert view.status(world.machine.core).expected == 2


def test_a_node_is_written_down_once_and_not_at_every_word():
    world = World(1, 5)
    world.run_for(30.0)
    world.daemon.restart()
    world.run_for(30.0)
    entries = world.daemon.disk.entries()
    assert sum(isinstance(entry, NodeJoined) for entry in entries) == 5
    assert not any(isinstance(entry, NodeOver) for entry in entries)

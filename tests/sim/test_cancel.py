"""A job that is cancelled ends with all of its steps in a checkpoint, whatever happens in between."""

from __future__ import annotations

import pytest

from oobleckd.core.machine import Machine
from oobleckd.protocol.requests import Accepted, Control, Denied, Drain, Submit
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def training(seed: int = 0, num_nodes: int = 6, **spec) -> World:
    """A job that has made a few steps, and no checkpoint."""
    world = World(seed, num_nodes)
    world.run_for(3.0)
    world.submit(make_job(**{"steps": 400, "memory": 350, "every": 0} | spec))
    world.until_step(5)
    return world


def _nodes(policy: str) -> int:
    return 12 if policy == "bamboo" else 6  # which holds every layer twice in each pipeline


def cancel(world: World, *, discard: bool = False) -> Accepted:
    answer = world.ask(Control("job-1", "cancel", discard=discard))
    assert isinstance(answer, Accepted)
    return answer


def assert_kept(world: World, step: int) -> None:
    """It ends with a checkpoint of all that it has committed, at ``step`` or later, and nothing was lost."""
    world.until_state("cancelled", limit_s=60.0)
    job = world.job()
    assert job.counters.step >= step
    assert (job.checkpoint_counters.step, job.steps_lost) == (job.counters.step, 0)
    assert {state[0] for state in world.complete[job.checkpoint].values()} == {job.counters.step}
    assert [each.step for each in job.steps] == list(range(job.counters.step))
    again = Machine.restore(world.daemon.disk.entries(), world.now, world.config)
    assert again.core.state.jobs == world.machine.core.state.jobs


@pytest.mark.thin(2)
@pytest.mark.parametrize("policy", ["oobleck", "slipstream", "varuna", "bamboo", "adaptive"])
@pytest.mark.parametrize("every", [0, 4, "auto"])
def test_a_running_job_keeps_every_step(policy: str, every: str | int) -> None:
    world = training(num_nodes=_nodes(policy), policy=policy, every=every)
    step = world.job().counters.step
    cancel(world)
    assert_kept(world, step)
    assert world.job().counters.step <= step + 6
    job = world.job()
    resumed = world.ask(Submit(make_job(steps=job.counters.step + 3, memory=350), resume="latest"))
    world.until_state("done", job_id=resumed.id)
    assert world.job(resumed.id).start.step == job.counters.step


def test_a_paused_job_does_too() -> None:
    world = training()
    world.ask(Control("job-1", "pause"))
    world.until_state("paused")
    step = world.job().counters.step
    cancel(world)
    assert_kept(world, step)


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.2, 0.5])
def test_a_second_cancel_changes_nothing(wait_s: float) -> None:
    world = training()
    step = world.job().counters.step
    cancel(world)
    world.run_for(wait_s)
    if world.state() != "cancelled":
        cancel(world)
    assert_kept(world, step)
    answer = world.ask(Control("job-1", "cancel"))
    assert isinstance(answer, Denied)
    assert world.job().checkpoint in answer.hint


@pytest.mark.thin(8)
@pytest.mark.parametrize("policy", ["oobleck", "slipstream", "bamboo", "adaptive"])
@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.1, 0.2, 0.3])
def test_a_loss_in_between_loses_no_step(wait_s: float, policy: str) -> None:
    world = training(num_nodes=_nodes(policy), policy=policy)
    step = world.job().counters.step
    cancel(world)
    world.run_for(wait_s)
    world.kill("n02")
    assert_kept(world, step)


@pytest.mark.parametrize("wait_s", [0.0, 0.1, 0.3])
def test_a_daemon_that_restarts_in_between_ends_it(wait_s: float) -> None:
    world = training()
    step = world.job().counters.step
    cancel(world)
    world.run_for(wait_s)
    world.daemon.restart(0.5)
    assert_kept(world, step)


def test_a_drain_in_between_is_not_waited_for() -> None:
    world = training()
    step = world.job().counters.step
    cancel(world)
    world.ask(Drain("n03"))
    assert_kept(world, step)


def test_it_cannot_be_paused_or_let_go_on_any_more() -> None:
    world = training()
    cancel(world)
    for act in ("pause", "resume"):
        assert isinstance(world.ask(Control("job-1", act)), Denied)
    assert_kept(world, 5)


def test_a_disk_that_refuses_is_waited_for() -> None:
    world = training()
    world.disk_full = True
    cancel(world)
    world.run_for(20.0)
    assert world.state() == "running"
    cancel(world)
    world.run_for(20.0)
    step = world.job().counters.step
    assert step < 10, "nothing is trained that nobody wants"
    assert world.job().cause == "checkpoint-unwritten"
    world.disk_full = False
    assert_kept(world, step)


def test_a_job_that_waits_for_nodes_ends_at_once() -> None:
    """No device holds more than its checkpoint."""
    world = training(num_nodes=4, every=4)
    world.run(lambda: bool(world.job().checkpoint))
    for name in ("n01", "n02", "n03"):
        world.kill(name)
    world.until_state("waiting")
    cancel(world)
    assert world.state() == "cancelled"
    assert world.job().counters.step == world.job().checkpoint_counters.step


@pytest.mark.parametrize("act", ["running", "paused", "disk", "second"])
def test_discard_ends_it_at_once(act: str) -> None:
    world = training()
    if act == "paused":
        world.ask(Control("job-1", "pause"))
        world.until_state("paused")
    world.disk_full = act == "disk"
    if act in {"disk", "second"}:
        cancel(world)
    cancel(world, discard=True)
    assert (world.state(), world.job().checkpoint) == ("cancelled", "")
    answer = world.ask(Control("job-1", "cancel"))
    assert isinstance(answer, Denied)
    assert "--resume" not in answer.hint, "there is no checkpoint to start from"
    world.run_for(5.0)
    assert not world.partial


def test_what_has_trained_nothing_ends_at_once() -> None:
    world = World(0, 6)
    world.run_for(1.0)
    world.submit(make_job(steps=40, memory=350))
    world.submit(make_job(steps=40, memory=350))
    for job in ("job-2", "job-1"):
        assert isinstance(world.ask(Control(job, "cancel")), Accepted)
        assert world.state(job) == "cancelled"


def test_what_is_at_its_end_is_done() -> None:
    world = training(steps=8)
    world.until_step(7)
    cancel(world)
    world.run(lambda: world.job().final)
    assert world.job().checkpoint_counters.step == world.job().counters.step

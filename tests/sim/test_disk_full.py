"""A disk that does not take a checkpoint: the job goes on with the last good one, says so, and tries again;
nothing fails while all state is alive.
"""

from __future__ import annotations

import pytest

from oobleckd.core.entries import CheckpointWritten
from oobleckd.protocol.changes import CheckpointRoom
from oobleckd.protocol.requests import Control, Denied, Drain
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def training(seed: int = 0, num_nodes: int = 6, *, checkpoints: int = 1, **spec) -> World:
    """A job with so many checkpoints."""
    world = World(seed, num_nodes)
    world.run_for(3.0)
    world.submit(make_job(**{"steps": 80, "memory": 350, "every": 4} | spec))
    world.run(lambda: len(written(world)) >= checkpoints)
    return world


def written(world: World) -> list[int]:
    return [e.counters.step for e in world.daemon.disk.entries() if isinstance(e, CheckpointWritten)]


def told(world: World, level: str) -> list[CheckpointRoom]:
    """What people were told of the room: ``error``: one was refused, ``warn``: there is none for the next
    one.
    """
    return [
        change.data
        for change in world.daemon.changes
        if isinstance(change.data, CheckpointRoom) and change.level == level
    ]


def waits_at_its_end(world: World) -> bool:
    view = world.view()
    return (
        view.step == view.steps and view.checkpoint_trouble is not None and view.checkpoint_trouble.tries > 0
    )


def finish(world: World) -> None:
    world.until_state("done", limit_s=120.0)
    world.check_done()


@pytest.mark.thin(6)
@pytest.mark.parametrize("policy", ["oobleck", "slipstream", "varuna"])
@pytest.mark.parametrize("seed", range(3))
def test_the_job_goes_on_says_so_once_and_tries_again(seed: int, policy: str) -> None:
    world = training(seed, policy=policy)
    good, step = world.job().checkpoint, world.job().counters.step
    world.disk_full = True
    world.until_step(step + 40)
    assert (world.state(), world.job().checkpoint) == ("running", good)
    assert [refused.errno for refused in told(world, "error")] == ["ENOSPC"]
    assert [short.free_bytes for short in told(world, "warn")] == [0]
    trouble = world.view().checkpoint_trouble
    assert trouble.tries == 1, "none is begun while there is known to be no room"
    assert not world.partial
    world.disk_full = False
    before = len(written(world))
    world.run(lambda: len(written(world)) > before, limit_s=5.0)
    assert world.view().checkpoint_trouble is None
    finish(world)
    assert world.job().steps_lost == 0


def test_room_is_looked_at_ahead() -> None:
    """Before the next one is due, and before a first one."""
    world = World(0, 6)
    world.disk_full = True
    world.run_for(3.0)
    world.submit(make_job(steps=60, memory=350, every=20))
    world.run(lambda: bool(told(world, "warn")), limit_s=20.0)
    assert world.job().counters.step < 5
    assert told(world, "error") == []
    world.until_step(50)
    assert (world.view().checkpoint_trouble.tries, written(world)) == (0, [])
    world.disk_full = False
    world.run(lambda: bool(written(world)), limit_s=20.0)
    finish(world)


@pytest.mark.parametrize("every", [0, 4, "auto"])
def test_the_last_one_is_the_result_and_is_waited_for(every) -> None:
    world = World(0, 6)
    world.run_for(3.0)
    world.submit(make_job(steps=20, memory=350, every=every))
    world.until_step(10)
    world.disk_full = True
    world.run(lambda: waits_at_its_end(world), limit_s=30.0)
    world.run_for(30.0)
    assert world.state() == "running"
    assert 1 <= len(told(world, "error")) <= 7, "one for each who writes, and one of an earlier step"
    assert {refused.errno for refused in told(world, "error")} == {"ENOSPC"}
    world.disk_full = False
    finish(world)
    assert written(world)[-1] == 20


def test_at_the_end_a_loss_a_restart_and_a_cancel_are_what_they_always_are() -> None:
    world = training(steps=20)
    world.disk_full = True
    world.run(lambda: waits_at_its_end(world), limit_s=30.0)
    world.kill("n02")
    world.run_for(5.0)
    world.daemon.restart(0.5)
    world.run_for(20.0)
    assert world.state() in {"running", "recovering"}
    world.disk_full = False
    finish(world)
    assert world.job().steps_lost == 0
    other = training(steps=20)
    other.disk_full = True
    other.run(lambda: waits_at_its_end(other), limit_s=30.0)
    other.ask(Control("job-1", "cancel", discard=True))
    other.run_for(5.0)
    assert other.state() == "cancelled"
    assert not other.partial


def test_a_rollback_while_the_disk_is_full_leads_to_the_last_good_one() -> None:
    world = training(policy="varuna")
    step = world.job().checkpoint_counters.step
    world.disk_full = True
    world.until_step(step + 11)
    world.kill("n02")
    world.until_step(step + 30)
    assert world.job().steps_lost >= 11
    world.disk_full = False
    finish(world)


@pytest.mark.parametrize("policy", ["oobleck", "varuna"])
def test_a_change_that_takes_a_checkpoint_waits_for_room(policy: str) -> None:
    """A drain: under varuna all drop what they hold, and load it."""
    world = training(policy=policy)
    world.disk_full = True
    world.until_step(world.job().counters.step + 10)
    world.ask(Drain("n02"))
    world.run_for(5.0)
    assert world.state() == "running"
    step = world.job().counters.step
    world.until_step(step + 5)
    world.disk_full = False
    world.run(lambda: world.node("n02").state == "drained", limit_s=20.0)
    finish(world)
    assert world.job().steps_lost == 0


def test_who_asks_for_one_is_told() -> None:
    world = training(every=0, checkpoints=0)
    world.until_step(5)
    world.disk_full = True
    assert world.ask(Control("job-1", "checkpoint")).id
    world.run(lambda: world.view().checkpoint_trouble is not None, limit_s=5.0)
    world.run(lambda: bool(told(world, "warn")), limit_s=5.0)
    answer = world.ask(Control("job-1", "checkpoint"))
    assert isinstance(answer, Denied)
    assert world.view().checkpoint_trouble.text in answer.problem
    world.disk_full = False
    world.run(lambda: bool(written(world)), limit_s=5.0)
    finish(world)

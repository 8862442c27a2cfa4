"""Steps that are skipped: three in a row end a job at the same step, whatever dies meanwhile, and with its
last good checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from oobleckd.core.apply import apply
from oobleckd.core.entries import JobSubmitted
from oobleckd.core.state import State
from oobleckd.protocol.parts import Counters
from tests.helpers.simjobs import make_job
from tests.helpers.world import World

ROW = (9, 10, 12, 13, 14, 15, 16, 17)
"""Two pass, and the third of the next three is the last: steps are numbered from 0 here."""
END = Counters(0, 15, 10, 3)


def running(
    seed: int = 0, num_nodes: int = 6, *, on_nan: str = "stop", nans: tuple[int, ...] = ROW, **spec
) -> World:
    """Overflows come in between: what is repeated ends no row."""
    world = World(seed, num_nodes, nans=nans, overflows=(13,), lease_s=1.5, grace_s=2.0)
    world.run_for(1.0)
    job = make_job(**{"steps": 20, "f": 1, "memory": 350} | spec)
    world.submit(msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, on_nan=on_nan)))
    world.until_step(5)
    return world


def check_stopped(world: World, end: Counters = END) -> None:
    """It failed there, once all is quiet, and nobody holds it any more."""
    world.until_state("failed")
    job, view = world.job(), world.view()
    assert msgspec.structs.replace(job.counters, round=0) == end
    assert [step.step for step in job.steps] == list(range(end.step))
    assert (view.cause, view.steps_skipped, view.skipped_in_row) == ("not-finite", end.skipped, 3)
    world.run_for(1.0)
    alive = [device for node in world.nodes.values() for device in node.devices.values() if device.alive]
    assert not any(device.job for device in alive)


@pytest.mark.parametrize("update", ["flushed", "staggered"])
def test_three_in_a_row_end_a_job_and_say_why(update: str) -> None:
    world = running(schedule=msgspec.structs.replace(make_job().schedule, update=update))
    check_stopped(world)
    assert world.view().checkpoint == ""


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(9))
def test_whoever_dies_meanwhile_it_ends_at_the_same_step(seed: int) -> None:
    world = running(seed)
    dice = world.random
    world.until_step(dice.randrange(8, 14))
    world.run_for(dice.uniform(0.0, 0.02))
    (world.kill, world.kill_device, world.spare_takes_place)[seed % 3](dice.choice(world.view().nodes))
    check_stopped(world)


@pytest.mark.parametrize("seed", range(3))
def test_without_the_daemon_devices_stop_there_by_themselves(seed: int) -> None:
    world = running(seed)
    world.daemon.stop()
    devices = [device for node in world.nodes.values() for device in node.devices.values()]
    world.run(lambda: all(device.holding for device in devices))
    assert {msgspec.structs.replace(device.counters, round=0) for device in devices} == {END}
    world.daemon.start()
    check_stopped(world)


def test_a_daemon_that_dies_as_it_hears_of_the_last_one_ends_it_again() -> None:
    world = running()
    world.until_step(15)
    world.daemon.restart(down_s=0.5)
    world.run(lambda: world.machine is not None)
    check_stopped(world)


def test_a_rollback_counts_the_row_anew() -> None:
    world = running(policy="varuna", every=4)
    world.until_step(14)
    world.kill(world.view().nodes[0])
    check_stopped(world)
    assert world.view().checkpoint_step == 12
    assert world.job().num_skipped >= END.skipped


@pytest.mark.parametrize(
    ("every", "keep", "last"), [(1, 1, 12), (2, 1, 12), (5, 2, 12), (4, 1, 12), (7, 1, 7)]
)
def test_the_last_checkpoint_before_them_is_kept(every: int, keep: int, last: int) -> None:
    """One that is due in a row waits for the next update: of steps 10 and 11, so, with 5, it is
    that of 12.
    """
    world = running(every=every, keep=keep)
    check_stopped(world)
    assert world.view().checkpoint_step == last
    assert Path(world.view().checkpoint).name == f"step-{last:08d}"


def test_who_wants_to_goes_on() -> None:
    world = running(on_nan="skip", nans=tuple(range(8, 18)))
    world.until_state("done")
    world.check_done()
    view = world.view()
    assert (view.steps_skipped, view.skipped_in_row, view.cause) == (10, 0, "")


def test_the_last_steps_may_be_the_third() -> None:
    """It is no success to have no step left."""
    check_stopped(running(steps=15))


def test_a_job_of_before_goes_on_as_it_did() -> None:
    """Its specification in the journal says nothing of skipped steps, and then nothing stopped them."""
    job, state = make_job(), State()
    for knows in (False, True):
        apply(state, JobSubmitted(f"job-{knows}", job, "init", Counters(), 0.0, knows_on_nan=knows))
    assert [each.spec.train.on_nan for each in state.jobs.values()] == ["skip", "stop"]

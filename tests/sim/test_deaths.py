"""Devices that die and know of what: once it is a loss like any other, twice of one kind in one phase it is
the job (docs/mechanisms/devices.md).
"""

from __future__ import annotations

import pytest

from oobleckd.protocol.changes import DeviceEnded
from oobleckd.protocol.deaths import OUT_OF_MEMORY, Death, Memory
from tests.helpers.simjobs import make_job
from tests.helpers.world import World

GIB = 2**30
HUNGRY = Memory(used=15 * GIB, capacity=16 * GIB, wanted=2 * GIB)


def hungry(phase: str = "backward") -> Death:
    return Death(OUT_OF_MEMORY, phase, "OutOfMemoryError: CUDA out of memory", "job-1", 1, memory=HUNGRY)


def broken(epoch: int, where: str = "layer.py:80") -> Death:
    return Death("RuntimeError", "forward", "RuntimeError: shapes do not fit", "job-1", epoch, where)


def running(seed: int = 0, steps: int = 60, num_nodes: int = 6) -> World:
    """A job of two copies (six nodes, pipelines of three) that has committed a few steps."""
    world = World(seed, num_nodes)
    world.run_for(3.0)
    world.submit(make_job(steps=steps, memory=300, every=4, min_pipeline_nodes=3))
    world.until_step(6)
    return world


def lose(world: World, name: str, death: Death | None, *, spare: bool = False) -> None:
    """A device of ``name`` dies, and after a while all nodes are in the plan again and go on."""
    before = world.job().epoch
    (world.spare_takes_place if spare else world.kill_device)(name, death=death)
    world.run(lambda: world.job().epoch > before)
    world.run(lambda: world.state() == "running" and len(world.job().surviving_nodes()) == 6, limit_s=30.0)
    world.until_step(world.job().counters.step + 1)


def epoch(world: World) -> int:
    return world.job().epoch


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_once_is_a_loss_like_any_other(seed: int, spare: bool) -> None:
    world = running(seed)
    (world.spare_takes_place if spare else world.kill_device)("n02", death=hungry())
    world.until_state("done")
    world.check_done()
    (told,) = world.view().deaths
    assert (told.device, told.death) == ("n02/0", hungry())
    assert told.planned_bytes > 0
    assert world.told(DeviceEnded) == [
        DeviceEnded("job-1", "n02/0", OUT_OF_MEMORY, hungry(), told.planned_bytes)
    ]


@pytest.mark.parametrize("other", ["n02", "n05"])
@pytest.mark.parametrize("spare", [False, True])
def test_twice_is_the_job_and_nobody_is_blamed(other: str, spare: bool) -> None:
    world = running()
    lose(world, "n02", hungry(), spare=spare)
    (world.spare_takes_place if spare else world.kill_device)(other, death=hungry())
    world.until_state("failed")
    view = world.view()
    assert view.cause == OUT_OF_MEMORY
    assert [(each.device, each.death.phase) for each in view.deaths] == [
        ("n02/0", "backward"),
        (f"{other}/0", "backward"),
    ]
    assert all(each.planned_bytes > 0 for each in view.deaths)
    assert world.machine.core.state.drained == {}
    world.run_for(3.0)
    states = {name: world.node(name).state for name in world.nodes}
    assert set(states.values()) == {"standby"}
    world.submit(make_job(steps=10, memory=300))
    world.until_state("done", job_id="job-2")


def test_at_once_on_two_devices_is_twice() -> None:
    world = running()
    world.kill_device("n02", death=hungry())
    world.kill_device("n05", death=hungry())
    world.until_state("failed")


def test_in_another_phase_is_another_kind() -> None:
    world = running()
    lose(world, "n02", hungry())
    world.kill_device("n02", death=hungry("update"))
    world.until_state("done")
    world.check_done()
    assert len(world.view().deaths) == 2


def test_a_third_time_in_any_phase_is_enough() -> None:
    world = running()
    lose(world, "n02", hungry())
    lose(world, "n05", hungry("update"))
    world.kill_device("n03", death=hungry("forward"))
    world.until_state("failed")
    assert world.view().cause == OUT_OF_MEMORY


def test_a_job_that_trains_on_for_long_is_forgiven() -> None:
    world = running(steps=200)
    world.kill_device("n02", death=hungry())
    world.until_step(120)
    world.kill_device("n05", death=hungry())
    world.until_state("done", limit_s=200.0)
    world.check_done()


def test_the_journal_remembers_the_first() -> None:
    world = running()
    lose(world, "n02", hungry())
    world.daemon.stop()
    world.run_for(0.2)
    world.daemon.start()
    world.run(lambda: all(node.connected for node in world.nodes.values()))
    world.kill_device("n05", death=hungry())
    world.until_state("failed")
    assert world.view().cause == OUT_OF_MEMORY


def test_kills_from_outside_never_count() -> None:
    world = running()
    for _ in range(3):
        lose(world, "n02", None)
    world.until_state("done")
    world.check_done()
    assert world.view().deaths == ()


def test_an_error_that_comes_again_fails_the_job_with_its_line() -> None:
    world = running()
    lose(world, "n02", broken(epoch(world)))
    world.kill_device("n05", death=broken(epoch(world)))
    world.until_state("failed")
    view = world.view()
    assert view.cause == "same-error"
    assert [each.device for each in view.deaths] == ["n02/0", "n05/0"]
    assert {(each.death.phase, each.death.where) for each in view.deaths} == {("forward", "layer.py:80")}
    assert world.machine.core.state.drained == {}


def test_errors_that_two_devices_meet_at_once_are_one() -> None:
    """A peer's end may be the reason of both."""
    world = running(num_nodes=8)
    heard = epoch(world)
    world.kill_device("n02", death=broken(heard))
    world.kill_device("n03", death=broken(heard))
    world.until_state("done")
    world.check_done()


def test_errors_of_other_lines_are_of_other_kinds() -> None:
    world = running()
    lose(world, "n02", broken(epoch(world)))
    world.kill_device("n05", death=broken(epoch(world), "layer.py:81"))
    world.until_state("done")
    world.check_done()


def test_what_is_said_of_another_job_counts_for_none() -> None:
    world = running()
    for _ in range(2):
        lose(world, "n02", Death(OUT_OF_MEMORY, "backward", "", "job-0", 1))
    world.until_state("done")
    world.check_done()

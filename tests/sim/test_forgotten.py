"""The end of the journal is lost: jobs roll back to the last checkpoint that is known, and nothing of what
came after is taken for what follows.
"""

from __future__ import annotations

import pytest

from oobleckd.core.entries import JobSubmitted, RolledBack
from oobleckd.protocol.changes import JobWentBack
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def running(seed: int, **spec) -> World:
    world = World(seed, 6)
    world.run_for(3.0)
    world.submit(make_job(**{"steps": 24, "memory": 350, "every": 4} | spec))
    world.until_step(11)
    return world


def cut(world: World, left: int) -> None:
    """The daemon dies, and starts with the first ``left`` entries of its journal."""
    world.daemon.stop()
    del world.daemon.disk.journal[left:]
    world.checks.forget_end(world.daemon.disk.entries())
    world.run_for(0.1)
    world.daemon.start(forgotten=True)


@pytest.mark.thin(8)
@pytest.mark.parametrize("policy", ["oobleck", "slipstream", "adaptive", "varuna"])
@pytest.mark.parametrize("seed", range(10))
def test_a_job_goes_back_to_what_is_known_and_ends_as_if_nothing_had_been(seed: int, policy: str) -> None:
    world = running(seed, policy=policy)
    if seed % 3 == 0:
        world.kill("n02")
        world.run_for(0.05 * seed)
    entries = world.daemon.disk.entries()
    first = next(n for n, entry in enumerate(entries) if isinstance(entry, JobSubmitted)) + 1
    cut(world, world.random.randrange(first, len(entries)))
    world.run(
        lambda: (
            any(isinstance(entry, RolledBack) for entry in world.daemon.disk.entries())
            or world.state() == "queued"
        )
    )
    world.until_state("done", limit_s=200.0)
    world.check_done()
    causes = [went.cause for went in world.told(JobWentBack)]
    assert "journal-lost" in causes or not causes, "none where nothing had been deployed yet"


def test_a_job_that_nobody_knows_any_more_is_dropped_by_its_workers() -> None:
    world = running(0)
    cut(world, 0)
    world.run_for(30.0)
    assert world.machine.core.state.jobs == {}
    assert all(device.executor is None for device in world.devices())
    assert world.submit(make_job(steps=6, memory=350)) == "job-1"
    world.until_state("done")

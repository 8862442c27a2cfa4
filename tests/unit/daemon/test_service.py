"""The daemon's parts put together, without agents and without the pool's processes: its past is recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from oobleckd.daemon.config import Config
from oobleckd.daemon.journal import Journal
from oobleckd.daemon.past import FILE
from oobleckd.daemon.service import open_service, step_row
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def config(folder: Path, replay_mb: int = 64) -> Config:
    return Config(state_dir=str(folder), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=replay_mb)


@pytest.mark.asyncio
async def test_a_life_is_recorded_and_the_next_one_knows_of_it(tmp_path: Path) -> None:
    service = open_service(config(tmp_path))
    assert service.recorder is not None
    service.recorder.start()
    service.history.notice("the disk is full", "error")
    began = service.clock.now()
    past = await service.recorder.read(began, 60.0)
    assert [change.text for change in past.changes] == ["the disk is full"]
    assert past.snapshot.status.state_dir == str(tmp_path)
    await service.close()
    again = open_service(config(tmp_path))
    assert again.recorder is not None
    again.recorder.start()
    assert (await again.recorder.read(began, 0.0)).begins == past.begins
    await again.close()


@pytest.mark.asyncio
async def test_it_is_not_recorded_where_that_is_switched_off(tmp_path: Path) -> None:
    service = open_service(config(tmp_path, 0))
    assert service.recorder is None
    await service.close()
    assert not (tmp_path / FILE).exists()


@pytest.mark.asyncio
async def test_who_listened_before_a_restart_misses_no_change_of_before(tmp_path: Path) -> None:
    """Steps too: the daemon may have died between writing one and telling of it."""
    world = World(1, 6)
    world.run_for(1.0)
    world.submit(make_job(steps=40))
    world.until_step(25)
    journal = Journal(tmp_path, step_of=step_row, on_trouble=lambda _trouble: None)
    await asyncio.wrap_future(journal.append(world.daemon.disk.entries()))
    journal.close()
    service = open_service(config(tmp_path))
    kept = [change for change in service.history.cursor(0).take() if change.kind != "gap"]
    assert [change.seq for change in kept] == list(range(1, service.history.last + 1))
    assert {change.kind for change in kept} > {"step", "job"}
    assert "gap" not in {change.kind for change in service.history.cursor(service.history.last - 1).take()}
    await service.close()

"""The daemon's parts put together, without agents and without the pool's processes: its past is recorded."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from oobleckd.core import snapshot
from oobleckd.core.config import CoreConfig
from oobleckd.core.machine import Machine
from oobleckd.core.state import JobRecord
from oobleckd.daemon.config import Config
from oobleckd.daemon.journal import Journal
from oobleckd.daemon.past import FILE
from oobleckd.daemon.place import CopiedState
from oobleckd.daemon.recorder import Recorder
from oobleckd.daemon.service import Service, open_service, status_of, step_row
from oobleckd.host.folder import FolderMark, mark_of
from oobleckd.protocol.changes import DaemonTrouble
from oobleckd.protocol.job import Checkpoint
from oobleckd.protocol.parts import Counters
from oobleckd.protocol.requests import Submit
from oobleckd.protocol.watch import Past
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def config(folder: Path, replay_mb: int = 64) -> Config:
    return Config(state_dir=str(folder), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=replay_mb)


async def read(recorder: Recorder, at: float, span_s: float) -> Past:
    """As whoever looks."""
    await recorder.reach()
    return recorder.store.read(at, span_s)


@pytest.mark.asyncio
async def test_an_incarnation_is_recorded_and_the_next_one_knows_of_it(tmp_path: Path) -> None:
    service = open_service(config(tmp_path))
    assert service.recorder is not None
    service.recorder.start()
    service.history.notice("the disk is full", DaemonTrouble("journal", error="full"), "error")
    began = service.clock.now()
    past = await read(service.recorder, began, 60.0)
    assert [change.data for change in past.changes] == [DaemonTrouble("journal", error="full")]
    assert past.snapshot.status.state_dir == str(tmp_path)
    await service.close()
    again = open_service(config(tmp_path))
    assert again.recorder is not None
    again.recorder.start()
    assert (await read(again.recorder, began, 0.0)).begins == past.begins
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


# ---------------------------------------------------------------------- what is lost, and what is a copy


@pytest.mark.asyncio
async def test_lost_records_are_said_by_the_next_incarnations_too(tmp_path: Path) -> None:
    service = open_service(config(tmp_path, 0))
    assert status_of(service).lost_records == ()
    await service.close()
    (tmp_path / "journal.sqlite").unlink()
    (tmp_path / "journal.copy").unlink()
    for _ in range(2):
        service = open_service(config(tmp_path, 0))
        service.start()
        (lost,) = status_of(service).lost_records
        assert lost.what
        assert status_of(service).line == "0 nodes, no job, records of the journal are lost"
        await service.close()


@pytest.mark.asyncio
async def test_a_copied_state_folder_is_refused_and_adopted_with_folders_of_its_own(tmp_path: Path) -> None:
    spec = make_job(steps=40)
    spec = msgspec.structs.replace(spec, checkpoint=Checkpoint(dir=str(tmp_path / "ck")))
    service = open_service(config(tmp_path / "state", 0))
    service.start()
    name = service.folders.new(tmp_path / "ck", "job", 1)
    await service.loop.ask(Submit(spec, folder=name))
    await service.close()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    with pytest.raises(CopiedState, match="is a copy"):
        open_service(config(tmp_path / "copy", 0))
    copy = open_service(config(tmp_path / "copy", 0), adopt=True)
    assert copy.core.state.jobs["job-1"].folder == "job-2"
    assert (await incarnation(copy)).folder == "job-2"
    assert (await incarnation(open_service(config(tmp_path / "copy", 0)))).folder == "job-2"
    assert (await incarnation(open_service(config(tmp_path / "state", 0)))).folder == "job-1"
    marks = [mark_of(tmp_path / "ck" / folder) for folder in ("job-1", "job-2")]
    assert [mark.journal for mark in marks if mark is not None] == [
        service.journal.names[0],
        copy.journal.names[0],
    ]
    assert service.journal.names[0] == copy.journal.names[1]


@pytest.mark.asyncio
async def test_a_job_of_an_older_version_gets_the_mark_into_its_folder(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(make_job(steps=40), checkpoint=Checkpoint(dir=str(tmp_path / "ck")))
    service = open_service(config(tmp_path / "state", 0))
    service.start()
    await service.loop.ask(Submit(spec))
    await service.close()
    (tmp_path / "ck" / "job-1" / "step-00000010").mkdir(parents=True)
    service = open_service(config(tmp_path / "state", 0))
    service.start()
    assert service.looking is not None
    await service.looking
    assert (await incarnation(service)).folder == "job-1"
    assert mark_of(tmp_path / "ck" / "job-1") == FolderMark(service.journal.names[0], "job-1")


async def incarnation(service: Service) -> JobRecord:
    """The job as it stands, after which the incarnation ends."""
    if service.running is None:
        service.start()
    await service.close()
    return service.core.state.jobs["job-1"]


@pytest.mark.asyncio
async def test_steps_are_kept_as_long_as_the_setting_says_and_those_of_live_jobs_for_ever(
    tmp_path: Path,
) -> None:
    service = open_service(msgspec.structs.replace(config(tmp_path), keep_steps_days=2))
    now = service.clock.now()
    for job, ended in (("live", None), ("fresh", now - 1.9 * 86_400), ("old", now - 2.1 * 86_400)):
        record = JobRecord(job, make_job(), now, "init", Counters(), Counters())
        record.state, record.finished_at = "failed" if ended else "running", ended
        service.core.state.jobs[job] = record
    assert service.kept_for_long_enough() == ["old"]
    service.config = config(tmp_path)
    assert service.kept_for_long_enough() == [], "90 days, where nothing is set"
    service.config = msgspec.structs.replace(service.config, keep_steps_days=0)
    assert service.kept_for_long_enough() == [], "for ever"
    await service.close()


@pytest.mark.asyncio
async def test_a_start_goes_on_from_the_snapshot_that_is_kept(tmp_path: Path) -> None:
    world = World(1, 6)
    world.run_for(1.0)
    world.submit(make_job(steps=12, memory=350, every=4))
    world.until_step(5)
    entries = world.daemon.disk.entries()
    journal = Journal(tmp_path, step_of=step_row, on_trouble=print, decode=snapshot.decode)
    whole = Machine.restore(entries, 1e10, CoreConfig(daemon="d"))
    journal.append(entries[:-3])
    journal.keep_state(
        snapshot.encode(Machine.restore(entries[:-3], 1e10, CoreConfig(daemon="d")).core.state)
    )
    journal.append(entries[-3:])
    journal.close()
    service = open_service(config(tmp_path))
    assert service.journal.num_read == 2 * 3
    assert service.core.state.jobs == whole.core.state.jobs
    await service.close()

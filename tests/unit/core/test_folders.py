"""What devices say of the folder of a job's model is announced once, and shown with the job."""

from __future__ import annotations

import msgspec

from oobleckd.core import view
from oobleckd.core.entries import ProfileMeasured, noted
from oobleckd.core.machine import Machine
from oobleckd.protocol.changes import ModelSaid
from oobleckd.protocol.job import Job, Model
from oobleckd.protocol.modelnotes import FolderNote
from tests.helpers.simjobs import make_job
from tests.helpers.world import World

NOTES = (FolderNote("fresh", 1, ("lm_head.weight",)), FolderNote("unread", 9, ("a", "b", "c", "d")))


def told(world: World) -> list[ModelSaid]:
    story = map(noted, view.story(world.machine.core, "job:job-1"))
    return [change.data for change in story if isinstance(change.data, ModelSaid)]


def with_model(folder: str, steps: int = 2) -> Job:
    return msgspec.structs.replace(make_job(steps=steps, memory=350), model=Model(checkpoint=folder))


def with_folder(world: World) -> None:
    world.run_for(1.0)
    world.submit(with_model("/m", steps=200))
    world.until_step(3)


def test_notes_are_told_once_whatever_follows() -> None:
    world = World(1, 4)
    world.folder_notes = NOTES
    with_folder(world)
    said = [ModelSaid("job-1", note.kind, note.count, note.names) for note in NOTES]
    assert told(world) == said
    assert world.view().notes == NOTES
    world.kill("n02")
    world.until_state("recovering")
    world.until_state("running")
    assert told(world) == said
    again = Machine.restore(world.daemon.disk.entries(), world.now, world.config)
    assert view.job_views(again.core)[0].notes == NOTES


def test_a_change_is_data_too() -> None:
    world = World(1, 4)
    world.folder_notes = NOTES
    with_folder(world)
    first = noted(next(kept for kept in view.story(world.machine.core, "job:job-1") if kept.kind == "model"))
    assert first.data == ModelSaid("job-1", "fresh", 1, ("lm_head.weight",))
    fields = msgspec.json.decode(msgspec.json.encode(first))["data"]
    assert fields == {
        "type": "model-said",
        "job": "job-1",
        "what": "fresh",
        "count": 1,
        "names": ["lm_head.weight"],
    }
    assert first.level == "warn"


def test_a_whole_folder_is_not_mentioned() -> None:
    world = World(1, 4)
    with_folder(world)
    assert not told(world)
    assert world.view().notes == ()


def test_what_is_in_a_folder_is_measured_for_every_job() -> None:
    """Another model may be in the same folder by then; its costs are not those of the one before, nor is its
    depth.
    """
    world = World(1, 4)
    world.run_for(1.0)
    plain = make_job(steps=2, memory=350)
    for number, job in enumerate((plain, plain, with_model("/m"), with_model("/m")), start=1):
        world.submit(job)
        world.until_state("done", job_id=f"job-{number}")
    measured = [entry.key for entry in world.daemon.disk.entries() if isinstance(entry, ProfileMeasured)]
    assert len(set(measured)) == len(measured) == 3

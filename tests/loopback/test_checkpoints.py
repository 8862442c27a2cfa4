"""Checkpoints on a real cluster: written beside training, and never a torn one loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.host.checkpoint import checkpoints
from oobleckd.protocol.changes import CheckpointDamaged, CheckpointRoom
from oobleckd.protocol.jobviews import JobView
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.smalldisk import SmallDisk
from tests.helpers.torn import torn_seed

NODES = 5
SLOW, SLOW_S = 8, 3.0
"""Times as long as layers take, nearly all of it asleep, and for how many seconds."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("checkpoints"), NODES) as running:
        yield running


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_writer_dies_in_the_middle_of_a_file(cluster: Cluster, seed: int) -> None:
    torn_seed(cluster, seed)


def test_the_newest_is_damaged_on_the_disk(cluster: Cluster) -> None:
    """The job rolls back to the one before it, and ends bit for bit as a run without failures."""
    cluster.heal()
    job, newest, older = _paused_after_two(cluster)
    _flip_a_bit(newest / "bucket-00001.safetensors")
    victim = cluster.client.job(job).pipelines[0].nodes[0]
    cluster.kill(victim, "device")
    cluster.until(lambda: _set_aside(newest) or None, f"{newest.name} to be set aside")
    cluster.client.control(job, "resume")
    done = cluster.job_in(job, "done")
    assert done.step == done.steps
    (incident,) = [i for i in cluster.client.incidents() if i.job == job]
    assert incident.parts.back
    assert incident.steps_lost == done.steps_lost >= int(newest.name[5:]) - int(older.name[5:])
    (found,) = [data for data in told(cluster, job) if isinstance(data, CheckpointDamaged)]
    assert (found.step, found.directory) == (int(newest.name[5:]), str(newest))
    assert _set_aside(newest), "it stays for people to look at"
    cluster.verify(job)


def _paused_after_two(cluster: Cluster) -> tuple[str, Path, Path]:
    """A job that stands still with at least two checkpoints: its id, the newest, the one before it."""
    tables = {"checkpoint": {"every": 3}, "resources": {"device_memory": "12MiB"}}
    job = cluster.client.submit(
        tiny_job("damaged", train={"steps": 30}, fault_tolerance={"policy": "varuna"}, **tables)
    ).id
    cluster.at_step(job, 7)
    cluster.client.control(job, "pause")
    cluster.job_in(job, "paused")
    folder = Path(cluster.client.status().state_dir) / "checkpoints" / job
    cluster.until(lambda: not list(folder.glob("*.partial")) or None, "what is begun to be written")
    *_, older, newest = checkpoints(folder)
    return job, newest, older


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _set_aside(checkpoint: Path) -> bool:
    return checkpoint.with_name(f"{checkpoint.name}.damaged").is_dir()


def test_the_disk_is_full(cluster: Cluster, tmp_path: Path) -> None:
    """The job goes on with its last good one, and at its end waits for room to write the last."""
    cluster.heal()
    with SmallDisk(tmp_path / "small", 64 * 2**20) as disk:
        tables = {"checkpoint": {"every": 3, "dir": str(disk.path)}, "resources": {"device_memory": "12MiB"}}
        job = cluster.client.submit(tiny_job("full", train={"steps": 24}, **tables)).id
        good = cluster.until(lambda: cluster.client.job(job).checkpoint or None, "the first checkpoint")
        waiting = cluster.until(lambda: _waits(cluster, job, disk), "the job to wait for room")
        assert (waiting.state, waiting.step, waiting.steps_lost) == ("running", 24, 0)
        assert Path(good).parent == Path(waiting.checkpoint).parent
        assert waiting.checkpoint_trouble is not None
        assert "ENOSPC" in {data.errno for data in told(cluster, job) if isinstance(data, CheckpointRoom)}
        disk.free()
        assert cluster.job_in(job, "done").checkpoint_step == 24
        assert not list((disk.path / job).glob("*.partial"))
        cluster.verify(job)


def _waits(cluster: Cluster, job: str, disk: SmallDisk) -> JobView | None:
    disk.fill()
    view = cluster.client.job(job)
    trouble = view.checkpoint_trouble
    return view if view.step == view.steps and trouble is not None and trouble.tries else None


def told(cluster: Cluster, job: str) -> list[object]:
    """What the story of ``job`` says, in fields."""
    return [change.data for change in cluster.client.story(f"job:{job}")]


def test_a_node_that_comes_back_to_another_text(cluster: Cluster, tmp_path: Path) -> None:
    """It is kept out with the reason, the others go on with what they have open; and where that is written
    to, the job rolls back and waits for the text (for how long: ``tests/sim/test_texts.py``).
    """
    cluster.heal()
    text, right = tmp_path / "text", b"what is trained on, again and again. " * 3000
    text.write_bytes(right)
    tables = {
        "checkpoint": {"every": 25},
        "resources": {"device_memory": "12MiB"},
        "train": {"steps": 36},
        "fault_tolerance": {"policy": "oobleck"},
    }
    spec = tiny_job("texts", data={"source": "text", "path": str(text)}, **tables)
    job = cluster.client.submit(spec).id
    cluster.at_step(job, 8)
    cluster.client.control(job, "pause")
    cluster.job_in(job, "paused")
    other = tmp_path / "other"
    other.write_bytes(right.upper())
    other.replace(text)
    cluster.kill("node-2", "sigkill")
    cluster.until(lambda: "node-2" not in {n.name for n in cluster.usable(1)} or None, "node-2 lost")
    cluster.ctl("start-node", "node-2")
    cluster.slow_down((node.name for node in cluster.usable(NODES)), SLOW, SLOW_S)
    cluster.client.control(job, "resume")

    def kept_out() -> bool | None:
        node = next(view for view in cluster.client.nodes() if view.name == "node-2")
        return node.kept_out == "data-changed" or None

    cluster.until(kept_out, "node-2 kept out")
    cluster.job_in(job, "done")
    assert f"{text} was replaced" in cluster.ctl("story", job).stdout
    text.write_bytes(right)
    cluster.verify(job)
    job = cluster.client.submit(spec).id
    cluster.at_step(job, 12)
    with text.open("r+b") as file:
        file.write(right.upper())
    assert cluster.job_in(job, "waiting").steps_lost > 0

    def all_kept_out() -> bool | None:
        return {view.kept_out for view in cluster.client.nodes()} == {"data-changed"} or None

    cluster.until(all_kept_out, "all kept out")
    cluster.client.control(job, "cancel")
    cluster.job_in(job, "cancelled")


def test_people_see_how_often_and_why(cluster: Cluster) -> None:
    cluster.heal()
    spec = tiny_job("seen", checkpoint={"every": "auto"}, resources={"device_memory": "12MiB"})
    job = cluster.client.submit(spec).id
    view = cluster.at_step(job, 3)
    assert view.cadence is not None
    assert view.cadence.interval_s > 60
    assert "cadence" in cluster.ctl("describe", "job", job).stdout
    cluster.job_in(job, "done")
    assert "(step 24)" in cluster.ctl("describe", "job", job).stdout

"""A share of a checkpoint beside training: which state is written, what is told when, and what is left of one
that is given up.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

from oobleckd.planner.plan import Layout, Range, Segment, holdings_of
from oobleckd.protocol.checkpointmessages import CheckpointFailed, CheckpointPart
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.parts import Counters, Flags, Vote, outcome_of
from oobleckd.worker.checkpointing.snapshot import Due, Share, take_share
from oobleckd.worker.checkpointing.writer import BackgroundWriter, InlineWriter
from oobleckd.worker.models import load_spec
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.state import bucket_files
from oobleckd.worker.state.bucket_files import CannotWrite
from oobleckd.worker.state.store import Store
from tests.helpers.due import due_of
from tests.helpers.models import CPU, small_config, small_job

JOB = small_job("llama", small_config("llama"), checkpoint={"every": 2})
TIMEOUT_S = 60.0


class Gate(Faults):
    """Lets the thread that writes go on only when the test says so."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__("n/0", run_dir)
        self.at, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.points: list[str] = []

    def reach(self, point: str, round_: int) -> None:
        self.points.append(point)
        if point == "checkpoint-write":
            self.at.release()
            assert self.go.acquire(timeout=TIMEOUT_S)

    def let_go(self, count: int) -> None:
        for _ in range(count):
            assert self.at.acquire(timeout=TIMEOUT_S)
            self.go.release()


@pytest.fixture
def store() -> Store:
    spec = load_spec(JOB)
    store = Store(spec, CPU)
    layers = holdings_of([Segment("n/0", Range(0, spec.num_layers))])["n/0"]
    store.adopt(layers, {bucket: store.fresh(bucket) for bucket in store.needed(layers)})
    return store


def share_of(store: Store, tmp_path: Path, *, copied: bool = True, step: int = 2) -> Share:
    place = msgspec.structs.replace(JOB.checkpoint, dir=str(tmp_path))
    job = msgspec.structs.replace(JOB, checkpoint=place)
    held = holdings_of([Segment("n/0", Range(0, store.spec.num_layers))])
    layout = Layout(1, store.spec.num_layers, held, ())
    return take_share(
        "n/0", "job-1", job, store, layout, {"n/0"}, Counters(step, step, step), "", copied=copied
    )


def spoil(store: Store) -> None:
    """As an update does: in place."""
    with torch.no_grad():
        for state in store.buckets.values():
            for tensor in state.tensors():
                tensor.add_(1.0)


def written_params(store: Store, folder: Path) -> list[torch.Tensor]:
    found = []
    for bucket in store.spec.buckets:
        with safe_open(str(folder / f"bucket-{bucket.index:05d}.safetensors"), framework="pt") as file:
            found += [file.get_tensor(f"param/{key}") for key in bucket.keys]
    return found


def test_training_goes_on_and_what_is_written_is_the_state_at_the_boundary(
    store: Store, tmp_path: Path
) -> None:
    told: list[CheckpointPart] = []
    woken = threading.Event()
    gate = Gate(tmp_path)
    writer = BackgroundWriter(told.append, gate, woken.set)  # type: ignore[arg-type]
    wanted = [param.detach().clone() for state in store.buckets.values() for param in state.params]
    share = share_of(store, tmp_path)
    writer.begin(share)
    assert gate.at.acquire(timeout=TIMEOUT_S)
    assert writer.busy
    assert not writer.blocks
    assert told == []
    spoil(store)
    gate.go.release()
    gate.let_go(len(store.buckets) - 1)
    assert woken.wait(TIMEOUT_S)
    assert not writer.busy
    assert [part.bucket for part in told] == sorted(store.buckets)
    found = written_params(store, share.directory)
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_without_room_for_a_copy_the_device_waits(store: Store, tmp_path: Path) -> None:
    gate, woken = Gate(tmp_path), threading.Event()
    writer = BackgroundWriter(lambda _: None, gate, woken.set)
    share = share_of(store, tmp_path, copied=False)
    assert all(share.states[bucket] is store.buckets[bucket] for bucket in share.states)
    writer.begin(share)
    assert writer.blocks
    gate.let_go(len(store.buckets))
    assert woken.wait(TIMEOUT_S)
    assert not writer.blocks


def test_shares_are_written_one_after_the_other(store: Store, tmp_path: Path) -> None:
    told: list[Any] = []
    gate, woken = Gate(tmp_path), threading.Semaphore(0)
    writer = BackgroundWriter(told.append, gate, woken.release)
    for step in (2, 4):
        writer.begin(share_of(store, tmp_path, step=step))
    gate.let_go(2 * len(store.buckets))
    for _ in range(2):
        assert woken.acquire(timeout=TIMEOUT_S)
    assert [part.counters.step for part in told] == [2] * len(store.buckets) + [4] * len(store.buckets)
    writer.begin(share_of(store, tmp_path, step=6))  # the thread of the first two has ended, or is about to
    gate.let_go(len(store.buckets))
    assert woken.acquire(timeout=TIMEOUT_S)
    assert told[-1].counters.step == 6


def test_one_that_is_given_up_leaves_nothing_and_tells_nothing(store: Store, tmp_path: Path) -> None:
    told: list[Any] = []
    gate = Gate(tmp_path)
    writer = BackgroundWriter(told.append, gate, lambda: None)
    share = share_of(store, tmp_path)
    writer.begin(share)
    gate.let_go(1)  # the first bucket is durable
    assert gate.at.acquire(timeout=TIMEOUT_S)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "checkpoint-writer"]
    writer.abandon()
    gate.go.release()
    thread.join(TIMEOUT_S)
    assert len(told) == 1
    assert not list(share.directory.glob("*.tmp"))


def test_a_disk_that_refuses_is_told_and_the_next_one_is_written(store: Store, tmp_path: Path) -> None:
    """Whatever the disk says: nothing fails, and nothing of the try is left."""
    (tmp_path / "job-1").touch()
    told: list[Any] = []
    woken = threading.Semaphore(0)
    writer = BackgroundWriter(told.append, Faults("n/0", tmp_path), woken.release)
    writer.begin(share_of(store, tmp_path))
    assert woken.acquire(timeout=TIMEOUT_S)
    (failed,) = told
    assert (failed.device, failed.counters.step, failed.last) == ("n/0", 2, False)
    assert failed.errno == "ENOTDIR"
    assert failed.needed_bytes > 0
    assert not writer.busy
    assert not writer.blocks
    (tmp_path / "job-1").unlink()
    writer.begin(share_of(store, tmp_path, step=4))
    assert woken.acquire(timeout=TIMEOUT_S)
    assert [part.bucket for part in told[1:]] == sorted(store.buckets)


@pytest.mark.parametrize("free", [(1, -1), (2**40, 1)])
def test_a_disk_without_room_or_inodes_is_not_filled_to_its_brim(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: tuple[int, int]
) -> None:
    monkeypatch.setattr("oobleckd.worker.checkpointing.snapshot.room", lambda _directory: free)
    told: list[Any] = []
    woken = threading.Event()
    writer = BackgroundWriter(told.append, Faults("n/0", tmp_path), woken.set)
    share = share_of(store, tmp_path)
    writer.begin(share)
    assert woken.wait(TIMEOUT_S)
    assert told[0].errno == "ENOSPC"
    assert not share.directory.exists()


def test_the_last_one_is_tried_again_until_there_is_room(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there already is not written again, unless somebody removed it to make room; people are told
    once.
    """
    monkeypatch.setattr("oobleckd.worker.checkpointing.writer._AGAIN_S", (0.0,))
    told: list[Any] = []
    woken = threading.Event()
    share = share_of(store, tmp_path, step=JOB.train.steps)
    write, tries, written = bucket_files.write_bucket, 0, list[int]()

    def refusing(directory: Path, bucket: Any, *rest: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries in {2, 3, 4}:
            raise CannotWrite(directory, "full", "ENOSPC")
        if tries == 6:
            shutil.rmtree(directory)
            raise CannotWrite(directory, "full", "ENOSPC")
        written.append(bucket.index)
        return write(directory, bucket, *rest)

    monkeypatch.setattr("oobleckd.worker.state.bucket_files.write_bucket", refusing)
    writer = BackgroundWriter(told.append, Faults("n/0", tmp_path), woken.set)
    writer.begin(share)
    assert woken.wait(TIMEOUT_S)
    first, second, *others = sorted(store.buckets)
    assert written == [first, second, first, second, *others]
    failed = [each for each in told if isinstance(each, CheckpointFailed)]
    assert [(each.last, each.errno) for each in failed] == [(True, "ENOSPC")]
    assert sorted(path.name for path in share.directory.iterdir()) == sorted(
        {each.file for each in told if isinstance(each, CheckpointPart)}
    )


def test_a_job_that_is_cancelled_waits_for_no_room(store: Store, tmp_path: Path) -> None:
    (tmp_path / "job-1").touch()
    told: list[Any] = []
    heard = threading.Event()

    def tell(message: Any) -> None:
        told.append(message)
        heard.set()

    writer = BackgroundWriter(tell, Faults("n/0", tmp_path), lambda: None)
    writer.begin(share_of(store, tmp_path, step=JOB.train.steps))
    assert heard.wait(TIMEOUT_S)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "checkpoint-writer"]
    writer.abandon()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert len(told) == 1


def test_a_folder_that_somebody_removed_is_told(store: Store, tmp_path: Path) -> None:
    """Else nobody would begin another one while this one is waited for."""
    told: list[Any] = []
    gate, woken = Gate(tmp_path), threading.Event()
    writer = BackgroundWriter(told.append, gate, woken.set)
    share = share_of(store, tmp_path)
    writer.begin(share)
    assert gate.at.acquire(timeout=TIMEOUT_S)
    shutil.rmtree(share.directory)
    gate.go.release()
    assert woken.wait(TIMEOUT_S)
    assert told[0].errno == "ENOENT"


def test_inline_writes_at_once(store: Store, tmp_path: Path) -> None:
    told: list[Any] = []
    writer = InlineWriter(told.append, Faults("n/0", tmp_path))
    writer.begin(share_of(store, tmp_path))
    writer.abandon()
    assert not writer.busy
    assert not writer.blocks
    assert len(told) == len(store.buckets)


def test_a_copy_is_a_copy(store: Store, tmp_path: Path) -> None:
    share = share_of(store, tmp_path)
    store.settle()
    for bucket, state in share.states.items():
        ours = store.buckets[bucket]
        assert state.exponents == ours.exponents
        for copy, tensor in zip(state.tensors(), ours.tensors(), strict=True):
            assert torch.equal(copy, tensor)
            assert copy.data_ptr() != tensor.data_ptr()


def vote(**flags: bool) -> Vote:
    return Vote({}, {}, flags=Flags(**flags))


@pytest.mark.parametrize(
    ("given", "step", "wanted"),
    [
        (vote(), 1, Due()),
        (vote(), 2, Due(begins=True)),
        (vote(writing=True), 2, Due(skipped=True)),
        (vote(writing=True), 1, Due()),
        (vote(checkpoint=True), 1, Due(begins=True)),
        (vote(checkpoint=True, writing=True), 1, Due()),
        (vote(checkpoint=True, writing=True, hold=True), 1, Due(begins=True)),
        (vote(writing=True), 3, Due(begins=True)),  # the last
        (vote(full=True), 2, Due()),
        (vote(full=True, writing=True), 2, Due()),
        (vote(full=True, checkpoint=True), 2, Due(begins=True)),
        (vote(full=True), 3, Due(begins=True)),
    ],
)
def test_what_is_due(given: Vote, step: int, wanted: Due) -> None:
    assert due_of(JOB, given, Counters(step - 1, step - 1, step - 1)) == wanted


def test_what_only_evaluates_writes_no_last_one() -> None:
    was = Counters(2, 2, 2)
    assert due_of(JOB, vote(), was, at_end=False) == Due()
    assert due_of(JOB, vote(checkpoint=True), was, at_end=False) == Due(begins=True)


def test_a_step_that_is_repeated_is_not_written_again() -> None:
    was = Counters(1, 2, 2)
    assert due_of(JOB, Vote({}, {}, overflow=True), was) == Due()
    assert due_of(JOB, Vote({}, {}, overflow=True, flags=Flags(checkpoint=True)), was) == Due(begins=True)


def due_steps(job: Job, skipped: Collection[int]) -> list[int]:
    """After how many steps a checkpoint begins, where these steps, numbered from 0, are skipped."""
    counters, found = Counters(), []
    while counters.step < job.train.steps and not job.stopped_by(counters):
        given = Vote({}, {}, nan=counters.step in skipped)
        due, counters = due_of(job, given, counters), counters.after(outcome_of(given))
        found += [counters.step] if due.begins else []
    return found


def test_one_that_is_due_after_a_skipped_step_waits_for_the_next_update() -> None:
    job = parse_job({
        "name": "due", "checkpoint": {"every": 4},
        "train": {"steps": 18, "global_batch": 1, "micro_batch": 1, "sequence": 8},
    })  # fmt: skip
    assert due_steps(job, ()) == [4, 8, 12, 16, 18]
    assert due_steps(job, (3, 6, 7)) == [5, 9, 12, 16, 18]
    assert due_steps(job, (3, 4)) == [6, 8, 12, 16, 18]
    assert due_steps(job, (7, 8, 9, 10)) == [4]
    train = msgspec.structs.replace(job.train, on_nan="skip")
    assert due_steps(msgspec.structs.replace(job, train=train), range(3, 13)) == [14, 16, 18]

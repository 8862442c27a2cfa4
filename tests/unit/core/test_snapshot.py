"""The state as bytes: it comes back as it was, and is nobody's who would read it in another way."""

import math

import msgspec
import pytest

from oobleckd.core import snapshot, state
from oobleckd.core.apply import apply
from oobleckd.core.entries import (
    CheckpointWritten,
    IncidentClosed,
    IncidentOpened,
    JobStateChanged,
    JobSubmitted,
    LayoutDeployed,
    Noted,
    ProfileMeasured,
    RecordsLost,
    RolledBack,
    StepEntry,
    TemplatesMade,
)
from oobleckd.core.events import KeepState, Record
from oobleckd.core.state import State
from oobleckd.planner.plan import Layout, Plan
from oobleckd.planner.policy import Setup
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.parts import Counters
from tests.helpers.simjobs import make_job, profile
from tests.helpers.world import World


def submitted(job: str = "job-1") -> JobSubmitted:
    return JobSubmitted(job, make_job(steps=10**6), "init", Counters(), 0.0, knows_on_nan=True)


def step(number: int, job: str = "job-1", loss: float = 1.0) -> StepEntry:
    counters = Counters(number, number, number)
    return StepEntry(job, counters, "applied", 1, loss, 1.0, 0.1, 8, "x" * 64, 0.5, number / 2, number)


def incident(number: int, *, is_open: bool) -> IncidentView:
    return IncidentView(f"inc-{number}", "job-1", "lost", ("n1",), number, 1, 1, is_open, (), 1.0, "why")


def fold(*entries) -> State:
    found = State()
    for entry in entries:
        apply(found, entry)
    return found


def lived() -> World:
    """A cluster that has lost a node."""
    world = World(3, 5)
    job = world.submit(make_job(steps=30))
    world.run(lambda: world.job(job).counters.step >= 10)
    world.kill("n02")
    world.run(lambda: world.job(job).counters.step >= 20)
    return world


def test_a_state_comes_back_as_it_was():
    kept = lived().machine.core.state
    data = snapshot.encode(kept)
    found = snapshot.decode(data)
    assert found is not None
    assert snapshot.encode(found) == data
    (job,), (was,) = found.jobs.values(), kept.jobs.values()
    assert found == kept
    assert (found.history.maxlen, job.step_s.maxlen) == (kept.history.maxlen, was.step_s.maxlen)
    assert job.book.recent.maxlen == was.book.recent.maxlen
    assert job.survivors() == was.survivors()


def test_a_loss_that_is_no_number_stays_none():
    kept = fold(submitted(), step(0, loss=math.nan), step(1, loss=math.inf))
    found = snapshot.decode(snapshot.encode(kept))
    assert found is not None
    assert math.isnan(found.jobs["job-1"].losses[0])
    assert found.jobs["job-1"].steps[1].loss == math.inf


def test_one_of_another_shape_is_none(monkeypatch: pytest.MonkeyPatch):
    data = snapshot.encode(lived().machine.core.state)
    snapshot.shape.cache_clear()
    monkeypatch.setattr(snapshot, "FOLD", snapshot.FOLD + 1)
    try:
        assert snapshot.decode(data) is None
    finally:
        snapshot.shape.cache_clear()


@pytest.mark.parametrize("name", ["loss", "at"])
def test_the_shape_tells_fields_apart_that_are_in_an_array(name: str):
    named = snapshot._named(State)
    assert name in named["oobleckd.core.state.Step"]
    assert {"oobleckd.core.goodput.Stretch", "oobleckd.protocol.parts.Counters"} <= named.keys()


def test_what_is_no_snapshot_is_none():
    data = snapshot.encode(fold(submitted(), step(0)))
    assert snapshot.decode(b"") is None
    assert snapshot.decode(data[:-1]) is None
    assert snapshot.decode(data[:40]) is None
    assert snapshot.decode(msgspec.msgpack.encode((snapshot.shape(), {"jobs": 3}))) is None
    assert snapshot.decode(msgspec.msgpack.encode(["\xff", 1])) is None


def test_after_so_many_entries_the_journal_gets_one_behind_them():
    world = World(1, 4, snapshot_every=10)
    kept: list[tuple[int, bytes]] = []
    machine, handle = world.machine, world.machine.handle
    so_far = State()

    def heard(event, now):
        commands = handle(event, now)
        for place, command in enumerate(commands):
            if isinstance(command, Record):
                apply(so_far, command.entry)
            elif isinstance(command, KeepState):
                assert not any(isinstance(later, Record) for later in commands[place:])
                assert command.data == snapshot.encode(so_far)
                kept.append((len(kept), command.data))
        return commands

    machine.handle = heard  # type: ignore[method-assign]
    job = world.submit(make_job(steps=20))
    world.run(lambda: world.job(job).final)
    num_entries = len(world.daemon.disk.entries())
    assert num_entries / 20 < len(kept) <= num_entries / 10


def test_after_a_restart_what_is_behind_the_snapshot_counts():
    world = World(1, 4, snapshot_every=30)
    job = world.submit(make_job(steps=200))
    world.run(lambda: world.job(job).counters.step >= 10)
    for _ in range(4):
        wanted = world.job(job).counters.step + 8
        world.daemon.restart()
        world.run(lambda wanted=wanted: world.daemon.up and world.job(job).counters.step >= wanted)
    state_, tail = world.daemon.disk.start()
    assert state_ is not None
    assert len(tail) < 60


# ---------------------------------------------------------------------- what is in it has an end


def test_steps_and_losses_are_the_newest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state, "KEPT_STEPS", 64)
    job = fold(submitted(), *map(step, range(1000))).jobs["job-1"]
    assert 56 <= len(job.steps) <= 64
    assert [each.step for each in job.steps] == list(range(1000 - len(job.steps), 1000))
    assert list(job.losses) == [each.step for each in job.steps]


def test_a_job_that_trains_and_writes_nothing_has_a_book_of_some_size():
    entries = [submitted(), deployed(), *map(step, range(9000))]
    book = fold(*entries).jobs["job-1"].book
    assert len(book.stretches) <= 2000
    whole, useful_s = sum(each.useful_s for each in book.stretches), book.useful_s
    book.rolled_back(1e6, 0)
    assert whole == pytest.approx(useful_s)
    assert book.useful_s == pytest.approx(0.0, abs=1e-6)
    assert book.stretches == []


def test_incidents_are_the_newest_and_all_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("oobleckd.core.apply.KEPT_INCIDENTS", 5)
    told = [submitted()]
    for number in range(1, 13):
        told += [
            IncidentOpened(incident(number, is_open=True)),
            IncidentClosed(incident(number, is_open=False)),
        ]
    found = fold(*told)
    assert list(found.incidents) == [f"inc-{number}" for number in range(8, 13)]
    assert (found.num_incidents, found.jobs["job-1"].num_incidents) == (12, 12)


def test_profiles_are_the_newest():
    told = (ProfileMeasured(f"{number}", profile(6)) for number in range(300))
    assert list(fold(*told).profiles)[:: state.KEPT_PROFILES - 1] == ["100", "299"]


def test_what_the_journal_lost_is_the_newest():
    found = fold(*(RecordsLost(f"{number}", "", float(number)) for number in range(300)))
    assert [lost.what for lost in found.lost_records][::99] == ["200", "299"]


def test_changes_are_the_newest():
    noted = (Noted(number, 0.0, "job", "info", "", (), {}) for number in range(state.HISTORY + 10))
    assert [each.seq for each in fold(*noted).history][:: state.HISTORY - 1] == [10, state.HISTORY + 9]


def deployed(job: str = "job-1") -> LayoutDeployed:
    layout = Layout(1, 1, {}, ())
    return LayoutDeployed(job, layout, Plan(()), Counters(), {}, (), 0.0)


def test_with_the_next_job_less_is_kept_of_those_that_are_over():
    setup, told = Setup(profile(6), 8, 1, 0, 1, 4), []
    for number in range(1, 31):
        job = f"job-{number}"
        told += [submitted(job), TemplatesMade(job, setup, ()), deployed(job)]
        told += [step(each, job) for each in range(3)]
        told.append(JobStateChanged(job, "done", "", 9.0))
    jobs = list(fold(*told).jobs.values())
    assert [len(job.steps) for job in jobs] == [1] * 29 + [3]
    assert [len(job.losses) for job in jobs] == [0] * 29 + [3]
    assert [job.setup is None for job in jobs] == [True] * 9 + [False] * 21
    assert all(job.counters.step == 3 and job.steps[-1].step == 2 for job in jobs)


def test_a_rollback_to_before_what_is_in_memory_goes_on_from_the_checkpoint_s_own_step(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(state, "KEPT_STEPS", 16)
    first = [submitted(), *map(step, range(10))]
    written = CheckpointWritten("job-1", Counters(10, 10, 10), "step-10", 5.0)
    back = RolledBack("job-1", "step-10", Counters(200, 10, 10), 90, 60.0)
    found = fold(*first, written, *map(step, range(10, 100)), back).jobs["job-1"]
    assert [each.step for each in found.steps] == [9]
    assert found.steps == [fold(*first).jobs["job-1"].steps[-1]]
    to_the_start = RolledBack("job-1", "init", Counters(200, 0, 0), 100, 60.0)
    assert fold(*first, written, *map(step, range(10, 100)), to_the_start).jobs["job-1"].steps == []


def test_one_that_is_full_has_some_megabytes():
    """It is made between two heartbeats, and written every some minutes."""
    setup, told = Setup(profile(100), 8, 1, 0, 1, 4), [submitted()]
    told += [IncidentOpened(incident(number, is_open=True)) for number in range(3000)]
    told += [
        Noted(number, 0.0, "job", "info", "x" * 80, ("job:job-1",), {"job": b"1"}) for number in range(9000)
    ]
    for number in range(2, 302):
        job = f"job-{number}"
        told += [submitted(job), TemplatesMade(job, setup, ()), deployed(job)]
        told += [step(each, job) for each in range(30)]
        told.append(JobStateChanged(job, "done", "", 9.0))
    told += [submitted("job-302"), deployed("job-302"), *(step(each, "job-302") for each in range(10_000))]
    data = snapshot.encode(fold(*told))
    assert 2**20 < len(data) < 2**23
    assert snapshot.decode(data) is not None

"""How often a checkpoint is written: Young's and Daly's interval from what the journal says, and
its bounds.
"""

import math

import msgspec
import pytest

from oobleckd.core import failures
from oobleckd.core import state as core_state
from oobleckd.core.apply import apply
from oobleckd.core.cadence import MAX_S, MIN_COST_S, MIN_S, cadence, due
from oobleckd.core.entries import CheckpointWritten, LayoutDeployed, RolledBack, StepEntry
from oobleckd.core.state import JobRecord, State
from oobleckd.planner.plan import Layout, Plan
from oobleckd.planner.policy import Setup
from oobleckd.protocol.job import Checkpoint
from oobleckd.protocol.parts import Counters
from tests.helpers.simjobs import make_job, profile

STEP_S = 2.0


def job_of(num_steps: int = 100, *, step_s: float = STEP_S, every: int | str = "auto") -> JobRecord:
    """A job that has trained for a while."""
    spec = make_job(steps=10_000)
    spec = msgspec.structs.replace(spec, checkpoint=Checkpoint(every=every))
    setup = Setup(profile(6), 8, 1, 0, 1, 4)
    job = JobRecord("job-1", spec, 0.0, "init", Counters(), Counters(), setup=setup, deployed_at=0.0)
    for _ in range(num_steps):
        train(job, step_s)
    return job


def train(job: JobRecord, step_s: float = STEP_S, *, num_steps: int = 1, epoch: int = 1) -> None:
    """One word about so many steps."""
    was = job.counters
    at = (job.steps[-1].at if job.steps else 0.0) + num_steps * step_s
    step = was.step + num_steps - 1
    told = msgspec.structs.replace(was, step=step)
    apply(
        State(jobs={job.id: job}),
        StepEntry(job.id, told, "applied", epoch, 1.0, 1.0, 0.1, 8, "x", step_s, at, 0),
    )
    job.counters = Counters(was.round + 1, was.step + num_steps, was.applied + num_steps)


def write(job: JobRecord, step: int) -> None:
    """A checkpoint of ``step`` is complete now."""
    state = State(jobs={job.id: job})
    apply(state, CheckpointWritten(job.id, Counters(step, step, step), f"step-{step}", job.steps[-1].at))


def roll_back(job: JobRecord) -> None:
    state = State(jobs={job.id: job})
    counters = msgspec.structs.replace(job.counters, round=job.counters.round + 2)
    apply(state, RolledBack(job.id, "init", counters, 0, job.steps[-1].at))


def found_of(job: JobRecord):
    found = cadence(job)
    assert found is not None
    return found


def test_nobody_asks_where_it_is_fixed_or_nothing_is_known():
    assert cadence(job_of(every=5)) is None
    assert cadence(job_of(every=0)) is None
    assert cadence(job_of(0)) is None
    assert not due(job_of(every=5))
    assert not due(job_of(0))


def test_the_prior_gives_minutes():
    """A job of 40 steps of 0.1 s writes none before its end."""
    job = job_of(40, step_s=0.1)
    found = found_of(job)
    assert 120 < found.interval_s < 300
    assert found.steps == round(found.interval_s / 0.1)
    assert not found.measured
    assert not due(job)


def test_young_and_daly():
    job = job_of(100)
    found = found_of(job)
    assert found.mtbf_s == failures.PRIOR_S
    assert found.interval_s == pytest.approx(math.sqrt(2 * found.cost_s * found.mtbf_s))
    assert found.steps == round(found.interval_s / STEP_S)
    while job.counters.step < found_of(job).steps:
        assert not due(job)
        train(job)
    assert due(job)
    write(job, job.counters.step)
    assert not due(job)


def test_each_rollback_counts():
    job = job_of(900)
    before = found_of(job)
    for count in (1, 2, 3):
        roll_back(job)
        found = found_of(job)
        assert found.mtbf_s == failures.mean_between_s([900 * STEP_S] * count, 0.0, 900 * STEP_S)
        assert found.interval_s < before.interval_s
        before = found


def test_what_one_costs_is_measured_by_the_steps_meanwhile():
    job = job_of(100)
    for _ in range(3):
        train(job, STEP_S + 0.5)
    write(job, 100)
    found = found_of(job)
    assert found.measured
    assert found.cost_s == pytest.approx(1.5)
    assert found.write_s == pytest.approx(3 * STEP_S + 1.5)


def test_one_that_was_written_within_a_step_is_measured_when_that_step_is_over():
    job = job_of(100)
    write(job, 100)
    assert not found_of(job).measured
    train(job, STEP_S + 0.25)
    found = found_of(job)
    assert found.measured
    assert found.cost_s == pytest.approx(0.25)


def test_after_a_rollback_to_it_its_step_is_another_one():
    job = job_of(100)
    write(job, 100)
    train(job, STEP_S + 0.25)
    assert found_of(job).measured
    apply(State(jobs={job.id: job}), RolledBack(job.id, "step-100", Counters(200, 100, 100), 1, 300.0))
    assert not found_of(job).measured
    train(job, 3 * STEP_S, epoch=2)
    assert not found_of(job).measured


def test_a_cost_stays_known_when_its_steps_are_in_memory_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(core_state, "KEPT_STEPS", 64)
    job = job_of(100)
    write(job, 100)
    train(job, STEP_S + 0.25)
    for _ in range(500):
        train(job)
    assert job.steps[0].step > 101
    assert found_of(job).cost_s == pytest.approx(0.25)


def test_steps_that_are_told_of_together_tell_it_as_well():
    """As in the simulator, whose words stand for many steps: 1,000 steps in ten of them, and the checkpoint's
    ten more in one.
    """
    job = job_of(0)
    for _ in range(10):
        train(job, num_steps=100)
    write(job, 1000)
    assert not found_of(job).measured
    train(job, STEP_S + 0.03, num_steps=10)
    found = found_of(job)
    assert found.measured
    assert found.cost_s == pytest.approx(0.3)
    train(job, num_steps=40)
    assert found_of(job).cost_s == pytest.approx(0.3)


def test_steps_of_another_layout_tell_nothing_of_what_one_costs():
    job = job_of(100)
    write(job, 100)
    train(job, 3 * STEP_S, epoch=2)
    assert not found_of(job).measured
    for _ in range(5):
        train(job, 3 * STEP_S, epoch=2)
    write(job, 106)
    train(job, 3 * STEP_S + 0.25, epoch=2)
    found = found_of(job)
    assert found.measured
    assert found.cost_s == pytest.approx(0.25)


def test_the_cost_is_the_median_of_the_last_ones():
    job = job_of(100)
    for extra in (0.2, 9.0, 0.4, 0.3, 0.1, 0.5):
        write(job, job.counters.step)
        train(job, STEP_S + extra)
        for _ in range(30):
            train(job)
    assert found_of(job).cost_s == pytest.approx(0.4)


def test_bounds(monkeypatch: pytest.MonkeyPatch):
    cheap = job_of(100)
    write(cheap, 100)
    train(cheap)
    assert found_of(cheap).cost_s == MIN_COST_S
    for _ in range(10_000):
        roll_back(cheap)
    assert found_of(cheap).interval_s == MIN_S
    monkeypatch.setattr(failures, "PRIOR_S", 1e9)
    assert found_of(job_of(100)).interval_s == MAX_S


def test_the_disk_has_half_of_the_time_for_itself():
    job = job_of(100)
    for _ in range(1000):
        train(job)
    write(job, 100)
    assert found_of(job).interval_s == pytest.approx(2 * 1000 * STEP_S)


def test_what_was_rolled_back_says_nothing_of_costs():
    job = job_of(100)
    write(job, 100)
    for _ in range(5):
        train(job, STEP_S + 1.0)
    assert found_of(job).measured
    state = State(jobs={job.id: job})
    apply(state, RolledBack(job.id, "init", Counters(200, 50, 50), 55, job.steps[-1].at))
    assert not found_of(job).measured


def test_the_first_deployment_begins_the_history():
    job = job_of(0)
    job.deployed_at = None
    state = State(jobs={job.id: job})
    layout = Layout(1, 6, {}, ())
    for at in (50.0, 70.0):
        apply(state, LayoutDeployed(job.id, layout, Plan(()), Counters(), {}, (), at))
    assert job.deployed_at == 50.0

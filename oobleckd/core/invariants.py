"""What must hold between any two events: asserted by the simulated worlds after every one of them."""

from __future__ import annotations

from oobleckd.core.context import Core
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord
from planner.plan import standing_routes


def check(core: Core) -> None:
    """Raise AssertionError if the machine's state contradicts itself."""
    active = [job for job in core.state.jobs.values() if not job.final and job.state != "queued"]
    assert len(active) <= 1, f"more than one active job: {[job.id for job in active]}"
    assert [core.run.job] == active if core.run is not None else not active
    for job in core.state.jobs.values():
        _job(core, job)
    if core.run is not None:
        _run(core, core.run)


def _job(core: Core, job: JobRecord) -> None:
    assert job.epoch <= core.state.epoch
    numbers = [step.step for step in job.steps]
    assert numbers == list(range(job.start.step, job.start.step + len(numbers))), f"{job.id}: {numbers}"
    assert not numbers or job.counters.step == numbers[-1] + 1
    assert job.counters.step <= job.spec.train.steps
    assert (job.finished_at is None) != job.final
    if job.layout is not None:
        assert set(job.dead) <= set(job.layout.holdings)
        assert set(job.settled) <= set(job.dead)
        assert job.lives.keys() == job.layout.holdings.keys()
        assert job.layout.epoch <= job.epoch
        for device, shadows in job.layout.shadows.items():
            assert set(shadows.layers()) <= set(job.layout.holdings[device].layers())
        if job.detours is not None:
            assert not any(route.touches(job.settled) for route in job.detours.routes)
            routes = standing_routes(job.layout, job.detours, job.detours.round)
            assert not any(route.touches(job.settled) for route in routes)
    else:
        assert (job.dead, job.settled, job.detours) == ((), (), None)
    if job.state == "done":
        assert job.counters.step == job.spec.train.steps
        assert job.checkpoint_counters.step == job.spec.train.steps


def _run(core: Core, run: Run) -> None:
    job = run.job
    assert (run.phase == "deploy") == (run.candidate is not None)
    assert run.phase != "off" or job.layout is None
    assert run.phase not in {"adrift", "report", "run"} or job.layout is not None
    if job.state in {"running", "paused"}:
        assert job.layout is not None
    if run.candidate is not None:
        candidate = run.candidate
        assert candidate.epoch == job.epoch
        assert candidate.ready.keys() < candidate.deploys.keys()
        assert all(core.members.living(device, life) for device, life in candidate.lives.items())
    if job.layout is not None and run.phase != "adrift":
        assert min(job.layout.copies(job.dead)) > 0, "a lost layer without a way back"

"""What must hold between any two events: asserted by the simulated worlds after every one of them.

``check`` looks at one moment, also at how large the state may be, ``PastState`` at what may only grow in an
incarnation of the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oobleckd.core import goodput, state
from oobleckd.core.context import Core
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord, State
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.plan import Layout, Plan, node_of, standing_routes
from oobleckd.protocol.jobparts import lacks_folder


def check(core: Core) -> None:
    """Raise AssertionError if the machine's state contradicts itself."""
    active = [job for job in core.state.jobs.values() if not job.final and job.state != "queued"]
    assert len(active) <= 1, f"more than one active job: {[job.id for job in active]}"
    assert [core.run.job] == active if core.run is not None else not active
    for job in core.state.jobs.values():
        _job(core, job)
    _bounds(core.state)
    if core.run is not None:
        _run(core, core.run)
        _candidates(core, core.run.job)


def _bounds(kept: State) -> None:
    """Nothing grows with steps, losses or time: all has a number, or goes with jobs and nodes."""
    most = {
        "profiles": state.KEPT_PROFILES,
        "lost_records": state.KEPT_LOST_RECORDS,
        "incidents": state.KEPT_INCIDENTS,
        "history": state.HISTORY,
    }
    for name, number in most.items():
        assert len(getattr(kept, name)) <= number, name
    jobs = kept.jobs.values()
    assert sum(len(job.steps) > 1 for job in jobs) <= 2, "steps of jobs that were over before the last one"
    over = [job for job in jobs if job.final and job.deployed_at is not None]
    assert sum(bool(job.losses) for job in over) <= 2
    for job in jobs:
        _bounds_of_job(job)


def _bounds_of_job(job: JobRecord) -> None:
    most = {
        "steps": state.KEPT_STEPS,
        "losses": state.KEPT_STEPS,
        "step_s": state.RECENT_STEPS,
        "rolled_back_at": state.KEPT_ROLLBACKS,
        "written": state.RECENT_STEPS + 1,
        "kept": max(state.MIN_KEPT, job.spec.checkpoint.keep) + 2,
        "disputes": state.KEPT_DISPUTES,
        "deaths": state.RECENT_DEATHS,
    }
    for name, number in most.items():
        assert len(getattr(job, name)) <= number, f"{job.id}: {name}"
    assert len(job.book.stretches) <= goodput.MAX_STRETCHES
    assert not (job.final and job.book.stretches)


def _candidates(core: Core, job: JobRecord) -> None:
    """What is remembered is what is so."""
    remembered = core.candidates(job)
    core.candidates(job, without=[""])  # another question, so that the one before is forgotten
    assert core.candidates(job) == remembered


def _job(core: Core, job: JobRecord) -> None:
    assert job.epoch <= core.state.epoch
    numbers = [step.step for step in job.steps]
    first = numbers[0] if numbers else job.counters.step
    assert job.start.step <= first
    if not job.final and job.counters.round < state.KEPT_STEPS * 7 // 8:  # so none was too many
        assert job.start.step == first, f"{job.id}: {numbers}"
    assert numbers == list(range(first, job.counters.step)), f"{job.id}: {numbers}"
    assert job.counters.step <= job.spec.train.steps
    assert (job.finished_at is None) != job.final
    if job.layout is not None:
        assert set(job.dead) <= set(job.layout.holdings)
        assert set(job.settled) <= set(job.dead)
        assert job.incarnations.keys() == job.layout.holdings.keys()
        assert job.layout.epoch <= job.epoch
        for device, redundant in job.layout.redundant.items():
            assert set(redundant.layers()) <= set(job.layout.holdings[device].layers())
        if job.detours is not None:
            out = job.layout.unable(job.settled)
            assert not any(route.touches(out) for route in job.detours.routes)
            routes = standing_routes(job.layout, job.detours, job.detours.round)
            assert not any(route.touches(out) for route in routes)
    else:
        assert (job.dead, job.settled, job.detours) == ((), (), None)
    if job.state == "done":
        assert job.counters.step == job.spec.train.steps
        assert job.spec.eval_rounds.finished(job.counters)
        assert job.only_evaluates or job.checkpoint_counters.step == job.spec.train.steps


def _run(core: Core, run: Run) -> None:
    job = run.job
    assert (run.phase == "deploy") == (run.candidate is not None)
    assert run.phase != "off" or job.layout is None
    assert run.phase not in {"adrift", "report", "run"} or job.layout is not None or run.forgotten
    if job.state in {"running", "paused"}:
        assert job.layout is not None
    if job.state == "preparing":
        assert lacks_folder(job.spec)
        assert run.phase == "off" or run.forgotten
    else:
        assert not run.preparation.node
    if run.phase == "report":
        assert all(answer.epoch == job.epoch for answer in run.answers.values()), (
            "an answer to another question"
        )
    if run.phase == "run":
        assert all(held.epoch == job.epoch for held in run.held.values()), "held under another epoch"
    if run.candidate is not None:
        candidate = run.candidate
        assert candidate.epoch == job.epoch
        assert candidate.ready.keys() < candidate.deploys.keys()
        assert all(ready.epoch == candidate.epoch for ready in candidate.ready.values())
        assert all(
            core.members.living(device, incarnation) for device, incarnation in candidate.incarnations.items()
        )
        if job.layout is not None:
            assert not [device for device in candidate.deploys if core.members.owes(device)], (
                "copies to a device that is about to drop what it holds"
            )
    if run.pre_copy is not None:
        assert run.phase == "run", f"pre-copies while in phase {run.phase}"
        assert all(
            core.members.living(device, incarnation)
            for device, incarnation in run.pre_copy.incarnations.items()
        )
    if job.layout is not None and run.phase != "adrift":
        assert not job.layout.lost(job.dead), "a lost layer without a rollback"


def check_plan(plan: Plan, layout: Layout, num_micro_batches: int) -> None:
    """Raise AssertionError if a node has a place in two pipelines, a layer has no holder, or a standing route
    is not one way through all layers on devices that hold them.
    """
    place: dict[str, int] = {}
    for index, pipeline in enumerate(plan.pipelines):
        nodes = {node_of(s.device) for s in pipeline.segments if s.device not in plan.vacant}
        for node in sorted(nodes):
            assert place.setdefault(node, index) == index, f"{node} is in two pipelines"
    assert layout.holdings == Lanes.laid_out(layout).holdings(plan)
    assert min(layout.copies()) > 0, f"a layer that nobody holds: {layout.copies()}"
    assert [route.micro_batch for route in layout.routes] == list(range(num_micro_batches))
    for route in layout.routes:
        ends = [0, *(segment.layers.stop for segment in route.segments)]
        starts = [segment.layers.start for segment in route.segments]
        assert (starts, ends[-1]) == (ends[:-1], layout.num_layers), f"not a way through all layers: {route}"
        for segment in route.segments:
            held = layout.holdings[segment.device]
            assert held.spans(segment.layers), f"{segment.device} does not hold {segment.layers}"


@dataclass(slots=True)
class PastState:
    """What was so after the event before. A restarted daemon may have lost what nobody was told: each
    incarnation has its own.
    """

    now: float = float("-inf")
    epoch: int = 0
    seq: int = 0
    rounds: dict[str, int] = field(default_factory=dict)
    layouts: dict[str, int] = field(default_factory=dict)

    def check(self, core: Core) -> None:
        """Raise AssertionError if time, an epoch, a round or the order of changes has gone back. A layout
        that is new is looked at whole.
        """
        assert core.now >= self.now, "time went back"
        assert core.state.epoch >= self.epoch, "an epoch was taken back"
        assert core.state.seq >= self.seq, "a change was taken back"
        self.now, self.epoch, self.seq = core.now, core.state.epoch, core.state.seq
        for job in core.state.jobs.values():
            before = self.rounds.get(job.id, 0)
            assert job.counters.round >= before, f"{job.id}: round {before} was taken back"
            self.rounds[job.id] = job.counters.round
            if job.layout is not None and job.plan is not None:
                if self.layouts.get(job.id) != job.layout.epoch:
                    check_plan(job.plan, job.layout, job.spec.num_micro_batches)
                assert job.layout.epoch >= self.layouts.get(job.id, 0), f"{job.id}: an old layout is in force"
                self.layouts[job.id] = job.layout.epoch

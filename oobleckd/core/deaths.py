"""Fails a job whose devices die the same way twice: once may be anybody's fault, twice is the job's.

A device that says why it died (or of which the kernel says so) dies of a kind, in a phase. The first such
death is a loss like any other. The second one of the same kind in the same phase fails the job: it would die
again wherever it is tried, and the nodes are as good as before. Nobody is drained, and who was killed from
outside never counts.

Owns that rule, and what people are told of it. Where the words come from: ``oobleckd.worker.runtime.deaths``.
"""

from __future__ import annotations

from oobleckd.core import jobs
from oobleckd.core.context import Core
from oobleckd.core.entries import DeviceDied, Died
from oobleckd.core.memory import planned_by_device
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord
from oobleckd.planner.plan import Plan, node_of
from oobleckd.protocol.agentmessages import DeviceLost
from oobleckd.protocol.changes import DeviceEnded
from oobleckd.protocol.deaths import OUT_OF_MEMORY, Death, account_of, ways_out

FORGIVEN_AFTER = 100
"""Steps that a job commits after a death before it counts no more: what lets it train so long is no property
of the job.
"""


MAX_HUNGRY = 3
"""Deaths for want of memory, whatever the phases."""


def died(core: Core, message: DeviceLost, measuring: str) -> None:
    """A device is lost, and it is known what it died of. ``measuring``: the one that was at it
    for a profile.
    """
    run, death = core.run, message.death
    if run is None or death is None or not (death.job == run.job.id or message.device == measuring):
        return
    job = run.job
    found = Died(message.device, death, job.counters.step, _planned(run, message.device), core.now)
    # The second of a kind fails the job: a model that does not fit kills device after device, each with a
    # recovery, and nothing else would end it. One may be anybody's. (D-devices-014)
    before = _before(job, death)
    core.record(DeviceDied(job.id, found))
    if before is None:
        _first(core, job, found)
    elif death.kind == OUT_OF_MEMORY:
        _does_not_fit(core, run, before, found)
    else:
        error = f"{_both(before, found)} met the same error in {death.phase}: {death.error} ({death.where})"
        hint = (
            "a fault of the model, its data or oobleckd, as another device came to it, too, or the same one "
            "again; the log of "
            f"{node_of(found.device)} has where it came from"
        )
        jobs.fail(core, job, error, hint, "same-error")


def _planned(run: Run, device: str) -> int:
    """The same of the plan that is deployed, in force, or to come, whichever has a place for ``device``: it
    may die of what it is sent ahead, or of what the plan before gave it.
    """
    plans = [run.candidate.plan] if run.candidate is not None else []
    plans += [plan for plan in (run.job.plan,) if plan is not None]
    plans += [run.proposal[1].plan] if run.proposal is not None else []
    return next(filter(None, (planned_bytes(run.job, plan, device) for plan in plans)), 0)


def planned_bytes(job: JobRecord, plan: Plan | None, device: str) -> int:
    """What the planner counted on for ``device`` of ``plan``; 0 where it has no place in it."""
    return planned_by_device(job, plan).get(device, 0) if plan is not None else 0


def words(found: Died) -> str:
    """One death, for people."""
    death = found.death
    what = (
        f"ran out of memory in {death.phase}{account_of(death.memory, found.planned_bytes)}"
        if death.kind == OUT_OF_MEMORY
        else f"died in {death.phase} of {death.error}"
    )
    return f"{found.device} {what}"


def _before(job: JobRecord, death: Death) -> Died | None:
    """The one before ``death`` with which it makes two, if there is one. Errors that several devices meet at
    once are one: they may have one reason, such as a peer's end. Of memory everybody has its own; what is
    full is so in one phase and then in another, so the third counts in any.
    """
    kind = [
        each
        for each in job.deaths
        if each.death.what == death.what and job.counters.step - each.step <= FORGIVEN_AFTER
    ]
    hungry = death.kind == OUT_OF_MEMORY
    same = [
        each
        for each in kind
        if each.death.phase == death.phase and (hungry or each.death.epoch < death.epoch)
    ]
    # An unexpected error counts once a generation, as peers can meet it for one reason, such as another's
    # end. Of memory everybody has its own. (D-devices-015)
    if not same and hungry and len(kind) >= MAX_HUNGRY - 1:
        same = kind
    return same[-1] if same else None


def _first(core: Core, job: JobRecord, found: Died) -> None:
    text = f"{job.id}: {words(found)}; a second time like this fails the job"
    story = (f"job:{job.id}", f"node:{node_of(found.device)}")
    said = DeviceEnded(job.id, found.device, found.death.kind, found.death, found.planned_bytes)
    core.announce(text, said, story, level="warn")


def _does_not_fit(core: Core, run: Run, before: Died, found: Died) -> None:
    error = f"does not fit: {words(found)}; {before.device} did in step {before.step + 1}, too"
    jobs.fail(core, run.job, error, ways_out(run.job.spec), OUT_OF_MEMORY)


def _both(before: Died, found: Died) -> str:
    return f"{before.device} and {found.device}" if before.device != found.device else f"{found.device} twice"

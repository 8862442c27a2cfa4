"""Losses: report, decision, rollback (docs/recovery.md, "A failure"), and the first look after a restart.

Owns what is asked of the survivors and what they are told. The verdict is ``decide``'s, the plan that
follows is ``steer``'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from oobleckd.core import checkpoints, corruption, deploy, incidents, inputs, jobs, precopy
from oobleckd.core.context import Core
from oobleckd.core.corruption import Finding
from oobleckd.core.decide import Decision, Disagreement, Standing, decide
from oobleckd.core.entries import Detoured, EpochRaised, RolledBack
from oobleckd.core.evaluations import begun_anew
from oobleckd.core.incident import back_words, reopened
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord, KeptCheckpoint
from oobleckd.planner.plan import Detours, node_of
from oobleckd.planner.policy import REROUTING, ROLLING_BACK
from oobleckd.planner.reroute.redundant import takes_over
from oobleckd.protocol.changes import JobWentBack
from oobleckd.protocol.incidentviews import LossView, ReasonView, RollbackCause, RollbackView
from oobleckd.protocol.messages import Corrupted, Decide, DeviceFailed, Progress, Report
from oobleckd.words import noun


def check_lives(core: Core, run: Run) -> None:
    """Act on every device of the layout, or of the one being deployed, whose incarnation is over.

    This comes after every step, so where nothing that it looks at has changed nobody looks at thousands of
    devices.
    """
    if run.phase == "adrift":
        return
    # After every step, so it must cost nothing where no life began or ended: it was a third of what a step
    # costs the core, and milliseconds with thousands of devices. (D-daemon-016)
    seen = (core.members.turns, run.job.survivors(), run.job.incarnations, run.candidate, run.pre_copy)
    if run.seen_alive == seen:
        return
    precopy.check_lives(core, run)
    lost = _ended(core, {device: run.job.incarnations[device] for device in run.job.survivors()})
    joining = run.candidate.incarnations if run.candidate is not None else {}
    failed = [device for device in _ended(core, joining) if device not in lost]
    if lost:
        lose(core, run, lost, failed)
    elif failed:
        _abandon(core, run, failed)
    else:
        run.seen_alive = seen


def _ended(core: Core, incarnations: Mapping[str, str]) -> list[str]:
    return [
        device
        for device, incarnation in sorted(incarnations.items())
        if not core.members.living(device, incarnation)
    ]


def lose(core: Core, run: Run, lost: Sequence[str], failed: Sequence[str] = ()) -> None:
    """Devices of the plan are lost; ``failed`` ones were only joining.

    Nobody waits for the journal where processes have ended for certain: a daemon that has lost the entry
    finds them lost again, and asks anew under an epoch that was not used.
    """
    # The journal's sync was a third and more of the time from a loss to the decision. An ended process
    # stays ended, so a restarted daemon tells survivors the same; leases and closed links are judgements
    # and wait. (D-recovery-015)
    ahead = not failed and all(core.members.ended(device) for device in lost)
    _raise(core, run, tuple(sorted({*run.job.dead, *lost})), [*lost, *failed])
    _ask_reports(core, run, ahead=ahead)


def _abandon(core: Core, run: Run, failed: list[str]) -> None:
    """Devices that were only joining are lost: the layout in force stays."""
    if run.job.layout is not None:
        _raise(core, run, run.job.dead, failed)
        _ask_reports(core, run)
        return
    jobs.release(core, run)
    run.forget("off")
    if run.job.state == "deploying":
        what = ", ".join(_whole(core, failed))
        core.move(run.job, "replan", f"{what} lost before training began")


def restart_deployment(core: Core, run: Run, device: str, why: str) -> None:
    """``device`` may have missed a part of the deployment: begin it anew."""
    if run.job.layout is not None:
        _raise_quietly(core, run, why)
        _ask_reports(core, run)
    else:
        _abandon(core, run, [device])


def _raise(core: Core, run: Run, dead: tuple[str, ...], devices: Collection[str]) -> None:
    precopy.forget(core, run)
    epoch, names = core.next_epoch(), _whole(core, devices)
    cause = "; ".join(f"{name}: {_cause(core, name)}" for name in names)
    core.record(EpochRaised(run.job.id, epoch, dead, cause, core.now))
    nodes = list(dict.fromkeys(node_of(device) for device in devices))
    evidence_at = min(_evidence_at(core, name) for name in names)
    incidents.loss(core, run, nodes, cause, evidence_at, epoch, tuple(_loss(core, name) for name in names))
    core.move(run.job, "loss", f"lost {', '.join(names)}")


def _whole(core: Core, devices: Collection[str]) -> list[str]:
    """What to call a loss: a node where it is lost as one, a device where only its own
    incarnation is over.
    """
    fallen = {device for node in core.members.nodes.values() for device in node.fallen}
    return list(dict.fromkeys(device if device in fallen else node_of(device) for device in devices))


def _raise_quietly(core: Core, run: Run, why: str) -> None:
    precopy.forget(core, run)
    core.record(EpochRaised(run.job.id, core.next_epoch(), run.job.dead, why, core.now))


def ask_anew(core: Core, run: Run, why: str) -> None:
    """Ask all where they are though nobody is lost, and tell them once more what to do: at the end, to write
    the last checkpoint.
    """
    _raise_quietly(core, run, why)
    _ask_reports(core, run)


def _cause(core: Core, name: str) -> str:
    node = core.members.nodes.get(node_of(name) or name)
    if node is None:
        return "did not come back after the daemon's restart"
    if name in node.fallen:
        return f"{node.fallen[name].cause}; the node's spare takes its place"
    return node.cause or "a device of it began a new incarnation"


def _loss(core: Core, name: str) -> LossView:
    """The same as ``_cause``, for programs."""
    node = core.members.nodes.get(node_of(name) or name)
    if node is None:
        return LossView(node_of(name) or name, "not-heard")
    if name in node.fallen:
        return LossView(node.name, "device-replaced", name)
    return LossView(node.name, node.code or ("" if node.cause else "device-renewed"))


def _evidence_at(core: Core, name: str) -> float:
    node = core.members.nodes.get(node_of(name) or name)
    if node is None:
        return core.now
    if name in node.fallen:
        return node.fallen[name].at
    return core.now if node.suspect_at is None else node.suspect_at


def _ask_reports(core: Core, run: Run, *, ahead: bool = False) -> None:
    """Ask the survivors; or roll back, if nobody can have what is lost, or the policy has no other way."""
    job = run.job
    assert job.layout is not None
    if lost := job.layout.lost(job.dead):
        why = f"{noun(len(lost), 'layer')} {', '.join(map(str, lost))} lost the last copy"
        go_back(core, run, "last-copy-lost", why)
        return
    if job.dead and job.spec.fault_tolerance.policy in ROLLING_BACK:
        go_back(core, run, "policy", f"lost {', '.join(_whole(core, job.dead))}")
        return
    run.forget("report")
    for device in job.survivors():
        core.tell(device, report(run, device), ahead=ahead)
    incidents.enter(core, run, "plan")


def report(run: Run, device: str) -> Report:
    """The present question to ``device``."""
    assert run.job.layout is not None
    return Report(device, run.job.epoch, run.job.layout.epoch, run.job.dead)


def on_progress(core: Core, message: Progress) -> None:
    """An answer; the last one leads to the decision."""
    run = core.run
    if run is None or run.phase != "report" or message.epoch != run.job.epoch:
        return
    survivors = run.job.survivors()
    if message.device not in survivors:
        return
    run.answers[message.device] = message
    if all(device in run.answers for device in survivors):
        _decide(core, run)


def _decide(core: Core, run: Run) -> None:
    job = run.job
    assert job.layout is not None
    assert job.setup is not None
    profile = job.setup.profile
    buckets = profile.buckets or tuple((layer,) for layer in range(len(profile.layers)))
    # The devices commit by themselves; the core decides only after a failure, since a step must not wait
    # for a process that may be restarted. (D-recovery-002)
    standing = Standing(job.detours, job.settled, _goes_on(core, job))
    evaluation = job.spec.eval_rounds
    verdict = decide(job.epoch, run.answers, job.layout, job.dead, buckets, evaluation, standing)
    if isinstance(verdict, Disagreement):
        distrust(core, run, corruption.found(core, run, verdict.counters, verdict.odds))
        return
    assert isinstance(verdict, Decision), "lost layers are seen before anybody is asked"
    run.phase, run.decision, run.held = "run", verdict, {}
    run.resumed_round = -1
    if verdict.detours is not None:
        _detour(core, run, verdict.detours)
    if run.incident is not None:
        run.incident.decided = True
    incidents.enter(core, run, "reconfigure")
    for device in job.survivors():
        core.tell(device, decision(run, device))
    if not verdict.hold:
        incidents.enter(core, run, "resume")
        if job.state in {"deploying", "recovering"}:
            core.move(job, "deployed")


def _detour(core: Core, run: Run, detours: Detours) -> None:
    """The job goes on without its dead; whether anything is to be moved the policy will say."""
    job = run.job
    core.record(Detoured(job.id, job.epoch, detours, core.now))
    # The incident closes when the policy has said that nothing is to be moved: else a standby that takes
    # the place milliseconds later would not be in its time. (D-recovery-010)
    run.satisfied, run.refused, run.proposal = None, None, None
    if run.incident is not None and not run.incident.steps_lost:
        back = run.incident.parts.rollback
        run.incident.parts = ReasonView(rerouted=tuple(job.dead), rollback=back, way="re-route")


def _goes_on(core: Core, job: JobRecord) -> bool:
    """Whether the job goes on without its dead, as far as its policy and the nodes that are left allow: with
    fewer than n0 where redundant holders take over from all of them, which their templates have room for.
    """
    if job.spec.fault_tolerance.policy not in REROUTING:
        return False
    assert job.layout is not None
    # n0 is what a new plan needs. The one in force has room for every predecessor's double work, and to
    # wait would give up what the second copy was paid for. (D-policies-013)
    return len(core.candidates(job)) >= job.n0 or takes_over(job.layout, job.layout.unable(job.dead))


def decision(run: Run, device: str) -> Decide:
    """The present decision for ``device``: with all detours in force, as it may have missed those before."""
    found = run.decision
    assert found is not None
    # With all that is in force: who has answered a report says so in its Hello, but not whether it heard
    # the decision. (D-recovery-007)
    return found.told(device, run.job.epoch, run.job.detours)


def go_back(core: Core, run: Run, cause: RollbackCause, why: str, kept: KeptCheckpoint | None = None) -> None:
    """On from ``kept``, or else the last checkpoint, or the start when there is none: a layer has no copy
    left, the policy rolls back, or the state cannot be trusted.
    """
    job = run.job
    target, source = job.start, job.source
    if kept is None and (kept := inputs.rollback(core, job)) is not None:
        why = f"{why}; nobody lives who could say that the text was the right one since"
    if kept is not None:
        target, source = kept.counters, kept.directory
    elif job.checkpoint:
        target, source = job.checkpoint_counters, job.checkpoint
    infos = [info for device in job.survivors() if (info := core.members.device(device)) is not None]
    # What an agent said of its devices may be of another job, or of a history that was given up before.
    steps = [info.step for info in infos if job.layout is not None and info.layout == job.layout.epoch]
    steps_lost = max(job.counters.step, *steps, 0) - target.step
    # Rounds are not used twice: the dead may have been a round ahead of what anybody else reached.
    known = (info for node in core.members.nodes.values() for info in node.devices if info.job == job.id)
    reached = max(job.counters.round, *(info.round for info in known), 0)
    counters = msgspec.structs.replace(begun_anew(job.spec.eval_rounds, target), round=reached + 2)
    jobs.release(core, run)
    run.forget("off")
    run.parts.clear()
    run.completing.clear()
    run.early.clear()
    core.record(RolledBack(job.id, source, counters, steps_lost, core.now))
    back = RollbackView(target.step, steps_lost, source, cause)
    lost_before = run.incident.steps_lost if run.incident is not None else 0
    text = f"{job.id}: {why}; {back_words(back, lost_before, trusted=bool(job.checkpoint))}"
    story = [f"job:{job.id}"]
    if run.incident is not None:
        run.incident.steps_lost += steps_lost
        run.incident.parts = ReasonView(back=text, rollback=back)
        story.append(f"incident:{run.incident.id}")
    went = JobWentBack(job.id, steps_lost, target.step, why, cause, source)
    core.announce(text, went, story, level="warn")
    incidents.enter(core, run, "reconfigure")


def on_corrupted(core: Core, message: Corrupted) -> None:
    """A device does not trust what it or another one has."""
    finding = corruption.heard(core, message)
    if finding is not None and core.run is not None:
        distrust(core, core.run, finding)


def on_damaged(core: Core, message: DeviceFailed) -> None:
    """A device cannot load the checkpoint that it was told to: back to the one before it. Without one the job
    is over.

    All who load it say so, some of them when the one before it is under way already: the first counts.
    """
    run, device = core.run, message.device
    if run is None or run.candidate is None or device not in run.candidate.deploys:
        return
    told, incarnation = run.candidate.deploys[device], run.candidate.incarnations[device]
    if (told.job, told.source) != (message.job, message.damaged) or not core.members.living(
        device, incarnation
    ):
        return
    job = run.job
    # To the one before it, and never anew from fresh weights: to throw all of the training away is for a
    # person to decide. (D-checkpoints-011)
    older = checkpoints.damaged(core, job, message)
    if older is None:
        error = f"{device}: {message.error}; the job has no other checkpoint to roll back to"
        hint = f"mend {message.damaged} from a backup and submit with --resume, or begin anew"
        jobs.fail(core, job, error, hint, "checkpoint-damaged")
        return
    cause = f"the checkpoint of step {job.counters.step} is damaged"
    distrust(core, run, Finding(cause, (), older, "checkpoint-damaged"))


def distrust(core: Core, run: Run, finding: Finding) -> None:
    """Nobody is lost, and what devices have cannot be trusted: back to what can."""
    precopy.forget(core, run)
    epoch = core.next_epoch()
    core.record(EpochRaised(run.job.id, epoch, run.job.dead, finding.cause, core.now))
    incidents.loss(core, run, finding.nodes, finding.cause, core.now, epoch)
    # A job that had a layout may have none as far as the journal goes.
    if run.job.state not in {"preparing", "profiling"}:
        core.move(run.job, "loss", finding.cause)
    go_back(core, run, finding.code, finding.cause, finding.target)


# ---------------------------------------------------------------------- after a restart of the daemon


def adrift(core: Core, job: JobRecord, *, forgotten: bool = False) -> Run:
    """The run of a job that was active when the daemon stopped."""
    run = Run(job, "adrift" if job.layout is not None or forgotten else "off", forgotten=forgotten)
    run.restarted = True
    run.reads_since = dict.fromkeys(
        job.readers.values(), -1
    )  # since when each has read nobody knows any more
    for view in core.state.incidents.values():
        if view.open and view.job == job.id:
            run.incident = reopened(view, job.counters.round, core.now)
    return run


def awaited(core: Core, run: Run) -> list[str]:
    """Nodes of the layout that have not said Hello yet."""
    return sorted(run.job.surviving_nodes() - core.members.nodes.keys())


def look_again(core: Core, run: Run) -> None:
    """All have said Hello, or the grace has passed: go on, ask again, or mourn."""
    # What the devices hold came of decisions that nobody knows any more: layouts, generations, detours. To
    # ask them all of it back would be a second journal. (D-daemon-009)
    if run.forgotten:
        run.forgotten = False
        distrust(core, run, corruption.forgotten(run.job))
        return
    job = run.job
    assert job.layout is not None
    run.phase = "run"
    lost = _ended(core, {device: job.incarnations[device] for device in job.survivors()})
    if lost and _begun_anew(core, run, lost):
        _begin_anew(core, run, lost)
        return
    if lost:
        lose(core, run, lost)
        return
    infos = [core.members.device(device) for device in job.survivors()]
    # Who has answered a report may not have heard the decision: under a raised epoch all are asked again.
    calm = job.epoch == job.layout.epoch and all(
        info is not None and (info.layout, info.epoch, info.holding) == (job.layout.epoch, job.epoch, False)
        for info in infos
    )
    if calm and job.state == "running":
        incidents.enter(core, run, "resume")
        return
    _raise_quietly(core, run, "the daemon restarted")
    _ask_reports(core, run)


def _begun_anew(core: Core, run: Run, lost: Sequence[str]) -> bool:
    """Whether, with the daemon, all that trained the job was started anew, and nobody is missing."""
    here = {name for name, node in core.members.nodes.items() if node.alive}
    whole = len(lost) == len(run.job.survivors()) and here >= run.job.surviving_nodes()
    return whole and run.incident is None


def _begin_anew(core: Core, run: Run, devices: Sequence[str]) -> None:
    """The cluster was stopped and started again: the job goes on from what is on disk, and there is no loss
    that somebody had.
    """
    # Who ends the daemon first and then its nodes has ended a cluster. An incident would tell of failures
    # that nobody can look for, and be counted among those that plans expect. (D-recovery-026)
    why = "the whole cluster was started anew"
    precopy.forget(core, run)
    dead = tuple(sorted({*run.job.dead, *devices}))
    core.record(EpochRaised(run.job.id, core.next_epoch(), dead, why, core.now))
    core.move(run.job, "loss", why)
    go_back(core, run, "last-copy-lost", why)


def remind(core: Core, run: Run, device: str, *, back: bool) -> None:
    """Say again what ``device`` may have missed; ``back``: its agent was away."""
    info = core.members.device(device)
    assert info is not None
    if back and run.measuring == device:
        run.measuring = ""  # the question or its answer may be lost: ask again
    inside = device in run.job.survivors() and run.job.incarnations[device] == info.incarnation
    coming = run.candidate if run.candidate is not None and device in run.candidate.deploys else None
    waited_for = coming is not None and device not in coming.ready
    # One that never had a place holds nothing. Copies of a deployment to come may be on their way to it
    # already: a Release
    # would take them along. So it would the deployment, where this Hello left before that came.
    fresh = info.job == run.job.id and not info.layout
    deployed = coming is not None and not (back and waited_for)
    lost = back and core.members.owes(device)  # the order or its answer: once more
    if (lost or (info.job and not fresh)) and not (inside or deployed):
        core.release(device, info.job or run.job.id)
    if coming is not None:
        if back and waited_for:
            restart_deployment(core, run, device, f"{node_of(device)} was away during a deployment")
    elif inside and run.phase == "report" and device not in run.answers:
        if back and info.epoch >= run.job.epoch:
            _raise_quietly(core, run, f"{device} was away when it answered")
            _ask_reports(core, run)
        else:
            core.tell(device, report(run, device))
    elif inside and run.phase == "run":
        if run.decision is not None:
            core.tell(device, decision(run, device))
        else:
            _remind_of_resume(core, run, device)


def _remind_of_resume(core: Core, run: Run, device: str) -> None:
    info, layout = core.members.device(device), run.job.layout
    assert info is not None
    assert layout is not None
    # A connection that ended may have taken a Resume along; with its round the order does no harm when it
    # is said twice. (D-recovery-024)
    missed = info.layout != layout.epoch or (info.holding and info.round == run.resumed_round)
    if missed and device not in run.held:
        deploy.resume_again(core, run, device)

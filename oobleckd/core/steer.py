"""Decides what comes next, after every event and from the state alone.

Compares what is wanted (all usable nodes in the plan, no dead ones; a pause; a checkpoint) with what
is, and issues the next step towards it. Nothing here remembers what it did before, so a second failure
in the middle of anything needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from oobleckd.core import (
    checkpoints,
    corruption,
    deploy,
    ending,
    failures,
    incidents,
    inputs,
    jobs,
    notfinite,
    precopy,
    preparing,
    reading,
    recovery,
    resharding,
    room,
)
from oobleckd.core.context import Core
from oobleckd.core.entries import Released
from oobleckd.core.events import Planned
from oobleckd.core.run import PlannerRequest, Run
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.policy import ROLLING_BACK, Proposal, Situation
from oobleckd.protocol.changes import PlanRefused
from oobleckd.protocol.messages import Flag
from oobleckd.protocol.parts import Flags, JobCause
from oobleckd.words import count, noun

_NAMED = 5  # nodes, in a sentence


def steer(core: Core) -> None:
    """Take the next step of the active job, or start one."""
    if notfinite.ends(core):
        return
    jobs.start_next(core)
    run = core.run
    if run is None or run.phase in {"adrift", "report", "deploy"}:
        return
    if run.job.state == "preparing":
        preparing.steer(core, run)
        return
    room.look(core, run)
    if reading.leaves_unchecked(core, run) or (run.kept_out and reading.ends(core, run, _to_begin(run))):
        return
    resharding.look(core, run)
    if run.phase == "off":
        _before_deployment(core, run)
    elif run.all_held():
        _at_boundary(core, run)
    else:
        _while_running(core, run)


# ---------------------------------------------------------------------- no device holds the job


def _before_deployment(core: Core, run: Run) -> None:
    job = run.job
    if not job.templates:
        jobs.prepare(core, run)
        return
    nodes = core.candidates(job)
    if len(nodes) < _to_begin(run):
        if job.state != "profiling":
            _wait(core, run, nodes)
        return
    wanted = Situation(nodes, {}, zones=_zones(core, nodes))
    if core.now < core.joined_at + core.config.batch_s or _alike(wanted, run.refused):
        return
    if job.state == "waiting":
        core.move(job, "feed")
    found = _proposal(core, run, wanted)
    if found is not None and not _mending(core, found[1]):
        deploy.deploy(core, run, *found)


def _mending(core: Core, proposal: Proposal) -> bool:
    """Whether a spare is still taking its place in a node of the plan: milliseconds, the agent sees to it."""
    return any(core.members.nodes[name].mending for name in proposal.plan.nodes())


def _to_begin(run: Run) -> int:
    """Nodes that the job needs before it is deployed: for all f + 1 copies at its start, for one later on."""
    job = run.job
    return job.n0 * (job.spec.fault_tolerance.f + 1 if job.epoch == 0 and not _rolls_back(run) else 1)


def _wait(core: Core, run: Run, nodes: tuple[str, ...]) -> None:
    """There are too few ``nodes``: the job waits, and says what would help."""
    kept_out = inputs.kept_words(run)
    few_for_f = len(nodes) >= run.job.n0 and _to_begin(run) > run.job.n0
    lacking = _lacking_for_f(run, nodes) if few_for_f else _lacking(run, nodes)
    cause: JobCause = "too-few-for-f" if few_for_f else "too-few-nodes"
    core.move(run.job, "starve", f"{lacking}{f'; {kept_out}' if kept_out else ''}", cause)


def _lacking_for_f(run: Run, nodes: tuple[str, ...]) -> str:
    f = run.job.spec.fault_tolerance.f
    needed, here = count(_to_begin(run), "node"), f"{len(nodes)} {noun(len(nodes), 'is')} here"
    return (
        f"fault_tolerance.f = {f} needs {count(f + 1, 'copy')} of every layer: {needed}, and "
        f"{here} (start more nodes, lower fault_tolerance.f, or raise resources.device_memory)"
    )


def _lacking(run: Run, nodes: tuple[str, ...]) -> str:
    job = run.job
    step = job.counters.step
    if job.layout is None:
        where = (
            "nothing is trained yet"
            if job.source == "init" and not step
            else f"step {step} is in {job.source}"
        )
    else:
        where = f"step {step} is held by {count(len(job.surviving_nodes()), 'node')}"
    return f"needs {count(job.n0, 'node')} and has {len(nodes)}; {where}"


# ---------------------------------------------------------------------- devices are at work


def _while_running(core: Core, run: Run) -> None:
    """Plan ahead, and put into the votes what should happen at the next boundary."""
    job = run.job
    hold, checkpoint = job.paused, checkpoints.wanted(core, run)
    if job.unsettled:
        if len(core.candidates(job)) >= run.n0 and not job.paused:
            found = _proposal(core, run, situation(core, run))
            if found is not None:
                precopy.over(core, run, found[1])
        return  # the decision already holds everybody at the boundary
    use = None
    if job.ending:
        hold, checkpoint = ending.flagged(core, run)
    elif _wants_change(core, run) and not _needs_room(core, run):
        nodes = core.candidates(job)
        if len(nodes) >= run.n0:
            use = _has_use_for(core, run)
            moves = use is not None and precopy.over(core, run, use)
            hold |= moves
            checkpoint |= moves and _rolls_back(run)
        elif _leaving(core, run) and run.sizing is None:  # smaller stages may yet be found to fit
            hold = checkpoint = True
    if use is None:
        precopy.forget(core, run)
    _flag(core, run, Flags(hold, checkpoint, full=room.full(core, run)))


def _needs_room(core: Core, run: Run) -> bool:
    """Whether a change takes a checkpoint, and the disk has no room for one: then all stays as it is."""
    by_checkpoint = _rolls_back(run) or len(core.candidates(run.job)) < run.n0
    return by_checkpoint and room.refuses(core, run) and not checkpoints.saved(run.job)


def _flag(core: Core, run: Run, flags: Flags) -> None:
    """Say ``flags`` to all devices; again in every round, since a vote may have been cast already."""
    said = (run.flags, run.flagged_round) == (flags, run.job.counters.round)
    if said or flags == Flags():
        run.flags = flags
        return
    run.flags, run.flagged_round = flags, run.job.counters.round
    for device in run.job.survivors():
        core.tell(device, Flag(device, run.job.epoch, flags, run.job.counters.round))


def _wants_change(core: Core, run: Run) -> bool:
    """Whether the plan was made for other nodes than there are now (those that just join may bring more)."""
    nodes = core.candidates(run.job)
    if run.resharding is not None:
        return True
    if nodes in {run.job.offered, run.satisfied}:
        return _calmer(core, run)
    joining = set(nodes) - set(run.job.offered)
    return not joining or run.pre_copy is not None or core.now >= core.joined_at + core.config.batch_s


def _calmer(core: Core, run: Run) -> bool:
    """Whether the time until the next loss is twice of what it was when the policy left something undone:
    more may pay now.
    """
    plan = run.job.plan
    if plan is None or not (plan.vacant or plan.idle or run.job.settled):
        return False
    steps = failures.horizon_steps(core.state, run.job, core.now)
    run.weighed_steps = run.weighed_steps or steps
    return steps >= 2 * run.weighed_steps


def _has_use_for(core: Core, run: Run) -> Proposal | None:
    """A plan for the present nodes that differs from the one in force, if it is here."""
    found = _proposal(core, run, situation(core, run))
    if found is not None and _changes_nothing(run, found[1]):
        _stay(core, run, *found)
        return None
    return found[1] if found is not None else None


def _stay(core: Core, run: Run, asked: Situation, proposal: Proposal) -> None:
    """The plan in force is the best for these nodes; people are told why nothing is moved, after a loss with
    its incident.
    """
    before = run.job.offered if run.satisfied is None else run.satisfied
    run.satisfied, run.proposal, run.weighed_steps = asked.nodes, None, asked.horizon_steps
    if run.job.settled and run.incident is not None:
        incidents.explain(core, run, proposal)
        return
    # That nothing was done was written nowhere, and a node that stood by looked forgotten. No incident:
    # that is a recovery, with phases and a cost. (D-watching-014)
    before = before or asked.nodes  # after a restart nobody knows any more which nodes were weighed
    came, went = sorted(set(asked.nodes) - set(before)), sorted(set(before) - set(asked.nodes))
    changes = ((came, "can be used now"), (went, "cannot be used any more"))
    parts = [f"{_named(nodes)} {what}" for nodes, what in changes if nodes]
    occasion = f"{', '.join(parts)}, and the plan stays: " if parts else ""
    incidents.stays(core, run, proposal, occasion, tuple(came), tuple(went))


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= _NAMED else count(len(nodes), "node")


def _leaving(core: Core, run: Run) -> list[str]:
    """Nodes of the layout that are to leave it."""
    inside = run.job.surviving_nodes()
    return sorted(inside - set(core.candidates(run.job)))


# ---------------------------------------------------------------------- all devices hold


def _at_boundary(core: Core, run: Run) -> None:
    job = run.job
    finding = corruption.at_boundary(core, run)
    if finding is not None:
        recovery.distrust(core, run, finding)
        return
    if run.finished():
        _at_the_end(core, run)
        return
    if ending.at_boundary(core, run):
        return
    if job.paused:
        if run.incident is not None and not job.unsettled:
            incidents.close(core, run)
        if job.state != "paused":
            core.move(job, "hold")
        return
    if job.unsettled or (not job.ending and _wants_change(core, run)):
        _change_plan(core, run)
    else:
        _go_on(core, run)


def _at_the_end(core: Core, run: Run) -> None:
    """No round is left: end the job once its last state is in a checkpoint, if it has another one than it
    began with.
    """
    job = run.job
    told = job.spec.eval_rounds.finished(job.counters)
    # Its state is that of the checkpoint that it began from. (D-checkpoints-021)
    if job.only_evaluates and told:
        jobs.end(core, run, "finish", notfinite.at_the_end(job))
    elif told and job.checkpoint and job.checkpoint_counters.step >= job.spec.train.steps:
        inputs.note_checks(core, run)  # who was to say it may have died since the others did
        if inputs.is_checked(job):
            jobs.end(core, run, "finish", notfinite.at_the_end(job))
        else:
            reading.leaves_unchecked(core, run, job.kept[-1] if job.kept else None)
    elif room.rewrites(core, run):
        recovery.ask_anew(core, run, "the last checkpoint is to be written anew")


def _go_on(core: Core, run: Run) -> None:
    """Run the layout in force from this boundary."""
    precopy.forget(core, run)
    if run.job.state in {"waiting", "planning"}:
        if run.job.state == "waiting":
            core.move(run.job, "feed")
        core.move(run.job, "planned")
    if run.job.state in {"deploying", "recovering"}:
        core.move(run.job, "deployed")
    incidents.enter(core, run, "resume")
    deploy.resume(core, run, run.job.survivors())
    _while_running(core, run)


def _change_plan(core: Core, run: Run) -> None:
    job = run.job
    nodes = core.candidates(job)
    if len(nodes) < run.n0:
        if job.settled and not job.unsettled and not _leaving(core, run):
            _go_on(core, run)  # redundant holders compute for those who are missing
        else:
            _starve(core, run, nodes)
        return
    asked = situation(core, run)
    if _alike(asked, run.refused) and _at_hand(run, asked) is None:
        if not job.unsettled:
            run.satisfied = nodes
            _go_on(core, run)
        return
    if job.state == "waiting":
        core.move(job, "feed")
    found = _proposal(core, run, asked)
    if found is None:
        return
    if _changes_nothing(run, found[1]):
        _stay(core, run, *found)
        _go_on(core, run)
    elif _rolls_back(run):
        _by_checkpoint(core, run)
    elif not _mending(core, found[1]):
        deploy.deploy(core, run, *found)


def _rolls_back(run: Run) -> bool:
    """Whether a new plan loads a checkpoint instead of copying from those who hold the state."""
    return run.job.spec.fault_tolerance.policy in ROLLING_BACK


def _by_checkpoint(core: Core, run: Run) -> None:
    """All drop what they hold once it is in a checkpoint, and the plan for the present nodes loads that: no
    step is lost.
    """
    job = run.job
    if checkpoints.saving(run):
        return  # asked again when it is complete
    # A morph in order goes by a checkpoint of its own, written while all hold: no step is lost, and there
    # is one way to load state under this policy. (D-policies-005)
    if not checkpoints.saved(job):
        _go_on(core, run)  # one step more, whose votes bear hold and checkpoint
        return
    _let_go(core, run)
    resharding.look(core, run)
    if job.state == "running":
        core.move(job, "replan")
    _before_deployment(core, run)


def _let_go(core: Core, run: Run) -> None:
    """Have all devices drop the job: its state is in its checkpoint."""
    jobs.release(core, run)
    core.record(Released(run.job.id, run.job.checkpoint, core.now))
    run.forget("off")


def _starve(core: Core, run: Run, nodes: tuple[str, ...]) -> None:
    """Too few nodes are left: wait, with the state where it is safest."""
    job = run.job
    saved = checkpoints.saved(job)
    if checkpoints.saving(run):
        return  # the state of this boundary is about to be on disk: asked again then
    if _leaving(core, run) and not saved and not job.unsettled:
        _go_on(core, run)  # one step more, whose votes bear hold and checkpoint
        return
    if saved:
        _let_go(core, run)
    _wait(core, run, nodes)


def _changes_nothing(run: Run, proposal: Proposal) -> bool:
    """Whether ``proposal`` is the plan in force (nodes came that it has no use for), or that without the dead
    whom detours take care of. Devices on detours do whatever is ready: orders for them are something new,
    which all are to begin with at the same boundary, as one that keeps to an order and one that does not
    could wait for each other.
    """
    job, plan = run.job, run.job.plan
    if (
        run.resharding is not None
        or job.unsettled
        or plan is None
        or job.layout is None
        or (job.settled and proposal.ops)
    ):
        return False
    held = {device: job.layout.holdings[device] for device in job.survivors()}
    wanted = Lanes.laid_out(job.layout).holdings(proposal.plan)
    return plan.pipelines == proposal.plan.pipelines and wanted == held


# ---------------------------------------------------------------------- plans


def situation(core: Core, run: Run) -> Situation:
    """The moment, as the policy is asked about it."""
    job = run.job
    holdings = job.layout.holdings if job.layout is not None else {}
    pipelines = job.plan.pipelines if job.plan is not None else ()
    nodes = core.candidates(job)
    return Situation(
        nodes,
        {device: holdings[device] for device in job.survivors()},
        tuple(pipeline.nodes for pipeline in pipelines),
        _zones(core, nodes),
        failures.horizon_steps(core.state, job, core.now),
        failures.redo_s(job),
        resharding.held_per_stage(run),
    )


def _zones(core: Core, nodes: Iterable[str]) -> dict[str, str]:
    """The zones of those of ``nodes`` that have one."""
    members = core.members.nodes
    return {name: members[name].zone for name in nodes if name in members and members[name].zone}


def _proposal(core: Core, run: Run, wanted: Situation) -> tuple[Situation, Proposal] | None:
    """The answer of the policy, asking for it if need be.

    A plan for fewer nodes than there are by now is still good: the others get theirs afterwards, unless the
    interrupted step leaves time for a plan with all of them.
    """
    found = _at_hand(run, wanted)
    # A node whose device died is back after a tenth of a second, long before the others are at the
    # boundary: without it one step was trained on fewer, and the plan changed twice. Only then, as nodes that
    # trickle in could put off a change for ever. (D-recovery-025)
    if found is None or (found[0].nodes != wanted.nodes and run.job.unsettled and not run.all_held()):
        _ask(core, run, wanted)
    return found


def _at_hand(run: Run, wanted: Situation) -> tuple[Situation, Proposal] | None:
    """A plan that is here, for the nodes of ``wanted`` or for fewer of them."""
    if run.proposal is None:
        return None
    asked, _ = run.proposal
    serves = _holds_alike(asked, wanted) and set(asked.nodes) <= set(wanted.nodes)
    return run.proposal if serves else None


def _holds_alike(one: Situation, other: Situation) -> bool:
    """Whether a plan for the nodes of ``one`` can be that for those of ``other``."""
    return (one.holdings, one.held_per_stage) == (other.holdings, other.held_per_stage)


def _ask(core: Core, run: Run, wanted: Situation) -> None:
    """Ask the policy, unless that is under way, or has been refused."""
    job = run.job
    assert job.setup is not None
    if run.asked is not None and _is_first(run, run.asked.situation, wanted):
        return
    if not _alike(wanted, run.refused):
        setup = job.setup if run.resharding is None else run.resharding.setup
        ticket = core.ask_plan(job.spec.fault_tolerance.policy, setup, wanted)
        run.asked = PlannerRequest(ticket, setup, wanted)


def _is_first(run: Run, asked: Situation | None, wanted: Situation) -> bool:
    """Whether the answer about ``asked`` is waited for before anything is asked about ``wanted``: it is the
    same, or while a loss is open about fewer of its nodes, and so a plan in any case.
    """
    if asked is None or _alike(asked, wanted):
        return asked is not None
    return run.job.unsettled and _holds_alike(asked, wanted) and set(asked.nodes) < set(wanted.nodes)


def _alike(one: Situation, other: Situation | None) -> bool:
    """Whether they differ at most in what they are weighed by, which changes with every few steps: a planner
    that takes longer than that would never be heard to the end.
    """
    if other is None:
        return False
    return one == msgspec.structs.replace(other, horizon_steps=one.horizon_steps, redo_s=one.redo_s)


def on_planned(core: Core, event: Planned) -> None:
    """The planner's answer; one to an older question is dropped."""
    run = core.run
    if run is None or resharding.answered(run, event):
        return
    if run.asked is None or run.asked.ticket != event.ticket:
        return
    asked, run.asked = run.asked, None
    if asked.situation is None:
        if event.error:
            jobs.fail(core, run.job, event.error, event.hint, "no-plan")
        else:
            jobs.on_templates(core, run, event.setup or asked.setup, event.templates)
    elif event.proposal is not None:
        run.proposal = (asked.situation, event.proposal)
    else:
        _refused(core, run, asked.situation, event)


def _refused(core: Core, run: Run, asked: Situation, event: Planned) -> None:
    """No plan for this situation: wait for another one if there is no plan in force."""
    run.refused, run.weighed_steps = asked, asked.horizon_steps
    if asked.held_per_stage:
        run.resharding = None  # its stages stay as they are
    if _at_hand(run, asked) is not None:
        return  # that for fewer nodes
    if run.job.settled and not run.job.unsettled:
        run.satisfied = asked.nodes  # the detours stay
    if run.job.state == "waiting":
        return
    reason = f"{event.error} ({event.hint})" if event.hint else event.error
    if run.phase == "off" or (run.job.unsettled and run.all_held()):
        core.move(run.job, "starve", reason, "no-plan")
    else:
        text = f"{run.job.id}: no new plan: {reason}"
        core.announce(text, PlanRefused(run.job.id, reason), (f"job:{run.job.id}",), level="warn")

"""Stages of another number of devices, where the job leaves that open and other nodes are there than it was
chosen for (docs/mechanisms/shared-stages.md).

Owns when the planner is asked, once for each set of nodes, and what becomes of its answer. Which number is
the best is the planner's word; the way there is a deployment at a boundary like any other.
"""

from __future__ import annotations

from oobleckd.core import jobs
from oobleckd.core.context import Core
from oobleckd.core.entries import TemplatesMade
from oobleckd.core.events import Planned
from oobleckd.core.run import Candidate, Resharding, Run, StageSizeQuestion


def look(core: Core, run: Run) -> None:
    """Ask for the nodes that there are, unless somebody did; give up an answer for others."""
    job = run.job
    if job.setup is None or job.spec.resources.devices_per_stage != "auto":
        return
    nodes = core.candidates(job)
    if run.resharding is not None and (run.resharding.nodes != nodes or job.ending):
        run.resharding = None
    if run.resharding is not None and run.phase == "off":
        _take(core, run, run.resharding)  # its state is in a checkpoint
    # A job that recovers has better things to do, unless it waits for nodes: then this may be what helps.
    # (D-planner-021)
    waits = run.all_held() and len(nodes) < job.n0
    if not nodes or nodes == run.sized or run.sizing or job.ending or (job.unsettled and not waits):
        return
    if core.now < core.joined_at + core.config.batch_s:
        return
    run.sized = nodes
    if others := jobs.other_setups(core, run):
        policy = job.spec.fault_tolerance.policy
        ticket = core.ask_plan(policy, job.setup, others=others, num_nodes=len(nodes))
        run.sizing = StageSizeQuestion(ticket, nodes)


def answered(run: Run, event: Planned) -> bool:
    """Whether ``event`` is the answer to what ``look`` asked. A better number than the job's is wanted from
    now on.
    """
    asked, job = run.sizing, run.job
    if asked is None or asked.ticket != event.ticket:
        return False
    run.sizing = None
    if event.setup is not None and job.setup is not None and not event.error:
        number = event.setup.profile.devices_per_stage
        if number != job.setup.profile.devices_per_stage:
            run.resharding = Resharding(asked.nodes, event.setup, event.templates)
    return True


def held_per_stage(run: Run) -> int:
    """How many devices hold a stage now, where the next plan is to have another number; else 0."""
    layout = run.job.layout
    return layout.devices_per_stage if run.resharding is not None and layout is not None else 0


def made(run: Run, candidate: Candidate) -> TemplatesMade | None:
    """What the job is planned with from now on, as ``candidate`` comes into force: None where that stays."""
    found = candidate.resharding
    if found is None:
        return None
    run.resharding, run.asked = None, None
    return TemplatesMade(run.job.id, found.setup, found.templates)


def _take(core: Core, run: Run, found: Resharding) -> None:
    """No device has anything of the job: from now on it is planned so."""
    run.resharding, run.asked, run.proposal, run.refused = None, None, None, None
    jobs.on_templates(core, run, found.setup, found.templates)

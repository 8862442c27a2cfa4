"""Opening, feeding and closing incidents of the active job. Owns the journal entries; times are in
``incident``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from oobleckd.core.context import Core
from oobleckd.core.entries import IncidentClosed, IncidentOpened
from oobleckd.core.incident import Incident, rejected_views
from oobleckd.core.run import Run
from oobleckd.planner.policy import Proposal
from oobleckd.protocol.changes import IncidentBegan, IncidentOver, PlanChosen
from oobleckd.protocol.incidentviews import LossView, Phase, ReasonView
from oobleckd.words import count, seconds


def loss(
    core: Core,
    run: Run,
    nodes: Sequence[str],
    cause: str,
    evidence_at: float,
    epoch: int,
    losses: tuple[LossView, ...] = (),
) -> None:
    """``nodes`` are lost, of what ``cause`` says to people and ``losses`` to programs: a new incident, or
    more of the open one.
    """
    job, incident = run.job, run.incident
    if incident is None:
        layers = len(job.setup.profile.layers) if job.setup else 0
        incident = run.incident = Incident(
            f"inc-{core.state.num_incidents + 1}",
            job.id,
            cause,
            tuple(nodes),
            min(evidence_at, core.now),
            epoch,
            job.counters.step + 1,
            job.counters.round,
            layers * job.spec.batch_sizes.micro_batches(job.counters.step),
            [("detect", min(evidence_at, core.now))],
            losses=losses,
        )
        core.record(IncidentOpened(incident.view(core.now)))
    else:
        incident.nodes = (*incident.nodes, *(node for node in nodes if node not in incident.nodes))
        incident.cause = f"{incident.cause}; {cause}"
        incident.losses += losses
        incident.epoch = epoch
        incident.decided, incident.last_round = False, -1
        incident.enter("detect", core.now)
    story = (f"job:{job.id}", f"incident:{incident.id}", *(f"node:{node}" for node in nodes))
    began = IncidentBegan(incident.id, tuple(nodes), epoch, cause)
    core.announce(f"{incident.id}: {cause}", began, story, level="warn")


def enter(core: Core, run: Run, phase: Phase) -> None:
    """The open incident, if any, enters ``phase``."""
    if run.incident is not None:
        run.incident.enter(phase, core.now)


def explain(core: Core, run: Run, proposal: Proposal) -> None:
    """Say which plan follows, why, and what it was preferred to."""
    incident = run.incident
    story = [f"job:{run.job.id}"]
    if incident is not None:
        back = incident.parts.back if incident.steps_lost else ""
        incident.parts = ReasonView(
            back,
            proposal.reason,
            rollback=incident.parts.rollback,
            way=proposal.way,
            actions=proposal.actions,
        )
        incident.cost_s = proposal.cost_s
        incident.rejected = rejected_views(proposal)
        story.append(f"incident:{incident.id}")
    core.announce(f"{run.job.id}: {proposal.reason}", _chosen(run, proposal), story)


def stays(
    core: Core, run: Run, proposal: Proposal, occasion: str, came: tuple[str, ...], went: tuple[str, ...]
) -> None:
    """Say why the plan in force stays upon ``occasion``, which is that nodes ``came`` or ``went``, and what
    would have been the best in its stead: no incident tells.
    """
    story = [f"job:{run.job.id}", *(f"node:{node}" for node in (*came, *went))]
    best = f"; not {other.what}: {other.why}" if (other := next(iter(proposal.rejected), None)) else ""
    said = msgspec.structs.replace(_chosen(run, proposal), stays=True, came=came, went=went)
    core.announce(f"{run.job.id}: {occasion}{proposal.reason}{best}", said, story)


def _chosen(run: Run, proposal: Proposal) -> PlanChosen:
    return PlanChosen(
        run.job.id,
        proposal.cost_s,
        rejected_views(proposal),
        proposal.reason,
        way=proposal.way,
        actions=proposal.actions,
        precopy_s=max(0.0, proposal.precopy_s),
    )


def committed(core: Core, run: Run) -> None:
    """Take in a committed step: the interrupted one after the decision, or the first of the new layout."""
    incident = run.incident
    if incident is None:
        return
    if incident.decided and not incident.committed_s:
        incident.committed_s = core.now - incident.at
    mended = run.decision is None or run.job.counters.round > run.decision.round
    if incident.phase == "resume" and run.phase == "run" and mended and _answered(core, run):
        incident.last_round = run.job.counters.round - 1


def told(core: Core, run: Run) -> None:
    """Take in that a device told of a round: the incident is over when all have told of its last one, and of
    its cost.
    """
    incident = run.incident
    if incident is None or incident.last_round < 0 or run.phase != "run" or run.job.unsettled:
        return
    if all(run.told.get(device, -1) >= incident.last_round for device in run.job.survivors()):
        close(core, run)


def _answered(core: Core, run: Run) -> bool:
    """Whether nothing more is to come: no dead is left to be taken care of, and where detours do that the
    policy has said that nothing is to be moved, or cannot be asked.
    """
    job = run.job
    if job.unsettled:
        return False
    # Otherwise a standby that takes the place milliseconds later would not be in the incident's time.
    # (D-recovery-010)
    return not job.settled or run.satisfied == core.candidates(job) or len(core.candidates(job)) < job.n0


def close(core: Core, run: Run) -> None:
    """Close the incident: the recovery is over."""
    incident = run.incident
    assert incident is not None
    run.incident = None
    view = incident.view(core.now, still_open=False)
    core.record(IncidentClosed(view))
    story = (f"job:{view.job}", f"incident:{view.id}", *(f"node:{node}" for node in view.nodes))
    lost = f", {count(view.steps_lost, 'step')} lost" if view.steps_lost else ""
    core.announce(
        f"{view.id}: recovered in {seconds(view.total_s)}{lost}", IncidentOver(view.id, view), story
    )

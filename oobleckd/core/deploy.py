"""A new layout at a boundary: sent, copied, journaled, adopted (docs/recovery.md, "A new plan").

Owns what leads from a proposal to ``Resume``. A failure on the way is ``recovery``'s.
"""

from __future__ import annotations

import msgspec

from oobleckd.core import alike, corruption, incidents, precopy, resharding, samples
from oobleckd.core.context import Core
from oobleckd.core.entries import EpochRaised, FolderNoted, LayoutDeployed
from oobleckd.core.incident import precopied_words
from oobleckd.core.run import Candidate, Run
from oobleckd.core.state import JobRecord
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.policy import Proposal, Situation
from oobleckd.planner.reroute.reroute import layout_of
from oobleckd.protocol.changes import ModelSaid, PlanDeployed
from oobleckd.protocol.messages import Deploy, Ready, Resume
from oobleckd.protocol.modelnotes import words


def deploy(core: Core, run: Run, situation: Situation, proposal: Proposal) -> None:
    """Send ``proposal`` to every device of the new layout and of the one before it."""
    job, anew = run.job, run.resharding
    setup = job.setup if anew is None else anew.setup
    assert setup is not None
    epoch = core.next_epoch()
    core.record(EpochRaised(job.id, epoch, job.dead, "a new plan", core.now))
    incidents.explain(core, run, proposal)
    incidents.enter(core, run, "copy")
    planned = layout_of(proposal.plan, epoch, len(setup.profile.layers))
    layout = Lanes.of(setup).layout(planned)
    devices = sorted(set(layout.holdings) | set(job.survivors()))
    source = "copy" if job.layout is not None else job.source
    spec, peers = core.compared(core.spec_of(job), layout.holdings), core.peers(devices)
    found = run.pre_copy
    precopied = found.number if found is not None and found.transfers == proposal.transfers else 0
    precopy.forget(core, run, besides=devices)
    secret = core.secret(epoch)
    sample_every = samples.every(job, proposal.plan.step_s, len(layout.holdings))
    recheck = corruption.to_recheck(job)
    deploys = {
        device: Deploy(
            device=device,
            epoch=epoch,
            job=job.id,
            spec=spec,
            layout=layout,
            counters=job.counters,
            source=source,
            transfers=proposal.transfers,
            peers=peers,
            ops=proposal.ops.get(device, ""),
            secret=secret,
            precopied=precopied,
            sample_every=sample_every,
            recheck=recheck,
            folder=job.folder,
            journal=core.config.journal,
            only_evaluates=job.only_evaluates,
            held_per_stage=situation.held_per_stage,
        )
        for device in devices
    }
    incarnations = {
        device: info.incarnation for device in devices if (info := core.members.device(device)) is not None
    }
    run.candidate = Candidate(
        epoch, layout, proposal.plan, situation.nodes, incarnations, deploys, resharding=anew
    )
    run.phase, run.weighed_steps = "deploy", situation.horizon_steps
    run.proposal = None
    if job.state != "deploying":
        core.move(job, "replan" if job.state == "running" else "planned")
    for device in devices:
        core.tell(device, deploys[device])


def on_ready(core: Core, message: Ready) -> None:
    """Note that a device has all it needs for the new layout; with the last of them it comes into force."""
    run = core.run
    if run is None or run.candidate is None or message.epoch != run.candidate.epoch:
        return
    candidate = run.candidate
    if message.device not in candidate.deploys:
        return
    core.members.emptied(message.device)
    candidate.ready[message.device] = message
    if candidate.ready.keys() == candidate.deploys.keys():
        _say_of_folder(core, run.job, candidate)
        _adopt(core, run, candidate)


def _say_of_folder(core: Core, job: JobRecord, candidate: Candidate) -> None:
    """What of it nothing uses, and what it lacks: once for a job, whoever says it."""
    notes = next((ready.notes for ready in candidate.ready.values() if ready.notes), ())
    if not notes or notes == job.notes or job.origin != "init":
        return  # a job that was resumed takes nothing of it
    core.record(FolderNoted(job.id, notes))
    for note in notes:
        text = f"{job.id}: {job.spec.model.checkpoint}: {words(note)}"
        story = (f"job:{job.id}",)
        said = ModelSaid(job.id, note.kind, note.count, note.names)
        core.announce(text, said, story, level="warn")


def _adopt(core: Core, run: Run, candidate: Candidate) -> None:
    job = run.job
    copied = sum(ready.copied_bytes for ready in candidate.ready.values())
    staged = sum(ready.staged_bytes for ready in candidate.ready.values())
    incarnations = {device: candidate.incarnations[device] for device in candidate.layout.holdings}
    core.record(
        LayoutDeployed(
            job.id,
            candidate.layout,
            candidate.plan,
            job.counters,
            incarnations,
            candidate.offered,
            core.now,
            resharding.made(run, candidate),
        )
    )
    if run.incident is not None:
        run.incident.copied_bytes += copied
        for copy in next(iter(candidate.deploys.values())).transfers:  # all are told of all
            # A device says how much it got and not from whom; who sent is by the plan, or a resend would be
            # counted twice. (D-watching-010)
            run.incident.sent_bytes[copy.source] += copy.num_bytes
        parts = run.incident.parts
        run.incident.parts = msgspec.structs.replace(parts, staged_bytes=parts.staged_bytes + staged)
    alike.deployed(core, run)
    run.satisfied = None
    run.stumbled.clear()
    incidents.enter(core, run, "resume")
    core.move(job, "deployed")
    pipelines = tuple(pipeline.nodes for pipeline in candidate.plan.pipelines)
    names = ", ".join("+".join(nodes) for nodes in pipelines)
    text = f"{job.id}: generation {candidate.epoch}, {names}{precopied_words(staged)}"
    core.announce(text, PlanDeployed(job.id, candidate.epoch, pipelines, copied, staged), (f"job:{job.id}",))
    resume(core, run, tuple(candidate.deploys))


def resume(core: Core, run: Run, devices: tuple[str, ...]) -> None:
    """Let ``devices`` run the layout in force from its boundary."""
    job = run.job
    assert job.layout is not None
    run.forget("run")
    run.resumed_round = job.counters.round
    for device in devices:
        resume_again(core, run, device)


def resume_again(core: Core, run: Run, device: str) -> None:
    """Tell one of them, which may have missed it. Who has not, and holds again by now, heeds the round
    (``Resume.round``).
    """
    job = run.job
    assert job.layout is not None
    core.tell(device, Resume(device, job.epoch, job.layout.epoch, run.resumed_round))

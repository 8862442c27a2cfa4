"""The machine as people see it: pure views over ``Core``, in the structs of the API."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from oobleckd.core import alike, cards, deaths, evaluations, nodecauses, preparing, room
from oobleckd.core.cadence import cadence
from oobleckd.core.context import Core
from oobleckd.core.entries import Noted, noted
from oobleckd.core.evaluations import EvalResult
from oobleckd.core.membership import Node
from oobleckd.core.nodecauses import Use
from oobleckd.core.pipelineviews import pipelines_of
from oobleckd.core.progress import newest_batch, progress_of, time_left_s
from oobleckd.core.state import Expected, JobRecord, Step
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.plan import Layers, node_of
from oobleckd.planner.policy import ROLLING_BACK
from oobleckd.protocol.api import LostRecords, Status
from oobleckd.protocol.changes import Change
from oobleckd.protocol.evalviews import BestLoss, EvalSummary, EvaluationView, SourceLoss
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import (
    DeathView,
    JobView,
    KeptView,
    PipelineView,
    RouterView,
    StepView,
    TemplateView,
)
from oobleckd.protocol.nodeviews import LayerRange, NodeState, NodeView
from oobleckd.protocol.parts import RouterMeans, Spare
from oobleckd.words import count, seconds, silence

_SAID_S = 7 * 86400.0


def in_layout(core: Core, name: str) -> bool:
    """Whether a live incarnation of the node holds layers of the active job."""
    return core.run is not None and name in core.run.job.surviving_nodes()


# ---------------------------------------------------------------------- nodes


def node_state(core: Core, node: Node, *, inside: bool) -> NodeState:
    """The one word for a node. ``inside``: a live incarnation of it holds layers of the active job."""
    if node.left:
        return "left"
    if not node.alive:
        return "lost"
    if not is_here(core, node):
        return "disconnected"
    if node.notice or node.name in core.state.drained:
        return "draining" if inside else "drained"
    if inside:
        return "active"
    return "standby" if node.ready else "joining"


def is_here(core: Core, node: Node) -> bool:
    """Whether it is connected, and heard of lately. One that is not may be back until its lease is over."""
    return node.alive and node.connected and not core.members.silent_s(node, core.now)


def node_views(core: Core) -> list[NodeView]:
    """Every node, in name order; after a restart also those that should be here and have not said
    Hello yet.
    """
    return list(map(node_viewer(core), node_names(core)))


def node_names(core: Core) -> list[str]:
    """Those that have a view, in order."""
    inside = core.run.job.surviving_nodes() if core.run is not None else frozenset()
    here = {name for name, node in core.members.nodes.items() if not node.forgotten}
    missing = (inside | core.state.nodes.keys()) - core.members.nodes.keys()
    return sorted(here | missing)


def node_viewer(core: Core) -> Callable[[str], NodeView]:
    """What makes the view of a node by its name: what all nodes share is looked up once."""
    inside = core.run.job.surviving_nodes() if core.run is not None else frozenset()
    held, use, planned = _by_node(core), nodecauses.use(core), cards.planned(core)

    def made(name: str) -> NodeView:
        node = core.members.nodes.get(name)
        if node is None:
            return _missing_view(core, name, inside=name in inside)
        seen = _node_view(core, node, held.get(name), use, inside=name in inside)
        figures = cards.figures_of(core, node, planned)
        return msgspec.structs.replace(seen, figures=figures) if figures else seen

    return made


def _missing_view(core: Core, name: str, *, inside: bool) -> NodeView:
    """A node that has not said Hello in this incarnation of the daemon. It may yet, for a while after the
    restart, and as long as its place is kept.
    """
    known = core.state.nodes.get(name, Expected("", "", core.now))
    waiting = inside or (not known.lost and core.now < core.started_at + core.config.grace_s)
    why = nodecauses.why_missing(known, waiting=waiting)
    return NodeView(
        name=name,
        state="disconnected" if waiting else "lost",
        incarnation="",
        host=known.host,
        devices=(),
        kinds=(),
        pids=(),
        heartbeat_age_s=max(0.0, core.now - known.at) if known.lost else 0.0,
        layers=(),
        reason=why.reason,
        zone=known.zone,
        cause=why.cause,
    )


def num_lost(core: Core) -> int:
    """How many nodes should be here and are not, of which nobody waits for a sign of life any more."""
    members, inside = core.members.nodes, frozenset[str]()
    if core.run is not None:
        inside = core.run.job.surviving_nodes()
    gone = (name for name in core.state.nodes if name not in members or not members[name].alive)
    return sum(
        name in members or _missing_view(core, name, inside=name in inside).state == "lost" for name in gone
    )


class _Held(NamedTuple):
    """What live devices of a node have: all, and what of it is for others."""

    layers: list[LayerRange]
    redundant: list[LayerRange]


def _by_node(core: Core) -> dict[str, _Held]:
    """Node -> what its live devices hold of the active job: gathered once, as there may be
    thousands of both.
    """
    job = core.run.job if core.run is not None else None
    found: dict[str, _Held] = {}
    if job is None or job.layout is None:
        return found
    for device in job.survivors():
        held = found.setdefault(node_of(device), _Held([], []))
        held.layers.extend(_ranges(device, job.layout.holdings[device]))
        held.redundant.extend(_ranges(device, job.layout.redundant.get(device, Layers())))
    return found


def _ranges(device: str, held: Layers) -> Iterator[LayerRange]:
    return (LayerRange(device, part.start, part.stop) for part in held.ranges)


def _node_view(core: Core, node: Node, held: _Held | None, use: Use, *, inside: bool) -> NodeView:
    state = node_state(core, node, inside=inside)
    layers: tuple[LayerRange, ...] = ()
    redundant: tuple[LayerRange, ...] = ()
    if held is not None and state in {"active", "draining", "disconnected"}:
        redundant = tuple(held.redundant)
        layers = tuple(each for each in held.layers if each not in redundant)
    spare, why = node.spare or Spare(0), nodecauses.why(core, node, state, use)
    return NodeView(
        name=node.name,
        state=state,
        incarnation=node.incarnation,
        host=node.host,
        devices=tuple(d.device for d in node.devices),
        kinds=tuple(d.kind for d in node.devices),
        pids=tuple(d.pid for d in node.devices),
        heartbeat_age_s=max(0.0, core.now - node.heard_at),
        layers=layers,
        reason=why.reason or preparing.words_of(core, node.name),
        spare="ready" if spare.ready else "starting" if spare.pid else "",
        spare_pid=spare.pid,
        spare_bytes=spare.memory_bytes,
        redundant=redundant,
        zone=node.zone,
        bits=tuple(d.decides_bits for d in node.devices),
        traits=tuple(d.all_traits for d in node.devices),
        kept_out="data-changed" if core.run is not None and node.name in core.run.kept_out else "",
        lease_s=node.lease.length_s,
        cause=why.cause,
    )


# ---------------------------------------------------------------------- jobs


def job_views(core: Core) -> list[JobView]:
    """Every job, in order of submission."""
    return [job_view(core, job) for job in core.state.shown]


def job_view(core: Core, job: JobRecord) -> JobView:
    """One job."""
    step_s = statistics.median(job.step_s) if job.step_s else 0.0
    last = job.steps[-1] if job.steps else None
    run = core.run if core.run is not None and core.run.job is job else None
    at_data = preparing.view(run) if run else None
    evaluation = _evaluation(job) if job.spec.eval.wanted else None
    return JobView(
        id=job.id,
        name=job.spec.name,
        state=job.state,
        reason=job.reason or preparing.words(at_data),
        step=job.counters.step,
        steps=job.spec.train.steps,
        epoch=job.epoch,
        loss=last.loss if last else None,
        tolerance=node_tolerance(job),
        f=job.spec.fault_tolerance.f,
        policy=job.spec.fault_tolerance.policy,
        nodes=tuple(sorted(job.surviving_nodes())) if not job.final else (),
        pipelines=tuple(pipeline_views(job)) if not job.final else (),
        samples_per_s=newest_batch(job) / step_s if step_s else 0.0,
        step_s=step_s,
        submitted_at=job.submitted_at,
        finished_at=job.finished_at,
        incidents=job.num_incidents,
        steps_lost=job.steps_lost,
        checkpoint=job.checkpoint,
        digest=job.digest(),
        spec=job.spec,
        updates_early=run.updates_early if run else 0,
        updates_taken_back=run.updates_taken_back if run else 0,
        boundary_bytes=_boundary_bytes(job),
        sum_copies=job.spec.schedule.sum_copies,
        cadence=cadence(job) if not job.final else None,
        checkpoint_step=job.checkpoint_counters.step,
        cause=job.cause,
        notes=job.notes,
        steps_skipped=job.counters.skipped,
        skipped_in_row=job.counters.skipped_in_row,
        steps_spiked=job.counters.spiked,
        kept=kept(job),
        kinds=tuple(job.kinds),
        differences=alike.of_job(core, job),
        deaths=tuple(
            DeathView(each.device, each.step + 1, each.at, deaths.words(each), each.death, each.planned_bytes)
            for each in job.deaths
        ),
        checkpoint_trouble=room.view(run) if run else None,
        inputs=job.inputs,
        start_step=job.start.step,
        checked_step=next((kept.counters.step for kept in reversed(job.kept) if kept.checked), 0),
        preparing=at_data,
        evaluation=evaluation,
        progress=progress_of(core, job, step_s, evaluation),
        routers=router_views(core, job, tokens=False),
        devices_per_stage=job.layout.devices_per_stage if job.layout is not None else 0,
    )


def _evaluation(job: JobRecord) -> EvalSummary:
    """How evaluating goes."""
    rounds, found, book = job.spec.eval_rounds, job.evaluations, job.book
    planned_s = share = 0.0
    if job.plan is not None and job.setup is not None and not job.final:
        planned_s = evaluations.planned_s(rounds, job.plan, job.setup.profile)
        share = evaluations.planned_share(rounds, planned_s, job.plan.step_s)
    return EvalSummary(
        last=evaluation_view(found.results[-1]) if found.results else None,
        best=tuple(
            BestLoss(source, least[-1].step, least[-1].loss) for source, least in found.least.items() if least
        ),
        next_step=rounds.next_due(job.counters) if not job.final else -1,
        rounds_done=job.counters.evaluated if rounds.evaluates(job.counters) else 0,
        rounds=rounds.num_rounds,
        planned_s=planned_s,
        planned_share=share,
        measured_share=book.evaluated_s / book.total_s if book.total_s else 0.0,
    )


def _boundary_bytes(job: JobRecord) -> int:
    if job.setup is None:
        return 0
    return job.setup.profile.kept_bytes(job.spec.num_micro_batches, job.spec.schedule.boundary_bytes)


def node_tolerance(job: JobRecord) -> int:
    """How many nodes may be lost at once without a rollback to a checkpoint (-1: not deployed): as many as
    leave a copy of every layer, and none where the policy rolls back at every loss.
    """
    if job.layout is None or job.final:
        return -1
    if job.spec.fault_tolerance.policy in ROLLING_BACK:
        return 0
    return job.fewest_holders() - 1


def pipeline_views(job: JobRecord) -> list[PipelineView]:
    """The pipelines of the plan in force; places of the dead are vacant."""
    if job.plan is None or job.setup is None:
        return []
    return list(pipelines_of(job.plan, Lanes.of(job.setup), job.dead))


def template_views(job: JobRecord) -> list[TemplateView]:
    """The templates made for the job, and how often each one is used now."""
    used = Counter(len(pipeline.nodes) for pipeline in job.plan.pipelines) if job.plan else Counter[int]()
    return [
        TemplateView(
            template.num_nodes,
            tuple((stage.layers.start, stage.layers.stop) for stage in template.stages),
            template.fill_s,
            template.period_s,
            tuple(stage.memory_bytes for stage in template.stages),
            used[template.num_nodes],
            template.chunks,
            tuple(modes) if set(modes := [stage.recompute for stage in template.stages]) != {"none"} else (),
        )
        for template in job.templates
    ]


def kept(job: JobRecord) -> tuple[KeptView, ...]:
    """The complete checkpoints of a job that are on the disk, as far as the journal knows, oldest first."""
    newest = job.kept[-job.spec.checkpoint.keep :]
    checked = [each for each in job.kept if each.checked][-1:]
    return tuple(
        KeptView(each.counters.step, each.directory)
        for each in job.kept
        if each in newest or each in checked or each.directory == job.checkpoint
    )


def step_view(s: Step) -> StepView:
    """One committed step."""
    return StepView(
        s.step + 1,
        s.loss,
        s.loss.hex(),
        s.grad_norm,
        s.lr,
        s.samples,
        s.ledger,
        s.outcome,
        s.epoch,
        s.at,
        s.step_s,
        s.cause,
        *_of_routers(s.routers),
    )


def _of_routers(found: RouterMeans | None) -> tuple[float | None, float | None, float | None]:
    if found is None:
        return None, None, None
    return _finite(found.aux_loss), _finite(found.z_loss), found.load


def router_views(core: Core, job: JobRecord, *, tokens: bool) -> tuple[RouterView, ...]:
    """By layer what its router came to; with the ``tokens`` of each expert."""
    found = core.routers.of(job.id)
    if found is None:
        return ()
    return tuple(
        RouterView(
            layer,
            found.step + 1,
            _finite(each.aux_loss),
            _finite(each.z_loss),
            each.load,
            each.idle,
            found.tokens.get(layer, ()) if tokens else (),
        )
        for layer, each in found.figures.items()
    )


def evaluation_view(found: EvalResult) -> EvaluationView:
    """One evaluation."""
    losses = tuple(
        SourceLoss(each.source, _finite(each.loss), each.loss.hex(), _finite(each.perplexity), each.targets)
        for each in found.sums
    )
    mean = _finite(evaluations.mean_loss(found.sums))
    return EvaluationView(
        step=found.step, loss=mean, losses=losses, epoch=found.epoch, at=found.at, seconds=found.seconds
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---------------------------------------------------------------------- the rest


def incident_views(core: Core) -> list[IncidentView]:
    """Every incident in order; the open one as it stands now."""
    views = dict(core.state.incidents)
    if core.run is not None and core.run.incident is not None:
        views[core.run.incident.id] = core.run.incident.view(core.now)
    return list(views.values())


def story(core: Core, key: str) -> list[Noted]:
    """The changes that concern ``key`` (``node:n3``, ``incident:inc-2``, ``job:…``), oldest first, as they
    are kept.
    """
    return [entry for entry in core.state.history if key in entry.story]


def changes(core: Core) -> list[Change]:
    """The newest changes that were announced, but for steps, oldest first."""
    return list(map(noted, core.state.history))


def status(core: Core) -> Status:
    """The headline."""
    config = core.config
    return Status(
        version=config.version,
        daemon=config.daemon,
        state_dir=config.state_dir,
        up_s=core.now - core.started_at,
        nodes=sum(is_here(core, node) for node in core.members.nodes.values()),
        jobs=sum(not job.final for job in core.state.jobs.values()),
        line=_line(core),
        endpoint=config.endpoint,
        allow_injection=config.allow_injection,
        expected=len(core.state.nodes),
        lost=num_lost(core),
        lost_records=lost_records(core),
    )


def lost_records(core: Core) -> tuple[LostRecords, ...]:
    """What the journal lost in the last days: long enough that people see it, and not for ever."""
    return tuple(each for each in core.state.lost_records if core.now - each.at < _SAID_S)


def _line(core: Core) -> str:
    alive = [node for node in core.members.nodes.values() if node.alive]
    silent_s = [max(0.0, core.now - node.heard_at) for node in alive if not is_here(core, node)]
    here, lost, expected = len(alive) - len(silent_s), num_lost(core), len(core.state.nodes)
    nodes = f"{here} of {count(expected, 'node')}" if here < expected else count(here, "node")
    nodes += f", {silence(len(silent_s), max(silent_s))}" if silent_s else ""
    nodes += f", {lost} lost" if lost else ""
    damage = ["records of the journal are lost"] if lost_records(core) else []
    if core.run is None:
        return ", ".join([nodes, "no job", *damage])
    job = core.run.job
    words = [nodes, f"{job.id} {job.state}", f"step {job.counters.step}/{job.spec.train.steps}", *_far(job)]
    if job.counters.skipped:
        words.append(f"{job.counters.skipped} skipped ({job.counters.skipped_in_row} in a row)")
    words.append(f"generation {job.epoch}")
    tolerance = node_tolerance(job)
    if tolerance >= 0:
        words.append(f"can lose {tolerance}")
    return ", ".join([*words, *damage])


def _far(job: JobRecord) -> list[str]:
    """The share of its steps, and about how long the rest takes."""
    words = [f"{100 * job.counters.step // job.spec.train.steps}%"]
    evaluation = _evaluation(job) if job.spec.eval.wanted else None
    left_s = time_left_s(job, statistics.median(job.step_s) if job.step_s else 0.0, evaluation)
    return [*words, f"about {seconds(left_s)} left"] if left_s >= 0 and job.deployed_at is not None else words

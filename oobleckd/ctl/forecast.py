"""What a job would do on nodes that need not be there: plan, losses, guarantee and schedule as modelled.

Owns the answers of ``oobleckctl plan``; makes no plan itself (``planner``). Times leave out what no profile
has, the exchange of sums between pipelines, and what an estimate has not: adding up gradients, and the
update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import msgspec

from oobleckd.core.evaluations import planned_s, planned_share
from oobleckd.ctl.world import Loss, PlannedWorld
from oobleckd.planner.costs.devices import DeviceSheet
from oobleckd.planner.costs.makespan import busy_s, one_f_one_b_s
from oobleckd.planner.costs.recompute import MODES, modes_for
from oobleckd.planner.costs.work import stage_works
from oobleckd.planner.plan import Pipeline, Plan, RecomputeWanted
from oobleckd.planner.policy import PlanError
from oobleckd.planner.profile import Profile
from oobleckd.planner.reroute.reroute import layout_of
from oobleckd.planner.schedule import schedules
from oobleckd.planner.schedules.decoupled import ops_of
from oobleckd.planner.schedules.routed import device_s
from oobleckd.planner.schedules.timeline import dry_run_plan
from oobleckd.planner.sizing.instantiate import why_idle
from oobleckd.planner.templates.guarantee import guarantee, losses_survived
from oobleckd.planner.templates.needs import needed_by_mode
from oobleckd.planner.templates.redundant import decoupled_within
from oobleckd.protocol.forecast import (
    Forecast,
    Group,
    GuaranteeForecast,
    LossForecast,
    OpForecast,
    PlanForecast,
    RecomputeForecast,
    ScheduleForecast,
    StageForecast,
    TemplateForecast,
)
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobviews import PipelineView
from oobleckd.protocol.nodeviews import LayerRange
from oobleckd.words import count

SETTINGS: tuple[RecomputeWanted, ...] = (*MODES, "auto")
PIPELINES_LISTED = 64
EVERY_NODE = 16  # in a plan of so many nodes the loss of each is looked at, else one of each kind of pipeline
DRAWN_A_STAGE = 2  # micro-batches: enough to see how a pipeline fills, runs and drains
MAX_DRAWN = 16


@dataclass(frozen=True, slots=True)
class ForecastQuestion:
    """A job, what its layers cost, and the nodes in question. ``limit_bytes`` of a device, 0: none known.
    ``flops_per_token`` of its model, 0: not known; ``sheet``: of its devices, whose peak is known.
    ``compares``: whether other settings of ``schedule.recompute`` are asked for, too.
    """

    job: Job
    profile: Profile
    measured: bool
    limit_bytes: int
    num_nodes: int
    devices_per_node: int
    without: tuple[str, ...] = ()
    flops_per_token: float = 0.0
    sheet: DeviceSheet | None = None
    compares: bool = False

    def world(self, job: Job) -> PlannedWorld:
        """Its nodes, with ``job``. Raises PlanError where the model fits no number of nodes."""
        return PlannedWorld(job, self.profile, self.limit_bytes, self.num_nodes, self.devices_per_node)


def forecast(question: ForecastQuestion) -> Forecast:
    """The answer to ``question``. Raises PlanError where there is no plan."""
    job = question.job
    world = question.world(job)
    precision, sheet = job.train.precision, question.sheet
    of_peak = question.flops_per_token / sheet.peak(precision) if sheet is not None else 0.0
    teller = _Teller(job, world, of_peak)
    plan, change = world.start(), None
    recomputations = compared(question) if question.compares else ()
    if question.without:
        loss = world.lose(plan, frozenset(question.without))
        change = teller.loss(loss, 1)
        plan = world.after(loss)
    gone = frozenset(question.without)
    listed = plan.pipelines if len(plan.pipelines) <= PIPELINES_LISTED else ()
    return Forecast(
        job=job.name,
        device=question.profile.device,
        measured=question.measured,
        num_layers=len(question.profile.layers),
        num_nodes=question.num_nodes,
        devices_per_node=question.devices_per_node,
        memory_bytes=question.limit_bytes,
        micro_batches=job.num_micro_batches,
        templates=teller.templates(plan),
        plan=teller.plan(plan),
        pipelines=tuple(_listed(index, pipeline, plan) for index, pipeline in enumerate(listed)),
        guarantee=teller.guarantee(plan),
        losses=tuple(
            teller.loss(world.lose(plan, frozenset({node}), gone), alike)
            for node, alike in _possible_losses(world, plan)
        ),
        schedule=_schedule(world, plan),
        standby=len(world.nodes) - len(gone) - len(plan.nodes()) - len(plan.idle),
        without=question.without,
        change=change,
        flops_per_token=question.flops_per_token,
        peak_of=f"{sheet.name}, {precision}" if sheet is not None else "",
        params=question.profile.params,
        active_params=question.profile.active_params,
        recompute=job.schedule.recompute,
        recomputations=recomputations,
    )


def compared(question: ForecastQuestion) -> tuple[RecomputeForecast, ...]:
    """The job of ``question`` with each setting of ``schedule.recompute`` whose costs are known."""
    known = (*modes_for(question.profile, "auto"), "auto")
    return tuple(_with_setting(question, wanted) for wanted in SETTINGS if wanted in known)


def _with_setting(question: ForecastQuestion, wanted: RecomputeWanted) -> RecomputeForecast:
    job = question.job
    schedule = msgspec.structs.replace(job.schedule, recompute=wanted)
    try:
        world = question.world(msgspec.structs.replace(job, schedule=schedule))
        if len(world.nodes) < world.n0:
            return RecomputeForecast(wanted, world.n0)
        plan = world.start()
    except PlanError:
        return RecomputeForecast(wanted, 0)
    return RecomputeForecast(wanted, world.n0, plan.step_s, _most_bytes(world, plan))


def _most_bytes(world: PlannedWorld, plan: Plan) -> int:
    """The most that a device of ``plan`` holds."""
    sizes = {len(pipeline.nodes) for pipeline in plan.pipelines}
    return max(stage.memory_bytes for size in sizes for stage in world.by_size[size].stages)


def _listed(index: int, pipeline: Pipeline, plan: Plan) -> PipelineView:
    stages = tuple(LayerRange(s.device, s.layers.start, s.layers.stop) for s in pipeline.segments)
    empty = tuple(s.device for s in pipeline.segments if s.device in plan.vacant)
    again = {d: plan.recompute[d] for d in pipeline.devices if d in plan.recompute}
    return PipelineView(index, pipeline.nodes, stages, pipeline.micro_batches, empty, again)


def _possible_losses(world: PlannedWorld, plan: Plan) -> list[tuple[str, int]]:
    """(node, pipelines that its loss stands for): every node, or the one of most state of each kind."""
    nodes = plan.nodes()
    if len(nodes) <= EVERY_NODE:
        return [(node, 1) for node in nodes]
    kinds: dict[tuple[int, int], list[Pipeline]] = {}
    for pipeline in plan.pipelines:
        kinds.setdefault((len(pipeline.nodes), len(pipeline.micro_batches)), []).append(pipeline)
    return [(world.heaviest_node(alike[0]), len(alike)) for alike in kinds.values()]


@dataclass(frozen=True, slots=True)
class _Teller:
    """Plans and losses of a world in numbers for people. ``of_peak``: seconds of a device's peak that a token
    takes, 0: not known.
    """

    job: Job
    world: PlannedWorld
    of_peak: float = 0.0

    def templates(self, plan: Plan) -> tuple[TemplateForecast, ...]:
        """All templates, and how often ``plan`` has each."""
        instances = Counter(len(pipeline.nodes) for pipeline in plan.pipelines)
        return tuple(
            TemplateForecast(
                num_nodes=template.num_nodes,
                stages=tuple(
                    StageForecast(
                        stage.layers.start,
                        stage.layers.stop,
                        stage.time_s,
                        stage.memory_bytes,
                        stage.recompute,
                        needed,
                    )
                    for stage, needed in zip(
                        template.stages, needed_by_mode(self.world.setup, template), strict=True
                    )
                ),
                fill_s=template.fill_s,
                period_s=template.period_s,
                instances=instances[template.num_nodes],
                chunks=template.chunks,
            )
            for template in self.world.templates
        )

    def plan(self, plan: Plan) -> PlanForecast:
        """``plan`` by kinds of pipelines."""
        groups = groups_of(plan)
        samples_per_s = self.job.train.global_batch / plan.step_s
        tokens_per_s = samples_per_s * self.job.train.sequence
        rounds = self.job.eval_rounds
        evaluation_s = planned_s(rounds, plan, self.world.setup.profile) if rounds.total else 0.0
        return PlanForecast(
            groups=groups,
            can_lose=self._can_lose(plan),
            idle=len(plan.idle),
            idle_reason=self._why_idle(plan),
            step_s=plan.step_s,
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            bubble=self._bubble(groups) if not plan.vacant else self._bubble_around(plan),
            memory_bytes=_most_bytes(self.world, plan),
            evaluation_s=evaluation_s,
            evaluation_share=planned_share(rounds, evaluation_s, plan.step_s),
            mfu=self.of_peak * tokens_per_s / (len(plan.holdings()) or 1),
        )

    def loss(self, loss: Loss, alike: int) -> LossForecast:
        """``loss`` in numbers; it stands for that of a node in any of ``alike`` pipelines."""
        return LossForecast(
            nodes=loss.nodes,
            alike=alike,
            plan=None if loss.plan is None else self.plan(loss.plan),
            lost_layers=loss.lost_layers,
            copied_bytes=sum(copy.num_bytes for copy in loss.copies),
            copy_s=loss.copy_s,
            considered=loss.considered,
            reason=loss.reason,
            rolls_back=self.world.rolls_back,
            summary=loss.summary,
            way=loss.way,
            actions=loss.actions,
        )

    def guarantee(self, plan: Plan) -> GuaranteeForecast:
        """What the templates promise for as many nodes as ``plan`` has."""
        f = self.job.fault_tolerance.f
        promised = guarantee(len(plan.nodes()) + len(plan.idle), self.world.n0, max(self.world.by_size), f)
        return GuaranteeForecast(
            f=f,
            can_lose=self._can_lose(plan),
            n0=self.world.n0,
            n_max=max(self.world.by_size),
            full_down_to=promised.full_down_to,
            idle=tuple((gap.start, gap.stop - 1) for gap in promised.idle),
            rolls_back=self.world.rolls_back,
        )

    def _why_idle(self, plan: Plan) -> str:
        if not plan.idle:
            return ""
        if self.world.rolls_back:
            nodes = count(len(plan.pipelines[0].nodes), "node")
            return f"all pipelines are of {nodes}, and no other depth is faster"
        return why_idle(len(plan.nodes()) + len(plan.idle), self.world.n0, max(self.world.by_size))

    def _can_lose(self, plan: Plan) -> int:
        """Nodes whose loss leads to no checkpoint, whichever they are."""
        return 0 if self.world.rolls_back else losses_survived(plan.copies())

    def _bubble_around(self, plan: Plan) -> float:
        """Share of waiting over all devices, where peers compute for vacant places."""
        profile = self.world.setup.profile
        layout = layout_of(plan, 1, len(profile.layers))
        working_s = sum(device_s(layout.routes, profile, layout.recompute).values())
        return max(0.0, 1 - working_s / (plan.step_s * len(plan.holdings())))

    def _bubble(self, groups: Sequence[Group]) -> float:
        """Share of waiting over all devices, until the slowest pipeline is done."""
        took_s, working_s, num_devices = 0.0, 0.0, 0
        for group in groups:
            template = self.world.by_size[group.num_nodes]
            stages = [stage.layers for stage in template.stages]
            works = stage_works(
                stages, self.world.setup.profile, chunks=template.chunks,
                recompute=[stage.recompute for stage in template.stages],
            )  # fmt: skip
            decoupled = self.world.setup.decoupled
            alone_s = template.time_s if decoupled else partial(one_f_one_b_s, works)
            took_s = max(took_s, alone_s(group.micro_batches))
            working_s += group.count * group.micro_batches * sum(map(busy_s, works))
            num_devices += group.count * len(works) // template.chunks
        return max(0.0, 1 - working_s / (took_s * num_devices)) if took_s else 0.0


def groups_of(plan: Plan) -> tuple[Group, ...]:
    """The kinds of pipelines of ``plan``, smallest first."""
    kinds = sorted((len(pipeline.nodes), len(pipeline.micro_batches)) for pipeline in plan.pipelines)
    return tuple(Group(*kind, sum(1 for _ in alike)) for kind, alike in groupby(kinds))


def _schedule(world: PlannedWorld, plan: Plan) -> ScheduleForecast:
    """1F1B of the deepest pipeline, or what is in its place, of the first micro-batches."""
    deepest, setup = max(plan.pipelines, key=lambda pipeline: len(pipeline.devices)), world.setup
    names, share = deepest.devices, len(deepest.micro_batches)
    drawn = min(share, max(2, DRAWN_A_STAGE * len(names)), MAX_DRAWN)
    first = Plan(
        (msgspec.structs.replace(deepest, micro_batches=tuple(range(drawn))),), recompute=plan.recompute
    )
    redundant = bool(plan.redundant)
    ordered = decoupled_within(setup, first, redundant=redundant) if setup.decoupled else ()
    ops = ops_of(first, ordered) if ordered else schedules(first)
    run = dry_run_plan(first, setup.profile, ops)
    return ScheduleForecast(
        num_nodes=len(deepest.nodes),
        micro_batches=drawn,
        of_micro_batches=share,
        makespan_s=run.makespan_s,
        stages=tuple(
            tuple(
                OpForecast(str(span.op), span.start_s, span.stop_s)
                for span in run.spans[name]
                if span.op.kind in {"F", "B", "I", "W"}
            )
            for name in names
        ),
        decoupled=setup.decoupled,
        chunks=deepest.chunks,
    )

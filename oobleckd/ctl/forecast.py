"""What a job would do on nodes that need not be there: plan, losses, guarantee and schedule as modelled.

Owns the answers of ``oobleckctl plan``; makes no plan itself (``planner``). Times leave out what an
estimate has not, adding up gradients and the update, and the exchange of gradients where the job does not say
its link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import ceil
from typing import Literal

import msgspec

from oobleckd.core.evaluations import planned_s, planned_share
from oobleckd.core.pipelineviews import pipeline_view
from oobleckd.ctl.exchange import exchange_forecast
from oobleckd.ctl.stagesize import SizedWorld, fastest_world
from oobleckd.ctl.world import Loss, PlannedWorld
from oobleckd.planner.costs.devices import DeviceSheet
from oobleckd.planner.costs.makespan import busy_s, one_f_one_b_s
from oobleckd.planner.costs.recompute import MODES, modes_for
from oobleckd.planner.costs.sharded import UNKNOWN, NodeLink, Sharding, StageBytes, stage_bytes
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
from oobleckd.planner.templates.guarantee import guarantee
from oobleckd.planner.templates.needs import needed_by_mode
from oobleckd.planner.templates.redundant import decoupled_within
from oobleckd.protocol.forecast import (
    ExchangeForecast,
    Forecast,
    Group,
    GuaranteeForecast,
    LossForecast,
    OpForecast,
    PlanForecast,
    RecomputeForecast,
    ScheduleForecast,
    StageForecast,
    StagesForecast,
    TemplateForecast,
)
from oobleckd.protocol.job import Job
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
    ``compares``: whether other settings of ``schedule.recompute`` are asked for, too. ``node_link``: between
    the devices of a node, for stages of several; ``devices_per_stage``: "auto": the best number.
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
    node_link: NodeLink = UNKNOWN
    devices_per_stage: Literal["auto"] | int = 1

    def world(self, job: Job, devices_per_stage: int) -> PlannedWorld:
        """Its nodes, with ``job`` and so many devices a stage. Raises PlanError where the model fits no
        number of nodes.
        """
        sharding = Sharding(devices_per_stage, self.node_link, job.train.exact)
        return PlannedWorld(
            job, self.profile, self.limit_bytes, self.num_nodes, self.devices_per_node, sharding
        )

    def sized(self) -> SizedWorld:
        """The same with as many devices a stage as it asks for. Raises PlanError."""
        job, wanted = self.job, self.devices_per_stage
        if wanted == "auto":
            return fastest_world(
                self.devices_per_node, job.fault_tolerance.f, lambda number: self.world(job, number)
            )
        return SizedWorld(self.world(job, wanted), wanted, "asked" if wanted > 1 else "")


def forecast(question: ForecastQuestion) -> Forecast:
    """The answer to ``question``. Raises PlanError where there is no plan."""
    job = question.job
    sized = question.sized()
    world = sized.world
    question = replace(question, devices_per_stage=sized.devices_per_stage)
    precision, sheet = job.train.precision, question.sheet
    of_peak = question.flops_per_token / sheet.peak(precision) if sheet is not None else 0.0
    teller = _Teller(job, world, of_peak)
    plan, change = world.start(), None
    recomputations = compared(question) if question.compares else ()
    if question.without:
        loss = world.lose(plan, frozenset(question.without))
        change = teller.loss(loss, 1)
        plan = world.after(loss)
    gone, empty = frozenset(question.without), frozenset[str]().union(*map(world.lanes.devices, plan.vacant))
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
        pipelines=tuple(
            pipeline_view(index, pipeline, plan, world.lanes, empty) for index, pipeline in enumerate(listed)
        ),
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
        devices_per_stage=sized.devices_per_stage,
        stages_because=sized.because,
        stage_options=tuple(StagesForecast(*msgspec.structs.astuple(each)) for each in sized.options),
    )


def compared(question: ForecastQuestion) -> tuple[RecomputeForecast, ...]:
    """The job of ``question`` with each setting of ``schedule.recompute`` whose costs are known."""
    known = (*modes_for(question.profile, "auto"), "auto")
    return tuple(_with_setting(question, wanted) for wanted in SETTINGS if wanted in known)


def _with_setting(question: ForecastQuestion, wanted: RecomputeWanted) -> RecomputeForecast:
    job = question.job
    schedule = msgspec.structs.replace(job.schedule, recompute=wanted)
    job = msgspec.structs.replace(job, schedule=schedule)
    try:
        world = replace(question, job=job).sized().world
        if len(world.nodes) < world.n0:
            return RecomputeForecast(wanted, world.n0)
        plan = world.start()
    except PlanError:
        return RecomputeForecast(wanted, 0)
    return RecomputeForecast(wanted, world.n0, plan.step_s, world.most_bytes(plan))


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
        groups = groups_of(plan, self.world)
        exchange = exchange_forecast(self.world.setup, plan, self.world.by_size)
        samples_per_s = self.job.train.global_batch / plan.step_s
        tokens_per_s = samples_per_s * self.job.train.sequence
        rounds = self.job.eval_rounds
        evaluation_s = planned_s(rounds, plan, self.world.setup.profile) if rounds.total else 0.0
        in_stages = self._in_stages(plan)
        return PlanForecast(
            groups=groups,
            can_lose=self.world.can_lose(plan),
            idle=len(plan.idle),
            idle_reason=self._why_idle(plan),
            step_s=plan.step_s,
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            bubble=self._bubble(groups) if not plan.vacant else self._bubble_around(plan, exchange),
            memory_bytes=self.world.most_bytes(plan),
            evaluation_s=evaluation_s,
            evaluation_share=planned_share(rounds, evaluation_s, plan.step_s),
            mfu=self.of_peak * tokens_per_s / (len(plan.holdings()) * self.world.devices_per_stage or 1),
            exchange=exchange,
            gathered_bytes=max((round(each.gathered) for each in in_stages), default=0),
            shard_gradient_bytes=max((round(each.gradients) for each in in_stages), default=0),
        )

    def _in_stages(self, plan: Plan) -> list[StageBytes]:
        """What moves inside each stage, where several devices share it."""
        profile, lanes = self.world.setup.profile, self.world.lanes
        if profile.devices_per_stage == 1:
            return []
        return [
            stage_bytes(profile, hop.layers.layers(), len(lanes.micro_batches(pipeline.micro_batches)))
            for pipeline in plan.pipelines
            for hop in pipeline.segments
        ]

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
            can_lose=self.world.can_lose(plan),
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

    def _bubble_around(self, plan: Plan, exchange: ExchangeForecast) -> float:
        """Share of waiting over all devices, where peers compute for vacant places."""
        passes_s = plan.step_s - (exchange.shown_s if exchange.counted else 0.0)
        profile = self.world.setup.profile
        layout = layout_of(plan, 1, len(profile.layers))
        working_s = sum(device_s(layout.routes, profile, layout.recompute).values())
        return max(0.0, 1 - working_s / (passes_s * len(plan.holdings())))

    def _bubble(self, groups: Sequence[Group]) -> float:
        """Share of waiting over all devices, until the slowest pipeline is done."""
        took_s, working_s, num_devices = 0.0, 0.0, 0
        each = self.world.devices_per_stage
        for group in groups:
            template = self.world.by_size[group.num_nodes]
            stages = [stage.layers for stage in template.stages]
            works = stage_works(
                stages, self.world.setup.profile, chunks=template.chunks,
                recompute=[stage.recompute for stage in template.stages],
            )  # fmt: skip
            decoupled = self.world.setup.decoupled
            alone_s = template.time_s if decoupled else partial(one_f_one_b_s, works)
            took_s = max(took_s, alone_s(ceil(group.micro_batches / each)))
            working_s += group.count * group.micro_batches / each * sum(map(busy_s, works))
            num_devices += group.count * len(works) // template.chunks
        return max(0.0, 1 - working_s / (took_s * num_devices)) if took_s else 0.0


def groups_of(plan: Plan, world: PlannedWorld) -> tuple[Group, ...]:
    """The kinds of pipelines of ``plan``, smallest first."""
    kinds = sorted(
        (len(each.nodes), len(world.lanes.micro_batches(each.micro_batches))) for each in plan.pipelines
    )
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

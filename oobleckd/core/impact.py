"""What would follow if nodes died now, all at once: the layers at risk, the plan of the job's policy, and how
long it stops.

Owns the answer, not the moment it is asked about (``watching``). Plans: runs in the planner's pool, never on
the loop. Pauses are modelled from what this job's losses took so far, the copies from the profile; what
reading a checkpoint takes is assumed.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from oobleckd.core.incident import rejected_views
from oobleckd.core.pipelineviews import pipelines_of
from oobleckd.core.questions import LossQuestion
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.placement.transfer import copy_s
from oobleckd.planner.plan import Plan, Template
from oobleckd.planner.policies import deployable, prepare
from oobleckd.planner.policies.stagesize import chosen
from oobleckd.planner.policy import REROUTING, ROLLING_BACK, Proposal, Setup
from oobleckd.planner.reroute.redundant import takes_over
from oobleckd.planner.reroute.reroute import detour
from oobleckd.planner.schedules.routed import busiest_s, device_s
from oobleckd.planner.sizing.instantiate import too_few
from oobleckd.planner.templates.guarantee import losses_survived
from oobleckd.protocol.watch import ImpactView
from oobleckd.words import count, noun

DEPLOY_S = 0.1
"""A deployment but for its copies: a few messages between two steps, and new connections."""
READ_BYTES_PER_S = 1e9
"""Of a checkpoint, by each device: a local disk, or its share of a common one."""


def impact_view(
    question: LossQuestion, setup: Setup, templates: tuple[Template, ...], sizes: tuple[int, ...] = ()
) -> ImpactView:
    """The answer. ``sizes``: as for ``adapt``. Raises PlanError where the policy has no plan for another
    reason than too few nodes.
    """
    dead = frozenset(question.dead)
    if dead == frozenset(question.before):
        return _nothing(question)
    lost = question.layout.lost(dead)
    back = bool(lost) or question.policy in ROLLING_BACK
    n0 = min(template.num_nodes for template in templates)
    if len(question.situation.nodes) < n0:
        if (
            back
            or question.policy not in REROUTING
            or not takes_over(question.layout, question.layout.unable(dead))
        ):
            why = too_few(len(question.situation.nodes), n0).problem
            found = _with_other_stages(question, setup, lost, back=back)
            return found or _stops(question, lost, back=back, why=why)
        return _in_place(question, setup)
    holdings = {} if back else question.situation.holdings
    moment = msgspec.structs.replace(question.situation, holdings=holdings)
    proposal = deployable(question.policy, setup, templates, moment, sizes)
    return _follows(question, setup, setup, proposal, lost, back=back)


def _with_other_stages(
    question: LossQuestion, setup: Setup, lost: tuple[int, ...], *, back: bool
) -> ImpactView | None:
    """With stages of another number of devices, which need fewer nodes; None: nothing fits those that are
    left.
    """
    num_nodes = len(question.situation.nodes)
    if not question.others or not num_nodes:
        return None
    setups = (setup, *question.others)
    other = setups[chosen(question.policy, setups, num_nodes)]
    templates = prepare(question.policy, other)
    if num_nodes < min(template.num_nodes for template in templates):
        return None
    held = 0 if back else question.layout.devices_per_stage
    holdings = {} if back else question.situation.holdings
    moment = msgspec.structs.replace(question.situation, holdings=holdings, held_per_stage=held)
    proposal = deployable(question.policy, other, templates, moment)
    return _follows(question, setup, other, proposal, lost, back=back)


def _nothing(question: LossQuestion) -> ImpactView:
    return ImpactView(
        job=question.job,
        nodes=question.nodes,
        lost_layers=(),
        steps_back=0,
        stops=False,
        stall_s=0.0,
        throughput=1.0,
        copied_bytes=0,
        copy_s=0.0,
        can_lose=0
        if question.policy in ROLLING_BACK
        else max(0, losses_survived(_without_dead(question).copies())),
        plan=pipelines_of(_without_dead(question), _lanes(question), question.dead),
        reason="none of them computes or holds anything of the job",
        way="stay",
    )


def _without_dead(question: LossQuestion) -> Plan:
    """The plan with the places of the dead vacant."""
    plan, gone = question.plan, _lanes(question).places(question.dead)
    return msgspec.structs.replace(plan, vacant=tuple(sorted({*plan.vacant, *gone})))


def _lanes(question: LossQuestion) -> Lanes:
    return Lanes.laid_out(question.layout)


def _stops(question: LossQuestion, lost: tuple[int, ...], *, back: bool, why: str) -> ImpactView:
    return ImpactView(
        job=question.job,
        nodes=question.nodes,
        lost_layers=lost,
        steps_back=question.back if back else 0,
        stops=True,
        stall_s=0.0,
        throughput=0.0,
        copied_bytes=0,
        copy_s=0.0,
        can_lose=0,
        plan=(),
        reason=f"the job waits: {why}" + (_far(question, lost) if back else ""),
        way="wait",
    )


def _far(question: LossQuestion, lost: Collection[int]) -> str:
    """How far back, and why."""
    whose = f"{count(len(lost), 'layer')} {noun(len(lost), 'has')} no copy left; " if lost else ""
    steps = count(question.back, "step")
    return f"; {whose}back {steps} to the last checkpoint"


def _in_place(question: LossQuestion, setup: Setup) -> ImpactView:
    """Redundant holders take the places of the dead, with the plan as it is."""
    plan, unable = _without_dead(question), question.layout.unable(question.dead)
    around = {r.micro_batch: r for r in detour(question.layout, unable, question.layout.epoch)}
    routes = [around.get(route.micro_batch, route) for route in question.layout.routes]
    before_s = busiest_s(question.layout.routes, setup.profile, question.layout.recompute)
    after_s = busiest_s(routes, setup.profile, question.layout.recompute)
    return ImpactView(
        job=question.job,
        nodes=question.nodes,
        lost_layers=(),
        steps_back=0,
        stops=False,
        stall_s=question.notice_s + _redone_s(question, setup),
        throughput=before_s / after_s if after_s else 0.0,
        copied_bytes=0,
        copy_s=0.0,
        can_lose=max(0, losses_survived(plan.copies())),
        plan=pipelines_of(plan, _lanes(question), question.dead),
        reason="redundant holders compute what the dead would have; too few nodes are left for another plan",
        way="take-over",
    )


def _follows(
    question: LossQuestion,
    now: Setup,
    setup: Setup,
    proposal: Proposal,
    lost: tuple[int, ...],
    *,
    back: bool,
) -> ImpactView:
    """``now``: what the plan was made with that runs, ``setup``: the one that follows."""
    plan, transfers = proposal.plan, () if back else proposal.transfers
    took_s = copy_s(transfers, setup.profile)
    stall_s = question.notice_s
    if back:
        stall_s += DEPLOY_S + _max_bytes(plan, setup) / READ_BYTES_PER_S
    else:
        stays = question.policy in REROUTING and plan.pipelines == question.plan.pipelines
        stall_s += _redone_s(question, now) + (0.0 if stays and not transfers else DEPLOY_S + took_s)
    rolls_back = question.policy in ROLLING_BACK
    return ImpactView(
        job=question.job,
        nodes=question.nodes,
        lost_layers=lost,
        steps_back=question.back if back else 0,
        stops=False,
        stall_s=stall_s,
        throughput=question.plan.step_s / plan.step_s if plan.step_s else 0.0,
        copied_bytes=sum(copy.num_bytes for copy in transfers),
        copy_s=took_s,
        can_lose=0 if rolls_back else max(0, losses_survived(plan.copies())),
        plan=pipelines_of(plan, _lanes(question) if setup is now else Lanes.of(setup)),
        reason=proposal.reason + (_far(question, lost) if back else ""),
        rejected=rejected_views(proposal),
        way=proposal.way,
        actions=proposal.actions,
    )


def _redone_s(question: LossQuestion, setup: Setup) -> float:
    """What the survivors compute again: on average the loss comes in the middle of the step."""
    busy = device_s(question.layout.routes, setup.profile, question.layout.recompute)
    unable = question.layout.unable(question.dead)
    fresh = unable - question.layout.unable(question.before)
    lost_s = sum(seconds for device, seconds in busy.items() if device in fresh)
    left = sum(device not in unable for device in question.layout.holdings)
    return 0.5 * lost_s / left if left else 0.0


def _max_bytes(plan: Plan, setup: Setup) -> int:
    """State of the device that has most to read."""
    layers = setup.profile.layers
    most = max(
        (sum(layers[layer].state_bytes for layer in held.layers()) for held in plan.holdings().values()),
        default=0,
    )
    return most // setup.profile.devices_per_stage

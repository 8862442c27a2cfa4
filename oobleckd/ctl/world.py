"""Nodes that need not be there: the plan that a daemon would deploy on them, and the one after a loss.

Owns which nodes take part and what they hold; every choice is the job's policy's, by way of ``planner``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from oobleckd.core.jobs import exchange_of
from oobleckd.core.memory import held_besides
from oobleckd.planner.costs.sharded import Sharding, sharded, sharded_setup
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.placement.transfer import copy_s, recompute_on, redundant_on, segments_on
from oobleckd.planner.plan import Pipeline, Plan, Transfer, node_of
from oobleckd.planner.policies import adapt, prepare
from oobleckd.planner.policy import (
    ROLLING_BACK,
    WITH_REDUNDANT_LAYERS,
    Action,
    PlanError,
    Setup,
    Situation,
    Way,
)
from oobleckd.planner.profile import Profile
from oobleckd.planner.sizing.exchanged import exchanging, reduce_s_of
from oobleckd.planner.sizing.instantiate import instantiate, slowest_s, split_micro_batches, too_few
from oobleckd.planner.templates.fewest import fewest_recomputing
from oobleckd.planner.templates.guarantee import losses_survived, lost_layers, max_pipelines
from oobleckd.protocol.job import Job

NODES_AT_ONCE = 1024  # a change is planned over all nodes as long as there are so many at most
CONSIDERED = 512  # beyond, over the pipelines that were hit and others of about so many nodes, of all sizes


class Loss(msgspec.Struct, frozen=True):
    """``nodes`` have died: the plan that follows (None: too few are left), what it copies, and why it is so;
    ``way``, ``actions`` and ``summary`` as in a ``Proposal``.

    ``considered``: pipelines that could take part in it.
    """

    nodes: tuple[str, ...]
    plan: Plan | None
    lost_layers: tuple[int, ...]
    copies: tuple[Transfer, ...]
    copy_s: float
    considered: int
    reason: str
    way: Way
    actions: tuple[Action, ...] = ()
    summary: str = ""


def node_names(num_nodes: int) -> tuple[str, ...]:
    """node-1, node-2, …: as ``oobleckctl up`` calls them."""
    return tuple(f"node-{number}" for number in range(1, num_nodes + 1))


class PlannedWorld:
    """A job on ``num_nodes`` nodes of ``devices_per_node`` devices, each with ``limit_bytes`` (0: unlimited).
    With ``sharding`` a device of its plans is the place of a stage, and a micro-batch a turn of that stage's
    devices.

    Making it makes the templates. Raises PlanError where the model fits no number of nodes.
    """

    def __init__(
        self,
        job: Job,
        profile: Profile,
        limit_bytes: int,
        num_nodes: int,
        devices_per_node: int,
        sharding: Sharding | None = None,
    ) -> None:
        self._policy = job.fault_tolerance.policy
        whole = Setup(
            profile=profile,
            num_micro_batches=job.num_micro_batches,
            f=job.fault_tolerance.f,
            device_memory_bytes=limit_bytes,
            devices_per_node=devices_per_node,
            max_nodes=job.resources.max_nodes,
            min_nodes=job.resources.min_pipeline_nodes,
            decoupled=job.schedule.apart,
            chunks=job.schedule.num_chunks,
            staggered=job.schedule.update == "staggered",
            held=held_besides(job, sharded(profile, sharding) if sharding else profile),
            nodes_now=num_nodes,
            dealt=job.batch_sizes.ramp_steps > 0,
            recompute=job.schedule.recompute,
            exchange=exchange_of(job),
        )
        self.setup = sharded_setup(whole, sharding) if sharding else whole
        self.lanes = Lanes.of(self.setup)
        self.nodes = node_names(num_nodes)
        self.templates = prepare(self._policy, self.setup)
        self.by_size = {template.num_nodes: template for template in self.templates}

    @property
    def n0(self) -> int:
        """The fewest nodes that hold the model."""
        return min(self.by_size)

    @property
    def rolls_back(self) -> bool:
        """Whether every loss leads back to a checkpoint."""
        return self._policy in ROLLING_BACK

    @property
    def devices_per_stage(self) -> int:
        """How many devices a stage has."""
        return self.setup.profile.devices_per_stage

    def most_bytes(self, plan: Plan) -> int:
        """The most that a device of ``plan`` holds."""
        sizes = {len(pipeline.nodes) for pipeline in plan.pipelines}
        return max(stage.memory_bytes for size in sizes for stage in self.by_size[size].stages)

    def can_lose(self, plan: Plan) -> int:
        """Nodes whose loss leads to no checkpoint, whichever they are."""
        return 0 if self.rolls_back else losses_survived(plan.copies())

    def start(self) -> Plan:
        """The plan on all nodes, as far as the job wants them; in their order, since nobody holds anything
        yet.

        Raises PlanError below n0 nodes.
        """
        nodes = self._wanted(self.nodes, ())
        if self.rolls_back:
            return adapt(self._policy, self.setup, self.templates, Situation(nodes, {})).plan
        if len(nodes) < self.n0:
            raise self._too_few(len(nodes))
        reduce_s = reduce_s_of(self.setup, self.templates, len(nodes))
        found = instantiate(self.templates, len(nodes), self.setup.f, self.setup.num_micro_batches, reduce_s)
        placed, first = [], 0
        for size in found.sizes:
            placed.append(nodes[first : first + size])
            first += size
        return self._plan(placed, nodes[first:])

    def lose(self, plan: Plan, nodes: Collection[str], gone: Collection[str] = ()) -> Loss:
        """What follows when ``nodes`` die at once under ``plan``; ``gone`` have died before."""
        dead = frozenset(nodes) | frozenset(gone)
        alive = self._wanted([node for node in self.nodes if node not in dead], plan.nodes())
        named = tuple(node for node in self.nodes if node in nodes)
        held = {device: layers for device, layers in plan.holdings().items() if node_of(device) not in dead}
        missing = lost_layers(held.values(), len(self.setup.profile.layers))
        if len(alive) < self.n0:
            why = f"waits: {self._too_few(len(alive)).problem}"
            return Loss(named, None, missing, (), 0.0, 0, why, "wait")
        if self.rolls_back:
            found = adapt(self._policy, self.setup, self.templates, Situation(alive, {}))
            reason = f"back to the last checkpoint; {found.reason}"
            return Loss(named, found.plan, (), (), 0.0, len(plan.pipelines), reason, found.way, found.actions)
        touched = self._touched(plan, dead)
        open_ = frozenset(pipeline.nodes for pipeline in touched)
        staying = [pipeline for pipeline in plan.pipelines if pipeline.nodes not in open_]
        taken = frozenset(node for pipeline in staying for node in pipeline.nodes)
        proposal = adapt(
            self._policy,
            self._setup_for(touched, max_pipelines(len(alive), self.n0, self.setup.f) - len(staying)),
            self.templates,
            Situation(
                nodes=tuple(node for node in alive if node not in taken),
                holdings={device: layers for device, layers in held.items() if node_of(device) not in taken},
                running=tuple(pipeline.nodes for pipeline in touched),
            ),
        )
        placed = [pipeline.nodes for pipeline in (*staying, *proposal.plan.pipelines)]
        gone_before = {d for pipeline in staying for s in pipeline.segments if (d := s.device) in plan.vacant}
        vacant = (*sorted(gone_before), *proposal.plan.vacant)
        after = self._plan(placed, proposal.plan.idle)
        if vacant:
            step_s = max(after.step_s, proposal.plan.step_s)
            after = msgspec.structs.replace(after, vacant=vacant, step_s=step_s)
        took_s = copy_s(proposal.transfers, self.setup.profile)
        return Loss(
            named,
            after,
            missing,
            proposal.transfers,
            took_s,
            len(touched),
            proposal.reason,
            proposal.way,
            proposal.actions,
            proposal.summary,
        )

    def after(self, loss: Loss) -> Plan:
        """The plan that follows ``loss``. Raises PlanError where there is none."""
        if loss.plan is None:
            left = len(self.nodes) - len(loss.nodes)
            raise self._too_few(left)
        return loss.plan

    def heaviest_node(self, pipeline: Pipeline) -> str:
        """The node of ``pipeline`` with the most state; the first of them."""
        held: Counter[str] = Counter()
        for segment in pipeline.segments:
            layers = self.setup.profile.layers[segment.layers.start : segment.layers.stop]
            held[node_of(segment.device)] += sum(layer.state_bytes for layer in layers)
        return max(pipeline.nodes, key=lambda node: held[node])

    def _too_few(self, num_nodes: int) -> PlanError:
        redundant = self._policy in WITH_REDUNDANT_LAYERS
        return too_few(num_nodes, self.n0, fewest_recomputing(self.setup, self.n0, redundant=redundant))

    def _wanted(self, nodes: Sequence[str], working: Collection[str]) -> tuple[str, ...]:
        """As many of ``nodes`` as the job wants, those at work before those that stand by."""
        at_work = frozenset(working)
        order = sorted(nodes, key=lambda node: node not in at_work)
        return tuple(order[: self.setup.max_nodes or len(order)])

    def _touched(self, plan: Plan, dead: frozenset[str]) -> list[Pipeline]:
        """The pipelines that a change may touch: all, or the hit ones and some of each size."""
        if len(plan.nodes()) <= NODES_AT_ONCE:
            return list(plan.pipelines)
        sizes = {len(pipeline.nodes) for pipeline in plan.pipelines}
        room = {size: -(-CONSIDERED // (len(sizes) * size)) for size in sizes}
        touched = []
        for pipeline in plan.pipelines:
            size, hit = len(pipeline.nodes), not dead.isdisjoint(pipeline.nodes)
            if hit or room[size] > 0:
                touched.append(pipeline)
                room[size] -= not hit
        return touched

    def _setup_for(self, touched: Sequence[Pipeline], min_pipelines: int) -> Setup:
        """The setup of the part of the job that ``touched`` run, which is to keep ``min_pipelines``
        pipelines.
        """
        share = sum(len(pipeline.micro_batches) for pipeline in touched)
        return msgspec.structs.replace(
            self.setup, num_micro_batches=max(1, share), f=max(0, min_pipelines - 1)
        )

    def _plan(self, placed: Sequence[tuple[str, ...]], idle: Sequence[str]) -> Plan:
        members = [self.by_size[len(nodes)] for nodes in placed]
        timed = exchanging(self.setup, members)
        shares = split_micro_batches(timed, self.setup.num_micro_batches)
        pipelines, first = [], 0
        for template, nodes, share in zip(members, placed, shares, strict=True):
            block = tuple(range(first, first + share))
            pipelines.append(Pipeline(nodes, segments_on(template, nodes), block))
            first += share
        return Plan(
            tuple(pipelines),
            tuple(idle),
            slowest_s(timed, shares),
            redundant=redundant_on(members, placed),
            recompute=recompute_on(members, placed),
        )

"""What ``oobleckctl plan`` says of a job on nodes that need not be there.

Owns the shapes only. Nodes are called node-1, node-2, …; layers are ``[start, stop)``; times are modelled,
in seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from oobleckd.planner.plan import Recompute, RecomputeWanted
from oobleckd.planner.policy import Action, Way
from oobleckd.protocol.api import API_VERSION
from oobleckd.protocol.jobviews import PipelineView
from oobleckd.protocol.modelnotes import AttentionNote

StagesBecause = Literal["", "asked", "only", "fastest", "can-lose"]
"""Why stages have so many devices: nobody asked for more than one; the job says it; no other number has a
plan; the others are slower; those that are not could lose fewer nodes than the job asks for.
"""


class StageForecast(msgspec.Struct, frozen=True):
    """Layers of one device, or of those that share the stage: forward and backward of a micro-batch, and the
    most that such a device holds.

    ``recompute``: what its blocks compute again in the backward. ``needed_bytes``: what the device would hold
    with each setting of that, as far as costs are known.
    """

    start: int
    stop: int
    time_s: float
    memory_bytes: int
    recompute: Recompute = "none"
    needed_bytes: dict[Recompute, int] = {}


class TemplateForecast(msgspec.Struct, frozen=True):
    """The split for so many nodes; ``instances`` of it are in the plan. ``chunks``: stages a device
    (``TemplateView``).
    """

    num_nodes: int
    stages: tuple[StageForecast, ...]
    fill_s: float
    period_s: float
    instances: int
    chunks: int = 1


class Group(msgspec.Struct, frozen=True):
    """``count`` pipelines of ``num_nodes`` nodes with ``micro_batches`` each."""

    num_nodes: int
    micro_batches: int
    count: int


class ExchangeForecast(msgspec.Struct, frozen=True):
    """What the exchange of gradients costs in each step of a plan.

    ``sent_bytes`` by the device that sends most, on average over steps; ``checked_bytes`` in a step in which
    replicas are compared (``fault_tolerance.check_every``). ``waiting_bytes``: of a device's memory, in which
    sums of others wait at most, and no plan reserves. ``shown_s``: what of it does not fit under the backward
    where a node sends ``link_bytes_per_s`` to others, and whether that is ``counted`` in the step, as it is
    where the job says its link.
    """

    sent_bytes: int = 0
    checked_bytes: int = 0
    waiting_bytes: int = 0
    shown_s: float = 0.0
    link_bytes_per_s: float = 0.0
    counted: bool = False


class PlanForecast(msgspec.Struct, frozen=True):
    """A plan by kinds of pipelines. ``can_lose``: nodes that may die at once, whichever they are.

    ``idle``: nodes of the job without a place, for ``idle_reason``. ``bubble``: share of the passes' time in
    which a device waits, over all devices in the plan. ``memory_bytes``: the most that one of them holds.
    ``evaluation_s`` of an evaluation, and ``evaluation_share`` of all in the job's time (0: there is none).
    ``mfu``: model FLOPs utilisation, as in ``ProgressView``; 0 where it is not known. ``exchange``: of
    gradients. ``gathered_bytes`` of weights and ``shard_gradient_bytes`` move in a step between a device and
    others of its stage, where it shares one; the most of any.
    """

    groups: tuple[Group, ...]
    can_lose: int
    idle: int
    idle_reason: str
    step_s: float
    samples_per_s: float
    tokens_per_s: float
    bubble: float
    memory_bytes: int
    evaluation_s: float = 0.0
    evaluation_share: float = 0.0
    mfu: float = 0.0
    exchange: ExchangeForecast = ExchangeForecast()
    gathered_bytes: int = 0
    shard_gradient_bytes: int = 0


class LossForecast(msgspec.Struct, frozen=True):
    """What follows when ``nodes`` die at once; ``alike`` pipelines would fare the same.

    ``plan`` is None where too few nodes are left: the job waits. ``lost_layers`` have no copy left and come
    from the last checkpoint. ``copied_bytes`` of state travel, ``copy_s`` on the busiest link.
    ``considered``: pipelines that could take part in the change; fewer than there are where there are very
    many. ``rolls_back``: whatever is lost, the job rolls back to its last checkpoint. ``summary`` (in JSON
    ``cases``): of the reason what becomes of the pipelines, where it says more than that. ``way`` and
    ``actions``: the reason for programs.
    """

    nodes: tuple[str, ...]
    alike: int
    plan: PlanForecast | None
    lost_layers: tuple[int, ...]
    copied_bytes: int
    copy_s: float
    considered: int
    reason: str
    rolls_back: bool = False
    summary: str = msgspec.field(default="", name="cases")  # its first name
    way: Way = ""
    actions: tuple[Action, ...] = ()


class GuaranteeForecast(msgspec.Struct, frozen=True):
    """What these templates promise (docs/guarantee.md). ``n0``: with fewer nodes the job waits.

    ``full_down_to``: ``f + 1`` pipelines down to so many nodes. ``idle``: first and last of the numbers of
    nodes at which some idle, because no sizes sum up to them. ``rolls_back``: every loss leads to the last
    checkpoint, so nothing is promised but to go on down to ``n0``.
    """

    f: int
    can_lose: int
    n0: int
    n_max: int
    full_down_to: int
    idle: tuple[tuple[int, int], ...]
    rolls_back: bool = False


class RecomputeForecast(msgspec.Struct, frozen=True):
    """The job with ``schedule.recompute`` as it says. ``n0``: the fewest nodes that hold the model (0: none
    do). ``step_s`` of the plan on all nodes, and the most that a device of it holds; 0 where they are too
    few.
    """

    recompute: RecomputeWanted
    n0: int
    step_s: float = 0.0
    memory_bytes: int = 0


class StagesForecast(msgspec.Struct, frozen=True):
    """The job with so many devices a stage. ``n0``: the fewest nodes that hold the model (0: none do).
    ``step_s`` of the plan on all nodes, the most that a device of it holds, and the nodes that it
    ``can_lose``; 0 where they are too few.
    """

    devices_per_stage: int
    n0: int
    step_s: float = 0.0
    memory_bytes: int = 0
    can_lose: int = 0


class OpForecast(msgspec.Struct, frozen=True):
    """A forward (``0F3``: stage 0, micro-batch 3), backward or part of one, from ``start_s`` to
    ``stop_s``.
    """

    op: str
    start_s: float
    stop_s: float


class ScheduleForecast(msgspec.Struct, frozen=True):
    """1F1B of one pipeline for the first ``micro_batches`` of its ``of_micro_batches``; with ``decoupled``
    what is in its place.

    ``stages``: the ops of each, as simulated; with two ``chunks`` of each device, which has two. Where stages
    have several devices, all counts are of turns: as many micro-batches at once.
    """

    num_nodes: int
    micro_batches: int
    of_micro_batches: int
    makespan_s: float
    stages: tuple[tuple[OpForecast, ...], ...]
    decoupled: bool = False
    chunks: int = 1


class Forecast(msgspec.Struct, frozen=True):
    """The whole answer. ``memory_bytes``: limit of a device, 0 where none is known.

    ``measured``: whether the times were measured on a device, or follow from its data sheet. ``without``:
    nodes that are taken to have died together; what ``change`` says of that, and the plan after it.
    ``pipelines`` are left out where there are many. ``standby``: nodes beyond those that the job wants at
    most. ``flops_per_token`` and ``peak_of``: of ``mfu``, and ``params``, ``active_params``,
    as in ``ProgressView``. ``attention``: the kernels
    that compute it, as torch would choose on such a device; () where nobody asked, or could look.
    ``recompute``: as the job has it, and ``recomputations``: each setting of it; () where nobody asked.
    ``devices_per_stage`` hold the state of a stage between them, ``stages_because`` of what, and
    ``stage_options``: each number that was compared.
    """

    job: str
    device: str
    measured: bool
    num_layers: int
    num_nodes: int
    devices_per_node: int
    memory_bytes: int
    micro_batches: int
    templates: tuple[TemplateForecast, ...]
    plan: PlanForecast
    pipelines: tuple[PipelineView, ...]
    guarantee: GuaranteeForecast
    losses: tuple[LossForecast, ...]
    schedule: ScheduleForecast
    standby: int = 0
    without: tuple[str, ...] = ()
    change: LossForecast | None = None
    flops_per_token: float = 0.0
    peak_of: str = ""
    attention: tuple[AttentionNote, ...] = ()
    params: int = 0
    active_params: int = 0
    recompute: RecomputeWanted = "none"
    recomputations: tuple[RecomputeForecast, ...] = ()
    devices_per_stage: int = 1
    stages_because: StagesBecause = ""
    stage_options: tuple[StagesForecast, ...] = ()
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect

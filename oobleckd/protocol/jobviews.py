"""Jobs, their plans and their steps as the HTTP API shows them (``api`` has what all answers share)."""

from __future__ import annotations

from itertools import groupby
from typing import Literal, NamedTuple

import msgspec

from oobleckd.planner.plan import Recompute, node_of
from oobleckd.protocol.deaths import Death
from oobleckd.protocol.evalviews import EvalSummary
from oobleckd.protocol.generation import Numbered
from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.job import Job
from oobleckd.protocol.modelnotes import FolderNote
from oobleckd.protocol.nodeviews import LayerRange
from oobleckd.protocol.parts import (
    JobCause,
    PreparePhase,
    SkipCause,
)
from oobleckd.protocol.traits import Difference

JobState = Literal[
    "queued", "preparing", "profiling", "planning", "deploying", "running", "recovering", "waiting", "paused",
    "done", "failed", "cancelled",
]  # fmt: skip


class ShownStage(NamedTuple):
    """Layers ``[start, stop)`` of a pipeline, on ``devices`` of one node that hold their state between them;
    together they are named ``"node-1/0-3"``. ``missing``: those that nobody has now.
    """

    name: str
    devices: tuple[str, ...]
    start: int
    stop: int
    missing: tuple[str, ...]

    @property
    def absence(self) -> str:
        """In a word, why nobody computes at it; "" where somebody does."""
        if len(self.missing) == len(self.devices):
            return "vacant"
        return f"without {', '.join(self.missing)}" if self.missing else ""


class PipelineView(msgspec.Struct, frozen=True):
    """One pipeline of the running plan. ``stages``: device by device; those of one stage follow each other.
    ``vacant``: devices of its stages that nobody has now; peers compute for them, and while one of several is
    missing for its whole stage. ``recompute``: device -> what its blocks compute again in the backward, where
    that is anything.
    """

    index: int
    nodes: tuple[str, ...]
    stages: tuple[LayerRange, ...]
    micro_batches: tuple[int, ...]
    vacant: tuple[str, ...] = ()
    recompute: dict[str, Recompute] = {}

    @property
    def shown(self) -> tuple[ShownStage, ...]:
        """Its stages, each with all of its devices."""
        found = []
        for (node, start, stop), held in groupby(self.stages, key=_stage_of):
            devices = tuple(each.device for each in held)
            first, last = devices[0], devices[-1].removeprefix(f"{node}/")
            name = first if len(devices) == 1 else f"{first}-{last}"
            missing = tuple(device for device in devices if device in self.vacant)
            found.append(ShownStage(name, devices, start, stop, missing))
        return tuple(found)


def _stage_of(held: LayerRange) -> tuple[str, int, int]:
    return node_of(held.device), held.start, held.stop


class TemplateView(msgspec.Struct, frozen=True):
    """One template: layer split, modelled seconds of one micro-batch and per further one, instances now.

    With two ``chunks`` a device has two stages, as far from the beginning as from the end, and the memory is
    that of both. ``recompute``: stage by stage what blocks compute again in the backward; () where they
    compute nothing again.
    """

    num_nodes: int
    stages: tuple[tuple[int, int], ...]
    fill_s: float
    period_s: float
    memory_bytes: tuple[int, ...]
    instances: int
    chunks: int = 1
    recompute: tuple[Recompute, ...] = ()


class StepTimes(msgspec.Struct, frozen=True):
    """How long the newest ``count`` steps took: quantiles in seconds, and a histogram: ``counts[i]``
    steps took at most ``edges_s[i]`` (and more than the edge before). ``slowest``: the device that was busy
    longest in the newest round that all told of ("": not known), for ``slowest_factor`` of the median of its
    peers, as work is shared among them.
    """

    count: int
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float
    edges_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    slowest: str = ""
    slowest_factor: float = 0.0


class ProgressView(msgspec.Struct, frozen=True):
    """How far a job is, and how fast. 0 where nothing is known yet, -1 for ``left_s``.

    ``elapsed_s``: since its first plan ran, all pauses and recoveries included; ``left_s``: until its last
    step, at the pace of late. ``tokens``: seen in committed steps, padding included; ``passes``: over its
    data. ``tokens_per_s``: of late. ``flops_per_token``: forward and backward, by the formula of its model's
    shape; ``peak_flops`` a second: of all devices of the plan, by the data sheet of ``peak_of`` (such as
    "h100-sxm, bf16"); ``mfu``: model FLOPs utilisation, what is done of that. ``goodput``: the share of
    its devices' time since it began that was not lost; a bubble is not, nor is what evaluates. ``params`` of
    the model, of which a token goes through ``active_params``: fewer where there are experts, and what FLOPs
    are counted of.
    """

    elapsed_s: float = 0.0
    left_s: float = -1.0
    tokens: int = 0
    total_tokens: int = 0
    passes: float = 0.0
    tokens_per_s: float = 0.0
    flops_per_token: float = 0.0
    peak_flops: float = 0.0
    peak_of: str = ""
    mfu: float = 0.0
    goodput: float = 0.0
    step_times: StepTimes | None = None
    params: int = 0
    active_params: int = 0


class CadenceView(msgspec.Struct, frozen=True):
    """How often a job writes checkpoints with ``checkpoint.every = "auto"``: after so many ``steps``, which
    are ``interval_s`` seconds.

    ``cost_s``: what one costs training (``measured``, or modelled until then); ``mtbf_s``: mean time between
    losses that need one; ``write_s``: the longest that one of the last took to be written. Why these make the
    interval: docs/mechanisms/checkpoints.md.
    """

    steps: int
    interval_s: float
    cost_s: float
    mtbf_s: float
    write_s: float
    measured: bool


class DeathView(msgspec.Struct, frozen=True):
    """A device of a job that died in ``step``, and knew of what. ``text`` is for people; ``planned_bytes``:
    of memory, what it was to have at most (0: not known).
    """

    device: str
    step: int
    at: float
    text: str
    death: Death
    planned_bytes: int


class TroubleView(msgspec.Struct, frozen=True):
    """Why no checkpoint can be written now: ``text`` for people, ``tries`` in vain since the last one was
    complete, the first at ``since`` (0: none was begun). A checkpoint takes ``needed_bytes``, of which
    ``free_bytes`` are free (-1: not known).
    """

    text: str
    since: float = 0.0
    tries: int = 0
    needed_bytes: int = 0
    free_bytes: int = -1


class PreparingView(msgspec.Struct, frozen=True):
    """How far ``node`` is that prepares a job's data: ``done_bytes`` of ``total_bytes`` of a ``phase``
    (``source``: of that one of several), ``bytes_per_s`` of it, ``left_s`` until it is over. 0: not known.
    """

    node: str
    phase: PreparePhase
    source: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    left_s: float = 0.0


class RouterView(msgspec.Struct, frozen=True):
    """What the router of ``layer`` came to in ``step``, the newest that all devices have told of.

    ``aux_loss`` and ``z_loss``: before their coefficients, means over micro-batches as they count, 0 where
    the job does not ask for them, null where they are no finite number. ``load``: the tokens of the expert
    with most, times those of the mean; ``idle``: experts without a token. ``tokens``: of each expert, all
    micro-batches together; empty in a JobView, and while nobody has told them.
    """

    layer: int
    step: int
    aux_loss: float | None
    z_loss: float | None
    load: float
    idle: int
    tokens: tuple[int, ...] = ()


class KeptView(msgspec.Struct, frozen=True):
    """A complete checkpoint of a job: the state after ``step`` steps, in ``directory``."""

    step: int
    directory: str


class JobView(Numbered, frozen=True):
    """A job as ``get jobs`` and ``describe`` show it.

    ``step`` is the number of committed steps. ``tolerance``: nodes that can still be lost at once without
    going back to a checkpoint (-1 when not deployed), of ``f`` asked for. ``step_s`` is the median of the
    last steps. Of the devices' updates since the daemon's start ``updates_early`` were made before all votes
    were in (with a staggered update), ``updates_taken_back`` of those in vain. ``boundary_bytes``: what a
    device has at most in its boundary cache; ``sum_copies``: how often in a step a peer gets a copy of its
    gradient sums. ``cadence``: of its checkpoints, where that is not fixed; ``checkpoint_step``: the steps in
    the last one. ``cause``: why it waits or has failed, for programs. ``notes``: what is to be said of
    the folder that its model starts from. ``steps_skipped``: of ``step``, those that made no update, since
    their loss or a gradient was not finite, or they were spikes (``steps_spiked`` of them);
    ``skipped_in_row``: the last ones, if the last step was one.
    ``kinds``: the traits of all devices that ever trained it, those that are alike once; ``differences``: in
    what those differ that train it now. ``deaths``: the newest of its devices that knew what they died of.
    ``checkpoint_trouble``: why its checkpoints cannot be written now, if so. ``inputs``: the identity of what
    it reads; ``checked_step``: up to the newest checkpoint of so many steps all who read have found
    afterwards that it was that (0: of none). ``start_step``: steps in the checkpoint that it was resumed
    from. ``preparing``: who prepares its data, and how far that is. ``evaluation``: how evaluating goes, of a
    job that does. ``progress``: how far it is and how fast, once it has a plan. ``routers``: of a mixture of
    experts, by layer, without tokens. ``devices_per_stage``: of the layout in force (0: there is none).
    """

    id: str
    name: str
    state: JobState
    reason: str
    step: int
    steps: int
    epoch: int
    loss: float | None
    tolerance: int
    f: int
    policy: str
    nodes: tuple[str, ...]
    pipelines: tuple[PipelineView, ...]
    samples_per_s: float
    step_s: float
    submitted_at: float
    finished_at: float | None
    incidents: int
    steps_lost: int
    checkpoint: str
    digest: str
    spec: Job
    updates_early: int = 0
    updates_taken_back: int = 0
    boundary_bytes: int = 0
    sum_copies: int = 0
    cadence: CadenceView | None = None
    checkpoint_step: int = 0
    cause: JobCause = ""
    notes: tuple[FolderNote, ...] = ()
    steps_skipped: int = 0
    skipped_in_row: int = 0
    steps_spiked: int = 0
    kept: tuple[KeptView, ...] = ()
    kinds: tuple[dict[str, str], ...] = ()
    differences: tuple[Difference, ...] = ()
    deaths: tuple[DeathView, ...] = ()
    checkpoint_trouble: TroubleView | None = None
    inputs: Inputs = ()
    checked_step: int = 0
    start_step: int = 0
    preparing: PreparingView | None = None
    evaluation: EvalSummary | None = None
    progress: ProgressView | None = None
    routers: tuple[RouterView, ...] = ()
    devices_per_stage: int = 0


class StepView(Numbered, frozen=True):
    """One committed step, numbered from 1. ``loss`` round-trips exactly through JSON, where it is finite
    (else it is null); ``loss_hex`` is its bits for people. ``outcome``: applied, or skipped: it made no
    update, for ``cause``.

    ``at`` is when the daemon heard of it; ``step_s`` is how long a device took from the commit before it. Of
    a mixture of experts: ``router_aux_loss`` and ``router_z_loss``, means over its layers before coefficients
    (null where they are no finite number, and in any other job), and ``expert_load``, the largest of a layer.
    """

    step: int
    loss: float
    loss_hex: str
    grad_norm: float
    lr: float
    samples: int
    ledger: str
    outcome: str
    epoch: int
    at: float
    step_s: float = 0.0
    cause: SkipCause = ""
    router_aux_loss: float | None = None
    router_z_loss: float | None = None
    expert_load: float | None = None


class CurveBin(msgspec.Struct, frozen=True):
    """Steps ``first`` to ``last`` of a run, of which ``count`` are known and ``skipped`` were skipped.

    Losses and ``grad_norm`` (the mean) are of the steps where they are finite, None where none is; ``lr`` is
    that of the last step. ``tokens_per_s`` is over the sum of the steps' times, and the least and most of
    single steps.
    """

    first: int
    last: int
    count: int
    skipped: int
    loss_min: float | None
    loss_mean: float | None
    loss_max: float | None
    step_s_min: float
    step_s_mean: float
    step_s_max: float
    lr: float
    grad_norm: float | None
    grad_norm_min: float | None = None
    grad_norm_max: float | None = None
    lr_min: float | None = None
    lr_max: float | None = None
    tokens_per_s: float = 0.0
    tokens_per_s_min: float = 0.0
    tokens_per_s_max: float = 0.0

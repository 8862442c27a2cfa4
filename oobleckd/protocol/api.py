"""Structs of the HTTP API on the daemon's socket (JSON), shared by daemon, client, ctl and console.

Owns the shapes only. Every answer that a person may script against carries ``apiVersion``.
Times are POSIX seconds (``*_at``) or durations in seconds (``*_s``).
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

from oobleckd.planner.plan import Recompute
from oobleckd.planner.policy import Action, RejectionCause, Way
from oobleckd.protocol.deaths import Death
from oobleckd.protocol.generation import Numbered
from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.job import Job
from oobleckd.protocol.modelnotes import FolderNote
from oobleckd.protocol.parts import (
    Counters,
    How,
    JobCause,
    KeptOutCause,
    LossCause,
    NodeCause,
    PreparePhase,
    SkipCause,
)
from oobleckd.protocol.traits import Difference

API_VERSION = "oobleck/v1"

JobState = Literal[
    "queued", "preparing", "profiling", "planning", "deploying", "running", "recovering", "waiting", "paused",
    "done", "failed", "cancelled",
]  # fmt: skip
NodeState = Literal["joining", "standby", "active", "draining", "drained", "disconnected", "lost", "left"]
Phase = Literal["detect", "plan", "reconfigure", "copy", "resume"]
RollbackCause = Literal[
    "", "last-copy-lost", "policy", "corruption", "data-changed", "checkpoint-damaged", "journal-lost"
]
"""Why a job went back: a layer has no copy left, its policy does so at every loss, or something cannot be
trusted. "": a version that did not say.
"""

# --------------------------------------------------------------------------- requests that change something


class Request(msgspec.Struct, frozen=True, tag=True):
    """Base of what a user asks the daemon to do. ``who`` is filled in by the HTTP layer (audit)."""


class Submit(Request, frozen=True):
    """Queue ``job``. ``resume``: a checkpoint folder to start from, or "latest" of the job's own folder.

    ``counters``: those of that folder, filled in by the HTTP layer from its manifest.json, as the
    core reads no files; None where there is none that can be read. ``folder``: the folder that it made for
    the job's checkpoints, by its name, which is the job's id ("": none was made, and the id has the next
    number). ``inputs``: what that checkpoint was made from, by the same manifest, where ``job`` names the
    same data.
    """

    job: Job
    resume: str = ""
    who: str = ""
    counters: Counters | None = None
    folder: str = ""
    inputs: Inputs = ()


class Control(Request, frozen=True):
    """pause, resume, cancel or checkpoint a job. ``discard``: a cancel writes no checkpoint before."""

    job: str
    act: Literal["pause", "resume", "cancel", "checkpoint"]
    who: str = ""
    discard: bool = False


class Delete(Request, frozen=True):
    """A job that is over is in no list any more, and its id means nothing. Its files stay where they are."""

    job: str
    who: str = ""


class Drain(Request, frozen=True):
    """Take a node out of plans (``undo``: back in) at a step's boundary."""

    node: str
    reason: str = ""
    undo: bool = False
    who: str = ""


class Forget(Request, frozen=True):
    """A node that is gone will not come back: it is not expected any more."""

    node: str
    who: str = ""


class Kill(Request, frozen=True):
    """Failure injection on a node; see ``messages.Inject``."""

    node: str
    how: How = "sigkill"
    at: str = ""
    round: int = -1
    seconds: float = 0.0
    times: float = 1.0
    who: str = ""


AnyRequest = Submit | Control | Delete | Drain | Forget | Kill


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Done or under way. ``id`` is the job's id for a submit; ``message`` says what happens next."""

    id: str = ""
    message: str = ""


class Denied(msgspec.Struct, frozen=True, tag=True):
    """Not done, and nothing changed. ``kind`` decides exit code and HTTP status (404, 409, 403, 422)."""

    kind: Literal["not-found", "conflict", "forbidden", "invalid"]
    problem: str
    hint: str = ""


Response = Accepted | Denied

# --------------------------------------------------------------------------- views


class LayerRange(msgspec.Struct, frozen=True):
    """Layers ``[start, stop)`` of ``device``."""

    device: str
    start: int
    stop: int


class PipelineView(msgspec.Struct, frozen=True):
    """One pipeline of the running plan. ``vacant``: devices of its stages that nobody has now; peers compute
    for them. ``recompute``: device -> what its blocks compute again in the backward, where that is anything.
    """

    index: int
    nodes: tuple[str, ...]
    stages: tuple[LayerRange, ...]
    micro_batches: tuple[int, ...]
    vacant: tuple[str, ...] = ()
    recompute: dict[str, Recompute] = {}


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


class PhaseView(msgspec.Struct, frozen=True):
    """One timed phase of an incident, offset from the first evidence."""

    phase: Phase
    start_s: float
    duration_s: float


class RejectedView(msgspec.Struct, frozen=True):
    """A way that a policy did not take, with its modelled cost in seconds, and why not: ``what`` and ``why``
    for people, ``way`` and ``cause`` for programs.

    ``at_least``: the cost is a bound from below. ``step_s``, ``copied_bytes``, ``precopy_s``: of the plan it
    would have been, and until its copies are made before the stop (0: none, or not known). ``risk_s``: of the
    cost, for a last copy that the next loss may take along. ``can_lose``: nodes (-1: not known).
    """

    what: str
    cost_s: float
    why: str
    way: Way = ""
    cause: RejectionCause = ""
    at_least: bool = False
    step_s: float = 0.0
    copied_bytes: int = 0
    precopy_s: float = 0.0
    risk_s: float = 0.0
    can_lose: int = -1


class SourceView(msgspec.Struct, frozen=True):
    """``device`` sent so much of the layers that a new plan had others hold."""

    device: str
    num_bytes: int


class RollbackView(msgspec.Struct, frozen=True):
    """A job went on from the state of ``step``, ``steps_lost`` before where it was. ``source``: the folder of
    that checkpoint; "init": fresh weights.
    """

    step: int
    steps_lost: int
    source: str
    cause: RollbackCause = ""


class ReasonView(msgspec.Struct, frozen=True):
    """The reason of an incident in parts. ``back``: why the job went back, and how far ("": it did not).
    ``plan``: what became of the plan, and why. ``rerouted``: until there is another plan, the micro-batches
    of these devices go to other holders of their layers. ``staged_bytes`` of the copies were made before the
    stop.

    For programs: ``rollback`` is the last one, ``way`` what the plan is, and ``actions`` what it does to each
    pipeline or place that it changes.
    """

    back: str = ""
    plan: str = ""
    rerouted: tuple[str, ...] = ()
    staged_bytes: int = 0
    rollback: RollbackView | None = None
    way: Way = ""
    actions: tuple[Action, ...] = ()


class LossView(msgspec.Struct, frozen=True):
    """A node, or where its spare took the place a ``device`` of it, was lost."""

    node: str
    cause: LossCause
    device: str = ""


class IncidentView(Numbered, frozen=True):
    """One recovery from evidence to resumed step. ``step`` is the one that was interrupted, numbered from 1.

    ``steps_lost`` is 0 unless a layer's last copy died and the job went back to a checkpoint.
    ``layer_gradients`` were computed again, of ``step_layer_gradients`` that one step has, and
    ``layer_forwards``, of as many. ``cost_s``: what was modelled of the way taken, until the next loss is
    expected (0: there was no choice); ``rejected``: the others. ``sources``: who the copies came from, most
    bytes first; some may have been pre-copied. ``reason`` is a sentence, ``parts`` what it is made of;
    ``cause`` is one, too, and ``losses`` what was lost of what, for programs.
    """

    id: str
    job: str
    cause: str
    nodes: tuple[str, ...]
    at: float
    epoch: int
    step: int
    open: bool
    phases: tuple[PhaseView, ...]
    total_s: float
    reason: str
    steps_lost: int = 0
    copied_bytes: int = 0
    layer_gradients: int = 0
    step_layer_gradients: int = 0
    committed_s: float = 0.0
    layer_forwards: int = 0
    cost_s: float = 0.0
    rejected: tuple[RejectedView, ...] = ()
    sources: tuple[SourceView, ...] = ()
    parts: ReasonView = ReasonView()
    losses: tuple[LossView, ...] = ()


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


class DeviceFigures(msgspec.Struct, frozen=True):
    """What a device and its card say of themselves, as of ``at``. 0, or -1 where 0 is a figure: not known.

    ``rss_bytes``: of its process. ``used_bytes`` of ``planned_bytes`` (the planner's) and of ``total_bytes``:
    memory that it computes in, of the card where it has one. The rest is a card's: ``utilisation`` (0 to 1),
    watts, degrees Celsius, clocks in MHz, why its clocks are held down, memory errors since the driver was
    loaded, and the XIDs that the driver told of, newest last.
    """

    device: str
    at: float
    rss_bytes: int = 0
    used_bytes: int = 0
    planned_bytes: int = 0
    total_bytes: int = 0
    card: str = ""
    utilisation: float = -1.0
    power_w: float = 0.0
    power_limit_w: float = 0.0
    temperature_c: int = 0
    clock_mhz: int = 0
    clock_max_mhz: int = 0
    throttled: tuple[str, ...] = ()
    ecc_corrected: int = -1
    ecc_uncorrected: int = -1
    xids: tuple[int, ...] = ()


class NodeView(msgspec.Struct, frozen=True):
    """A node and its devices. ``heartbeat_age_s`` (in JSON ``beat_age_s``) is the age of its last heartbeat.

    ``spare``: its warm spare, "" if it keeps none; ``spare_bytes`` of the host's memory are the spare's (0:
    not known yet). ``layers`` are those that its devices compute, ``redundant`` (in JSON ``shadows``) the
    redundant ones, which they hold for others. ``zone``: what it fails together with, where that is known.
    ``bits``: of each device what decides the bits of its results, in short; ``traits``: all that does, by
    name. ``kept_out``: why no plan of the active job uses it, where a program should know ("data-changed": it
    would read another text). ``lease_s``: how long its silence is forgiven at present; what its first
    heartbeats teach makes that shorter. ``figures``: of its devices, what they said last. ``reason`` says to
    people why it is in its state, ``cause`` to programs.
    """

    name: str
    state: NodeState
    incarnation: str
    host: str
    devices: tuple[str, ...]
    kinds: tuple[str, ...]
    pids: tuple[int, ...]
    heartbeat_age_s: float = msgspec.field(name="beat_age_s")
    layers: tuple[LayerRange, ...]
    reason: str = ""
    spare: Literal["", "starting", "ready"] = ""
    spare_pid: int = 0
    spare_bytes: int = 0
    redundant: tuple[LayerRange, ...] = msgspec.field(default=(), name="shadows")  # its first name
    zone: str = ""
    bits: tuple[str, ...] = ()
    traits: tuple[dict[str, str], ...] = ()
    kept_out: KeptOutCause = ""
    lease_s: float = 0.0
    cause: NodeCause = ""
    figures: tuple[DeviceFigures, ...] = ()


class NodeLogView(msgspec.Struct, frozen=True):
    """The newest ``lines`` of a node's log, oldest first, as its agent tells them. ``complete``: with what
    its devices print, and not those of the agent alone.
    """

    node: str
    lines: tuple[str, ...]
    complete: bool


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


class SourceLoss(msgspec.Struct, frozen=True):
    """What an evaluation found on ``source``: the mean loss over ``targets`` tokens, null where that is no
    finite number, its bits for people (``loss_hex``), and the ``perplexity``, exp of it, null where that has
    no room.
    """

    source: str
    loss: float | None
    loss_hex: str
    perplexity: float | None
    targets: int


class EvaluationView(Numbered, frozen=True):
    """An evaluation after ``step`` steps (0: before the first): ``losses`` by source, and their mean over all
    targets in ``loss`` (null where it is no finite number). It took ``seconds``, up to ``at``.
    """

    step: int
    loss: float | None
    losses: tuple[SourceLoss, ...]
    epoch: int
    at: float
    seconds: float


class BestLoss(msgspec.Struct, frozen=True):
    """The least loss of an evaluation ``source``, first met after ``step`` steps."""

    source: str
    step: int
    loss: float


class EvalSummary(msgspec.Struct, frozen=True):
    """How evaluating goes. ``last``: the newest evaluation; ``best``: the least loss of each source.
    ``next_step``: after how many steps the next one is, or the one under way (-1: none is to come), of which
    ``rounds_done`` of ``rounds`` are over. ``planned_s``: of one, and ``planned_share`` of all in the time of
    a job without failures (0: no plan is in force). ``measured_share``: of the time of the job's devices so
    far.
    """

    last: EvaluationView | None = None
    best: tuple[BestLoss, ...] = ()
    next_step: int = -1
    rounds_done: int = 0
    rounds: int = 0
    planned_s: float = 0.0
    planned_share: float = 0.0
    measured_share: float = 0.0


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
    experts, by layer, without tokens.
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


class LostRecords(msgspec.Struct, frozen=True):
    """The journal was damaged, and records of it are gone: ``what`` was found, and ``kept_as`` has what was
    left of it ("": nothing was).
    """

    at: float
    what: str
    kept_as: str = ""


class Status(msgspec.Struct, frozen=True):
    """Headline of the daemon.

    ``nodes`` are here (connected, and heard of lately), of those ``expected``: all that ever joined but for
    who left in order or was forgotten.
    ``lost``: how many of them are not here and not waited for. ``lost_records``: of the last seven days.
    """

    version: str
    daemon: str
    state_dir: str
    up_s: float
    nodes: int
    jobs: int
    line: str
    endpoint: str
    allow_injection: bool
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect
    expected: int = 0
    lost: int = 0
    lost_records: tuple[LostRecords, ...] = ()


Item = TypeVar("Item")


class Items(msgspec.Struct, Generic[Item], frozen=True):
    """A page of a list. ``cursor``: what to ask for the next one with ("": this is the last)."""

    items: tuple[Item, ...]
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect
    cursor: str = ""


class Problem(msgspec.Struct, frozen=True):
    """RFC 9457 problem+json. ``retry_s``: after which the same question may be answered (0: it was not asked
    too often).
    """

    title: str
    status: int
    detail: str
    hint: str = ""
    type: str = "about:blank"
    retry_s: float = 0.0


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

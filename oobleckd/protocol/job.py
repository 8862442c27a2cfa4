"""job.toml: one model, used by the command line, the HTTP API, the daemon and the workers.

Owns the fields, their checks, and the words of the error messages. docs/job-toml.md is generated
from here. Loading never touches torch or the network; whether paths exist is asked where they are
read (``oobleckctl submit`` asks before it sends).
"""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from oobleckd.planner.policy import WITH_REDUNDANT_LAYERS
from oobleckd.protocol import fields
from oobleckd.protocol.batchramp import BatchRamp, BatchSizes, check_ramp, sizes_of
from oobleckd.protocol.evaldata import check_evaluated
from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.jobdata import Data, check_data, same_data
from oobleckd.protocol.jobeval import Eval, check_eval
from oobleckd.protocol.joboptimizer import Optimizer, check_rule
from oobleckd.protocol.jobschedule import FIRST_NAMES, Resources, Schedule, check_link, check_stages
from oobleckd.protocol.jobsinks import SinkTable, check_sinks
from oobleckd.protocol.jobtable import SEE, JobError, JobTable, fields_of
from oobleckd.protocol.parts import Counters
from oobleckd.protocol.units import parse_size
from oobleckd.protocol.unreadable import misfit
from oobleckd.protocol.wishes import wish_of
from oobleckd.words import count

PolicyName = Literal["adaptive", "oobleck", "slipstream", "bamboo", "varuna"]
Positive = Annotated[int, Meta(ge=1)]
MAX_SKIPPED = 3
"""Steps in a row, with ``train.on_nan = "stop"``. A bad batch or two pass; what comes a third time comes for
ever.
"""
MAX_MICRO_BATCHES = 2**16
"""In a step: each has a route of its own in every plan."""

_LARGEST = 2**63 - 1


class Model(JobTable, frozen=True):
    """What is trained: a Hugging Face architecture from a configuration, or from a local folder."""

    family: Annotated[
        str, Meta(description="Hugging Face model type, such as gpt2, llama or bert (docs/models.md).")
    ] = "gpt2"
    config: Annotated[
        dict[str, fields.ConfigValue],
        Meta(
            description="Fields of that family's configuration class, tables and lists among them, such as "
            "`layer_types` and "
            "`rope_scaling`; the others keep their defaults."
        ),
    ] = {}  # noqa: RUF012 - msgspec gives every struct one of its own
    checkpoint: Annotated[
        str,
        Meta(
            description="Folder with config.json and safetensors to start from instead of fresh weights "
            "(docs/models.md)."
        ),
    ] = ""


class Train(JobTable, frozen=True):
    """The training run. Every field here shows in the bits of the result (docs/exactness.md)."""

    steps: Annotated[Positive, Meta(description="Optimizer steps.")]
    global_batch: Annotated[
        int, Meta(ge=1, le=2**24, description="Sequences per step, whatever the number of nodes.")
    ]
    micro_batch: Annotated[Positive, Meta(description="Sequences per micro-batch; divides global_batch.")]
    sequence: Annotated[int, Meta(ge=2, description="Tokens per sequence.")]
    seed: Annotated[int, Meta(ge=0, description="Seed of weights, samples and dropout.")] = 0
    precision: Annotated[
        Literal["fp32", "bf16"], Meta(description="bf16: autocast over float32 weights.")
    ] = "fp32"
    experts_precision: Annotated[
        Literal["fp32", "bf16"],
        Meta(
            description="In what the experts of a mixture compute where precision is bf16 (docs/experts.md). "
            "fp32: as autocast has them. bf16: as other products, which on GPUs is several times as fast; "
            "weights stay float32. Shows in the bits."
        ),
    ] = "fp32"
    loss_chunk_size: Annotated[
        int,
        Meta(
            ge=0,
            description="Tokens of a micro-batch of which logits and loss are computed at a time, by the "
            "model's output projection; 0: all at once. Takes less memory, and comes to other bits "
            "(docs/models.md).",
        ),
    ] = 0
    router_aux_loss_coef: Annotated[
        float,
        Meta(
            ge=0,
            description="What the load-balancing loss of each router of a mixture of experts counts "
            "(docs/experts.md), as Megatron's moe-aux-loss-coeff; 0: there is none. 0.01 is usual. That of "
            "model.config is not used.",
        ),
    ] = 0.0
    router_z_loss_coef: Annotated[
        float,
        Meta(
            ge=0,
            description="What the z-loss of each router counts, which keeps its logits small, as Megatron's "
            "moe-z-loss-coeff; 0: there is none. 0.001 is usual.",
        ),
    ] = 0.0
    on_nan: Annotated[
        Literal["stop", "skip"],
        Meta(
            description="What follows steps that are skipped, since their loss or a gradient is no number or "
            "infinite. stop: after three in a row "
            "the job has failed, and its last checkpoint from before them stays. skip: it goes on, whatever "
            "their number."
        ),
    ] = "stop"
    on_spike: Annotated[
        Literal["ignore", "skip", "stop"],
        Meta(
            description="What follows a step whose loss is a spike, or whose gradient norm is beyond "
            "spike_grad_norm (docs/recipe.md). ignore: it is a step as any other. skip: it makes no update. "
            "stop: neither, and after three in a row the job has failed."
        ),
    ] = "ignore"
    spike_factor: Annotated[
        float,
        Meta(
            ge=0,
            description="A loss beyond so many times the median of the last spike_window losses is a spike; "
            "0: none is.",
        ),
    ] = 2.0
    spike_window: Annotated[
        int,
        Meta(ge=3, le=512, description="Losses in that median; while there are fewer none is a spike."),
    ] = 32
    spike_grad_norm: Annotated[
        float,
        Meta(ge=0, description="Largest global gradient norm, before clipping, of a step; 0: no limit."),
    ] = 0.0
    # Integers are the only way in which any grouping gives the same bits by construction: wider floats
    # agree by luck, and an order that is fixed cannot survive a failure. (D-exactness-001)
    exact: Annotated[
        bool,
        Meta(
            description="Gradients summed as integers, so that any grouping gives the same bits; false: "
            "floating point."
        ),
    ] = True
    # A property of the job, and false: what is compiled rounds elsewhere than what is not. (D-compile-001)
    compile: Annotated[
        bool,
        Meta(
            description="Blocks and head run as torch's compiler makes them (docs/compile.md), with other "
            "bits than without; nodes need a C++ compiler, GPUs Triton besides."
        ),
    ] = False
    # Unset and not a ramp of no steps: a job without one is encoded as it was before there were any.
    batch_ramp: Annotated[
        BatchRamp | UnsetType,
        Meta(
            description="Fewer sequences a step at first: `{ start = 32, increment = 32, samples = 100000 }` "
            "(docs/recipe.md); left out: global_batch in every step."
        ),
    ] = UNSET


class FaultTolerance(JobTable, frozen=True):
    """How many simultaneous losses the job must survive, and how it reacts."""

    f: Annotated[
        int, Meta(ge=0, description="Simultaneous node losses that must leave a copy of every layer.")
    ] = 1
    policy: Annotated[
        PolicyName,
        Meta(
            description="What follows a loss. oobleck: a new plan on all nodes, with copies. slipstream: "
            "peers compute "
            "what the dead would have, nothing is moved until a node can take its place. bamboo: every "
            "device also holds the layers of "
            "the one behind it in its pipeline and computes for it when it dies. varuna: back to the "
            "last checkpoint, and on with the best depth x width for the nodes that are left. adaptive: "
            "whichever costs least until "
            "the next loss is expected; the others are shown with their costs."
        ),
    ] = "adaptive"
    check_every: Annotated[
        int,
        Meta(
            ge=0,
            description="In every so many steps the replicas of each layer compare digests of weights and "
            "optimizer state before they update, and "
            "devices check that their gradient sums have not changed in memory; 0: never. With 1 a flipped "
            "bit is found before anybody "
            "has used what came of it, and its device is named with two copies, too (docs/corruption.md).",
        ),
    ] = 1
    slow: Annotated[
        Literal["report", "drain"],
        Meta(
            description="What happens when a device takes twice as long for its work as its peers, or more, "
            "over eight steps. report: it is said. "
            "drain: its node is kept out of plans until somebody lets it back (`oobleckctl undrain`), if the "
            "others keep f + 1 copies of every "
            "layer (docs/corruption.md)."
        ),
    ] = "report"


class Checkpoint(JobTable, frozen=True):
    """Where and how often the whole state is written."""

    dir: Annotated[
        str, Meta(description="Folder for checkpoints, seen by every node; empty: under the daemon's state.")
    ] = ""
    # "auto" is the default: a job that said nothing used to write one at its end alone, so the loss of the
    # cluster cost all of it. (D-checkpoints-005)
    every: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["auto"],
        Meta(
            description="Steps between checkpoints; 0: only at the end and on demand. auto: as often as "
            "pays, by what one costs and how often "
            "one is needed in this job (docs/mechanisms/checkpoints.md); every half hour at least."
        ),
    ] = "auto"
    keep: Annotated[Positive, Meta(description="Newest checkpoints to keep.")] = 2


class Job(JobTable, frozen=True):
    """A training job."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$(?!\n)", description="Name of the job.")]
    train: Train
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    fault_tolerance: FaultTolerance = FaultTolerance()
    schedule: Schedule = Schedule()
    resources: Resources = Resources()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    # Unset and not empty: a job without sinks is encoded as it was before there were any. (D-sinks-001)
    sink: Annotated[
        tuple[SinkTable, ...] | msgspec.UnsetType,
        Meta(description="Where its figures go beside the daemon's own: `[[sink]]`, below."),
    ] = msgspec.UNSET

    @property
    def sinks(self) -> tuple[SinkTable, ...]:
        """Its sinks, each of another kind."""
        return self.sink or ()

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step of the whole global batch, which plans are made for."""
        return self.train.global_batch // self.train.micro_batch

    @property
    def batch_sizes(self) -> BatchSizes:
        """How many sequences each step takes."""
        return sizes_of(self.train.global_batch, self.train.micro_batch, self.train.batch_ramp)

    def tokens_before(self, step: int) -> int:
        """Places for tokens in the sequences of the first ``step`` steps, padding among them."""
        return self.batch_sizes.before(step) * self.train.sequence

    @property
    def warmup_steps(self) -> int:
        """Of the learning rate's warm-up, in whichever unit it was said."""
        sequences = -(-self.optimizer.warmup_tokens // self.train.sequence)
        return self.optimizer.warmup_steps or self.batch_sizes.steps_for(sequences)

    @property
    def eval_sources(self) -> tuple[str, ...]:
        """Names of what is evaluated on: what is ``held_out``, and behind it each `[[eval.source]]`."""
        return (*self.held_out, *(source.name for source in self.eval.source))

    @property
    def held_out(self) -> tuple[str, ...]:
        """Names of the sources of `[data]` that a share is held out of; a single one is "held-out"."""
        if not self.eval.held_out:
            return ()
        return tuple(source.name for source in self.data.sources) or ("held-out",)

    @property
    def eval_micro_batches(self) -> int:
        """Micro-batches of each evaluation source in an evaluation; those of the first come first."""
        return self.eval.sequences // self.train.micro_batch

    @property
    def eval_rounds(self) -> EvalRounds:
        """Which of its rounds evaluate."""
        return EvalRounds(
            self.train.steps,
            self.num_micro_batches,
            self.eval_micro_batches * len(self.eval_sources),
            self.eval.every,
            self.eval.at_start,
            self.eval.at_end,
            self.batch_sizes if self.train.batch_ramp is not UNSET else None,
        )

    @property
    def max_skipped(self) -> int:
        """After so many steps in a row that were skipped as not finite no step follows; 0: after any
        number.
        """
        return MAX_SKIPPED if self.train.on_nan == "stop" else 0

    @property
    def max_spiked(self) -> int:
        """The same of steps that were skipped for a spike."""
        return MAX_SKIPPED if self.train.on_spike == "stop" else 0

    def stopped_by(self, counters: Counters) -> bool:
        """Whether no step follows so many skipped ones."""
        return stops(counters, self.max_skipped, self.max_spiked)

    def may_stop_after(self, skipped_in_row: int) -> bool:
        """Whether no step may follow so many skipped ones, of which it is not known why they were."""
        return skipped_in_row >= MAX_SKIPPED and bool(self.max_skipped or self.max_spiked)

    @property
    def measures_selective(self) -> bool:
        """Whether somebody asks what a block costs that computes again what is cheap: not of a compiled one,
        which cannot.
        """
        return self.schedule.recompute in {"selective", "auto"} and not self.train.compile

    @property
    def costs_depend_on(self) -> tuple[object, ...]:
        """What of a job decides what a layer costs on a device: jobs that agree in it share a profile."""
        train = self.train
        shapes = (train.micro_batch, train.sequence, train.precision, train.exact)
        switches = {
            "separate": self.data.is_separate,
            "compiled": train.compile,
            "selective": self.measures_selective,
            "experts in bf16": train.experts_precision == "bf16",
        }
        said = (name for name, on in switches.items() if on)
        kept = self.optimizer.kept
        chunked = ("loss_chunk_size", train.loss_chunk_size) if train.loss_chunk_size else ()
        return (
            self.model,
            *shapes,
            self.schedule.backward,
            self.fault_tolerance.check_every,
            *said,
            *kept,
            *chunked,
        )


def stops(counters: Counters, max_skipped: int, max_spiked: int) -> bool:
    """Whether so many steps in a row were skipped as not finite, or so many for a spike (0: any may be)."""
    not_finite = counters.skipped_in_row - counters.spiked_in_row
    return 0 < max_skipped <= not_finite or 0 < max_spiked <= counters.spiked_in_row


def reads_the_same(one: Job, other: Job) -> bool:
    """Whether the two jobs read the same files, as far as they say: packed and padded rows have a plan in a
    file of its own for each length, and each draw of what is held out.
    """
    lengths = {job.train.sequence for job in (one, other) if job.data.row_kind != "windows"}
    seeds = {job.eval.held_out and (job.eval.held_out, job.train.seed) for job in (one, other)}
    evaluated = [[job.data.evaluated(source) for source in job.eval.source] for job in (one, other)]
    return (
        same_data(one.data, other.data)
        and len(lengths) < 2
        and len(seeds) < 2
        and len(evaluated[0]) == len(evaluated[1])
        and all(map(same_data, *evaluated))
    )


def jobs_of_sources(job: Job) -> tuple[tuple[str, Job], ...]:
    """Of each source its name and a job on it alone; of a single one "" and the job itself."""
    if not job.data.sources:
        return (("", job),)
    return tuple(
        (source.name, msgspec.structs.replace(job, data=job.data.only(source))) for source in job.data.sources
    )


def reject_old_names(raw: dict[str, Any]) -> None:
    """Of a file that somebody submits. Raises JobError for a key that has another name now."""
    for old, new in FIRST_NAMES.items():
        if old in _schedule_of(raw):
            raise JobError(f"schedule.{old}", "this key has a new name", f"write schedule.{new} instead")


def table_of(job: Job) -> dict[str, Any]:
    """What a job.toml has for ``job``; the inverse of ``parse_job``."""
    table: dict[str, Any] = msgspec.to_builtins(job)
    schedule = {FIRST_NAMES.get(key, key): value for key, value in table["schedule"].items()}
    return table | {"schedule": schedule}


def parse_job(raw: dict[str, Any]) -> Job:
    """The job of a decoded TOML table, or of what the API says of a job, where some keys have their first
    names. Raises JobError.
    """
    _reject_huge(raw, "")
    raw = _by_first_names(raw)
    _reject_unknown(raw, Job, "")
    model = raw.get("model")
    if isinstance(model, dict) and isinstance(model.get("config"), dict):
        for key, value in model["config"].items():
            if found := fields.misfit(value, f"model.config.{key}"):
                raise JobError(found[0], f"cannot be a {found[1]} here", fields.HINT)
    try:
        job = msgspec.convert(raw, Job)
    except msgspec.ValidationError as error:
        found = misfit(error, Job, raw)
        raise JobError(_path_of(found.path), found.problem, SEE) from error
    check_job(job)
    return job


def check_job(job: Job) -> None:
    """What the types cannot say. Raises JobError."""
    if job.train.global_batch % job.train.micro_batch:
        near = _divisors(job.train.global_batch)
        best = min(near, key=lambda n: abs(n - job.train.micro_batch))
        raise JobError(
            "train.micro_batch",
            f"{job.train.micro_batch} does not divide train.global_batch = {job.train.global_batch}",
            f"the nearest divisor is {best}",
        )
    if job.num_micro_batches > MAX_MICRO_BATCHES:
        raise JobError(
            "train.micro_batch",
            f"{count(job.num_micro_batches, 'micro-batch')} in a step are too many",
            f"make it {math.ceil(job.train.global_batch / MAX_MICRO_BATCHES)} or larger: "
            f"{MAX_MICRO_BATCHES:,} are the most",
        )
    check_ramp(job.train.global_batch, job.train.micro_batch, job.train.batch_ramp)
    for path, size in (
        ("resources.device_memory", job.resources.device_memory),
        ("schedule.boundary_memory", job.schedule.boundary_memory),
        ("schedule.redundant_memory", job.schedule.redundant_memory),
    ):
        try:
            parse_size(size)
        except ValueError as error:
            raise JobError(path, str(error), 'write a number with a unit, such as "48MiB"') from error
    check_link(job.resources)
    check_stages(job.resources, compiled=job.train.compile)
    _check_chunks(job)
    _check_compile(job)
    _check_experts(job.train)
    check_sinks(job.sinks)
    check_eval(job.eval, job.train.micro_batch)
    for index, source in enumerate(job.eval.source):
        if source.name in job.held_out:
            problem = f"{source.name!r} is the name of what is held out of [data], too"
            raise JobError(f"eval.source[{index}].name", problem, "rename one")
    has_folder = bool(job.model.checkpoint)
    check_data(job.data, job.train.steps, has_folder=has_folder, evaluated=job.eval.source)
    check_evaluated(job.data, job.eval.source, has_folder=has_folder)
    _check_rates(job)
    check_rule(job.optimizer)
    _check_spikes(job.train)
    for index, beta in enumerate(job.optimizer.betas):
        if not 0 <= beta < 1:
            raise JobError(
                f"optimizer.betas[{index}]", f"{beta} is not in [0, 1)", "usual values are [0.9, 0.999]"
            )


def _check_experts(train: Train) -> None:
    if train.experts_precision == "bf16" and train.precision != "bf16":
        raise JobError(
            "train.experts_precision",
            f"experts compute in bf16 where all products do, and train.precision is {train.precision}",
            'set train.precision = "bf16", or leave experts_precision out',
        )


def _check_spikes(train: Train) -> None:
    if train.on_spike == "ignore":
        defaults = {field.name: field.default for field in fields_of(Train)}
        for key in ("spike_factor", "spike_window", "spike_grad_norm"):
            if getattr(train, key) != defaults[key]:
                problem = 'nobody looks for spikes: train.on_spike = "ignore"'
                raise JobError(f"train.{key}", problem, 'set train.on_spike = "skip" or "stop"')
    elif not (train.spike_factor or train.spike_grad_norm):
        problem = "with spike_factor = 0 and no spike_grad_norm no step is a spike"
        raise JobError("train.on_spike", problem, "set one of the two")
    elif 0 < train.spike_factor <= 1:
        problem = f"{train.spike_factor} times the median would make every other step a spike"
        raise JobError("train.spike_factor", problem, "usual values are 1.5 to 10")


def _check_rates(job: Job) -> None:
    """What makes no sense of the learning rate's schedule. Raises JobError."""
    optimizer, steps = job.optimizer, job.train.steps
    if optimizer.warmup_steps and optimizer.warmup_tokens:
        problem = "the warm-up is said in steps, too (optimizer.warmup_steps)"
        raise JobError("optimizer.warmup_tokens", problem, "leave one of the two out")
    if optimizer.schedule == "inverse-sqrt" and not job.warmup_steps:
        raise JobError(
            "optimizer.schedule",
            "inverse-sqrt needs a warm-up: from its end on the rate falls with the root of the step",
            "set optimizer.warmup_steps, such as 2000",
        )
    if optimizer.schedule != "wsd":
        for key, value, default in (
            ("decay_steps", optimizer.decay_steps, 0),
            ("decay_type", optimizer.decay_type, "linear"),
        ):
            if value != default:
                problem = f'goes with schedule = "wsd" alone, and it is {optimizer.schedule!r}'
                raise JobError(f"optimizer.{key}", problem, f"leave {key} out, or set schedule")
    elif optimizer.decay_steps and optimizer.decay_steps + job.warmup_steps > steps:
        raise JobError(
            "optimizer.decay_steps",
            f"{optimizer.decay_steps} and {count(job.warmup_steps, 'step')} of warm-up are more than "
            f"train.steps = {steps}",
            f"make it {max(0, steps - job.warmup_steps)} or less",
        )


def _divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _reject_huge(value: object, path: str) -> None:
    """Numbers that do not fit into 64 bits, or are none, could be read and then be sent to nobody."""
    match value:
        case dict():
            for key, each in value.items():
                _reject_huge(each, f"{path}.{key}" if path else str(key))
        case list():
            for index, each in enumerate(value):
                _reject_huge(each, f"{path}[{index}]")
        case int() if abs(value) > _LARGEST:
            raise JobError(path, "is too large a number", "the largest is 2**63 - 1")
        case float() if not math.isfinite(value):
            raise JobError(path, "is no finite number", "write one, such as 0.01")
        case _:
            pass


def _check_chunks(job: Job) -> None:
    # 1F1B over twice as many stages would hold as much and wait more: what was asked for would not be what
    # is run. (D-schedules-010)
    if job.schedule.chunks != 2:
        return
    if not job.schedule.apart:
        raise JobError(
            "schedule.chunks",
            f"2 needs a decoupled backward, and schedule.backward = {job.schedule.backward!r}",
            'set schedule.backward = "decoupled", or leave chunks out',
        )
    policy = job.fault_tolerance.policy
    if policy in WITH_REDUNDANT_LAYERS:
        raise JobError(
            "schedule.chunks",
            f"2 does not go with fault_tolerance.policy = {policy!r}: a device with two parts of a pipeline "
            "has two successors, and "
            "holds the layers of one",
            "leave chunks out, or choose another policy",
        )


def _check_compile(job: Job) -> None:
    # Torch's compiler makes one backward of a block, input and weight gradients together. (D-compile-005)
    if job.train.compile and job.schedule.apart:
        raise JobError(
            "train.compile",
            'does not go with schedule.backward = "decoupled": a compiled block has one backward, which '
            "cannot be cut in two",
            'set schedule.backward = "fused", or leave compile out',
        )
    # A compiled block is one program, within which nothing can be told to be kept. (D-recompute-004)
    if job.train.compile and job.schedule.recompute == "selective":
        raise JobError(
            "schedule.recompute",
            '"selective" does not go with train.compile: of a compiled block either all is computed again '
            "or nothing",
            'set schedule.recompute = "blocks" or "auto", or leave train.compile out',
        )


def _schedule_of(raw: dict[str, Any]) -> dict[str, Any]:
    schedule = raw.get("schedule")
    return schedule if isinstance(schedule, dict) else {}


def _by_first_names(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` as it is stored and sent. Raises JobError where a key is there by both of its names."""
    schedule = dict(_schedule_of(raw))
    for old, new in FIRST_NAMES.items():
        if old in schedule and new in schedule:
            raise JobError(
                f"schedule.{old}", f"schedule.{new} is the same key and is set, too", f"leave {old} out"
            )
        if new in schedule:
            schedule[old] = schedule.pop(new)
    return raw | {"schedule": schedule} if schedule else raw


def _path_of(stored: str) -> str:
    """A key that is wrong, as a job.toml calls it."""
    table, _, key = stored.partition(".")
    return f"{table}.{FIRST_NAMES.get(key, key)}" if table == "schedule" and key else stored


def _reject_unknown(raw: dict[str, Any], table: type[msgspec.Struct], path: str) -> None:
    fields = {field.encode_name: field for field in fields_of(table)}
    for key, value in raw.items():
        where = f"{path}.{key}" if path else key
        if key not in fields:
            names = [field.name for field in fields.values()]
            if wish := wish_of(key, path):
                raise JobError(where, f"unknown key: {wish.problem}", f"see {wish.page}")
            close = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(names)}"
            raise JobError(where, "unknown key", hint)
        kind = _table_in(fields[key].type)
        if kind is None:
            continue
        for index, row in enumerate(value) if isinstance(value, list) else [(-1, value)]:
            if isinstance(row, dict):
                _reject_unknown(row, kind, f"{where}[{index}]" if index >= 0 else where)


def _table_in(kind: Any) -> type[msgspec.Struct] | None:
    """The table that a key has one or several of; None where it has a plain value."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    found = (_table_in(each) for each in get_args(kind))
    return next((each for each in found if each is not None), None)

"""What a plan without a cluster knows of layers and devices: measured once, or from shapes and data sheets.

Owns reading those files: a profile as JSON, the journal of a daemon (which keeps what its workers measured),
a ``[device]`` table. Every mistake in them is a Failure with exit code 2.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from oobleckd.core.entries import ProfileMeasured
from oobleckd.core.jobs import as_linked, profile_key
from oobleckd.ctl.output import USAGE, Failure
from oobleckd.ctl.ownrule import slot_bytes
from oobleckd.ctl.shapes import shape_of
from oobleckd.host import anyfile
from oobleckd.planner.costs.analytic import Shape, Workload, analytic_profile
from oobleckd.planner.costs.devices import SHEETS, DeviceSheet, sheet_of
from oobleckd.planner.costs.sharded import NodeLink
from oobleckd.planner.profile import Profile, added_bytes, state_bytes_per_param
from oobleckd.protocol.job import Job
from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.optimizers import RULES, RuleSheet
from oobleckd.protocol.paramgroups import knobs_of
from oobleckd.protocol.parts import DeviceInfo
from oobleckd.protocol.units import parse_size
from oobleckd.protocol.unreadable import UNREADABLE, problem_of

_MAX_BYTES = 64 * 2**20
_SQLITE = b"SQLite format 3\0"
_MEASURED = "SELECT data FROM entries WHERE kind = 'ProfileMeasured' ORDER BY seq DESC"
_HOW = "a profile is JSON with the fields of oobleckd.planner.profile.Profile, or a daemon's journal.sqlite"


def limit_bytes(job: Job, profile: Profile, sheet: DeviceSheet | None) -> int:
    """What a device may hold: its memory, or the job's cap and what the runtime takes; 0: no
    limit is known.
    """
    cap = job.resources.device_memory_bytes
    limits = [sheet.memory_bytes if sheet else 0, cap + profile.reserve_bytes if cap else 0]
    return min(filter(None, limits), default=0)


def node_link(profile: Profile, sheet: DeviceSheet | None) -> NodeLink:
    """What lies between the devices of a node: as the data sheet has it, or that of the card that was
    measured; else as the profile says of the way from the host's memory, or to another node.
    """
    known = sheet if sheet is not None else sheet_of(profile.device)
    rate = known.node_bytes_per_s if known is not None else 0.0
    return NodeLink(rate or profile.host_bytes_per_s or profile.link_bytes_per_s, profile.link_latency_s)


# --------------------------------------------------------------------------- from shapes


def analytic(job: Job, sheet: DeviceSheet) -> Profile:
    """The profile that follows from the model's shape. Raises Failure for a model whose shape is
    not known.
    """
    try:
        shape = shape_of(job)
        return as_linked(analytic_profile(shape, workload_of(job, shape), sheet), job)
    except JobError as error:
        raise Failure(str(error), error.hint, USAGE) from error


def workload_of(job: Job, shape: Shape) -> Workload:
    """A micro-batch of ``job``, whose model has this ``shape``. Raises JobError where the job says something
    of experts, and there are none.
    """
    if job.train.experts_precision == "bf16" and shape.experts is None:
        raise JobError(
            "train.experts_precision",
            f"{job.model.family}, as model.config has it, has no experts",
            "leave experts_precision out, or plan a mixture of experts (docs/experts.md)",
        )
    return Workload(
        job.train.micro_batch,
        job.train.sequence,
        job.train.precision,
        state_bytes_per_param=state_bytes_per_param(job.train.exact),
        separate=job.data.is_separate,
        chunked=bool(job.train.loss_chunk_size),
        slot_bytes=_slot_bytes(job.optimizer, shape),
        selective=not job.train.compile,
        added_bytes_per_param=added_bytes(job.train.exact),
        experts_precision=job.train.experts_precision,
    )


def _slot_bytes(optimizer: Optimizer, shape: Shape) -> tuple[int, ...] | None:
    """What the optimizer keeps of each layer, as if nothing were frozen; None where that is two float32
    moments, or taken for them (of a rule that nobody here knows).
    """
    if optimizer.kept == ():
        return None
    tables = [(number, shape.hidden) for number in (shape.vocab, shape.positions) if number]
    head = [(shape.vocab, shape.hidden), (shape.norm + shape.head_bias * shape.vocab,)]
    blocks = [shape.block(number) for number in range(shape.num_blocks)]
    kinds = list(dict.fromkeys(blocks))
    hidden = [[*kind.attention_matrices, *kind.mlp_tensors] for kind in kinds]
    vectors = [
        (kind.block_params - sum(map(prod, of_kind)),) for kind, of_kind in zip(kinds, hidden, strict=True)
    ]
    rule = RULES.get(optimizer.name)
    if rule is None:
        parts = [[*of_kind, each] for of_kind, each in zip(hidden, vectors, strict=True)]
        told = _of_own(optimizer, tables, *parts, head)
    else:
        told = _of_rule(optimizer, rule, tables, list(zip(hidden, vectors, strict=True)), head)
    if told is None:
        return None
    of_kinds = dict(zip(kinds, told[1:-1], strict=True))
    return told[0], *(of_kinds[block] for block in blocks), told[-1]


_Shapes = Sequence[tuple[int, ...]]


def _of_rule(
    optimizer: Optimizer,
    rule: RuleSheet,
    tables: _Shapes,
    blocks: Sequence[tuple[_Shapes, tuple[int, ...]]],
    head: _Shapes,
) -> tuple[int, ...]:
    """Of embedding, each kind of block (its tensors, and all that is a vector as one), and head."""
    rest = RULES[rule.rest] if rule.rest else rule
    knobs, bf16 = knobs_of(optimizer, optimizer.name), optimizer.state == "bf16"

    def kept(by: RuleSheet, *shapes: tuple[int, ...]) -> int:
        return sum(slot.num_bytes(bf16=bf16) for each in shapes for slot in by.slots(each, knobs))

    def of_block(shapes: _Shapes) -> int:
        return sum(kept(rule if len(each) == 2 else rest, each) for each in shapes)

    of_blocks = (of_block(shapes) + kept(rest, vectors) for shapes, vectors in blocks)
    return kept(rest, *tables), *of_blocks, kept(rest, *head)


def _of_own(optimizer: Optimizer, *parts: _Shapes) -> tuple[int, ...] | None:
    """The same of a rule of an installed package: of parameters of these shapes in each part."""
    told = slot_bytes(optimizer, [shape for part in parts for shape in part])
    if told is None:
        return None
    rest = iter(told)
    return tuple(sum(islice(rest, len(part))) for part in parts)


def device_sheet(name: str) -> DeviceSheet:
    """The data sheet called ``name``, or of the ``[device]`` table in the file of that name.
    Raises Failure.
    """
    if name.lower() in SHEETS:
        return SHEETS[name.lower()]
    path = Path(name).expanduser()
    known = ", ".join(SHEETS)
    if path.suffix != ".toml" and not path.exists():
        raise Failure(
            f"no device {name!r}", f"known are {known}, or name a file with a [device] table", USAGE
        )
    try:
        raw = anyfile.toml(path, "write a [device] table: docs/planner.md")
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}", f"known devices are {known}", USAGE) from error
    except anyfile.FileError as error:
        raise Failure(f"{path}: {error}", error.hint, USAGE) from error
    return _sheet_of(path, raw.get("device"))


def _sheet_of(path: Path, table: Any) -> DeviceSheet:
    fields = ", ".join(DeviceSheet.__struct_fields__)
    if not isinstance(table, dict):
        raise Failure(f"{path}: no [device] table", f"its keys are like, {fields}", USAGE)
    given = {"name": path.stem, **table}
    like = given.pop("like", None)
    if like is not None and like not in SHEETS:
        raise Failure(f"{path}: device.like: no device {like!r}", f"known are {', '.join(SHEETS)}", USAGE)
    try:
        for key in ("memory_bytes", "reserve_bytes"):
            if key in given:
                given[key] = parse_size(given[key])
        base = msgspec.to_builtins(SHEETS[like]) if like else {}
        return msgspec.convert(base | given, DeviceSheet)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise Failure(
            f"{path}: [device]: {problem_of(error)}", f"its keys are like, {fields}", USAGE
        ) from error


# --------------------------------------------------------------------------- measured


def _is_journal(path: Path) -> bool:
    if not path.is_file():
        return False  # a pipe, and what was read of it is gone
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def measured(path: Path, job: Job) -> Profile:
    """The profile in a file: JSON, or the newest in a daemon's journal that was measured for ``job``.

    Raises Failure.
    """
    try:
        if _is_journal(path):
            profile = _from_journal(path, job)
        else:
            profile = msgspec.json.decode(anyfile.read(path, _MAX_BYTES), type=Profile)
    except anyfile.FileError as error:
        raise Failure(f"{path}: {error}", _HOW, USAGE) from error
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}", _HOW, USAGE) from error
    except sqlite3.Error as error:
        raise Failure(f"{path}: cannot be read: {error}", _HOW, USAGE) from error
    except UNREADABLE as error:
        raise Failure(f"{path}: no profile: {problem_of(error)}", _HOW, USAGE) from error
    if not profile.layers:
        raise Failure(f"{path}: a profile without layers", _HOW, USAGE)
    return as_linked(profile, job)


def _from_journal(path: Path, job: Job) -> Profile:
    decoder = msgspec.msgpack.Decoder(ProfileMeasured)
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
        entries = [decoder.decode(data) for (data,) in database.execute(_MEASURED)]
    fitting = [entry.profile for entry in entries if entry.key.partition("/")[0] in _keys(job, entry.profile)]
    if not fitting:
        raise Failure(
            f"{path}: none of its {len(entries)} profiles is of {job.name}'s model, shapes and precision",
            "submit the job once, and it is measured; or leave --profile away for an analytic one",
            USAGE,
        )
    return fitting[0]


def _keys(job: Job, profile: Profile) -> Iterable[str]:
    """What the daemon calls a profile of ``job`` on the device of ``profile``: that of a CPU or of a GPU."""
    for kind, name in (("cpu", "cpu"), ("cuda", profile.device)):
        yield profile_key(job, DeviceInfo("", kind, name, 0, "", "", 0))

"""The bytes that stand for a job where it is named by a digest: what a job does not say leaves no trace.

Owns which keys came later: a job that leaves them at their defaults has the digest that it had before they
were there, so a reference run that was kept still serves it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from oobleckd.protocol.job import Job, Train
from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.protocol.jobschedule import Resources, Schedule
from oobleckd.protocol.jobtable import fields_of

_OPTIMIZER = (
    "schedule", "warmup_tokens", "decay_steps", "decay_type",
    "name", "momentum", "nesterov", "state", "decay", "options", "group",
)  # fmt: skip
_LATER: dict[str, tuple[type[msgspec.Struct], tuple[str, ...]]] = {
    "optimizer": (Optimizer, _OPTIMIZER),
    "resources": (Resources, ("devices_per_stage",)),
    "schedule": (Schedule, ("recompute",)),
    "train": (
        Train,
        (
            "on_spike",
            "spike_factor",
            "spike_window",
            "spike_grad_norm",
            "compile",
            "batch_ramp",
            "loss_chunk_size",
            "experts_precision",
            "router_aux_loss_coef",
            "router_z_loss_coef",
        ),
    ),
}
"""Table -> its struct, and its keys since the first digest of it."""


def canonical(job: Job, tables: Sequence[str] = ()) -> bytes:
    """``job`` as JSON, all of it, or of these ``tables`` a list."""
    # Through JSON: its order is that of the structs' fields and sorted keys, as it has always been.
    said: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(job, order="deterministic"))
    for name, (kind, later) in _LATER.items():
        said[name] = _without(said[name], kind, later)
    what = [said[name] for name in tables] if tables else said
    return msgspec.json.encode(what)


def digest(spec: Job) -> str:
    """Names what a job computes: SHA-256 of its specification without the name and without sinks."""
    nameless = msgspec.structs.replace(spec, name="job", sink=msgspec.UNSET)
    return hashlib.sha256(canonical(nameless)).hexdigest()


def _without(table: dict[str, Any], kind: type[msgspec.Struct], later: Sequence[str]) -> dict[str, Any]:
    defaults = _defaults(kind)
    return {key: value for key, value in table.items() if key not in later or value != defaults[key]}


@functools.cache
def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.encode_name: _default(field) for field in fields_of(kind)}


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """As it is read from JSON; what is left out when it is unset has none."""
    value = field.default_factory() if callable(field.default_factory) else field.default
    unset = value is msgspec.UNSET or value is msgspec.NODEFAULT
    return None if unset else msgspec.json.decode(msgspec.json.encode(value))

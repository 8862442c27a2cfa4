"""The tables `[[sink]]` of a job.toml: where a job's figures go beside the daemon's own.

Owns their fields and checks. A job says which sinks and under which names; where they write is the daemon's
configuration alone (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from oobleckd.protocol.jobtable import JobError, JobTable

BUILT_IN = ("csv", "jsonl", "tensorboard", "wandb")
EXTRAS = ("tensorboard", "wandb")
"""Sinks whose package is an extra of ours of the same name."""
SINK_KIND = r"^[a-z][a-z0-9_-]{0,30}$(?!\n)"
_WANDB_KEYS = ("project", "entity", "name", "tags")

Option = str | int | float | bool


class SinkTable(JobTable, frozen=True):
    """Where the figures of a job go beside the daemon's own: a table for each sink (docs/sinks.md)."""

    kind: Annotated[
        str,
        Meta(
            pattern=SINK_KIND,
            description="csv, jsonl, tensorboard or wandb, or one that the daemon's configuration names.",
        ),
    ]
    project: Annotated[str, Meta(description="W&B: project; empty: oobleckd.")] = ""
    entity: Annotated[str, Meta(description="W&B: user or team; empty: that of the daemon's key.")] = ""
    name: Annotated[str, Meta(description="W&B: name of the run; empty: the job's id.")] = ""
    tags: Annotated[tuple[str, ...], Meta(description="W&B: tags of the run.")] = ()
    options: Annotated[
        dict[str, Option],
        Meta(description="For sinks of other packages: what they are told, as they document it."),
    ] = {}  # noqa: RUF012 - msgspec gives every struct one of its own


def check_sinks(sinks: Iterable[SinkTable]) -> None:
    """What the types cannot say. Raises JobError."""
    seen: set[str] = set()
    for index, sink in enumerate(sinks):
        where = f"sink[{index}]"
        if sink.kind in seen:
            raise JobError(f"{where}.kind", f"{sink.kind!r} is there twice", "leave one of them out")
        seen.add(sink.kind)
        if sink.kind != "wandb":
            for key in _WANDB_KEYS:
                if getattr(sink, key):
                    raise JobError(f"{where}.{key}", f"is for wandb, and this is {sink.kind}", "leave it out")
        if sink.kind in BUILT_IN and sink.options:
            raise JobError(f"{where}.options", f"{sink.kind} has none", "leave them out")

"""The table `[eval]` of a job.toml: on which text the model is evaluated while it trains, and when.

Owns its fields, and what is wrong with them before anything is read. Which rounds evaluate is
``evalrounds``'s.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from oobleckd.protocol.jobtable import JobError, JobTable
from oobleckd.protocol.mixtures import MAX_SOURCES, DTypeName, RowFormat, SourceKind, millionths
from oobleckd.words import count

_MOST_HELD_OUT = 0.5


class EvalSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Text that the model is evaluated on and never trained on: a table for each. Keys that are not here are
    those of `[data]`, and hold for all.
    """

    name: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$(?!\n)",
            description="Its name, under which its loss is shown.",
        ),
    ]
    kind: Annotated[SourceKind, Meta(description="What data.source says of a single one.")]
    path: Annotated[str, Meta(description="As data.path.")] = ""
    column: Annotated[str, Meta(min_length=1, description="As data.column.")] = "text"
    format: Annotated[RowFormat, Meta(description="As data.format.")] = "text"
    dtype: Annotated[DTypeName, Meta(description="As data.dtype.")] = "auto"
    prepared: Annotated[str, Meta(description="As data.prepared.")] = ""


class Eval(JobTable, frozen=True):
    """When and on what the model is evaluated while it trains. No evaluation changes a bit of the weights."""

    every: Annotated[
        int, Meta(ge=0, description="Steps between evaluations; 0: at the start and end alone, as they say.")
    ] = 0
    sequences: Annotated[
        int,
        Meta(
            ge=1,
            le=2**24,
            description="Sequences of each source in an evaluation, the same every time, in whole "
            "micro-batches: rounded down to a multiple of train.micro_batch.",
        ),
    ] = 64
    at_start: Annotated[bool, Meta(description="Also before the first step.")] = False
    at_end: Annotated[bool, Meta(description="Also after the last step.")] = True
    held_out: Annotated[
        float,
        Meta(
            ge=0,
            le=_MOST_HELD_OUT,
            description="Share of the documents of every source of `[data]` that are not trained on, and "
            "evaluated on instead: drawn by train.seed; six decimals at most.",
        ),
    ] = 0.0
    source: Annotated[
        tuple[EvalSource, ...],
        Meta(description="Text of its own to evaluate on: `[[eval.source]]`, below."),
    ] = ()

    @property
    def wanted(self) -> bool:
        """Whether anything is evaluated."""
        return bool(self.source) or self.held_out > 0


def check_eval(table: Eval, micro_batch: int) -> None:
    """What the types cannot say, of a job with micro-batches of so many sequences. Raises JobError."""
    if not table.wanted:
        if table != Eval():
            raise JobError(
                "eval",
                "says when to evaluate, and not on what",
                "set eval.held_out = 0.01, or write an [[eval.source]] table",
            )
        return
    if table.sequences < micro_batch:
        raise JobError(
            "eval.sequences",
            f"{table.sequences} are less than a micro-batch, which has {count(micro_batch, 'sequence')}",
            f"make it {micro_batch} or more",
        )
    if not (table.every or table.at_start or table.at_end):
        raise JobError(
            "eval", "names text, and no step to evaluate at", "set eval.every, eval.at_start or eval.at_end"
        )
    if millionths(table.held_out) is None:
        raise JobError("eval.held_out", f"{table.held_out} has more than six decimals", "round it")
    names = [source.name for source in table.source]
    if len(names) > MAX_SOURCES:
        raise JobError("eval.source", f"has {count(len(names), 'table')}", f"{MAX_SOURCES} are the most")
    for index, name in enumerate(names):
        if name in names[:index]:
            raise JobError(f"eval.source[{index}].name", f"{name!r} is another one's name", "rename one")

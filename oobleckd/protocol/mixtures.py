"""The tables of a job that trains on several sources: `[[data.source]]` and `[[data.stage]]`.

Owns their fields, what is wrong with them before anything is read, and their weights as whole numbers. Which
sample is of which source ``oobleckd.tokens.mixture`` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from oobleckd.words import count

SourceKind = Literal[
    "stdlib", "text", "tokens", "jsonl", "parquet", "arrow", "megatron", "npy", "llmc", "bin"
]
RowFormat = Literal["text", "chat", "completion"]
DTypeName = Literal["auto", "uint8", "uint16", "int32", "uint32", "int64"]
# Weights are decimals and no floats that were rounded: all devices have the same integers. (D-data-016)
MAX_PERIOD = 1_000_000
"""Samples after which the order of sources begins anew: a table of so many entries is kept."""
_MILLION = 1_000_000
MAX_SOURCES = 64
_LARGEST = 1e9
_ADD_UP = "weights need not add up to 1: write 1 and 2 for a third and two thirds"


class DataSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of several sources of a job: a table for each. Keys that are not here are those of `[data]`, and
    hold for all.
    """

    name: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$(?!\n)",
            description="Its name, which decides the order of its samples: a source more, or in another "
            "place, shuffles no other one anew.",
        ),
    ]
    kind: Annotated[SourceKind, Meta(description="What data.source says of a single one.")]
    path: Annotated[str, Meta(description="As data.path.")] = ""
    weight: Annotated[
        float,
        Meta(
            description="Its share of the samples, divided by the sum of all weights; six decimals at most. "
            "0: none before a stage gives it one."
        ),
    ]
    column: Annotated[str, Meta(min_length=1, description="As data.column.")] = "text"
    format: Annotated[RowFormat, Meta(description="As data.format.")] = "text"
    dtype: Annotated[DTypeName, Meta(description="As data.dtype.")] = "auto"
    epochs: Annotated[
        float, Meta(description="Passes over it that the job makes at most; 0: any number.")
    ] = 0.0
    tokens: Annotated[
        int, Meta(ge=0, description="Tokens of it that the job reads at most; 0: any number.")
    ] = 0
    # To move on unseen would be another mix than the one that was asked for. (D-data-017)
    at_limit: Annotated[
        Literal["fail", "drop"],
        Meta(
            description="Where epochs or tokens are too few for the job. fail: it is refused before it "
            "begins. drop: from that sample on the others have its share, by their weights."
        ),
    ] = "fail"
    prepared: Annotated[str, Meta(description="As data.prepared.")] = ""


class DataStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Other weights of the sources from a step on: a curriculum, or a mix to anneal on."""

    from_step: Annotated[
        int, Meta(ge=2, description="The first step that has them, counted from 1 as `get steps` does.")
    ]
    weights: Annotated[
        dict[str, float],
        Meta(description="Name of a source -> weight; a source that is not named gives no sample."),
    ]


class Wrong(NamedTuple):
    """What is wrong with a key of `[data]`."""

    key: str
    problem: str
    hint: str


def millionths(value: float) -> int | None:
    """``value`` in millionths; None where it has more than six decimals."""
    found = round(value * _MILLION)
    return found if found / _MILLION == value else None


def weights_of(
    sources: Sequence[DataSource], stages: Sequence[DataStage]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """First step of each stage, from 1, and the weights of all sources in it, as the smallest integers."""
    first = 1, tuple(source.weight for source in sources)
    more = [
        (stage.from_step, tuple(stage.weights.get(each.name, 0.0) for each in sources)) for stage in stages
    ]
    return tuple(
        (step, smallest(tuple(millionths(each) or 0 for each in row))) for step, row in (first, *more)
    )


def smallest(weights: tuple[int, ...]) -> tuple[int, ...]:
    """The same shares, without a common divisor."""
    common = math.gcd(*weights) or 1
    return tuple(weight // common for weight in weights)


def wrong_with(sources: Sequence[DataSource], stages: Sequence[DataStage], steps: int) -> Wrong | None:
    """What is wrong with them before anything is read, the first of it."""
    found = _wrong_sources(sources, stages) or _wrong_stages(sources, stages, steps)
    if found is not None:
        return found
    for (_, weights), key in zip(weights_of(sources, stages), _keys(stages), strict=True):
        if not any(weights):
            return Wrong(key, "gives no source a weight", "give at least one of them more than 0")
        if sum(weights) > MAX_PERIOD:
            return Wrong(
                key,
                f"has weights whose order repeats after {count(sum(weights), 'sample')} only, and "
                f"{MAX_PERIOD:,} are the most",
                "write them with fewer digits",
            )
    return None


def _keys(stages: Sequence[DataStage]) -> list[str]:
    return ["source", *(f"stage[{index}].weights" for index in range(len(stages)))]


def _wrong_sources(sources: Sequence[DataSource], stages: Sequence[DataStage]) -> Wrong | None:
    if not 0 < len(sources) <= MAX_SOURCES:
        return Wrong("source", f"has {count(len(sources), 'table')}", f"1 to {MAX_SOURCES} can be mixed")
    later = {name for stage in stages for name, weight in stage.weights.items() if weight > 0}
    names: dict[str, int] = {}
    for index, source in enumerate(sources):
        key = f"source[{index}]"
        if source.name in names:
            return Wrong(
                f"{key}.name",
                f"{source.name!r} is the name of source[{names[source.name]}], too",
                "rename one",
            )
        names[source.name] = index
        if wrong := _wrong_number(f"{key}.weight", source.weight, _ADD_UP):
            return wrong
        if not source.weight and source.name not in later:
            return Wrong(
                f"{key}.weight",
                f"is 0, and no stage gives {source.name!r} another",
                "make it more than 0, or leave the source out",
            )
        if wrong := _wrong_number(f"{key}.epochs", source.epochs, "write a number such as 4 or 1.5"):
            return wrong
    return None


def _wrong_stages(sources: Sequence[DataSource], stages: Sequence[DataStage], steps: int) -> Wrong | None:
    names, before = {source.name for source in sources}, 1
    for index, stage in enumerate(stages):
        key = f"stage[{index}]"
        if stage.from_step <= before:
            return Wrong(
                f"{key}.from_step",
                f"{stage.from_step:,} is not after {before:,}",
                "write stages in their order",
            )
        if stage.from_step > steps:
            return Wrong(
                f"{key}.from_step",
                f"{stage.from_step:,} is after the last step, {steps:,}",
                "leave the stage out, or make train.steps larger",
            )
        before = stage.from_step
        for name, weight in stage.weights.items():
            if name not in names:
                known = ", ".join(source.name for source in sources)
                return Wrong(f"{key}.weights.{name}", "is no source of the job", f"its sources: {known}")
            if wrong := _wrong_number(f"{key}.weights.{name}", weight, _ADD_UP):
                return wrong
    return None


def _wrong_number(key: str, value: float, hint: str) -> Wrong | None:
    if value < 0:
        return Wrong(key, f"{value} is negative", hint)
    if value > _LARGEST:
        return Wrong(key, f"{value} is too large", hint)
    if millionths(value) is None:
        return Wrong(key, f"{value} has more than six decimals", hint)
    return None

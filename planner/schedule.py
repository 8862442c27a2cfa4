"""Schedules as data: a device's ops in order, their text form, 1F1B, and a validator.

Owns ops and orders; the time that they take is ``timeline``'s. On the worker a schedule gives
priorities, not an order that must be kept: after a failure it could not be.

Text form, one op a word (stage first, micro-batch last, as in torch.distributed.pipelining):

    2F0 forward          2B0 backward         2I0 input gradient    2W0 weight gradient
    2SA0 sends its activations to stage 3     2RA0 receives activations from stage 1
    2SG0 sends a gradient to stage 1          2RG0 receives a gradient from stage 3
    R   reduces the gradient sums over all replicas                 U   updates the weights
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast, get_args

import msgspec

from planner.plan import Plan

Kind = Literal["F", "B", "I", "W", "SA", "RA", "SG", "RG", "R", "U"]
WHOLE_STEP: frozenset[Kind] = frozenset({"R", "U"})
_WORD = re.compile(r"(?P<stage>\d+)(?P<kind>[FBIW]|[SR][AG])(?P<micro_batch>\d+)")


class ScheduleError(ValueError):
    """Ops that cannot be read or run: the message names the op, the device and what is wrong."""


class Op(msgspec.Struct, frozen=True, order=True):
    """One op. ``R`` and ``U`` are for the whole step and have neither stage nor micro-batch (-1)."""

    kind: Kind
    stage: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        return self.kind if self.kind in WHOLE_STEP else f"{self.stage}{self.kind}{self.micro_batch}"

    def source(self) -> Op | None:
        """The send on another stage that a receive waits for; None for other ops."""
        if self.kind == "RA":
            return Op("SA", self.stage - 1, self.micro_batch)
        if self.kind == "RG":
            return Op("SG", self.stage + 1, self.micro_batch)
        return None


def parse_op(word: str) -> Op:
    """The op that ``word`` stands for. Raises ScheduleError."""
    if word in WHOLE_STEP:
        return Op(word)
    match = _WORD.fullmatch(word)
    if match is None:
        kinds = ", ".join(get_args(Kind))
        raise ScheduleError(f"{word!r} is no op: it reads <stage><kind><micro-batch>, kinds are {kinds}")
    return Op(cast("Kind", match["kind"]), int(match["stage"]), int(match["micro_batch"]))


def parse_ops(text: str) -> tuple[Op, ...]:
    """Ops from words between blanks. Raises ScheduleError."""
    return tuple(parse_op(word) for word in text.split())


def format_ops(ops: Iterable[Op]) -> str:
    """Ops as text: words with a blank between."""
    return " ".join(map(str, ops))


def one_f_one_b(num_stages: int, stage: int, micro_batches: Sequence[int]) -> tuple[Op, ...]:
    """1F1B (PipeDream-flush) for one stage: at most ``num_stages - stage`` micro-batches in flight.

    Without micro-batches only the reduce and the update are left.
    """
    ahead = min(num_stages - stage - 1, len(micro_batches))
    ops: list[Op] = []
    for micro_batch in micro_batches[:ahead]:
        ops += _forward(num_stages, stage, micro_batch)
    for done, micro_batch in enumerate(micro_batches[ahead:]):
        ops += _forward(num_stages, stage, micro_batch)
        ops += _backward(num_stages, stage, micro_batches[done])
    for micro_batch in micro_batches[len(micro_batches) - ahead :]:
        ops += _backward(num_stages, stage, micro_batch)
    return (*ops, Op("R"), Op("U"))


def _forward(num_stages: int, stage: int, micro_batch: int) -> list[Op]:
    receive = [Op("RA", stage, micro_batch)] if stage > 0 else []
    send = [Op("SA", stage, micro_batch)] if stage < num_stages - 1 else []
    return [*receive, Op("F", stage, micro_batch), *send]


def _backward(num_stages: int, stage: int, micro_batch: int) -> list[Op]:
    receive = [Op("RG", stage, micro_batch)] if stage < num_stages - 1 else []
    send = [Op("SG", stage, micro_batch)] if stage > 0 else []
    return [*receive, Op("B", stage, micro_batch), *send]


def schedules(plan: Plan) -> dict[str, tuple[Op, ...]]:
    """Device -> its 1F1B schedule, for every device of ``plan``."""
    return {
        segment.device: one_f_one_b(len(pipeline.segments), stage, pipeline.micro_batches)
        for pipeline in plan.pipelines
        for stage, segment in enumerate(pipeline.segments)
    }


def in_flight(ops: Iterable[Op]) -> int:
    """The most micro-batches whose activations are held at once: after F, until B or W."""
    held = peak = 0
    for op in ops:
        held += (op.kind == "F") - (op.kind in {"B", "W"})
        peak = max(peak, held)
    return peak


def validate(stages: Sequence[Sequence[Op]], micro_batches: Iterable[int]) -> None:
    """Check the schedules of one pipeline, stage by stage: every op once and in an order that its data
    allow, every receive with its send, no more in flight than 1F1B holds. Raises ScheduleError.
    """
    wanted = tuple(micro_batches)
    for stage, ops in enumerate(stages):
        _check_complete(stage, len(stages), ops, wanted)
        _check_order(stage, ops)
        peak, cap = in_flight(ops), len(stages) - stage
        if peak > cap:
            raise ScheduleError(f"stage {stage} holds {peak} micro-batches in flight, 1F1B at most {cap}")


def _check_complete(stage: int, num_stages: int, ops: Sequence[Op], wanted: Sequence[int]) -> None:
    """Exactly the ops that the stage owes, each once; B or I with W for each micro-batch."""
    split = {op.micro_batch for op in ops if op.kind in {"I", "W"}}
    owed = Counter([Op("R"), Op("U")])
    for micro_batch in wanted:
        for op in _forward(num_stages, stage, micro_batch) + _backward(num_stages, stage, micro_batch):
            if op.kind == "B" and micro_batch in split:
                owed.update([Op("I", stage, micro_batch), Op("W", stage, micro_batch)])
            else:
                owed[op] += 1
    there = Counter(ops)
    for op in sorted((owed - there) + (there - owed)):
        number = "missing" if op not in there else "there twice" if op in owed else "not asked for"
        raise ScheduleError(f"stage {stage}: {op} is {number}")


_FOLLOWS: Mapping[Kind, tuple[Kind, ...]] = {
    "F": ("RA",),
    "SA": ("F",),
    "B": ("F", "RG"),
    "I": ("F", "RG"),
    "W": ("I",),
    "SG": ("B", "I"),
}


def _check_order(stage: int, ops: Sequence[Op]) -> None:
    """Every op after those on its stage whose result it uses; R after all gradients, U last."""
    at = {op: position for position, op in enumerate(ops)}
    for op in ops:
        for kind in _FOLLOWS.get(op.kind, ()):
            before = Op(kind, stage, op.micro_batch)
            if at.get(before, -1) > at[op]:
                raise ScheduleError(f"stage {stage}: {op} comes before {before}")
    if list(ops[-2:]) != [Op("R"), Op("U")]:
        raise ScheduleError(f"stage {stage}: ends with {format_ops(ops[-2:])}, not with R U")

"""Schedules as data: a device's ops in order, their text form, and 1F1B.

Owns ops; what they cost is ``work``'s, when they run ``timeline``'s, whether they can ``validator``'s. On the
worker it is kept to until somebody dies; a whole backward in a pipeline of its own has 1F1B as priorities
instead.

Text form, one op a word (stage first, micro-batch last, as in torch.distributed.pipelining); where a device
has two stages (``pipe``), what one of them hands to the other is sent and received like the rest. Where
routes cross (``jobshop``) the stage is the hop of that micro-batch's route:

    2F0 forward          2B0 backward         2I0 input gradient    2W0 weight gradient
    2SA0 sends its activations to stage 3     2RA0 receives activations from stage 1
    2SG0 sends a gradient to stage 1          2RG0 receives a gradient from stage 3
    R   reduces the gradient sums over all replicas                 U   updates the weights
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, cast, get_args

import msgspec

from oobleckd.planner.plan import Plan

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


def one_f_one_b(
    num_stages: int, stage: int, micro_batches: Sequence[int], max_in_flight: int | None = None
) -> tuple[Op, ...]:
    """1F1B (PipeDream-flush) for one stage: at most ``num_stages - stage`` micro-batches in flight.

    ``max_in_flight`` bounds them further where memory is short (``work.max_in_flight``). Without
    micro-batches only the reduce and the update are left.
    """
    in_flight_cap = num_stages - stage if max_in_flight is None else min(max_in_flight, num_stages - stage)
    ahead = min(in_flight_cap - 1, len(micro_batches))
    ops: list[Op] = []
    for micro_batch in micro_batches[:ahead]:
        ops += forward_ops(num_stages, stage, micro_batch)
    for done, micro_batch in enumerate(micro_batches[ahead:]):
        ops += forward_ops(num_stages, stage, micro_batch)
        ops += backward_ops(num_stages, stage, micro_batches[done])
    for micro_batch in micro_batches[len(micro_batches) - ahead :]:
        ops += backward_ops(num_stages, stage, micro_batch)
    return (*ops, Op("R"), Op("U"))


def forward_ops(num_stages: int, stage: int, micro_batch: int) -> list[Op]:
    """F with the receive before it and the send behind it, where there are such stages."""
    receive = [Op("RA", stage, micro_batch)] if stage > 0 else []
    send = [Op("SA", stage, micro_batch)] if stage < num_stages - 1 else []
    return [*receive, Op("F", stage, micro_batch), *send]


def backward_ops(num_stages: int, stage: int, micro_batch: int, kind: Kind = "B") -> list[Op]:
    """B, or I of a decoupled backward, with the receive before it and the send behind it."""
    receive = [Op("RG", stage, micro_batch)] if stage < num_stages - 1 else []
    send = [Op("SG", stage, micro_batch)] if stage > 0 else []
    return [*receive, Op(kind, stage, micro_batch), *send]


def schedules(plan: Plan) -> dict[str, tuple[Op, ...]]:
    """Device -> its 1F1B schedule, for every device of ``plan``; each has one stage."""
    assert all(pipeline.chunks == 1 for pipeline in plan.pipelines), "two stages a device are decoupled"
    return {
        segment.device: one_f_one_b(len(pipeline.segments), stage, pipeline.micro_batches)
        for pipeline in plan.pipelines
        for stage, segment in enumerate(pipeline.segments)
    }


def in_flight(ops: Iterable[Op]) -> int:
    """The most micro-batches whose activations are held at once, stage by stage: after F, until B or W."""
    held = peak = 0
    for op in ops:
        held += (op.kind == "F") - (op.kind in {"B", "W"})
        peak = max(peak, held)
    return peak

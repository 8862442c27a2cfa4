"""Whether the schedules of a pipeline can be run: complete, in an order that data allow, within memory.

Owns the checks of what is written; a circle of waiting stages is found by ``timeline``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from planner.schedule import Kind, Op, ScheduleError, backward_ops, format_ops, forward_ops, in_flight
from planner.work import StageWork


def validate(
    stages: Sequence[Sequence[Op]], micro_batches: Iterable[int], works: Sequence[StageWork] | None = None
) -> None:
    """Check the schedules of one pipeline, stage by stage: every op once and in an order that its data
    allow, every receive with its send, and no more held than the devices of ``works`` have room for.

    Without ``works``: no more micro-batches in flight than 1F1B holds. Raises ScheduleError.
    """
    wanted = tuple(micro_batches)
    for stage, ops in enumerate(stages):
        _check_complete(stage, len(stages), ops, wanted)
        _check_order(stage, ops)
        if works is None:
            _check_in_flight(stage, ops, len(stages) - stage)
        else:
            _check_memory(stage, ops, works[stage])


def _check_in_flight(stage: int, ops: Sequence[Op], cap: int) -> None:
    peak = in_flight(ops)
    if peak > cap:
        raise ScheduleError(f"stage {stage} holds {peak} micro-batches in flight, 1F1B at most {cap}")


def _check_memory(stage: int, ops: Sequence[Op], work: StageWork) -> None:
    peak = work.peak_bytes(op.kind for op in ops)
    if not work.fits(peak):
        raise ScheduleError(
            f"stage {stage} holds {peak:,} bytes at its peak and its device has {work.limit_bytes:,}"
        )


def _check_complete(stage: int, num_stages: int, ops: Sequence[Op], wanted: Sequence[int]) -> None:
    """Exactly the ops that the stage owes, each once; B or I with W for each micro-batch."""
    split = {op.micro_batch for op in ops if op.kind in {"I", "W"}}
    owed = Counter([Op("R"), Op("U")])
    for micro_batch in wanted:
        for op in forward_ops(num_stages, stage, micro_batch) + backward_ops(num_stages, stage, micro_batch):
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

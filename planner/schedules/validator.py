"""Whether the schedules of a pipeline, or of routes that cross, can be run: complete, in an order that data
allow, within memory.

Owns the checks of what is written; a circle of waiting stages is found by ``timeline``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from oobleckd.planner.costs.work import DeviceWork, StageWork
from oobleckd.planner.schedule import (
    Kind,
    Op,
    ScheduleError,
    backward_ops,
    format_ops,
    forward_ops,
    in_flight,
)
from oobleckd.planner.schedules.jobshop import Shop, orders_of
from oobleckd.planner.schedules.pipe import homes
from oobleckd.words import count


def validate(
    devices: Sequence[Sequence[Op]],
    micro_batches: Iterable[int],
    works: Sequence[StageWork] | None = None,
    chunks: int = 1,
) -> None:
    """Check the schedules of one pipeline, device by device: every op once and in an order that its data
    allow, every receive with its send, and no more held than the devices of ``works`` have room for. A device
    has as many virtual stages as ``chunks``; ``works`` has one entry for each of those.

    Without ``works``: no more micro-batches in flight than 1F1B holds on that device, or with two stages on
    the first of as many devices with one. Raises ScheduleError.
    """
    wanted = tuple(micro_batches)
    where = homes(len(devices) * chunks, chunks)
    for device, ops in enumerate(devices):
        stages = [stage for stage, home in enumerate(where) if home == device]
        _check_complete(stages, len(where), ops, wanted)
        for stage in stages:
            _check_order(stage, ops)
        if works is None:
            _check_in_flight(stages, ops, len(where) - stages[0] if chunks == 1 else len(where))
        else:
            _check_memory(ops, DeviceWork({stage: works[stage] for stage in stages}))


def validate_shop(shop: Shop, ops: Mapping[str, Sequence[Op]]) -> None:
    """The same of the schedules (by device) of a step over routes. Raises ScheduleError."""
    mine: dict[str, list[int]] = {name: [] for name in shop.names}
    for number, device in enumerate(shop.device):
        mine[shop.names[device]].append(number)
    if ops.keys() != mine.keys():
        raise ScheduleError(f"schedules of {', '.join(sorted(ops))} for {', '.join(shop.names)}")
    for name, numbers in mine.items():
        _check_counts(f"device {name}", Counter(shop.step_ops(numbers)), Counter(ops[name]))
        for stage in sorted({op.stage for op in ops[name] if op.stage >= 0}):
            _check_order(stage, ops[name])
    for device, order in enumerate(orders_of(shop, ops)):
        if not shop.fits(device, order):
            raise ScheduleError(
                f"device {shop.names[device]} has {shop.peak_bytes(order):,} bytes in flight at its peak and "
                f"room for {shop.room[device]:,}"
            )


def _named(stages: Iterable[int]) -> str:
    return f"stage {' and '.join(map(str, stages))}"


def _check_in_flight(stages: Sequence[int], ops: Sequence[Op], cap: int) -> None:
    peak = in_flight(ops)
    if peak > cap:
        raise ScheduleError(
            f"{_named(stages)} holds {count(peak, 'micro-batch')} in flight, 1F1B at most {cap}"
        )


def _check_memory(ops: Sequence[Op], work: DeviceWork) -> None:
    peak = work.peak_bytes(ops)
    if 0 < work.limit_bytes < peak:
        raise ScheduleError(
            f"{_named(work.stages)} holds {peak:,} bytes at its peak and its device has {work.limit_bytes:,}"
        )


def _check_complete(stages: Sequence[int], num_stages: int, ops: Sequence[Op], wanted: Sequence[int]) -> None:
    """Exactly the ops that a device with ``stages`` owes, each once; B or I with W for each micro-batch."""
    split = {(op.stage, op.micro_batch) for op in ops if op.kind in {"I", "W"}}
    owed = Counter([Op("R"), Op("U")])
    for stage, micro_batch in product(stages, wanted):
        for op in forward_ops(num_stages, stage, micro_batch) + backward_ops(num_stages, stage, micro_batch):
            if op.kind == "B" and (stage, micro_batch) in split:
                owed.update([Op("I", stage, micro_batch), Op("W", stage, micro_batch)])
            else:
                owed[op] += 1
    _check_counts(_named(stages), owed, Counter(ops))


def _check_counts(whose: str, owed: Counter[Op], there: Counter[Op]) -> None:
    for op in sorted((owed - there) + (there - owed)):
        number = "missing" if op not in there else "there twice" if op in owed else "not asked for"
        raise ScheduleError(f"{whose}: {op} is {number}")


_FOLLOWS: Mapping[Kind, tuple[Kind, ...]] = {
    "F": ("RA",),
    "SA": ("F",),
    "B": ("F", "RG"),
    "I": ("F", "RG"),
    "W": ("I",),
    "SG": ("B", "I"),
}


def _check_order(stage: int, ops: Sequence[Op]) -> None:
    """Every op of ``stage`` after those there whose result it uses; R after all gradients, U last."""
    at = {op: position for position, op in enumerate(ops)}
    for op in (op for op in ops if op.stage == stage):
        for kind in _FOLLOWS.get(op.kind, ()):
            before = Op(kind, stage, op.micro_batch)
            if at.get(before, -1) > at[op]:
                raise ScheduleError(f"stage {stage}: {op} comes before {before}")
    if list(ops[-2:]) != [Op("R"), Op("U")]:
        raise ScheduleError(f"stage {stage}: ends with {format_ops(ops[-2:])}, not with R U")

"""Writes the orders of a plan as the text that its devices get, once they are checked: one that cannot be run
never leaves the planner.

Owns that step, for pipelines by themselves (each shape is checked once, then written for the micro-batches of
every pipeline that has it) and for routes that cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from oobleckd.planner.plan import Plan
from oobleckd.planner.schedule import WHOLE_STEP, Op, ScheduleError, format_ops
from oobleckd.planner.schedules.decoupled import Ordered
from oobleckd.planner.schedules.jobshop import Shop
from oobleckd.planner.schedules.validator import validate, validate_shop
from oobleckd.words import count


class WrittenOrders(NamedTuple):
    """``ops``: device -> its schedule as text. ``fault``: what is wrong with one of them, and then there is
    none.
    """

    ops: dict[str, str]
    fault: str = ""


NOTHING = WrittenOrders({})


# No order leaves where one is wrong: devices then do whatever is ready, which never waits for ever, fits
# where the plan does, and ends at the same bits. A refused plan would stop training. (D-schedules-023)
def written_shop(shop: Shop, ops: Mapping[str, Sequence[Op]]) -> WrittenOrders:
    """``ops`` (device -> schedule) of a step over the routes of ``shop``."""
    try:
        validate_shop(shop, ops)
    except ScheduleError as error:
        return WrittenOrders({}, str(error))
    return WrittenOrders({device: format_ops(each) for device, each in ops.items()})


def written_pipelines(plan: Plan, ordered: Sequence[Ordered]) -> WrittenOrders:
    """Of every pipeline of ``plan`` the orders that are ``ordered`` for it."""
    forms: dict[int, tuple[_Form, ...]] = {}
    ops = {}
    for pipeline, each in zip(plan.pipelines, ordered, strict=True):
        if id(each) not in forms:
            schedules = each.ops(range(max(map(len, each.orders), default=0)))
            fault = fault_of(each, schedules)
            if fault:
                return WrittenOrders({}, f"pipeline of {pipeline.devices[0]}: {fault}")
            forms[id(each)] = tuple(map(_Form.of, schedules))
        names = tuple(map(str, pipeline.micro_batches))
        for device, form in zip(pipeline.devices, forms[id(each)], strict=True):
            ops[device] = form.text(names)
    return WrittenOrders(ops)


def fault_of(ordered: Ordered, schedules: Sequence[Sequence[Op]]) -> str:
    """What is wrong with the ``schedules`` of ``ordered``, with micro-batches counted from 0; "": nothing."""
    pipe = ordered.pipe
    if len(schedules) != len(pipe.stages):
        return f"{count(len(schedules), 'schedule')} for {count(len(pipe.stages), 'device')}"
    works = list(pipe.works)
    for stages, limit in zip(pipe.stages, pipe.limit_bytes, strict=True):
        for stage in stages:
            works[stage] = msgspec.structs.replace(works[stage], limit_bytes=limit)
    try:
        validate(schedules, range(ordered.num_micro_batches), works, pipe.chunks)
    except ScheduleError as error:
        return str(error)
    return ""


class _Form(NamedTuple):
    """A schedule with places for the names of ``micro_batches``, which are by number."""

    words: str
    micro_batches: tuple[int, ...]

    @classmethod
    def of(cls, ops: Sequence[Op]) -> _Form:
        """That of ``ops``."""
        words = (op.kind if op.kind in WHOLE_STEP else f"{op.stage}{op.kind}%s" for op in ops)
        return cls(" ".join(words), tuple(op.micro_batch for op in ops if op.kind not in WHOLE_STEP))

    def text(self, names: Sequence[str]) -> str:
        """The schedule, as text, of micro-batches with these ``names``."""
        return self.words % tuple(map(names.__getitem__, self.micro_batches))

"""Whether the schedules of a pipeline, or of routes that cross, can be run: complete, in an order that data
allow, within memory, and without devices that wait for each other.

Owns the checks. Each op is looked at once, as all that leaves the planner is checked (``written``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from oobleckd.planner.costs.work import DeviceWork, StageWork
from oobleckd.planner.schedule import Kind, Op, ScheduleError, format_ops
from oobleckd.planner.schedules.jobshop import Shop
from oobleckd.planner.schedules.pipe import homes
from oobleckd.planner.schedules.timeline import Deadlock, dry_run
from oobleckd.words import count

_RECEIVED, _FORWARD, _SENT, _RECEIVED_BACK, _WHOLE, _INPUT, _WEIGHTS, _SENT_BACK, _BACKWARD = (
    1 << bit for bit in range(9)
)
_DOES: Mapping[Kind, tuple[int, int]] = {
    "RA": (_RECEIVED, 0),
    "F": (_FORWARD, _RECEIVED),
    "SA": (_SENT, _FORWARD),
    "RG": (_RECEIVED_BACK, 0),
    "B": (_WHOLE | _BACKWARD, _FORWARD | _RECEIVED_BACK),
    "I": (_INPUT | _BACKWARD, _FORWARD | _RECEIVED_BACK),
    "W": (_WEIGHTS, _INPUT),
    "SG": (_SENT_BACK, _BACKWARD),
}
"""Kind -> what an op does, and what must be done before it where the device owes that."""
_IN_FLIGHT: Mapping[str, int] = {"F": 1, "B": -1, "W": -1}
_END = [Op("R"), Op("U")]

Place = tuple[int, int]
"""Stage (where routes cross: hop) and micro-batch."""


class _Owed(NamedTuple):
    """What a device owes at a place: all of ``whole``, or all of ``apart``. ``kinds``: what each op does,
    needs, and adds to what is held.
    """

    whole: int
    apart: int
    kinds: dict[Kind, tuple[int, int, int]]


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
    the first of as many devices with one. Raises ScheduleError; Deadlock where devices wait for each other.
    """
    wanted = tuple(micro_batches)
    where = homes(len(devices) * chunks, chunks)
    last = len(where) - 1
    for device, ops in enumerate(devices):
        stages = [stage for stage, home in enumerate(where) if home == device]
        whose = f"stage {' and '.join(map(str, stages))}"
        of_stage = {
            stage: _owed("BIW", stage == 0, stage == last, works[stage].changes() if works else _IN_FLIGHT)
            for stage in stages
        }
        peak = _run_through(
            whose, ops, {(stage, mb): of_stage[stage] for stage, mb in product(stages, wanted)}
        )
        if works is not None:
            _check_memory(whose, peak, DeviceWork({stage: works[stage] for stage in stages}))
            continue
        cap = len(where) - stages[0] if chunks == 1 else len(where)
        if peak > cap:
            raise ScheduleError(f"{whose} holds {count(peak, 'micro-batch')} in flight, 1F1B at most {cap}")
    check_waits({f"device {device}": ops for device, ops in enumerate(devices)})


def validate_shop(shop: Shop, ops: Mapping[str, Sequence[Op]]) -> None:
    """The same of the schedules (by device) of a step over routes. Raises ScheduleError."""
    owed: dict[str, dict[Place, _Owed]] = {name: {} for name in shop.names}
    if ops.keys() != owed.keys():
        raise ScheduleError(f"schedules of {', '.join(sorted(ops))} for {', '.join(shop.names)}")
    stride, made = shop.stride, dict[tuple[bool, bool, tuple[int, ...]], _Owed]()
    for hop, (index, position) in enumerate(shop.hops):
        op = stride * hop
        key = position == 0, shop.left[op] == 1, shop.change[op : op + stride]
        if key not in made:
            made[key] = _owed(shop.kinds[1:], *key[:2], dict(zip(shop.kinds, key[2], strict=True)))
        owed[shop.names[shop.device[op]]][position, shop.routes[index].micro_batch] = made[key]
    for name, room in zip(shop.names, shop.room, strict=True):
        peak = _run_through(f"device {name}", ops[name], owed[name])
        if room is not None and peak > room:
            raise ScheduleError(
                f"device {name} has {peak:,} bytes in flight at its peak and room for {room:,}"
            )
    check_waits(ops)


def check_waits(ops: Mapping[str, Sequence[Op]]) -> None:
    """Raises Deadlock where devices wait for each other, or for what nobody sends."""
    sent: set[tuple[bool, int, int]] = set()
    waiting: dict[tuple[bool, int, int], str] = {}
    left = {name: iter(mine) for name, mine in ops.items()}
    todo = list(ops)
    while todo:
        name = todo.pop()
        for op in left[name]:
            kind = op.kind
            if kind in {"SA", "SG"}:
                what = kind == "SG", op.stage, op.micro_batch
                sent.add(what)
                if what in waiting:
                    todo.append(waiting.pop(what))
            elif kind in {"RA", "RG"}:
                back = kind == "RG"
                what = back, op.stage + 1 if back else op.stage - 1, op.micro_batch
                if what not in sent:
                    waiting[what] = name
                    break
    if waiting:
        dry_run(ops, lambda _device, _op: 0.0)  # says who waits for what
        raise Deadlock(f"deadlock: {', '.join(sorted(waiting.values()))}")


def _owed(backward: str, first: bool, last: bool, changes: Mapping[str, int]) -> _Owed:
    """At a place that begins a route or ends it; ``backward``: the kinds of which that may be made."""
    left_out = {kind for kind in "BIW" if kind not in backward}
    left_out |= {"RA", "SG"} if first else set()
    left_out |= {"SA", "RG"} if last else set()
    kinds = [kind for kind in _DOES if kind not in left_out]
    every = 0
    for kind in kinds:
        every |= _DOES[kind][0]
    does = {kind: (_DOES[kind][0], _DOES[kind][1] & every, changes.get(kind, 0)) for kind in kinds}
    return _Owed(every & ~_INPUT & ~_WEIGHTS, every & ~_WHOLE, does)


def _run_through(whose: str, ops: Sequence[Op], owed: Mapping[Place, _Owed]) -> int:
    """The most that ``ops`` hold at once. Raises ScheduleError where they are not what is owed, each once and
    behind all that it needs, with R and U at the end.
    """
    if list(ops[-2:]) != _END:
        raise ScheduleError(f"{whose}: ends with {format_ops(ops[-2:])}, not with R U")
    done = dict.fromkeys(owed, 0)
    held = peak = 0
    for op in ops[:-2]:
        place = op.stage, op.micro_batch
        mine = owed.get(place)
        known = None if mine is None else mine.kinds.get(op.kind)
        if known is None:
            raise ScheduleError(f"{whose}: {op} is not asked for")
        does, needs, change = known
        before = done[place]
        if before & does or needs & ~before:
            raise _fault(whose, ops, op, before, needs)
        done[place] = before | does
        held += change
        if held > peak:  # noqa: PLR1730 - a call for each op
            peak = held
    for (stage, micro_batch), mine in owed.items():
        so_far = done[stage, micro_batch]
        if so_far not in (mine.whole, mine.apart):
            missing = (mine.apart if so_far & (_INPUT | _WEIGHTS) else mine.whole) & ~so_far
            raise ScheduleError(f"{whose}: {_who_does(missing, stage, micro_batch)[0]} is missing")
    return peak


def _who_does(what: int, stage: int, micro_batch: int) -> list[Op]:
    """The ops that do any of it."""
    return [Op(kind, stage, micro_batch) for kind, (does, _) in _DOES.items() if does & what]


def _fault(whose: str, ops: Sequence[Op], op: Op, done: int, needs: int) -> ScheduleError:
    """What is wrong with ``op``, which does what is ``done``, or ``needs`` what is not."""
    other = _WHOLE if op.kind in {"I", "W"} else _INPUT if op.kind == "B" else 0
    if done & other:
        return ScheduleError(f"{whose}: {Op('B', op.stage, op.micro_batch)} is not asked for")
    if done & _DOES[op.kind][0]:
        return ScheduleError(f"{whose}: {op} is there twice")
    needed = _who_does(needs & ~done, op.stage, op.micro_batch)
    before = next((each for each in needed if each in ops), None)
    if before is None:
        return ScheduleError(f"{whose}: {needed[0]} is missing")
    return ScheduleError(f"stage {op.stage}: {op} comes before {before}")


def _check_memory(whose: str, change: int, work: DeviceWork) -> None:
    peak = sum(each.base_bytes for each in work.stages.values()) + change
    if 0 < work.limit_bytes < peak:
        raise ScheduleError(
            f"{whose} holds {peak:,} bytes at its peak and its device has {work.limit_bytes:,}"
        )

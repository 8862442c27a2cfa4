"""Who computes what when, in one step: a row for each device, time to the right. Pure.

F forward, B backward, I input gradients, W weight gradients, U update, S a forward pass run ahead for another
device; behind it the number of the micro-batch where there is room. A dot is waiting (the bubble), ✗ is what
a dead device does not do any more, » an update before all votes are in. What another device was meant to do
has a colour of its own, and its origin is said in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from oobleckd.console.model import View
from oobleckd.console.widgets.pipelines import node_of
from oobleckd.draw.lines import Line, Role, Span, clipped, cut, length
from oobleckd.protocol.watch import LaneView, OpView, ScheduleView
from oobleckd.words import count, noun, seconds

Mode = Literal["measured", "modelled", "difference"]
Order = Literal["number", "waiting", "hurt"]
MODES: tuple[Mode, ...] = ("measured", "modelled", "difference")
ORDERS: tuple[Order, ...] = ("number", "waiting", "hurt")
BUBBLE, DEAD, EARLY = "·", "✗", "»"
_NAME = 12
LEGEND: Line = (
    ("F0", "op-F"), (" forward ", "dim"), ("B0", "op-B"), (" backward ", "dim"), ("I0", "op-I"),
    (" input ", "dim"),
    ("W0", "op-W"), (" weight ", "dim"), ("U", "op-U"), (" update ", "dim"), (EARLY, "op-U"),
    (" early ", "dim"),
    ("F0", "op-moved"), (" re-routed ", "dim"), ("F0", "op-again"), (" again ", "dim"), (BUBBLE, "bubble"),
    (" waiting ", "dim"),
    (DEAD, "bad"), (" lost", "dim"),
)  # fmt: skip

_SHORT: Line = (
    ("F0", "op-F"), (" forward ", "dim"), ("B0", "op-B"), (" back ", "dim"), ("W0", "op-W"),
    (" weight ", "dim"), ("U", "op-U"),
    (" update ", "dim"), ("F0", "op-moved"), (" re-routed ", "dim"), (BUBBLE, "bubble"), (" wait ", "dim"),
    (DEAD, "bad"), (" lost", "dim"),
)  # fmt: skip


class TimelineLook(msgspec.Struct, frozen=True):
    """What of it one looks at. ``top``: index of the first pipeline in sight; ``order`` of them. Where there
    is room a device has ``most_rows``.
    """

    mode: Mode = "measured"
    top: int = 0
    order: Order = "number"
    most_rows: int = 1


def paint(view: View, _now: float, width: int, height: int, look: TimelineLook | None = None) -> list[Line]:
    """Pipelines from ``look.top`` on, as many as have room."""
    look = look or TimelineLook()
    shown = shown_schedule(view, look.mode)
    if shown is None:
        return [clipped(line, width) for line in _missing(view, look.mode)][:height]
    groups = by_pipeline(shown, look.order)
    other = view.modelled if look.mode == "difference" else None
    roomy = len(shown.lanes) + 2 * len(groups) <= height + 1
    tall = max(1, min(look.most_rows, (height + 1 - 2 * len(groups)) // max(1, len(shown.lanes))))
    lines: list[Line] = []
    for number in groups[min(look.top, max(0, len(groups) - 1)) :]:
        if len(lines) >= height:
            break
        if lines and roomy:
            lines.append(())
        lanes = [lane for lane in shown.lanes if lane.pipeline == number]
        lines += _pipeline(number, lanes, shown, other, width, tall)
    return lines[:height]


def num_rows(schedule: ScheduleView) -> int:
    """Rows of all its pipelines, each device in one."""
    return len(schedule.lanes) + 2 * len({lane.pipeline for lane in schedule.lanes}) - 1


def least_rows(schedule: ScheduleView) -> int:
    """Rows of all its pipelines where none is between them."""
    return len(schedule.lanes) + len({lane.pipeline for lane in schedule.lanes})


def legend(width: int) -> Line:
    """What the colours and letters are, as much of it as has room."""
    return clipped(LEGEND if length(LEGEND) <= width else _SHORT, width)


def shown_schedule(view: View, mode: Mode) -> ScheduleView | None:
    """The schedule that a mode is about; a difference needs both."""
    if mode == "modelled":
        return view.modelled
    if mode == "difference" and view.modelled is None:
        return None
    return view.schedule


def headline(view: View, look: TimelineLook) -> Line:
    """Which step, how long it took, and how much of it was waiting."""
    shown = shown_schedule(view, look.mode)
    if shown is None:
        return ((look.mode, "strong"),)
    spans: list[Span] = [(look.mode, "strong")]
    if shown.measured:
        spans.append((f"  step {shown.step:,}", ""))
    spans += [(f"  {seconds(shown.span_s)}", ""), (f"  bubble {bubble(shown.lanes):.0%}", "")]
    if look.mode == "difference" and view.modelled is not None and view.modelled.span_s > 0:
        more = shown.span_s / view.modelled.span_s - 1
        role: Role = "warn" if abs(more) > 0.1 else "dim"
        spans.append((f"  {more:+.1%} against the model's {seconds(view.modelled.span_s)}", role))
    return tuple(spans)


def by_pipeline(schedule: ScheduleView, order: Order = "number") -> list[int]:
    """Numbers of the pipelines: as they are, the most waiting first, or those first that a loss touches."""
    numbers = sorted({lane.pipeline for lane in schedule.lanes})
    match order:
        case "number":
            return numbers
        case "waiting":
            waiting = bubbles(schedule)
            return sorted(numbers, key=lambda number: (-waiting[number], number))
        case "hurt":
            hurt = {
                lane.pipeline for lane in schedule.lanes if lane.dead or any(op.origin for op in lane.ops)
            }
            return sorted(numbers, key=lambda number: (number not in hurt, number))


def bubbles(schedule: ScheduleView) -> dict[int, float]:
    """Pipeline -> share of the step in which its live devices waited; 1 where none is live."""
    lanes: dict[int, list[LaneView]] = {}
    for lane in schedule.lanes:
        lanes.setdefault(lane.pipeline, []).append(lane)
    return {number: bubble(group) for number, group in lanes.items()}


def bubble(lanes: Iterable[LaneView]) -> float:
    """Mean share of waiting of the live ones."""
    live = [lane.bubble for lane in lanes if not lane.dead]
    return sum(live) / len(live) if live else 1.0


def _missing(view: View, mode: Mode) -> list[Line]:
    what = (
        "modelled"
        if mode == "modelled" or (mode == "difference" and view.schedule is not None)
        else "schedule"
    )
    if problem := view.refusal(what) or view.refusal("schedules"):
        return [(("the daemon has none: ", "dim"), (problem, ""))]
    if view.job is None:
        return [(("no job", "dim"),)]
    if view.tape is not None:
        kept = (
            "of the past only measured steps are kept"
            if what == "modelled"
            else "no step of that time was kept op by op"
        )
        return [((kept, "dim"),)]
    wanted = (
        "the plan's schedule is being modelled" if what == "modelled" else "no step with known op times yet"
    )
    return [((wanted, "dim"),)]


# --------------------------------------------------------------------------- a pipeline


def _pipeline(
    number: int,
    lanes: Sequence[LaneView],
    shown: ScheduleView,
    other: ScheduleView | None,
    width: int,
    tall: int,
) -> list[Line]:
    lines = [clipped(_head(number, lanes), width)]
    all_modelled = {lane.device: lane for lane in other.lanes} if other is not None else {}
    names = lane_names(shown)
    for lane in lanes:
        if other is None:
            line = _lane(lane, names[lane.device], shown.span_s, width)
        else:
            line = _difference(lane, names[lane.device], all_modelled.get(lane.device), shown, other, width)
        line = clipped(line, width)
        lines += [line, *[_ground(line)] * (tall - 1)]
    return lines


def _ground(line: Line) -> Line:
    """The same ops in another row: their colours, without what they say."""
    return tuple((" " * len(text), role) for text, role in line)


def _head(number: int, lanes: Sequence[LaneView]) -> Line:
    stages = sorted({stage for lane in lanes for stage in lane.stages})
    spans: list[Span] = [
        (f"▾ P{number}", "strong"),
        (f"  {count(len(stages), 'stage')}  bubble {bubble(lanes):.0%} ", "dim"),
    ]
    dead = [stage for lane in lanes if lane.dead for stage in lane.stages]
    if dead:
        names = ", ".join(map(str, dead))
        spans.append((f" ✖ {noun(len(dead), 'stage')} {names} lost ", "banner-bad"))
    moved: dict[str, set[int]] = {}
    for lane in lanes:
        for op in lane.ops:
            if op.origin and op.kind != "S":
                moved.setdefault(op.origin, set()).add(op.micro_batch)
    for origin, numbers in sorted(moved.items()):
        spans.append((f" ↪ runs {micro_batches(len(numbers))} of {origin} ", "op-moved"))
    return tuple(spans)


def micro_batches(number: int) -> str:
    """``"1 micro-batch"``, ``"2 micro-batches"``."""
    return count(number, "micro-batch")


def lane_names(schedule: ScheduleView) -> dict[str, str]:
    """Device -> what its lane is called: its node, unless that has several lanes."""
    nodes = {lane.device: node_of(lane.device) for lane in schedule.lanes}
    shared = Counter(nodes.values())
    return {device: node if node and shared[node] == 1 else device for device, node in nodes.items()}


def _label(lane: LaneView, called: str) -> Span:
    stages = "+".join(map(str, lane.stages))
    name = cut(called, _NAME - 1)
    sign = "✗" if lane.dead else " "
    return (f"{sign}s{stages:<3} {name:<{_NAME}}", "bad" if lane.dead else "")


def _lane(lane: LaneView, called: str, span_s: float, width: int) -> Line:
    label = _label(lane, called)
    room = max(1, width - len(label[0]))
    return (label, *cells(lane, span_s, room))


def cells(lane: LaneView, span_s: float, width: int) -> list[Span]:
    """The ops of a lane in ``width`` cells, which are ``span_s`` seconds."""
    spans: list[Span] = []
    at = 0
    for op in lane.ops:
        first = max(at, round(op.start_s / (span_s or 1.0) * width))
        stop = round(op.stop_s / (span_s or 1.0) * width)
        if first >= width or stop < at:
            continue  # its cells are taken: there are more ops than cells
        last = min(width, max(stop, first + 1))
        if first > at:
            spans.append((BUBBLE * (first - at), "bubble"))
        spans.append((_text(op, last - first), _shaded(role_of(op), op)))
        at = last
    if at < width:
        spans.append((DEAD * (width - at), "bad") if lane.dead else (BUBBLE * (width - at), "bubble"))
    return spans


def role_of(op: OpView) -> Role:
    """Whose work it was, and work done twice, before what kind of work it is."""
    if op.kind == "S":
        return "op-S"  # always another's, by the plan
    if op.origin:
        return "op-moved"
    if op.again:
        return "op-again"
    roles: dict[str, Role] = {"F": "op-F", "B": "op-B", "I": "op-I", "W": "op-W", "U": "op-U"}
    return roles[op.kind]


_SHADED: dict[Role, Role] = {
    "op-F": "op-F odd", "op-B": "op-B odd", "op-I": "op-I odd", "op-W": "op-W odd",
    "op-moved": "op-moved odd",
}  # fmt: skip


def _shaded(role: Role, op: OpView) -> Role:
    """Every other micro-batch in another shade: ops that touch are told apart."""
    return _SHADED.get(role, role) if op.micro_batch % 2 else role


def _text(op: OpView, width: int) -> str:
    if op.kind == "U":
        label = EARLY + "U" if op.early and width > 1 else EARLY if op.early else "U"
    else:
        label = f"{op.kind}{op.micro_batch}"
    return (label if len(label) <= width else label[:1]).ljust(width)


# --------------------------------------------------------------------------- the difference


def _difference(
    lane: LaneView,
    called: str,
    modelled: LaneView | None,
    shown: ScheduleView,
    other: ScheduleView,
    width: int,
) -> Line:
    """Where both do the same at the same time there is a line; else what was measured."""
    label = _label(lane, called)
    if modelled is None:
        return (label, ("not in the plan that is modelled", "dim"))
    tail = f" {lane.bubble:4.0%}, model {modelled.bubble:.0%}" if not lane.dead else ""
    room = max(1, width - len(label[0]) - len(tail))
    span_s = max(shown.span_s, other.span_s) or 1.0
    ours, theirs = raster(lane.ops, span_s, room), raster(modelled.ops, span_s, room)
    spans: list[Span] = []
    for one, two in zip(ours, theirs, strict=True):
        same = (one is None) == (two is None) and (one is None or two is None or _same(one, two))
        spans.append(("─" if one is not None else BUBBLE, "bubble") if same else _apart(one))
    return (label, *_joined(spans), (tail, "dim"))


def raster(ops: Sequence[OpView], span_s: float, width: int) -> list[OpView | None]:
    """The op in the middle of each of ``width`` equal parts of ``span_s``; None where there is none."""
    found: list[OpView | None] = []
    index = 0
    for column in range(width):
        at = (column + 0.5) / width * span_s
        while index < len(ops) and ops[index].stop_s <= at:
            index += 1
        inside = index < len(ops) and ops[index].start_s <= at
        found.append(ops[index] if inside else None)
    return found


def _same(one: OpView, two: OpView) -> bool:
    return (one.kind, one.stage, one.micro_batch) == (two.kind, two.stage, two.micro_batch)


def _apart(op: OpView | None) -> Span:
    return ("_", "warn") if op is None else (op.kind, role_of(op))


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Neighbours with the same role in one span."""
    joined: list[Span] = []
    for text, role in spans:
        if joined and joined[-1][1] == role:
            joined[-1] = (joined[-1][0] + text, role)
        else:
            joined.append((text, role))
    return joined

"""How long each device was at which kind of work in one step: a row for each lane of the timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oobleckd.console.widgets.timeline import lane_names
from oobleckd.draw.lines import Line, bar, cell, clipped
from oobleckd.protocol.watch import LaneView, OpKind, OpView, ScheduleView
from oobleckd.words import CELLS, seconds

_KINDS: tuple[tuple[str, frozenset[OpKind]], ...] = (
    ("forward", frozenset({"F", "S"})), ("backward", frozenset({"B", "I"})), ("weights", frozenset({"W"})),
    ("update", frozenset({"U"})),
)  # fmt: skip
_BAR = 12
_NAME = 17
_BUSY = len("   ") + _BAR + len(" 100%")
_AN_OP = f" {cell('an op', CELLS, right=True)}"


def paint(schedule: ScheduleView, numbers: Sequence[int], width: int) -> list[Line]:
    """The lanes of these pipelines, below the columns' names."""
    kinds = len(_KINDS) * (1 + CELLS)
    roomy, bars = width >= _NAME + 2 * kinds + _BUSY, width >= _NAME + kinds + _BUSY
    head = f"     {cell('device', 12)}" + "".join(
        f" {cell(name, CELLS, right=True)}{_AN_OP if roomy else ''}" for name, _ in _KINDS
    )
    lines = [clipped(((f"{head}   busy", "dim"),), width)]
    names = lane_names(schedule)
    for number in numbers:
        lanes = (lane for lane in schedule.lanes if lane.pipeline == number)
        rows = (_row(lane, names[lane.device], schedule.span_s, each=roomy, bars=bars) for lane in lanes)
        lines += [clipped(row, width) for row in rows]
    return lines


def _row(lane: LaneView, called: str, span_s: float, *, each: bool, bars: bool) -> Line:
    """``each``: how long a single op of a kind took, too. ``bars``: how busy it was as a bar as well."""
    told = "".join(
        f" {cell(_total(found), CELLS, right=True)}"
        + (f" {cell(_mean(found), CELLS, right=True)}" if each else "")
        for found in (_of(lane.ops, kinds) for _, kinds in _KINDS)
    )
    share = sum(op.stop_s - op.start_s for op in lane.ops) / span_s if span_s else 0.0
    name = cell(called, 12)
    drawn = f"  {cell(bar(0.0, share, _BAR) if share else '', _BAR)}" if bars else ""
    return (
        (f" P{lane.pipeline:<3}{name}", "bad" if lane.dead else ""), (told, "dim" if lane.dead else ""),
        (f" {drawn}", "bar"), (f" {share:>4.0%}", ""), ("  ✗ lost" if lane.dead else "", "bad"),
    )  # fmt: skip


def _of(ops: Iterable[OpView], kinds: frozenset[OpKind]) -> list[float]:
    """How long those of one kind took."""
    return [op.stop_s - op.start_s for op in ops if op.kind in kinds]


def _total(found: Sequence[float]) -> str:
    return seconds(sum(found)) if found else "-"


def _mean(found: Sequence[float]) -> str:
    return seconds(sum(found) / len(found)) if found else ""

"""How long the newest steps took: quantiles, the slowest device, a histogram. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from oobleckd.console.model import View
from oobleckd.draw.lines import Line, bar, cell, clipped, flow, length
from oobleckd.protocol.jobviews import StepTimes
from oobleckd.words import CELLS, count, seconds

DEPENDS = ("job", "link")
_SLOW = 1.2
"""Times the median of its peers: such a device is worth a look."""


def paint(view: View, _now: float, width: int, height: int) -> list[Line]:
    """Quantiles, who is slowest, and a bar for each part of the histogram."""
    times = times_of(view)
    if times is None or not times.count:
        return [clipped((("not known yet", "dim"),), width)][:height]
    lines = [*flow(quantiles(times), width), *slowest(times, width)]
    return [*lines, *_histogram(times, width, height - len(lines))][:height]


def times_of(view: View) -> StepTimes | None:
    """Those of the job that is shown."""
    return view.job.progress.step_times if view.job is not None and view.job.progress is not None else None


def said(view: View) -> str:
    """Of how many steps, for a title."""
    times = times_of(view)
    return f"the newest {count(times.count, 'step')}" if times is not None and times.count else ""


def quantiles(times: StepTimes) -> list[Line]:
    """Half of the steps, 95 and 99 of 100, and all took no longer than this."""
    named = (("p50", times.p50_s), ("p95", times.p95_s), ("p99", times.p99_s), ("max", times.max_s))
    return [((f"{name} ", "dim"), (seconds(value), "strong")) for name, value in named]


def slowest(times: StepTimes, width: int) -> list[Line]:
    """The device that was busy longest, where that is known."""
    if not times.slowest:
        return []
    is_slow = times.slowest_factor >= _SLOW
    who: Line = (("slowest ", "dim"), (times.slowest, "warn" if is_slow else ""))
    if not times.slowest_factor:
        return [clipped(who, width)]
    factor = f", {times.slowest_factor:.2f} times the median"
    whose = f"{factor} of its peers"
    return [clipped((*who, (whose if length(who) + len(whose) <= width else factor, "dim")), width)]


def _histogram(times: StepTimes, width: int, height: int) -> list[Line]:
    """Where not all parts have a line, neighbours share one."""
    parts = list(zip(times.edges_s, times.counts, strict=False))
    if not parts or height < 1:
        return []
    joined = list(_joined(parts, height))
    most = max(number for _, number in joined) or 1
    room = max(4, width - CELLS - len(" ≤  ") - len(" 100,000"))
    return [
        clipped(
            (
                (f" {cell(f'≤ {seconds(edge_s)}', CELLS + 2, right=True)} ", "dim"),
                (bar(0.0, number / most, room) if number else "", "bar"),
                (f" {number:,}", "dim"),
            ),
            width,
        )
        for edge_s, number in joined
    ]


def _joined(parts: Sequence[tuple[float, int]], height: int) -> list[tuple[float, int]]:
    per_line = -(-len(parts) // height)
    groups = [parts[first : first + per_line] for first in range(0, len(parts), per_line)]
    return [(group[-1][0], sum(number for _, number in group)) for group in groups]

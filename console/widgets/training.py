"""Throughput of the last minutes, and the loss of the whole run below it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from oobleckd.console.model import StepPoint, View
from oobleckd.console.widgets import curves
from oobleckd.console.widgets.listing import missing
from oobleckd.console.widgets.verdict import best_words
from oobleckd.draw.lines import Line, Role, Span, as_fits, clipped, curve
from oobleckd.protocol.batchramp import BatchSizes
from oobleckd.protocol.jobviews import JobView
from oobleckd.words import loss, rate

SPAN_S = 60.0
_SPAN_STEPS = 60
_ROOMY = 64


def paint(view: View, now: float, width: int, height: int) -> list[Line]:
    """Two curves with a headline each; in little room, each beside its headline."""
    job = view.job
    if job is None or not view.points:
        return [missing(view, "steps", "no step is committed yet")]
    if height < 4 or width < 1:
        return _beside(view, job, now, width)[:height]
    marks = [_marks(view, job, now, width)] if height >= 8 else []
    left = height - 1 - len(marks)
    upper = left * 2 // 5  # the loss has axes
    rates = _rates(view, job, now, width)
    return [
        _throughput_head(view, job, rates, now, width),
        *_curve(rates, 0.0, _ceiling(view, rates), upper, "good"),
        *marks,
        *curves.losses(view, width, left - upper),
    ]


def _beside(view: View, job: JobView, now: float, width: int) -> list[Line]:
    last = view.points[-1].loss
    labels = (f"{rate(job.samples_per_s)} samples/s ", f"loss {loss(last)} ")
    room = max(1, width - max(map(len, labels)))
    rates = _rates(view, job, now, room)
    drawn = curves.losses(view, room, 2)[-1]
    return [
        (
            (labels[0].ljust(width - room), "strong"),
            *_curve(rates, 0.0, _ceiling(view, rates), 1, "good")[0],
        ),
        ((labels[1].ljust(width - room), "strong" if math.isfinite(last) else "bad"), *drawn),
        as_fits((((_span(job), "dim"),), *curves.loss_fields(view, width)[1:]), width),
    ]


def _throughput_head(view: View, job: JobView, rates: Sequence[float | None], now: float, width: int) -> Line:
    at_work = view.link == "live" and job.state in {"running", "recovering"}
    spans: list[Span] = [(rate(job.samples_per_s), "strong"), (" samples/s", "")]
    if width >= _ROOMY:
        spans.append((best_words(view, now), "dim"))
    span = _span(job) if width >= _ROOMY else f"{_minutes(job)} min"
    spans.append((f"   0 to {rate(_ceiling(view, rates))}, {span}", "dim"))
    if not at_work:
        spans.append((f"   {job.state}", "dim"))
    return clipped(tuple(spans), width)


def _curve(values: Sequence[float | None], low: float, high: float, height: int, role: Role) -> list[Line]:
    return [((row, role),) for row in curve(values, low, high, height)]


def _most(values: Sequence[float | None]) -> float:
    return max((value for value in values if value is not None), default=0.0)


def _ceiling(view: View, rates: Sequence[float | None]) -> float:
    """The top of the axis: the most that was measured, in the whole run or in what is shown."""
    return max(view.best_rate[0], _most(rates))


def _marks(view: View, job: JobView, now: float, width: int) -> Line:
    """A sign under the throughput where an incident began."""
    end = _edge(view, job, now, width)
    begin = end - _span_s(job)
    cells = [" "] * width
    for incident in view.incidents:
        if begin <= incident.at <= end:
            cells[min(width - 1, int((incident.at - begin) / (end - begin) * width))] = "▲"
    return (("".join(cells), "warn"),)


# --------------------------------------------------------------------------- throughput


def _minutes(job: JobView) -> int:
    return round(_span_s(job) / 60)


def _span(job: JobView) -> str:
    return f"last {_minutes(job)} min"


def _span_s(job: JobView) -> float:
    return max(1, math.ceil(_SPAN_STEPS * job.step_s / SPAN_S)) * SPAN_S


def _rates(view: View, job: JobView, now: float, width: int) -> list[float | None]:
    end = _edge(view, job, now, width)
    begin = end - _span_s(job)
    return rates(view.points, job.spec.batch_sizes, begin, end, width)


def _end(view: View, job: JobView, now: float) -> float:
    """The right edge: the last step, unless the next one is overdue; then the gap is part of the picture."""
    last = view.points[-1].at
    at_work = job.state in {"running", "recovering", "deploying"}
    clock = view.clock(now)
    return clock if at_work and clock > last + 0.5 + 2 * job.step_s else last


def _edge(view: View, job: JobView, now: float, width: int) -> float:
    """``_end`` as it was when the last column was full: a column stays what it is as it moves to the left,
    and nothing is drawn anew until one is full.
    """
    column_s = _span_s(job) / width
    return math.floor(_end(view, job, now) / column_s) * column_s


def rates(
    points: Sequence[StepPoint], sizes: BatchSizes, begin: float, end: float, width: int
) -> list[float | None]:
    """Samples per second in ``width`` equal parts of ``[begin, end]``; None before the first known step.

    A step's samples are spread evenly over the time since the step before, so that a stall is a dip as wide
    as the stall was long, and no column is high or empty by where its edge falls.
    """
    times = [point.at for point in points]
    samples = list(accumulate((sizes.size(point.step - 1) for point in points), initial=0))
    edges = [begin + (end - begin) * column / width for column in range(width + 1)]
    done = [_done(times, samples, edge) for edge in edges]
    return [
        None if before is None or after is None else (after - before) * width / (end - begin)
        for before, after in pairwise(done)
    ]


def _done(times: Sequence[float], samples: Sequence[int], at: float) -> float | None:
    """Of the ``samples`` of the first steps, by number, those done by ``at``, with a part of the next step's;
    None before the first step.
    """
    after = bisect_right(times, at)
    if after == 0:
        return None
    if after == len(times):
        return float(samples[after])
    way = (at - times[after - 1]) / (times[after] - times[after - 1])
    return samples[after] + way * (samples[after + 1] - samples[after])

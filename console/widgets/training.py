"""Throughput of the last minutes, and the loss of the newest steps or of the whole run, as curves."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from oobleckd.console.model import StepPoint, View
from oobleckd.console.widgets.listing import missing
from oobleckd.console.widgets.verdict import best_words
from oobleckd.draw.lines import Line, Role, Span, clipped, curve
from oobleckd.protocol.api import CurveBin, EvaluationView, JobView
from oobleckd.words import rate

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
    told = _losses(view, width)
    evaluated = _evaluated(view, width)
    crosses = _crosses(told) if height >= 8 else []
    left = height - 2 - len(marks) - len(crosses)
    upper, lower = left - left // 2, left // 2
    rates = _rates(view, job, now, width)
    return [
        _throughput_head(view, job, rates, now, width),
        *_curve(rates, 0.0, _ceiling(view, rates), upper, "good"),
        *marks,
        _loss_head(view, width),
        *_loss_curve(told, evaluated, lower),
        *crosses,
    ]


def _beside(view: View, job: JobView, now: float, width: int) -> list[Line]:
    loss = view.points[-1].loss
    labels = (f"{rate(job.samples_per_s)} samples/s ", f"loss {_number(loss)} ")
    room = max(1, width - max(map(len, labels)))
    rates, losses = _rates(view, job, now, room), [each.mean for each in _losses(view, room)]
    steps = f"{_span(job)}, steps {_first(view):,} to {view.points[-1].step:,}"
    skipped = _num_skipped(view)
    return [
        (
            (labels[0].ljust(width - room), "strong"),
            *_curve(rates, 0.0, _ceiling(view, rates), 1, "good")[0],
        ),
        (
            (labels[1].ljust(width - room), "strong" if math.isfinite(loss) else "bad"),
            *_curve(losses, *_limits(losses), 1, "note")[0],
        ),
        clipped(((steps, "dim"), *skipped), width),
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


def _loss_head(view: View, width: int) -> Line:
    last = view.points[-1]
    spans: list[Span] = [("loss ", ""), (_number(last.loss), "strong" if math.isfinite(last.loss) else "bad")]
    spans.append((f"   steps {_first(view):,} to {last.step:,}", "dim"))
    if whole := _whole(view):
        least = min((each.loss_min for each in whole if each.loss_min is not None), default=math.nan)
        spans.append((f", least {_number(least)}", "dim"))
    if known := _known(view):
        spans += [("   ● ", "good"), ("evaluation ", ""), (_number_of(known[-1]), "strong")]
        spans.append((f" after step {known[-1].step:,}", "dim"))
    return clipped((*spans, *_num_skipped(view)), width)


def _known(view: View) -> list[EvaluationView]:
    """The evaluations of the steps that there are, in order."""
    return [each for each in view.evaluations if each.step <= view.points[-1].step]


def _number_of(evaluation: EvaluationView) -> str:
    return _number(math.nan if evaluation.loss is None else evaluation.loss)


def _whole(view: View) -> tuple[CurveBin, ...]:
    """The run from its first step on, where that is more than the newest steps."""
    if view.curve is None or not view.curve.bins or view.curve.bins[0].first >= view.points[0].step:
        return ()
    return view.curve.bins


def _first(view: View) -> int:
    """The step with which the curve of the loss begins."""
    whole = _whole(view)
    return whole[0].first if whole else view.points[0].step


def _num_skipped(view: View) -> Line:
    """How many of the steps shown made no update."""
    whole = _whole(view)
    skipped = sum(each.skipped for each in whole) or sum(point.skipped for point in view.points)
    return ((f"   ✗ {skipped:,} skipped", "bad"),) if skipped else ()


def _number(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "NaN" if math.isnan(loss) else "infinite"


def _curve(values: Sequence[float | None], low: float, high: float, height: int, role: Role) -> list[Line]:
    return [((row, role),) for row in curve(values, low, high, height)]


def _most(values: Sequence[float | None]) -> float:
    return max((value for value in values if value is not None), default=0.0)


def _ceiling(view: View, rates: Sequence[float | None]) -> float:
    """The top of the axis: the most that was measured, in the whole run or in what is shown."""
    return max(view.best_rate[0], _most(rates))


def _limits(values: Sequence[float | None]) -> tuple[float, float]:
    known = [value for value in values if value is not None]
    return (min(known, default=0.0), max(known, default=1.0))


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
    return rates(view.points, job.spec.train.global_batch, begin, end, width)


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
    points: Sequence[StepPoint], batch: int, begin: float, end: float, width: int
) -> list[float | None]:
    """Samples per second in ``width`` equal parts of ``[begin, end]``; None before the first known step.

    A step's samples are spread evenly over the time since the step before, so that a stall is a dip as wide
    as the stall was long, and no column is high or empty by where its edge falls.
    """
    times = [point.at for point in points]
    edges = [begin + (end - begin) * column / width for column in range(width + 1)]
    done = [_done(times, edge) for edge in edges]
    return [
        None if before is None or after is None else (after - before) * batch * width / (end - begin)
        for before, after in pairwise(done)
    ]


def _done(times: Sequence[float], at: float) -> float | None:
    """Steps done by ``at``, fractions included; None before the first."""
    after = bisect_right(times, at)
    if after == 0:
        return None
    if after == len(times):
        return float(after)
    return after + (at - times[after - 1]) / (times[after] - times[after - 1])


# --------------------------------------------------------------------------- loss


class _Column(NamedTuple):
    """Steps in one column: mean and highest loss, None where none is a number; whether some were skipped."""

    mean: float | None
    most: float | None
    skipped: bool


def _losses(view: View, width: int) -> list[_Column]:
    whole = _whole(view)
    return _of_run(whole, width) if whole else list(map(_of_points, _columns(view.points, width)))


def _evaluated(view: View, width: int) -> dict[int, float]:
    """Column -> what the last evaluation in it found, as a mean over all of its sources."""
    firsts = _firsts(view, width)
    found: dict[int, float] = {}
    for each in _known(view):
        column = bisect_right(firsts, max(1, each.step)) - 1
        if column >= 0 and each.loss is not None:
            found[column] = each.loss
    return found


def _firsts(view: View, width: int) -> list[int]:
    """The first step of each column of the loss."""
    whole = _whole(view)
    if whole:
        return [whole[column * len(whole) // width].first for column in range(width)]
    return [points[0].step for points in _columns(view.points, width)]


def _of_points(points: Sequence[StepPoint]) -> _Column:
    mean = _mean([point.loss for point in points])
    return _Column(mean, mean, any(point.skipped for point in points))


def _of_run(whole: Sequence[CurveBin], width: int) -> list[_Column]:
    """As many bins a column as it takes, or as many columns a bin."""
    found = []
    for column in range(width):
        first = column * len(whole) // width
        bins = whole[first : max(first + 1, (column + 1) * len(whole) // width)]
        means = [(each.loss_mean, each.count) for each in bins if each.loss_mean is not None]
        num = sum(count for _, count in means)
        mean = sum(mean * count for mean, count in means) / num if num else None
        most = max((each.loss_max for each in bins if each.loss_max is not None), default=None)
        found.append(_Column(mean, most, any(each.skipped for each in bins)))
    return found


def _loss_curve(columns: Sequence[_Column], evaluated: Mapping[int, float], height: int) -> list[Line]:
    """The mean, as a shade above it the highest, and a dot for what an evaluation found."""
    means, most = [each.mean for each in columns], [each.most for each in columns]
    low, high = _limits([*means, *most, *evaluated.values()])
    rows = zip(curve(means, low, high, height), curve(most, low, high, height), strict=True)
    dots: dict[int, set[int]] = {}
    for column, loss in evaluated.items():
        dots.setdefault(_row(loss, low, high, height), set()).add(column)
    return [_dotted(_shaded(mean, above), dots.get(row, set())) for row, (mean, above) in enumerate(rows)]


def _row(value: float, low: float, high: float, height: int) -> int:
    """Of ``height`` rows, the top one 0, the one that ``value`` stands in."""
    share = (value - low) / ((high - low) or 1.0)
    return min(height - 1, max(0, math.ceil((1.0 - share) * height) - 1))


def _dotted(line: Line, columns: Collection[int]) -> Line:
    """``line`` with a dot in each of the ``columns``."""
    if not columns:
        return line
    cells = [(cell, role) for text, role in line for cell in text]
    marked = (("●", "good") if at in columns else cell for at, cell in enumerate(cells))
    groups = groupby(marked, key=lambda each: each[1])
    return tuple(("".join(cell for cell, _ in group), role) for role, group in groups)


def _shaded(mean: str, most: str) -> Line:
    """One row: ``mean``, and a shade where there is only something in ``most``."""
    shades = [cell == " " != above for cell, above in zip(mean, most, strict=True)]
    spans: list[Span] = []
    for is_shade, group in groupby(zip(mean, shades, strict=True), key=lambda each: each[1]):
        cells = "".join(cell for cell, _ in group)
        spans.append(("░" * len(cells), "dim") if is_shade else (cells, "note"))
    return tuple(spans)


def _crosses(columns: Sequence[_Column]) -> list[Line]:
    """Under the loss, where steps were skipped; no line without any."""
    if not any(each.skipped for each in columns):
        return []
    return [(("".join("✗" if each.skipped else " " for each in columns), "bad"),)]


def _columns(points: Sequence[StepPoint], width: int) -> list[list[StepPoint]]:
    """As many steps a column as it takes for all to have room. Of step numbers, so that a column stays what
    it is.
    """
    most = max(1, math.ceil(len(points) / width))
    columns: dict[int, list[StepPoint]] = {}
    for point in points:
        columns.setdefault(point.step // most, []).append(point)
    return list(columns.values())[-width:]


def _mean(losses: Sequence[float]) -> float | None:
    known = [loss for loss in losses if math.isfinite(loss)]
    return sum(known) / len(known) if known else None

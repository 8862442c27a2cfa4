"""Curves of a whole run, from its first step on: loss with what evaluations found, tokens a second, gradient
norm, learning rate. Pure.

The daemon has them in parts that grow with their place (``CurveView``); steps that came since it answered are
added here. ``oobleckd.draw.chart`` draws.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from oobleckd.console.model import StepPoint, View
from oobleckd.console.widgets.listing import missing
from oobleckd.draw import chart
from oobleckd.draw.chart import Chart, ChartColumn
from oobleckd.draw.lines import Line, Role, Span, as_fits, clipped, length
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.jobviews import CurveBin
from oobleckd.words import count, loss, rate, short, tick

DEPENDS = ("curve", "points", "evaluations", "incidents", "job", "refused", "link")
_SIDE_FROM = 110  # cells: as wide a panel has curves side by side
_SIDE_ROWS = 6
_STACK_ROWS = 8
_FEW_COLUMNS = 20
_GAP = 2
_FIELD_GAP = 3


def paint(view: View, _now: float, width: int, height: int) -> list[Line]:
    """The loss; where there is room the others beside it, or below."""
    if view.job is None or not view.points:
        return [missing(view, "steps", "no step is committed yet")]
    others = (tokens_per_s, grad_norm, learning_rate)
    if width >= _SIDE_FROM:
        beside = others[: height // _SIDE_ROWS]
        left = width * 3 // 5 if beside else width
        return _side_by_side(
            losses(view, left, height), _stacked(view, beside, width - left - _GAP, height), left
        )
    return _stacked(view, (losses, *others)[: max(1, height // _STACK_ROWS)], width, height)


_Painter = Callable[[View, int, int], list[Line]]


def _stacked(view: View, painters: Sequence[_Painter], width: int, height: int) -> list[Line]:
    """One below the other; what cannot be shared evenly is the first one's."""
    lines: list[Line] = []
    for index, painter in enumerate(painters):
        rows = height // len(painters) + (height % len(painters) if index == 0 else 0)
        lines += painter(view, width, rows)
    return lines


def _side_by_side(left: list[Line], right: list[Line], width: int) -> list[Line]:
    if not right:
        return left
    return [
        (*line, (" " * (width + _GAP - length(line)), ""), *(right[row] if row < len(right) else ()))
        for row, line in enumerate(left)
    ]


# --------------------------------------------------------------------------- one curve each


def losses(view: View, width: int, height: int) -> list[Line]:
    """The loss, and a dot for what an evaluation found."""
    run = run_of(view)
    dots = tuple((run.column(each.step), each.loss) for each in _known(view) if each.loss is not None)
    columns = tuple(ChartColumn(each.loss_mean, each.loss_min, each.loss_max) for each in run.bins)
    return _titled(loss_head(view, width), run.chart(columns, "note", dots=dots), width, height)


def tokens_per_s(view: View, width: int, height: int) -> list[Line]:
    """Tokens a second; a part's is over the whole time of its steps."""
    run = run_of(view)
    columns = tuple(_rate(each, _tokens_of_step(view, each.last)) for each in run.bins)
    job = view.job
    now = job.samples_per_s * _sequence(view) if job is not None else 0.0
    known = [each.mean for each in columns if each.mean is not None]
    spans: list[Span] = [("tokens/s ", ""), (rate(now), "strong")]
    if known:
        spans.append((f"   most {rate(max(known))}", "dim"))
    return _titled(tuple(spans), run.chart(columns, "good"), width, height)


def grad_norm(view: View, width: int, height: int) -> list[Line]:
    """The norm of the gradients before they are clipped."""
    run = run_of(view)
    columns = tuple(ChartColumn(each.grad_norm, each.grad_norm_min, each.grad_norm_max) for each in run.bins)
    drawn = run.chart(columns, "warn", may_log=True)
    last = next((each.mean for each in reversed(columns) if each.mean is not None), None)
    head: Line = (("gradient norm ", ""), ("-" if last is None else short(last), "strong"))
    return _titled((*head, *_log_said(drawn)), drawn, width, height)


def learning_rate(view: View, width: int, height: int) -> list[Line]:
    """The learning rate."""
    run = run_of(view)
    columns = tuple(
        ChartColumn(each.lr, each.lr_min, each.lr_max) if math.isfinite(each.lr) else ChartColumn(None)
        for each in run.bins
    )
    known = [each.mean for each in columns if each.mean is not None]
    head: Line = (("learning rate ", ""), (tick(known[-1]) if known else "-", "strong"))
    return _titled(head, run.chart(columns, "resume"), width, height)


def _rate(each: CurveBin, tokens: int) -> ChartColumn:
    """As the daemon says; one of before has the time of a step alone."""
    if each.tokens_per_s > 0:
        return ChartColumn(each.tokens_per_s, each.tokens_per_s_min or None, each.tokens_per_s_max or None)
    return ChartColumn(tokens / each.step_s_mean if each.step_s_mean > 0 else None)


def _sequence(view: View) -> int:
    return view.job.spec.train.sequence if view.job is not None else 0


def _tokens_of_step(view: View, step: int) -> int:
    return view.job.spec.batch_sizes.size(step - 1) * _sequence(view) if view.job is not None else 0


def _log_said(drawn: Chart) -> Line:
    return (("   logarithmic", "dim"),) if chart.scale_of(drawn).log else ()


def _titled(head: Line, drawn: Chart, width: int, height: int) -> list[Line]:
    if height < 1:
        return []
    if all(column.mean is None for column in drawn.columns) and not drawn.dots:
        return [clipped(head, width), clipped((("not known", "dim"),), width), *[()] * (height - 2)][:height]
    return [clipped(head, width), *chart.paint(drawn, width, height - 1)]


# --------------------------------------------------------------------------- the headline of the loss


def loss_head(view: View, width: int) -> Line:
    """As much of what is known of the loss as has room."""
    return as_fits(loss_fields(view, width), width)


def loss_fields(view: View, width: int) -> list[Line]:
    """The newest loss, the newest evaluation, of which steps the curve is, and the least loss."""
    last = view.points[-1]
    run = run_of(view)
    fields: list[Line] = [(("loss ", ""), (loss(last.loss), "strong" if math.isfinite(last.loss) else "bad"))]
    if known := _known(view):
        fields.append(_evaluated(known[-1], width - length(fields[0]) - _FIELD_GAP))
    if skipped := sum(each.skipped for each in run.bins):
        fields.append(((f"✗ {skipped:,} skipped", "bad"),))
    fields.append(((f"steps {run.bins[0].first:,} to {last.step:,}", "dim"),))
    if known_least := [each.loss_min for each in run.bins if each.loss_min is not None]:
        fields.append(((f"least {loss(min(known_least))}", "dim"),))
    return fields


def _evaluated(last: EvaluationView, width: int) -> Line:
    """What the newest evaluation found, and after which step where that has room."""
    found = loss(math.nan if last.loss is None else last.loss)
    after = f" after step {last.step:,}"
    line: Line = (("● ", "good"), ("evaluation ", ""), (found, "strong"))
    if length(line) > width:
        return (("● ", "good"), ("eval ", ""), (found, "strong"))
    return (*line, (after, "dim")) if length(line) + len(after) <= width else line


def _known(view: View) -> list[EvaluationView]:
    """The evaluations of the steps that there are, in order."""
    found = view.evaluations or (view.curve.evaluations if view.curve is not None else ())
    return [each for each in found if each.step <= view.points[-1].step]


# --------------------------------------------------------------------------- the run


# A column is a part as the daemon made it, and not so many steps or cells: whichever scale it has, the axis
# says the steps. (D-console-017)
class RunInColumns(msgspec.Struct, frozen=True):
    """A run in ``bins``, a column each; ``log``: their widths grow. ``marks``: column, sign, role."""

    bins: tuple[CurveBin, ...]
    firsts: tuple[int, ...]
    log: bool
    marks: tuple[tuple[int, str, Role], ...]
    ticks: tuple[tuple[int, str], ...]

    def column(self, step: int) -> int:
        """The column in which a step is."""
        return _column(self.firsts, step)

    def chart(
        self,
        columns: tuple[ChartColumn, ...],
        role: Role,
        *,
        dots: tuple[tuple[int, float], ...] = (),
        may_log: bool = False,
    ) -> Chart:
        """A curve along the run."""
        return Chart(columns, self.ticks, self.marks, dots, role, may_log)


def _column(firsts: Sequence[int], step: int) -> int:
    return max(0, bisect_right(firsts, step) - 1)


def run_of(view: View) -> RunInColumns:
    """What the daemon told of the run, and the steps since then."""
    return _MADE.of(view)


@dataclass(slots=True)
class _Made:
    """The last run, and what it was made of: several painters want it in every frame."""

    source: tuple[object, ...] = ()
    found: RunInColumns | None = None

    def of(self, view: View) -> RunInColumns:
        """Of ``view``."""
        source = view.curve, view.points, view.incidents, view.job and view.job.id
        if self.found is None or any(one is not two for one, two in zip(source, self.source, strict=True)):
            self.source, self.found = source, _made(view)
        return self.found


_MADE = _Made(source=(object(),) * 4)


def _made(view: View) -> RunInColumns:
    told = view.curve
    bins: tuple[CurveBin, ...] = ()
    if told is not None and told.bins and told.bins[0].first <= view.points[0].step:
        newest = view.points[-1].step  # later ones were taken back by a rollback
        bins = tuple(each for each in told.bins if each.first <= newest)
    end = bins[-1].last if bins else 0
    newer = [point for point in view.points if point.step > end]
    log = told is not None and told.log and bool(bins)
    bins = (*bins, *_tail(newer, bins, log=log))
    firsts = tuple(each.first for each in bins)
    ticks = chart.round_ticks(firsts, max(bins[-1].last, 1), log=log)
    return RunInColumns(bins, firsts, log, tuple(_marks(view, bins, firsts)), ticks)


def _tail(points: Sequence[StepPoint], bins: Sequence[CurveBin], *, log: bool) -> Iterator[CurveBin]:
    """Steps that came since, in parts as wide as those before would go on."""
    steps = [point.step for point in points]
    usual = bins[-1].last - bins[-1].first + 1 if bins else 1
    first = 0
    while first < len(steps):
        step = steps[first]
        growing = int(step * math.log(step + 1) / max(_FEW_COLUMNS, len(bins))) if log else 0
        stop = bisect_left(steps, step + max(usual, growing), first)
        yield _bin_of(points[first:stop])
        first = stop


def _bin_of(points: Sequence[StepPoint]) -> CurveBin:
    """What is known here of steps that were told one by one."""
    known = [point.loss for point in points if math.isfinite(point.loss)]
    mean = sum(known) / len(known) if known else None
    return CurveBin(
        points[0].step, points[-1].step, len(points), sum(point.skipped for point in points), mean,
        min(known, default=None), max(known, default=None), 0.0, 0.0, 0.0, math.nan, None,
    )  # fmt: skip


def _marks(view: View, bins: Sequence[CurveBin], firsts: Sequence[int]) -> Iterator[tuple[int, str, Role]]:
    """The least important first: skipped steps, incidents, and where it went back to a checkpoint."""
    for column, each in enumerate(bins):
        if each.skipped:
            yield column, "✗", "bad"
    told = view.curve.marks if view.curve is not None else ()
    steps = {each.step for each in view.own_incidents}
    steps |= {mark.step for mark in told if mark.kind == "incident"}
    for step in sorted(step for step in steps if step <= bins[-1].last + 1):
        yield _column(firsts, step), "▲", "warn"
    for mark in told:
        if mark.kind == "rollback":
            yield _column(firsts, mark.step), "◀", "bad"


def said(view: View) -> str:
    """What the signs on the axes are, and how the axis goes, for a title."""
    if not view.points:
        return ""
    run = run_of(view)
    parts = ["▲ an incident"]
    if any(each.first < each.last for each in run.bins):
        parts.insert(0, "░ least to most")
    if any(sign == "◀" for _, sign, _ in run.marks):
        parts.append("◀ went back")
    if any(sign == "✗" for _, sign, _ in run.marks):
        parts.append("✗ skipped")
    if view.job is not None and view.job.steps_lost:
        parts.append(f"{count(view.job.steps_lost, 'step')} lost")
    return "  ".join(parts)

"""A run as panels: what is drawn over its steps, with units, whoever draws it.

Owns which curves there are, what a line and its band mean, and when an axis is logarithmic. Pure; nothing is
drawn here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from oobleckd.protocol.jobviews import CurveBin
from oobleckd.protocol.watch import CurveView

_DECADES = 1.5
"""Values that span more are drawn on a logarithmic axis: else all but the largest lie on its edge."""
_ROOM = 0.05  # above and below what is drawn, as a share of the axis


class CurvePanel(msgspec.Struct, frozen=True):
    """One curve: at ``steps``, the middles of bins, the mean of each bin in ``line``, from its least to its
    highest in ``low`` and ``high`` (None: not known). ``points``: (steps, value) that are drawn by
    themselves, as ``point_name``. ``log``: whether the axis of the values, from ``bottom`` to ``top``, is
    logarithmic.
    """

    key: str
    title: str
    unit: str
    steps: tuple[float, ...]
    low: tuple[float | None, ...]
    line: tuple[float | None, ...]
    high: tuple[float | None, ...]
    bottom: float
    top: float
    log: bool = False
    points: tuple[tuple[float, float], ...] = ()
    point_name: str = ""

    @property
    def label(self) -> str:
        """Of the axis of its values."""
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.title}{unit}{', log scale' if self.log else ''}"


Values = Callable[[CurveBin], tuple[float | None, float | None, float | None]]


def panels(curve: CurveView) -> tuple[CurvePanel, ...]:
    """Loss, learning rate, gradient norm and tokens a second, as far as any of it is known."""
    evaluated = [(float(each.step), each.loss) for each in curve.evaluations if each.loss is not None]
    found = (
        _panel(curve, "loss", "Loss", "nats per token", _loss, points=evaluated),
        _panel(curve, "lr", "Learning rate", "", _lr, from_zero=True),
        _panel(curve, "grad-norm", "Gradient norm", "", _grad_norm),
        _panel(curve, "tokens", "Throughput", "tokens/s", _tokens, from_zero=True),
    )
    return tuple(each for each in found if each is not None)


def _loss(each: CurveBin) -> tuple[float | None, float | None, float | None]:
    return each.loss_min, each.loss_mean, each.loss_max


def _lr(each: CurveBin) -> tuple[float | None, float | None, float | None]:
    return each.lr_min, each.lr, each.lr_max


def _grad_norm(each: CurveBin) -> tuple[float | None, float | None, float | None]:
    return each.grad_norm_min, each.grad_norm, each.grad_norm_max


def _tokens(each: CurveBin) -> tuple[float | None, float | None, float | None]:
    if not each.tokens_per_s:
        return None, None, None
    return each.tokens_per_s_min, each.tokens_per_s, each.tokens_per_s_max


def _panel(
    curve: CurveView,
    key: str,
    title: str,
    unit: str,
    of: Values,
    *,
    points: Sequence[tuple[float, float]] = (),
    from_zero: bool = False,
) -> CurvePanel | None:
    values = [of(each) for each in curve.bins]
    known = [value for three in values for value in three if value is not None]
    known += [value for _, value in points]
    if not known:
        return None
    log = not from_zero and min(known) > 0.0 and math.log10(max(known) / min(known)) > _DECADES
    bottom, top = _reach(known, log=log, from_zero=from_zero)
    return CurvePanel(
        key, title, unit,
        tuple(_middle(each, log=curve.log) for each in curve.bins),
        tuple(low for low, _, _ in values),
        tuple(mean for _, mean, _ in values),
        tuple(high for _, _, high in values),
        bottom, top, log, tuple(points), "evaluation" if points else "",
    )  # fmt: skip


def _middle(each: CurveBin, *, log: bool) -> float:
    return math.sqrt(each.first * each.last) if log else (each.first + each.last) / 2


def _reach(known: Iterable[float], *, log: bool, from_zero: bool) -> tuple[float, float]:
    """From where to where the axis goes."""
    known = [*known]
    low, high = min(known), max(known)
    if log:
        room = (high / low) ** _ROOM
        return low / room, high * room
    low = min(0.0, low) if from_zero else low
    room = (high - low) * _ROOM or abs(high) * _ROOM or 1.0
    return (low if from_zero else low - room), high + room

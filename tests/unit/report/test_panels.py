"""What is drawn of a run: which curves, from where to where."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from oobleckd.protocol.watch import CurveView
from oobleckd.report.panels import panels
from tests.unit.report.material import CURVE, a_bin


def test_a_run_is_four_curves_with_units() -> None:
    found = panels(CURVE)
    assert [each.label for each in found] == [
        "Loss (nats per token)", "Learning rate", "Gradient norm", "Throughput (tokens/s)",
    ]  # fmt: skip
    loss, lr, norm, tokens = found
    assert (loss.steps, loss.low, loss.line, loss.high) == ((3.0, 8.0), (4.5, 2.5), (5.0, 3.0), (6.0, 4.0))
    assert (loss.points, loss.point_name) == (((0.0, 5.5), (10.0, 2.75)), "evaluation")
    assert (loss.bottom, loss.top) == pytest.approx((2.5 - 0.175, 6.0 + 0.175))
    assert (lr.low, lr.line, lr.high, lr.bottom) == ((5e-4,) * 2, (1e-3,) * 2, (1e-3,) * 2, 0.0)
    assert (norm.low, norm.line, norm.high) == ((1.0,) * 2, (2.0,) * 2, (4.0,) * 2)
    assert (tokens.low, tokens.line, tokens.high, tokens.bottom) == ((2e3,) * 2, (4e3,) * 2, (8e3,) * 2, 0.0)


def test_bins_that_grow_have_their_middle_on_a_logarithmic_axis() -> None:
    assert panels(replace(CURVE, log=True))[0].steps == pytest.approx((5**0.5, 60**0.5))


def test_what_spans_decades_is_on_a_logarithmic_axis_that_says_so() -> None:
    spike = panels(replace(CURVE, bins=(a_bin(1, 5, 5.0), a_bin(6, 10, 4000.0))))[0]
    assert spike.log
    assert spike.label == "Loss (nats per token), log scale"
    assert 0.0 < spike.bottom < 2.75
    assert not panels(CURVE)[0].log


def test_what_nobody_knows_is_no_curve() -> None:
    assert panels(CurveView("job-1", 0, ())) == ()
    known = {"lr_min": None, "lr_max": None, "grad_norm": None, "grad_norm_min": None, "grad_norm_max": None}
    old = replace(a_bin(1, 5, 5.0), tokens_per_s=0.0, **known)
    assert [each.key for each in panels(CurveView("job-1", 5, (old,)))] == ["loss", "lr"]

"""Where values lie on an axis, and which are written beside it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.report.axes import Axis, exact, written


def test_a_value_lies_where_its_share_is() -> None:
    axis = Axis(0.0, 10.0, 100.0, 0.0)
    assert [axis.at(value) for value in (0.0, 2.5, 10.0, 11.0, -1.0)] == [100.0, 75.0, 0.0, 0.0, 100.0]
    assert Axis(3.0, 3.0, 0.0, 10.0).at(3.0) == 5.0


def test_on_a_logarithmic_axis_a_decade_is_as_long_as_the_next() -> None:
    axis = Axis(1.0, 1000.0, 0.0, 30.0, log=True)
    assert [axis.at(value) for value in (1.0, 10.0, 100.0, 1000.0)] == pytest.approx([0.0, 10.0, 20.0, 30.0])


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.0, 10.0, ["0", "2", "4", "6", "8", "10"]),
        (1.9, 5.6, ["2", "3", "4", "5"]),
        (0.0, 3.1e-4, ["0", "0.0001", "0.0002", "0.0003"]),
        (0.0, 4.2e-5, ["0", "1e-5", "2e-5", "3e-5", "4e-5"]),
        (0.0, 21_000.0, ["0", "5,000", "10,000", "15,000", "20,000"]),
        (7.0, 7.0, ["7"]),
    ],
)
def test_round_values_are_written(low: float, high: float, said: list[str]) -> None:
    assert [text for _, text in Axis(low, high, 0.0, 1.0).ticks()] == said


def test_round_values_of_a_logarithmic_axis() -> None:
    assert [text for _, text in Axis(0.9, 1100.0, 0.0, 1.0, log=True).ticks()] == [
        "1", "2", "5", "10", "20", "50", "100", "200", "500", "1,000",
    ]  # fmt: skip
    assert [text for _, text in Axis(1.0, 1e8, 0.0, 1.0, log=True).ticks()][:3] == ["1", "10", "100"]
    assert [text for _, text in Axis(2.2, 2.9, 0.0, 1.0, log=True).ticks()] == ["2.2", "2.4", "2.6", "2.8"]


@given(st.floats(1e-9, 1e12), st.floats(1.0001, 1e9), st.booleans())
def test_there_are_a_few_ticks_and_all_lie_on_the_axis(low: float, factor: float, log: bool) -> None:
    axis = Axis(low, low * factor, 0.0, 1.0, log)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 20
    assert all(low * (1 - 1e-6) <= value <= low * factor * (1 + 1e-6) for value, _ in ticks)
    assert all(math.isfinite(axis.at(value)) for value, _ in ticks)


def test_numbers_as_they_are_written() -> None:
    assert [written(value) for value in (0.0, 0.5, 1e-3, 2.5e-5, 1234.5)] == [
        "0",
        "0.5",
        "0.001",
        "2.5e-5",
        "1,234",
    ]
    assert (exact(None), exact(2.34567)) == ("-", "2.3457")

"""The chart: scales, ticks, dots, shades and marks, each in its place."""

from __future__ import annotations

import math

import pytest

from oobleckd.draw.chart import Chart, ChartColumn, paint, round_ticks, scale_of
from oobleckd.draw.lines import length, plain
from oobleckd.words import bandwidth, done, tick


def lines(chart: Chart, width: int, height: int) -> list[str]:
    return [plain(line) for line in paint(chart, width, height)]


def of(*values: float | None, **more: object) -> Chart:
    return Chart(tuple(ChartColumn(value) for value in values), **more)  # type: ignore[arg-type]


def test_a_line_goes_from_corner_to_corner_between_its_axes() -> None:
    drawn = lines(of(0.0, 10.0, ticks=((0, "1"), (1, "9"))), 11, 6)
    assert drawn == [
        "10┤      ⡠⠊",
        "  │    ⡠⠊",
        "  │  ⡠⠊",
        " 0┤⡠⠊",
        "  └┴──────┴",
        "   1      9",
    ]


def test_a_gap_stays_one_and_a_lone_value_is_a_dot() -> None:
    (row,) = lines(of(1.0, None, 1.0), 3, 1)
    assert [sign != " " for sign in row.ljust(3)] == [True, False, True]
    assert lines(of(5.0), 4, 1)[0].strip() != ""
    assert lines(of(), 4, 2) == ["", ""]


def test_between_the_least_and_the_most_there_is_a_shade_and_marks_lie_on_the_axis() -> None:
    columns = (ChartColumn(1.0, 0.0, 9.0), ChartColumn(1.0, 1.0, 1.0))
    drawn = lines(Chart(columns, marks=((0, "✗", "bad"), (0, "▲", "warn")), dots=((1, 9.0),)), 8, 5)
    assert "░" in drawn[0]
    assert "●" in drawn[0]
    assert "▲" in drawn[3]
    assert "✗" not in drawn[3], "what came later covers it"


def test_values_far_apart_have_a_logarithmic_axis_where_that_may_be() -> None:
    far = of(0.01, 1.0, 1000.0, may_log=True)
    assert scale_of(far).log
    assert not scale_of(of(0.01, 1000.0)).log
    assert not scale_of(of(0.0, 1000.0, may_log=True)).log
    labels = [row.split("┤")[0].strip() for row in lines(far, 30, 20) if "┤" in row]
    assert labels == ["1k", "100", "10", "1", "0.1", "0.01"]


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0, 1e-9])
def test_a_curve_that_never_moves_is_in_the_middle(value: float) -> None:
    scale = scale_of(of(value, value))
    assert scale.share(value) == pytest.approx(0.5)
    assert len(lines(of(value, value), 20, 6)) == 6


@pytest.mark.parametrize("width", [1, 3, 7, 40])
@pytest.mark.parametrize("height", [1, 2, 4, 9])
def test_no_line_is_wider_than_its_room(width: int, height: int) -> None:
    chart = of(*(1e6 * number**3 for number in range(50)), ticks=((0, "1"), (49, "12,000")))
    drawn = paint(chart, width, height)
    assert len(drawn) == height
    assert max(map(length, drawn)) <= width


def test_ticks_are_round_steps_and_the_last_one() -> None:
    firsts = [1, 2, 4, 9, 20, 45, 95, 210, 480, 990]
    assert round_ticks(firsts, 2_000, log=True) == ((0, "1"), (3, "10"), (6, "100"), (9, "2k"))
    even = list(range(1, 1_001, 10))
    assert [text for _, text in round_ticks(even, 1_000, log=False)] == [
        "1",
        "200",
        "400",
        "600",
        "800",
        "1k",
    ]
    assert round_ticks([], 0, log=False) == ()
    assert round_ticks([1], 1, log=False) == ((0, "1"),)


@pytest.mark.parametrize(
    ("part", "whole", "digits", "said"),
    [(0, 0, 0, "0%"), (19_990, 20_000, 0, "99%"), (19_999, 20_000, 1, "99.9%"), (20_000, 20_000, 0, "100%"),
     (624, 1000, 1, "62.4%"), (29, 100, 0, "29%"), (3, 2, 0, "100%")],
)  # fmt: skip
def test_all_of_it_is_done_only_where_nothing_is_left(
    part: float, whole: float, digits: int, said: str
) -> None:
    assert done(part, whole, digits) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0"), (0.002, "0.002"), (2.5, "2.5"), (1e-5, "1e-5"), (999.0, "999"), (1_000.0, "1k"),
     (12_480.0, "12.5k"), (2e7, "20M"), (3e12, "3T"), (math.nan, "NaN")],
)  # fmt: skip
def test_numbers_beside_an_axis(value: float, said: str) -> None:
    assert tick(value) == said


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (999.0, "999 B/s"),
        (1500.0, "1.5 KB/s"),
        (12.5e6, "12.5 MB/s"),
        (1e9, "1 GB/s"),
        (2.5e12, "2,500 GB/s"),
    ],
)
def test_bandwidths(bytes_per_s: float, text: str) -> None:
    assert bandwidth(bytes_per_s) == text

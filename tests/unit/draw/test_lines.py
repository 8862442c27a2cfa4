"""Text, numbers and bars."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.draw import lines


def test_nothing_that_a_terminal_obeys_is_left() -> None:
    assert lines.clean("a\x1b[31mb\n\tc\u202e\u0301漢") == r"a\x1b[31mb\n\tc\u202e??"


@given(st.text(), st.integers(0, 40), st.integers(0, 5))
def test_cut_and_wrapped_text_fits(text: str, width: int, max_lines: int) -> None:
    assert len(lines.cut(text, width)) <= width
    broken = lines.wrapped(text, width, max_lines)
    assert len(broken) <= max_lines
    assert all(len(line) <= width for line in broken)


def test_words_are_not_broken_and_the_rest_is_marked() -> None:
    assert lines.wrapped("one two three four", 9, 2) == ["one two", "three fo…"]
    assert lines.wrapped("one two", 9, 2) == ["one two"]


@given(st.floats(0, 1) | st.floats(), st.floats(0, 1) | st.floats(), st.integers(1, 60))
def test_a_bar_stays_in_its_cells_and_is_never_invisible(a: float, b: float, width: int) -> None:
    drawn = lines.bar(min(a, b), max(a, b), width)
    assert len(drawn) <= width
    assert drawn.strip()


def test_bars_of_neighbours_meet() -> None:
    assert lines.bar(0.0, 0.5, 8) == "████"
    assert lines.bar(0.5, 1.0, 8) == "    ████"
    assert lines.bar(0.0, 0.0, 8) == "▏"


def test_a_curve_of_two_rows() -> None:
    assert lines.curve([0.0, 8.0, 16.0, None], 0.0, 16.0, 2) == ["  █ ", "▁██ "]
    assert lines.curve([5.0, 5.0], 5.0, 5.0, 1) == ["▁▁"]


def test_fields_flow_into_the_next_line() -> None:
    fields = [(("aaa", "dim"),), (("bbb", ""),), (("cccccccccccc", ""),)]
    assert [lines.plain(line) for line in lines.flow(fields, 10, " ")] == ["aaa bbb", "ccccccccc…"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0.0031, "3.1 ms"), (0.0841, "84.1 ms"), (0.2132, "213 ms"), (1.1932, "1,193 ms")],
)
def test_milliseconds_of_phases(value_s: float, text: str) -> None:
    assert lines.ms(value_s) == text


def test_other_numbers() -> None:
    assert [lines.seconds(v) for v in (0.0384, 2.134, 250.0, 11_100.0)] == [
        "38.4 ms",
        "2.13 s",
        "4 min 10 s",
        "3 h 5 min",
    ]
    assert [lines.age(v) for v in (0.9, 59.9, 61.0)] == ["0 s", "59 s", "1 min 1 s"]
    assert [lines.size(v) for v in (12, 3 << 20, 5 << 40)] == ["12 B", "3 MiB", "5 TiB"]
    assert [lines.layers(*r) for r in ((3, 4), (3, 6))] == ["3", "3-5"]
    assert [lines.count(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert [lines.rate(v) for v in (12.34, 4118.0)] == ["12.3", "4,118"]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (lines.seconds(0.0384), "38.4 ms"),
        (lines.seconds(0.9991), "999 ms"),
        (lines.seconds(0.9996), "1 s"),
        (lines.seconds(59.96), "60 s"),
        (lines.seconds(250), "4 min 10 s"),
        (lines.ms(0.0997), "99.7 ms"),
        (lines.ms(1.2345), "1,234 ms"),
        (lines.size(1000), "1,000 B"),
        (lines.size(1023.7), "1 KiB"),
        (lines.size(12.5 * 2**20), "12.5 MiB"),
        (lines.size(2000 * 2**40), "2,000 TiB"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(shown: str, expected: str) -> None:
    assert shown == expected

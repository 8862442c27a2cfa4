"""Text and bars."""

from __future__ import annotations

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

"""Numbers and nouns as people read them: digits, plurals, and columns that stay columns."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd import words

DIGITS = (1.0, 1.2345, 8.96, 9.9949, 9.996)
MAGNITUDES = tuple(digit * 10.0**power for power in range(-12, 10) for digit in DIGITS)


@pytest.mark.parametrize("word", [words.seconds, words.ms, words.size, words.short_age])
def test_no_magnitude_is_wider_than_a_cell_or_has_an_exponent(word: Callable[[float], str]) -> None:
    for value in (0.0, *MAGNITUDES):
        text = word(value)
        assert len(text) <= words.CELLS, (value, text)
        assert "e+" not in text, (value, text)
        assert "e-" not in text, (value, text)
        assert not text.startswith("-0"), (value, text)


@given(st.floats(0, 1e9))
def test_what_takes_longer_never_reads_as_shorter(value_s: float) -> None:
    shown = words.seconds(value_s)
    assert _back(shown) == pytest.approx(value_s, rel=0.02, abs=5e-7)


def _back(text: str) -> float:
    units = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    parts = text.replace(",", "").split()
    return sum(float(number) * units[unit] for number, unit in zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0.0031, "3.1 ms"), (0.0841, "84.1 ms"), (0.2132, "213 ms"), (1.1932, "1,193 ms")],
)
def test_milliseconds_of_phases(value_s: float, text: str) -> None:
    assert words.ms(value_s) == text


def test_other_numbers() -> None:
    assert [words.seconds(v) for v in (0.0384, 2.134, 250.0, 11_100.0)] == [
        "38.4 ms",
        "2.13 s",
        "4 min 10 s",
        "3 h 5 min",
    ]
    assert [words.age(v) for v in (0.9, 59.9, 61.0)] == ["0 s", "59 s", "1 min 1 s"]
    assert [words.size(v) for v in (12, 3 << 20, 5 << 40)] == ["12 B", "3 MiB", "5 TiB"]
    assert [words.layers(*r) for r in ((3, 4), (3, 6))] == ["3", "3-5"]
    assert [words.count(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert [words.rate(v) for v in (12.34, 4118.0)] == ["12.3", "4,118"]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (words.seconds(0.0384), "38.4 ms"),
        (words.seconds(0.9991), "999 ms"),
        (words.seconds(0.9996), "1 s"),
        (words.seconds(59.96), "60 s"),
        (words.seconds(250), "4 min 10 s"),
        (words.ms(0.0997), "99.7 ms"),
        (words.ms(1.2345), "1,234 ms"),
        (words.size(1000), "1,000 B"),
        (words.size(1023.7), "1 KiB"),
        (words.size(12.5 * 2**20), "12.5 MiB"),
        (words.size(2000 * 2**40), "2,000 TiB"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("number", "what", "text"),
    [
        (1, "node", "1 node"), (0, "copy", "0 copies"), (2, "loss", "2 losses"),
        (12, "micro-batch", "12 micro-batches"),
        (3, "forward pass", "3 forward passes"),
        (2, "try", "2 tries"), (2, "day", "2 days"), (2, "has", "2 have"),
    ],
)  # fmt: skip
def test_nouns_and_verbs_bend(number: int, what: str, text: str) -> None:
    assert words.count(number, what) == text


@pytest.mark.parametrize(
    ("extra_s", "text"),
    [
        (1.99e-11, "as long"),
        (-1.99e-11, "as long"),
        (0.0, "as long"),
        (2.5, "2.5 s more"),
        (-0.04, "40 ms less"),
    ],
)
def test_what_rounding_leaves_is_no_difference(extra_s: float, text: str) -> None:
    assert words.than(extra_s) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e9, "1e9"), (3e-4, "0.0003"), (1e-5, "1e-5"), (20.0, "20"), (1234567.0, "1234567"), (1e15, "1e15")],
)
def test_what_somebody_wrote_reads_as_it_was_written(value: float, text: str) -> None:
    assert words.plain(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.345678, "2.3457"), (math.nan, "NaN"), (-math.inf, "infinite"), (3.4e38, "3.400e38"),
     (2e-7, "2.000e-7"),
     (0.0, "0.0000")],
)  # fmt: skip
def test_losses(value: float, text: str) -> None:
    assert words.loss(value) == text


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0.4, "0s"), (119, "119s"), (330, "5m30s"), (7200, "120m"), (4 * 3600 + 120, "4h2m"), (30 * 3600, "30h"),
     (53 * 3600, "2d5h"), (400 * 86400, "400d"), (800 * 86400, "2y70d"), (-3, "0s")],
)  # fmt: skip
def test_ages_are_as_kubectl_has_them(value_s: float, text: str) -> None:
    assert words.short_age(value_s) == text

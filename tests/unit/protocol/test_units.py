"""Times as people write them."""

import pytest

from oobleckd.protocol.units import parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60.0), ("5m", 300.0), ("90 s", 90.0), ("1h30m", 5400.0), ("1.5h", 5400.0), ("2d", 172800.0),
        ("500ms", 0.5), ("2.5", 2.5), ("7", 7.0), ("10min", 600.0), ("1H", 3600.0), ("30sec", 30.0),
    ],
)  # fmt: skip
def test_a_time_is_a_number_of_seconds_or_has_units(text: str, seconds: float) -> None:
    """Several units add up."""
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "5x", "m5", "1h-2m", "nan", "inf", "5 m x", "٣s", "1e999", "5,m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """And nothing of it is guessed."""
    with pytest.raises(ValueError, match="no time"):
        parse_seconds(text)

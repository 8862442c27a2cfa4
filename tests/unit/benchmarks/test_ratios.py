import math

import pytest

from benchmarks.ratios import median_interval


@pytest.mark.parametrize(
    ("values", "low", "high", "confidence"),
    [
        ([5, 1, 4, 2, 3, 7, 6], 1, 7, 1 - 2 / 2**7),
        (list(range(1, 11)), 2, 9, 1 - 2 * (1 + 10) / 2**10),
        ([3, 1, 2], 1, 3, 1 - 2 / 2**3),
        ([4], 4, 4, 0.0),
    ],
)
def test_the_interval_lies_between_order_statistics(values, low, high, confidence):
    interval = median_interval([float(value) for value in values])
    assert (interval.low, interval.high) == (low, high)
    assert math.isclose(interval.confidence, confidence)
    assert interval.count == len(values)


@pytest.mark.parametrize("count", range(6, 60))
def test_from_six_ratios_on_the_confidence_is_kept_and_the_next_narrower_one_would_break_it(count):
    interval = median_interval([float(i) for i in range(count)])
    k = int(interval.low) + 1
    assert interval.confidence >= 0.95
    assert 1 - 2 * sum(math.comb(count, i) for i in range(k + 1)) / 2**count < 0.95

"""Ratios of paired measurements: median, and an interval that assumes nothing about their distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """Median of ``count`` ratios; the true median lies in [low, high] with probability ``confidence`` or
    more.
    """

    count: int
    median: float
    low: float
    high: float
    confidence: float


def median_interval(ratios: Sequence[float], wanted: float = 0.95) -> Interval:
    """The narrowest interval between order statistics with at least ``wanted`` confidence.

    Between the k-th smallest and the k-th largest of n values the median lies with probability 1 - 2
    P(Binomial(n, 1/2) < k) (David and Nagaraja, Order Statistics, section 7.1). With fewer than 6 values even
    the smallest and the largest give less than 0.95, and ``confidence`` says so.
    """
    ordered, n = sorted(ratios), len(ratios)
    coverage = {k: 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n for k in range(1, (n + 1) // 2 + 1)}
    k = max((k for k, share in coverage.items() if share >= wanted), default=1)
    return Interval(n, statistics.median(ordered), ordered[k - 1], ordered[-k], coverage[k])

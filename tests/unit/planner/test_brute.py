"""Templates on several devices a stage, and sizes with an all-reduce, against everything there is."""

import pytest

from benchmarks.referee import sizes_mismatch, split_mismatch

STEP = 50


@pytest.mark.parametrize("first", range(0, 300, STEP))
def test_splits(first: int):
    assert [wrong for seed in range(first, first + STEP) if (wrong := split_mismatch(seed))] == []


@pytest.mark.parametrize("first", range(0, 100, STEP))
def test_splits_within_a_gap(first: int):
    assert [wrong for seed in range(first, first + STEP) if (wrong := split_mismatch(seed, 0.05))] == []


@pytest.mark.parametrize("first", range(0, 300, STEP))
def test_sizes(first: int):
    assert [wrong for seed in range(first, first + STEP) if (wrong := sizes_mismatch(seed))] == []

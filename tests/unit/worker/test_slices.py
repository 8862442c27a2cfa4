"""How a bucket is cut into slices: a function of its shapes, at borders at which norms do not show it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.worker.sums.slices import (
    MOST_SLICES,
    KeyRange,
    Shard,
    members,
    num_chunks,
    shards,
    slicing,
)
from tests.helpers.models import CPU

GPU = torch.device("cuda")
SHAPES = st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=2).map(tuple), max_size=6)


@given(SHAPES, st.sampled_from([CPU, GPU]))
def test_slices_cover_each_number_once_and_consist_of_whole_chunks(
    shapes: list[tuple[int, ...]], device: torch.device
) -> None:
    cut = slicing(shapes, device)
    assert 1 <= len(cut.slices) <= MOST_SLICES
    ends = dict.fromkeys(range(len(shapes)), 0)
    for ranges in cut.slices:
        for key, begin, end in ranges:
            assert (begin, begin % cut.chunk) == (ends[key], 0)
            assert end % cut.chunk == 0 or end == math.prod(shapes[key])
            ends[key] = end
    assert ends == {key: math.prod(shape) for key, shape in enumerate(shapes)}
    chunks = [chunk for number in range(len(cut.slices)) for chunk in cut.chunks(1 << number)]
    assert chunks == list(cut.chunks(cut.all)) == list(range(len(chunks)))
    assert len(chunks) == sum(num_chunks(math.prod(shape), cut.chunk) for shape in shapes)


@given(SHAPES, st.data())
def test_ranges_are_joined_where_slices_lie_together(
    shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    cut = slicing(shapes, CPU)
    slices = data.draw(st.integers(0, cut.all))
    ranges = cut.ranges(slices)
    assert not any((one.key, one.end) == (other.key, other.begin) for one, other in pairwise(ranges))
    assert sum(end - begin for _, begin, end in ranges) == sum(
        number for index, number in enumerate(cut.numbers) if slices >> index & 1
    )
    assert cut.ranges(cut.all) == tuple(
        KeyRange(key, 0, math.prod(shape)) for key, shape in enumerate(shapes)
    )


def test_a_small_bucket_is_one_slice() -> None:
    assert slicing([(64, 64), (64,)], CPU).slices == ((KeyRange(0, 0, 4096), KeyRange(1, 0, 64)),)
    assert slicing([], CPU).slices == ((),)


def test_small_keys_share_a_slice_and_large_ones_are_cut() -> None:
    cut = slicing([(100,), (1 << 16,), (5,)], CPU)
    assert cut.slices == (
        (KeyRange(0, 0, 100), KeyRange(1, 0, 1 << 15)),
        (KeyRange(1, 1 << 15, 1 << 16),),
        (KeyRange(2, 0, 5),),
    )


@pytest.mark.parametrize(
    ("numbers", "length", "on_gpu"),
    [(1 << 20, 1 << 15, 1 << 15), (100 << 20, 1 << 21, 1 << 20), (3 << 30, 1 << 26, 1 << 20)],
)
def test_slices_grow_with_the_bucket_and_chunks_do_not(numbers: int, length: int, on_gpu: int) -> None:
    for device, chunk in ((CPU, 1 << 15), (GPU, on_gpu)):
        cut = slicing([(numbers,)], device)
        assert max(cut.numbers) == length
        assert cut.chunk == chunk


def test_a_cut_is_a_view_of_the_keys() -> None:
    shapes = ((2, 3), (1 << 16,))
    cut = slicing(shapes, CPU)
    whole = Shard(cut, cut.all, shapes)
    keys = [torch.arange(6.0).view(2, 3), torch.arange(float(1 << 16))]
    small, part = whole.cut(keys, 0b01)
    (rest,) = whole.cut(keys, 0b10)
    assert (small.tolist(), part.numel(), rest[0]) == ([0, 1, 2, 3, 4, 5], 1 << 15, 1 << 15)
    rest.zero_()
    assert keys[1][-1] == 0


def test_members_of_a_set() -> None:
    assert list(members(0b10110)) == [1, 2, 4]
    assert list(members(0)) == []


def block(hidden: int, inner: int, kv: int) -> list[tuple[int, ...]]:
    """Parameters of a block of Llama."""
    square, up = (hidden, hidden), (inner, hidden)
    return [(hidden,), square, (kv, hidden), (kv, hidden), square, (hidden,), up, up, (hidden, inner)]


LLAMAS = {"7B": block(4096, 11008, 4096), "70B": block(8192, 28672, 1024), "405B": block(16384, 53248, 1024)}


@pytest.mark.parametrize("model", LLAMAS)
@pytest.mark.parametrize("num_shards", [2, 4, 8])
def test_ranks_hold_equal_parts_of_a_stage(model: str, num_shards: int) -> None:
    """Of one block the fullest rank has an eighth more than its part, of several next to nothing; where
    matrices are updated whole it takes as many blocks as there are ranks.
    """
    shapes = LLAMAS[model]
    whole = [key for key, shape in enumerate(shapes) if len(shape) > 1]
    for uncut, num_blocks, most in (((), 1, 1.12), ((), 4, 1.02), (whole, num_shards, 1.01)):
        cut = slicing(shapes, CPU, num_shards, uncut)
        for first in range(1, 9):
            held = [0] * num_shards
            for bucket in range(first, first + num_blocks):
                for rank, slices in enumerate(shards(bucket, cut, num_shards)):
                    held[rank] += sum(cut.numbers[number] for number in members(slices))
            assert max(held) <= most * sum(held) / num_shards

"""Memory in which gradients are added up: what changes in it besides additions is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from oobleckd.worker import sums
from oobleckd.worker.sums import Chunked, Sum, Whole
from oobleckd.worker.sums.guard import SumsChanged
from tests.helpers.kernels import fused

CPU = torch.device("cpu")
SHAPES = [(3, 4), (1 << 15,), (5,)]


def grads(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def added(count: int, *, exact: bool = True, guarded: bool = True) -> Chunked:
    total = Chunked(SHAPES, exact, CPU, guarded=guarded)
    for seed in range(count):
        total.add(grads(seed), (sums.START_EXPONENT,) * len(SHAPES), 8)
    return total


def flip(total: Sum, region: int, bit: int) -> None:
    flat = total._regions[region]
    words = flat.view(torch.int64 if flat.dtype == torch.float64 else torch.int32)
    words[len(words) // 2] ^= 1 << bit


@pytest.mark.parametrize("exact", [True, False])
def test_a_guard_changes_no_sum(exact: bool) -> None:
    guarded, plain = added(3, exact=exact), added(3, exact=exact, guarded=False)
    assert all(torch.equal(a, b) for a, b in zip(guarded.tensors, plain.tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(guarded.tensors, plain.copy(), strict=True))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("bit", [0, 11, 30])
@pytest.mark.parametrize("region", [1, 2])
def test_a_bit_that_flips_after_the_last_addition_is_found(region: int, bit: int, exact: bool) -> None:
    region = region - 1 if exact else region
    total = added(2, exact=exact)
    flip(total, region, bit)
    with pytest.raises(SumsChanged, match="changed in its memory"):
        _ = total.tensors


@pytest.mark.parametrize("region", [0, 1])
def test_a_bit_that_flips_between_two_additions_is_found(region: int) -> None:
    total = added(2)
    flip(total, region, 3)
    total.add(grads(7), (sums.START_EXPONENT,) * len(SHAPES), 8)
    with pytest.raises(SumsChanged):
        _ = total.tensors


def test_a_bit_that_flips_after_the_sums_were_taken_is_found_when_they_are_taken_again() -> None:
    total = added(2)
    _ = total.tensors
    flip(total, 0, 40)
    with pytest.raises(SumsChanged):
        _ = total.tensors


def test_additions_merges_and_new_rounds_are_no_changes() -> None:
    total = added(2)
    total.merge(added(1).tensors)
    total.add(grads(5), (sums.START_EXPONENT,) * len(SHAPES), 8)
    _ = total.tensors
    total.zero_()
    total.add(grads(6), (sums.START_EXPONENT,) * len(SHAPES), 8)
    assert torch.equal(total.tensors[2], _alone().tensors[2])


def _alone() -> Sum:
    total = Chunked(SHAPES, True, CPU)
    total.add(grads(6), (sums.START_EXPONENT,) * len(SHAPES), 8)
    return total


def test_a_round_without_gradients_is_zeros() -> None:
    total = Chunked(SHAPES, True, CPU, guarded=True)
    assert not any(tensor.any() for tensor in total.tensors)
    assert not any(tensor.any() for tensor in total.tensors)


# --------------------------------------------------------------------------- in one piece

Piece = Callable[..., Sum]
of_each_piece = pytest.mark.parametrize(("piece", "exact"), [(Whole, True), (Whole, False), (fused, True)])


def whole(piece: Piece, count: int, exact: bool) -> Sum:
    total = piece(SHAPES, exact, CPU, guarded=True)
    for seed in range(count):
        total.add(grads(seed), (sums.START_EXPONENT,) * len(SHAPES), 8)
    return total


def strike(total: Sum, key: int) -> None:
    flat = total._tensors[key].view(-1)
    words = flat.view(torch.int64 if flat.dtype == torch.float64 else torch.int32)
    words[len(words) // 2] ^= 1 << 3


@of_each_piece
@pytest.mark.parametrize("key", range(len(SHAPES)))
@pytest.mark.parametrize("when", ["between", "after", "taken"])
def test_a_bit_that_flips_in_one_piece_is_found(piece: Piece, when: str, key: int, exact: bool) -> None:
    total = whole(piece, 2, exact)
    if when == "taken":
        _ = total.tensors
    strike(total, key)
    if when == "between":
        total.add(grads(7), (sums.START_EXPONENT,) * len(SHAPES), 8)
    assert total.marks.tolist() == [0, 0, 0]  # nobody has looked yet
    assert [found(total), found(total)] == [True, True]
    total.zero_()
    assert total.marks.tolist() == [0, 0, 0]


def found(total: Sum) -> bool:
    """Whether a look at the sums says that they have changed: where they are on a CPU, or for the host."""
    try:
        _ = total.tensors
    except SumsChanged:
        return True
    return total.marks.tolist() == [0, 0, 1]


@of_each_piece
def test_one_piece_is_as_many(piece: Piece, exact: bool) -> None:
    total, other = whole(piece, 2, exact), added(2, exact=exact)
    for one in (total, other):
        one.merge(added(1, exact=exact).copy())
        one.add(grads(5), (sums.START_EXPONENT,) * len(SHAPES), 8)
    assert all(map(torch.equal, total.copy(), other.copy()))
    assert all(map(torch.equal, total.tensors, other.tensors))
    memory = total.memory()
    assert memory is not None
    assert memory.data_ptr() == total._tensors[0].data_ptr()
    total.zero_()
    assert total.memory() is None
    assert not any(tensor.any() for tensor in total.copy())

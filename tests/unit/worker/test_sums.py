"""Sums in fixed point: any grouping, the same bits; overflow and NaN are properties of a contribution."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oobleckd.worker import sums
from oobleckd.worker.sums import START_EXPONENT, Chunked, Sum, Whole, chunked
from tests.helpers.finishing import finished
from tests.helpers.kernels import fused
from tests.helpers.models import CPU

SHAPES = ((300, 7), (5,), (70_000,))
KINDS = (Chunked, Whole, fused)
of_each_kind = pytest.mark.parametrize("kind", KINDS)
Kind = Callable[[Sequence[tuple[int, ...]], bool, torch.device], Sum]


def some_grads(seed: int, scale: float = 1e-2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


def summed(seeds: list[int], kind: Kind = Chunked) -> list[Tensor]:
    result = kind(SHAPES, True, CPU)
    for seed in seeds:
        result.add(some_grads(seed), (START_EXPONENT,) * 3, 8)
    assert result.flags == (False, False)
    return result.tensors


@of_each_kind
def test_grouping_does_not_show(kind: Kind) -> None:
    whole = summed(list(range(8)))
    rng = random.Random(0)
    for _ in range(3):
        order = rng.sample(range(8), 8)
        cut = rng.randrange(1, 7)
        parts = [summed(order[:cut], kind), summed(order[cut:], kind)]
        assert all(torch.equal(a, b) for a, b in zip(whole, sums.total(parts), strict=True))


@of_each_kind
@pytest.mark.parametrize("cut", range(9))
def test_a_copy_merged_elsewhere_is_as_if_summed_there(kind: Kind, cut: int) -> None:
    """Whatever was in either, nothing too; and the one that was copied goes on undisturbed."""
    own, other = kind(SHAPES, True, CPU), kind(SHAPES, True, CPU)
    for seed in range(8):
        (own if seed < cut else other).add(some_grads(seed), (START_EXPONENT,) * 3, 8)
    copied = own.copy()
    own.add(some_grads(9), (START_EXPONENT,) * 3, 9)
    other.merge(copied)
    assert all(torch.equal(a, b) for a, b in zip(other.tensors, summed(list(range(8))), strict=True))
    other.add(some_grads(9), (START_EXPONENT,) * 3, 9)
    assert all(torch.equal(a, b) for a, b in zip(other.tensors, summed([*range(8), 9]), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(own.tensors, summed([*range(cut), 9]), strict=True))


@of_each_kind
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("odd", [1e-39, math.nan, math.inf, -1e30])
def test_gradients_in_bfloat16_are_added_as_what_they_are_in_float32(
    kind: Kind, exact: bool, guarded: bool, odd: float
) -> None:
    """Of some keys, as layers find them; also where there is something that is not to be summed."""
    narrow, wide = kind(SHAPES, exact, CPU, guarded=guarded), kind(SHAPES, exact, CPU, guarded=guarded)
    for seed in range(4):
        grads = some_grads(seed)
        grads[0], grads[2] = grads[0].bfloat16(), grads[2].bfloat16()
        grads[seed % 3].view(-1)[seed] = odd
        narrow.add(grads, (START_EXPONENT,) * 3, 8)
        wide.add([grad.float() for grad in grads], (START_EXPONENT,) * 3, 8)
        assert narrow.flags == wide.flags
    for mine, theirs in zip(narrow.tensors, wide.tensors, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@of_each_kind
def test_float_sums_are_copied_and_merged_too(kind: Kind) -> None:
    own, other = kind([(2,)], False, CPU), kind([(2,)], False, CPU)
    own.add([torch.tensor([1.0, 2.0])], (0,), 2)
    other.merge(own.copy())
    other.merge(own.copy())
    assert other.tensors[0].tolist() == [2.0, 4.0]


@of_each_kind
@given(
    st.lists(st.floats(-100, 100, width=32, allow_subnormal=True), min_size=1, max_size=20),
    st.integers(-20, 40),
)
def test_a_contribution_is_the_nearest_integer(kind: Kind, values: list[float], exponent: int) -> None:
    total = kind([(len(values),)], True, CPU)
    total.add([torch.tensor(values)], (exponent,), 8)
    assert total.flags == (False, False)
    assert total.tensors[0].tolist() == [nearest(math.ldexp(value, exponent)) for value in values]


def nearest(value: float) -> int:
    """Half an integer is rounded away from zero. ``abs(value) + 0.5`` would not be exact in float64."""
    return int(math.copysign(int(Fraction(abs(value)) + Fraction(1, 2)), value))


@of_each_kind
@given(
    st.lists(st.integers(-(2**24), 2**24), min_size=2, max_size=8),
    st.lists(st.integers(-3, 22), min_size=8, max_size=8),
    st.randoms(use_true_random=False),
)
def test_ties_are_rounded_the_same_wherever_they_are_added(
    kind: Kind, mantissas: list[int], shifts: list[int], rng: random.Random
) -> None:
    terms = [math.ldexp(m, shift - 2) for m, shift in zip(mantissas, shifts, strict=False)]
    expected = sum(map(nearest, terms))
    cut = rng.randrange(1, len(terms))
    for order in (terms, rng.sample(terms, len(terms))):
        groups = [kind([(1,)], True, CPU), kind([(1,)], True, CPU)]
        for index, term in enumerate(order):
            groups[index >= cut].add([torch.tensor([term])], (0,), 8)
            assert groups[index >= cut].flags == (False, False)
        assert sums.total([group.tensors for group in groups])[0].item() == expected


@of_each_kind
def test_terms_may_come_after_a_look_at_the_sum(kind: Kind) -> None:
    total = kind([(2,)], True, CPU)
    for expected in (1, 2, 3):
        total.add([torch.tensor([0.5, -0.5])], (0,), 8)
        assert total.tensors[0].tolist() == [expected, -expected]
        assert total.tensors[0].tolist() == [expected, -expected]


@of_each_kind
@pytest.mark.parametrize("size", [1, 7, 64, 1 << 16, (1 << 16) + 3])
def test_every_place_of_a_tensor_is_rounded_alike(kind: Kind, size: int) -> None:
    # Vectorised and left-over elements may take other instructions (a fused multiply-add, or none).
    terms = torch.tensor([0.5, 1.5, -2.5, 2.0**22 + 0.5, 8388607.5, 2.0**47 - 2.0**23])
    for term in terms:
        total = kind([(size,)], True, CPU)
        for _ in range(3):
            total.add([term.expand(size)], (0,), 8)
        assert set(total.tensors[0].tolist()) == {3 * nearest(term.item())}


def test_mean_is_right_to_the_last_bit_of_float32() -> None:
    total = summed(list(range(8)))
    mean = sums.mean_grads(total, (START_EXPONENT,) * 3, 8, True)
    expected = [torch.stack([some_grads(s)[k].double() for s in range(8)]).mean(0) for k in range(3)]
    for got, want in zip(mean, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want.float(), rtol=1.2e-7, atol=2.0**-36)


@of_each_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_is_seen(kind: Kind, bad: float) -> None:
    total = kind([(4,)], True, CPU)
    total.add([torch.tensor([1.0, bad, 0.0, 0.0])], (45,), 4)
    total.add([torch.ones(4)], (45,), 4)
    assert total.flags == (True, False)
    total.zero_()
    total.add([torch.ones(4)], (0,), 4)
    assert total.flags == (False, False)
    assert total.tensors[0].tolist() == [1, 1, 1, 1]


@of_each_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_in_a_term_is_seen_in_the_norm_of_a_float_sum(kind: Kind, bad: float) -> None:
    total = kind([(4,)], False, CPU)
    for term in ([1.0, bad, 0.0, 0.0], [1.0, -bad, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]):
        total.add([torch.tensor(term)], (0,), 4)
    _, figures = finished(total.tensors, (0,), 3, exact=False)
    assert figures == (True, False, False, (0.0,), (0,))


@of_each_kind
def test_overflow_is_tested_per_contribution(kind: Kind) -> None:
    limit = 2.0 ** (51 - 36 - 3)
    below = torch.tensor([limit - 2.0**-11])
    for sign in (1.0, -1.0):
        total = kind([(1,)], True, CPU)
        total.add([sign * below], (36,), 8)
        assert total.flags == (False, False)
        total.add([torch.tensor([sign * limit])], (36,), 8)
        assert total.flags == (False, True)


@of_each_kind
def test_as_many_contributions_as_announced_never_wrap(kind: Kind) -> None:
    value = torch.tensor([2.0**12 - 2.0**-12])
    total = kind([(1,)], True, CPU)
    for _ in range(8):
        total.add([value], (36,), 8)
        assert total.flags == (False, False)
    assert total.tensors[0].item() == 8 * int(math.ldexp(value.item(), 36)) < 2**51


@of_each_kind
def test_keys_have_scales_of_their_own(kind: Kind) -> None:
    total = kind([(1,), (1,)], True, CPU)
    total.add([torch.tensor([0.5]), torch.tensor([0.5])], (1, 3), 1)
    assert [tensor.item() for tensor in total.tensors] == [1, 4]


@of_each_kind
def test_transposed_gradients_are_added_in_place(kind: Kind) -> None:
    grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).t()
    total = kind([(4, 6)], True, CPU)
    total.add([grad], (40,), 1)
    assert torch.equal(total.tensors[0], torch.round(grad.double() * 2.0**40))


EDGES = (
    0.0, -0.0, 0.5, -0.5, 1.5, -2.5, 2.0**-149, 2.0**22 + 0.5, -8388607.5, 2.0**45, 2.0**47, -(2.0**47),
    2.0**48,
    math.nan, math.inf, -math.inf, 3.4e38,
)  # fmt: skip
MIXED = ((3,), (2, 2), (1,))


@st.composite
def contribution(draw: st.DrawFn) -> list[Tensor]:
    finite = st.one_of(st.sampled_from(EDGES[:10]), st.floats(-9, 9, width=32))
    numbers = finite if draw(st.integers(0, 3)) else st.one_of(finite, st.sampled_from(EDGES))
    sizes = [math.prod(shape) for shape in MIXED]
    values = [draw(st.lists(numbers, min_size=size, max_size=size)) for size in sizes]
    return [torch.tensor(some).view(shape) for some, shape in zip(values, MIXED, strict=True)]


@given(
    st.lists(st.one_of(contribution(), st.sampled_from(["look", "zero"])), max_size=8),
    st.lists(st.sampled_from([-120, -30, -1, 0, 1, 3, 34, 120]), min_size=3, max_size=3),
    st.sampled_from([1, 8, 5000]),
)
def test_many_keys_in_one_go_are_each_key_for_itself(
    events: list[Any], exponents: list[int], num_contributions: int
) -> None:
    alone = [Chunked([shape], True, CPU) for shape in MIXED]
    others: list[Sum] = [kind(MIXED, True, CPU) for kind in KINDS]
    for small in (0, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunked, "_SMALL", small)
            others.append(Chunked(MIXED, True, CPU))
    for event in [*events, "look"]:
        if event == "zero":
            for one in (*alone, *others):
                one.zero_()
        elif event == "look":
            flags = [one.flags for one in alone]
            wanted = any(nan for nan, _ in flags), any(overflow for _, overflow in flags)
            for other in others:
                # Where there is a NaN nobody asks for an overflow, nor for numbers where there is either.
                found = other.flags
                assert found == wanted or (found[0] and wanted[0] and not isinstance(other, Chunked))
                for tensor, one in zip(other.tensors, alone, strict=True):
                    assert any(wanted) or torch.equal(tensor, one.tensors[0])
        else:
            for one in others:
                one.add(event, exponents, num_contributions)
            for key, one in enumerate(alone):
                one.add([event[key]], [exponents[key]], num_contributions)


def test_what_fails_in_one_key_is_added_in_the_others() -> None:
    total = Chunked(MIXED, True, CPU)
    ones, bad = [torch.ones(shape) for shape in MIXED], torch.full((2, 2), math.nan)
    total.add(ones, (0, 0, 0), 8)
    assert total.flags == (False, False)
    total.add([ones[0], bad, torch.full((1,), 2.0**48)], (0, 0, 0), 8)
    assert total.flags == (True, True)
    assert [tensor.unique().tolist() for tensor in total.tensors] == [[2], [1], [1]]


@of_each_kind
@pytest.mark.parametrize("exponent", [-10, 0, 20])
@pytest.mark.parametrize("size", [3, (1 << 14) + 1])
def test_a_term_a_hair_below_the_limit_is_added(kind: Kind, size: int, exponent: int) -> None:
    below = 2.0**48 - 2.0**24
    total = kind([(size,)], True, CPU)
    total.add([torch.full((size,), math.ldexp(below, -exponent))], (exponent,), 1)
    assert total.flags == (False, False)
    assert set(total.tensors[0].tolist()) == {below}
    total.add([torch.full((size,), math.ldexp(2.0**48, -exponent))], (exponent,), 1)
    assert total.flags == (False, True)


@of_each_kind
def test_zero_forgets(kind: Kind) -> None:
    total = kind([(2,)], True, CPU)
    total.add([torch.ones(2)], (10,), 1)
    total.zero_()
    assert total.tensors[0].tolist() == [0, 0]


@of_each_kind
def test_an_empty_bucket_is_summed_like_any_other(kind: Kind) -> None:
    total = kind([], True, CPU)
    total.add([], (), 4)
    assert total.flags == (False, False)
    assert total.tensors == []
    assert sums.total([[], []]) == []
    assert finished([], (), 4) == ([], (False, False, False, (), ()))


@of_each_kind
def test_floating_point_sums(kind: Kind) -> None:
    total = kind([(3,)], False, CPU)
    for value in (1.0, 2.0):
        total.add([torch.full((3,), value)], (45,), 2)
        assert total.flags == (False, False)
    assert total.tensors[0].dtype == torch.float32
    assert sums.mean_grads(total.tensors, (45,), 2, False)[0].tolist() == [1.5, 1.5, 1.5]


def test_total_is_out_of_place() -> None:
    parts = [[torch.tensor([n])] for n in (1, 2, 3)]
    assert sums.total(parts)[0].item() == 6
    assert [part[0].item() for part in parts] == [1, 2, 3]


def test_squared_norms_are_float64_and_do_not_depend_on_threads() -> None:
    grads = some_grads(1)
    norms = finished(grads, (0, 0, 0), 1.0, exact=False)[1].norms
    assert norms == pytest.approx([float(grad.double().square().sum()) for grad in grads], rel=1e-12)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert finished(grads, (0, 0, 0), 1.0, exact=False)[1].norms == norms
    finally:
        torch.set_num_threads(threads)


# --------------------------------------------------------------------------- scales


@pytest.mark.parametrize("num_contributions", [1, 8, 100, 5000])
def test_next_exponents_leave_headroom(num_contributions: int) -> None:
    exponents = (START_EXPONENT,)
    total = [torch.tensor([3.0, -(2.0**40), 17.0])]
    for _ in range(10):
        _, figures = finished(total, exponents, 1.0, num_contributions=num_contributions)
        following = figures.exponents
        assert following[0] - exponents[0] <= 8
        total = [torch.tensor([math.ldexp(2**40, following[0] - START_EXPONENT)], dtype=torch.float64)]
        exponents = following
    # A contribution as large as the whole sum may still grow by the headroom, and little more is wasted.
    limit, room = min(2**51 / num_contributions, 2**48), sums.HEADROOM_BITS
    assert int(total[0]) * 2**room < limit <= int(total[0]) * 2 ** (room + 2)


def test_next_exponents_fall_at_once_and_zeros_keep_theirs() -> None:
    total = [torch.tensor([value], dtype=torch.float64) for value in (2.0**50, 0.0, 1.0)]
    assert finished(total, (36, 36, 36), 8, num_contributions=8)[1].exponents == (28, 36, 44)
    assert finished([torch.ones(1).double()], (119,), 1)[1].exponents == (120,)


@pytest.mark.parametrize("marks", [(1, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 1), (0, 1, 1)])
def test_a_total_with_a_nan_or_an_overflow_says_nothing_else(marks: tuple[int, int, int]) -> None:
    for value in (1.0, math.inf, math.nan):
        total = [torch.full((3,), value, dtype=torch.float64), torch.zeros(2).double()]
        _, figures = finished(total, (30, 31), 2, marks=marks)
        assert figures == (*map(bool, marks), (0.0, 0.0), (30, 31))


def test_what_changed_says_so_beside_all_else() -> None:
    _, figures = finished([torch.full((3,), 2.0**30).double()], (30,), 1, marks=(0, 0, 1))
    assert figures == (False, False, True, (3.0,), (38,))


def test_figures_of_keys_of_other_shapes_are_refused() -> None:
    total = [torch.zeros(3).double()]
    figures = sums.finish([total], (0,), 1.0, [torch.empty(3)], 1 << 15, exact=True)
    with pytest.raises(AssertionError, match="other shapes"):
        sums.decode((0, 0, 0), figures.flatten().tolist(), sums.slicing([], CPU), (0,), 1, exact=True)


@of_each_kind
@pytest.mark.parametrize("limit", [12, 8, 5000])
def test_marks_are_flags_on_the_device(kind: Kind, limit: int) -> None:
    total = kind([(2,)], True, CPU)
    assert total.marks.tolist() == [0, 0, 0]
    total.add([torch.ones(2)], (0,), limit)
    assert total.marks.tolist() == [0, 0, 0]
    total.add([torch.tensor([0.0, 2.0**60])], (0,), limit)
    assert total.marks.tolist() == [0, 1, 0]
    total.add([torch.tensor([0.0, math.nan])], (0,), limit)
    assert total.marks[0] == 1
    assert total.marks.dtype == torch.float64


def test_whatever_is_finite_fits_in_the_end() -> None:
    """A step is repeated until its gradients fit: 31 times at most, and never for ever."""
    exponents, grad = (120,), [torch.tensor([torch.finfo(torch.float32).max])]
    for _ in range(48):
        part = sums.empty([(1,)], True, torch.device("cpu"))
        part.add(grad, exponents, 2**17)
        if part.flags == (False, False):
            return
        exponents = sums.smaller_exponents(exponents)
    pytest.fail(f"overflows at {exponents}")


def test_smaller_exponents_after_an_overflow() -> None:
    assert sums.smaller_exponents((45, -118)) == (40, -120)


def test_a_sum_of_numbers_has_no_order() -> None:
    """From 3.12 on Python's ``sum`` rounds otherwise than before: nodes may have either."""
    values = [1.0, 1e100, 1.0, -1e100, 2.0**-60]
    assert {sums.added(random.Random(seed).sample(values, 5)) for seed in range(20)} == {2.0}
    assert sums.added([1.0, math.inf]) == math.inf
    assert math.isnan(sums.added([math.inf, -math.inf]))

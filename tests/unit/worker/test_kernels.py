"""Sums by compiled code: the bits of those by torch, from the file as it is, and without it too."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oobleckd.worker import sums
from oobleckd.worker.runtime import library
from oobleckd.worker.sums import Chunked, Fused, compiled
from oobleckd.worker.sums.arithmetic import limit_of
from oobleckd.worker.sums.kernels import SumMemory
from tests.helpers.kernels import build, fused, kernels
from tests.helpers.models import CPU

finish = sys.modules["oobleckd.worker.sums.finish"]  # the module: the package has a function of that name
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((300, 7), (5,), (70_001,), (1,))
EXPONENTS = (34, 20, 41, -3)


def grads(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Of many magnitudes, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for shape in SHAPES:
        tensor = torch.randn(shape, generator=generator) * torch.logspace(-9, -1, shape[-1])
        tensor[torch.rand(shape, generator=generator) < 0.1] = -0.0
        tensors.append(tensor.to(dtype))
    return tensors


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_sums_are_those_of_torch_to_the_bit(dtype: torch.dtype, number: int) -> None:
    one, other = fused(SHAPES, True, CPU), Chunked(SHAPES, True, CPU)
    for seed in range(number):
        one.add(grads(seed, dtype), EXPONENTS, 8)
        other.add([grad.float() for grad in grads(seed, dtype)], EXPONENTS, 8)
    for mine, wanted in zip(one.tensors, other.tensors, strict=True):
        assert torch.equal(bits(mine), bits(wanted))
    for mine, wanted in zip(one.copy(), other.copy(), strict=True):
        assert torch.equal(bits(mine), bits(wanted))


def finite(dtype: torch.dtype, below: float) -> st.SearchStrategy[float]:
    """Numbers of ``dtype`` and of all magnitudes up to ``below``, subnormal ones among them."""
    mantissa = 24 if dtype == torch.float32 else 8
    lowest = -149 if dtype == torch.float32 else -133
    made = st.builds(math.ldexp, st.integers(-(2**mantissa), 2**mantissa), st.integers(lowest, 100))
    return st.one_of(st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.5, -2.5]), made).filter(
        lambda value: abs(value) < below
    )


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data(), st.integers(-120, 120))
def test_rounding_is_that_of_a_sum_that_gathers(
    dtype: torch.dtype, data: st.DataObject, exponent: int
) -> None:
    """All that fits, at every exponent: ties, subnormal numbers, and those a hair below the limit."""
    below = math.ldexp(limit_of(8), -exponent)
    terms = data.draw(st.lists(finite(dtype, below), min_size=1, max_size=40))
    one, other = fused([(len(terms),)], True, CPU), Chunked([(len(terms),)], True, CPU)
    for _ in range(2):
        one.add([torch.tensor(terms, dtype=torch.float64).to(dtype)], (exponent,), 8)
        other.add([torch.tensor(terms, dtype=torch.float64).to(torch.float32)], (exponent,), 8)
    assert one.flags == other.flags == (False, False)
    assert torch.equal(bits(one.tensors[0]), bits(other.tensors[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_threads_leave_no_trace(parts: int, dtype: torch.dtype) -> None:
    sizes = [math.prod(shape) for shape in SHAPES]
    one, many = SumMemory.of(sizes, CPU, 1), SumMemory.of(sizes, CPU, parts)
    for first in (True, False):
        for memory in (one, many):
            kernels().add(memory, grads(int(first), dtype), EXPONENTS, first=first)
    assert torch.equal(bits(many.flat), bits(one.flat))
    assert torch.equal(many.seen.amax(0), one.seen[0])
    assert int(many.checksum.sum()) == int(one.checksum) == int(bits(one.flat).sum())
    assert int(kernels().checksum(one.flat)) == int(one.checksum)


def test_large_sums_take_as_many_threads_as_torch_has() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert [library.num_parts(size) for size in (0, 100, 1 << 19, 1 << 30)] == [1, 1, 2, 4]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [3.0, 2.0**-126, 0.0, math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 15, 16, 69_999])
def test_the_largest_magnitude_is_seen_wherever_it_is(place: int, value: float, dtype: torch.dtype) -> None:
    memory = SumMemory.of([70_000], CPU, 1)
    grad = torch.zeros(70_000, dtype=dtype)
    grad[place] = -value
    kernels().add(memory, [grad], (0,), first=True)
    seen = memory.seen.view(torch.float32).item()
    assert seen == value or (math.isnan(seen) and math.isnan(value))


def test_exponents_may_change_between_two_terms_of_one_sum() -> None:
    """What failed with the first ones has failed."""
    total = fused([(2,)], True, CPU)
    total.add([torch.tensor([1.0, 2.0**20])], (40,), 8)
    total.add([torch.ones(2)], (0,), 8)
    assert total.flags == (False, True)
    total.zero_()
    total.add([torch.ones(2)], (3,), 8)
    total.add([torch.ones(2)], (0,), 8)
    assert total.flags == (False, False)
    assert total.tensors[0].tolist() == [9, 9]


def test_a_gradient_of_another_dtype_or_layout_is_added_by_its_values() -> None:
    total = fused([(2, 3), (4,)], True, CPU)
    turned = torch.arange(6.0).view(3, 2).t()
    total.add([turned, torch.arange(4, dtype=torch.float64)], (0, 1), 8)
    assert total.tensors[0].tolist() == turned.tolist()
    assert total.tensors[1].tolist() == [0, 2, 4, 6]


def test_a_gradient_of_another_size_is_refused_before_anything_is_written() -> None:
    total = fused([(2,)], True, CPU)
    with pytest.raises(ValueError, match="3 numbers for a sum of 2"):
        total.add([torch.ones(3)], (0,), 8)


# --------------------------------------------------------------------------- the end of a step


def both(exponents: tuple[int, ...], weight: float, *parts: list[Tensor]) -> None:
    """Assert that what follows from ``parts`` is the same with kernels as without, to the bit."""
    found = []
    for using in (None, kernels()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(finish, "kernels_of", lambda _, using=using: using)
            grads = [torch.full(tensor.shape, math.nan) for tensor in parts[0]]
            found.append((sums.finish(parts, exponents, weight, grads, 1 << 15, exact=True), grads))
    (mine, means), (wanted, others) = found
    assert torch.equal(mine, wanted)  # none is negative; 0 may be -0
    for one, other in zip(means, others, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [1, 31, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, (1 << 19) + 5])
def test_the_end_of_a_step_is_that_of_torch_to_the_bit(size: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(size)
    total = [torch.randn((size,), generator=generator).mul(2.0**40).double().round(), torch.zeros(2, 3)]
    total[1][1] = torch.tensor([1.0, -(2.0**51), 0.0])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        total[1] = total[1].double()
        both((34, 3), 7.0, total)
        both((34, 3), 7.0, total, [tensor.flip(0).neg() for tensor in total])
        both((34, 3), 7.0, *[[(tensor / 4).round() for tensor in total]] * 3)
    finally:
        torch.set_num_threads(before)


@given(
    st.lists(st.integers(-(2**51), 2**51), min_size=1, max_size=9),
    st.integers(-120, 120),
    st.one_of(st.integers(1, 5000).map(float), st.floats(2.0**-20, 2.0**20)),
)
def test_means_are_rounded_as_torch_rounds_them(values: list[int], exponent: int, weight: float) -> None:
    """Those that become infinite, subnormal or nothing in float32 too."""
    both((exponent,), weight, [torch.tensor(values, dtype=torch.float64)])


@pytest.mark.parametrize(("rows", "columns"), [(1, 1024), (77, 1024), (3, 5), (0, 8)])
def test_rows_and_columns_are_added_up_in_one_pass(rows: int, columns: int) -> None:
    made = torch.Generator().manual_seed(rows)
    words = torch.randint(-(2**63), 2**63 - 1, (rows, columns), generator=made)
    by_row, by_column = kernels().square(words)
    assert torch.equal(by_row, words.sum(1))
    assert torch.equal(by_column, words.sum(0))


# --------------------------------------------------------------------------- where it comes from


@pytest.mark.parametrize("flags", ["-DEVERY_CPU=", "-DEVERY_CPU= -march=native"])
def test_instructions_leave_no_trace(tmp_path: Path, flags: str) -> None:
    """Those that every CPU of this kind has, and all of this one, beside those that the loader has taken."""
    other = compiled.compiled(build(tmp_path, CFLAGS=flags))
    assert other is not None
    found = []
    for one in (kernels(), other):
        memory = one.memory([math.prod(shape) for shape in SHAPES], CPU)
        for seed, dtype in enumerate((*DTYPES, *DTYPES)):
            one.add(memory, grads(seed, dtype), EXPONENTS, first=seed == 0)
        mean = torch.empty(memory.flat.shape)
        figures = one.finish([[memory.flat], [memory.flat.flip(0)]], [7.0], [mean], 1 << 15)
        found.append([memory.flat, memory.seen, memory.checksum, mean, *figures])
        assert int(one.checksum(memory.flat)) == int(memory.checksum)
    assert all(map(torch.equal, *found))


def test_without_a_compiler_the_installation_goes_on_and_torch_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(tmp_path, CC="no-such-compiler")
    assert compiled.compiled(folder) is None
    monkeypatch.setattr(sums, "kernels_of", lambda _: compiled.compiled(folder))
    assert isinstance(sums.empty([(2,)], True, CPU), Chunked)


def test_a_library_that_is_none_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "_kernels.abi3.so").write_bytes(b"not a library")
    assert compiled.compiled(tmp_path) is None


@pytest.mark.parametrize("text", ["int oobleckd_sums_interface(void) { return 0; }", "int other;"])
def test_a_library_of_other_sources_is_left_alone(text: str, tmp_path: Path) -> None:
    source = tmp_path / "older.c"
    source.write_text(text)
    compiler = shutil.which("cc") or "gcc"
    subprocess.run(
        [compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "_kernels.abi3.so")], check=True
    )
    assert compiled.compiled(tmp_path) is None


def test_exact_sums_of_a_cpu_are_added_by_the_kernels_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "kernels_of", lambda _: kernels())
    assert isinstance(sums.empty([(2,)], True, CPU), Fused)
    assert isinstance(sums.empty([(2,)], False, CPU), Chunked)

"""Kernels for gradient sums on a card, beside torch's operations in their place, there and on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oobleckd.worker import sums
from oobleckd.worker.device.context import DeviceContext, torch_device
from oobleckd.worker.sums.arithmetic import largest, mean_grads, squares
from oobleckd.worker.sums.choice import kernels_of
from oobleckd.worker.sums.guard import SumsChanged
from tests.helpers import gpu

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
SHAPES = ((768, 768), (257, 130), (), (1000,))
EXPONENTS = (30, 28, 40, 20)
TERMS, SEEDS = 4, range(4)
BAD = (math.nan, math.inf, 2.0**48)


@pytest.fixture
def device(tmp_path: Path) -> torch.device:
    """The device as a device process sets it up."""
    return torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))


def terms(seed: int, *, bad: float | None = None) -> list[list[Tensor]]:
    """Gradients of some micro-batches on the CPU, each key of its own magnitude; ``bad`` is somewhere in the
    second.
    """
    draw = torch.Generator().manual_seed(seed)
    drawn = [
        [torch.randn(shape, generator=draw) * 10.0 ** -(key + seed) for key, shape in enumerate(SHAPES)]
        for _ in range(TERMS)
    ]
    if bad is not None:
        drawn[1][1][-1, -1] = bad
    return drawn


def added(total: sums.Sum, of: Sequence[Sequence[Tensor]], device: torch.device) -> sums.Sum:
    for grads in of:
        total.add([grad.to(device) for grad in grads], EXPONENTS, TERMS)
    return total


def of_both(
    device: torch.device, of: Sequence[Sequence[Tensor]], *, exact: bool = True
) -> tuple[sums.Sum, sums.Sum]:
    """What the device's kernels make of the terms, and torch's operations there."""
    kernels = sums.empty(SHAPES, exact, device, guarded=True)
    plain = sums.Whole(SHAPES, exact, device, guarded=True)
    return added(kernels, of, device), added(plain, of, device)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True))


def test_a_card_has_kernels(device: torch.device) -> None:
    assert device.type == "cpu" or kernels_of(device.type) is not None, "see the device's log"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("exact", [True, False])
def test_sums_have_the_bits_of_torch_s_operations(device: torch.device, exact: bool, seed: int) -> None:
    one, other = of_both(device, terms(seed), exact=exact)
    assert same(one.tensors, other.tensors)
    assert torch.equal(one.marks.cpu(), other.marks.cpu())
    if exact:
        cpu = added(sums.Chunked(SHAPES, True, CPU), terms(seed), CPU)
        assert same(one.tensors, cpu.tensors)


@pytest.mark.parametrize("seed", SEEDS)
def test_bf16_gradients_count_as_the_same_numbers_in_float32(device: torch.device, seed: int) -> None:
    rounded = [[grad.to(torch.bfloat16) for grad in grads] for grads in terms(seed)]
    wide = [[grad.to(torch.float32) for grad in grads] for grads in rounded]
    one = added(sums.empty(SHAPES, True, device, guarded=True), rounded, device)
    assert same(one.tensors, added(sums.Whole(SHAPES, True, device), wide, device).tensors)


@pytest.mark.parametrize("bad", BAD)
def test_what_a_term_holds_is_marked_alike(device: torch.device, bad: float) -> None:
    one, other = of_both(device, terms(0, bad=bad))
    assert one.flags == other.flags
    assert any(one.flags)


def test_a_sum_that_is_begun_anew_forgets_what_was_in_it(device: torch.device) -> None:
    one, other = of_both(device, terms(0, bad=math.nan))
    for each in (one, other):
        each.zero_()
        added(each, terms(1), device)
    assert same(one.tensors, other.tensors)
    assert one.flags == other.flags == (False, False)


def test_copies_are_merged_to_the_same_bits(device: torch.device) -> None:
    (one, other), (more, rest) = of_both(device, terms(0)), of_both(device, terms(1))
    one.merge(rest.copy())
    other.merge(more.copy())
    assert same(one.tensors, other.tensors)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_follows_from_a_total_has_the_bits_of_a_cpu(device: torch.device, seed: int) -> None:
    """The mean gradients and the exponents of the next step; a norm is added up in other chunks."""
    found = []
    for on in (device, CPU):
        total = added(sums.empty(SHAPES, True, on), terms(seed), on)
        marks, tensors, slicing = total.marks, total.tensors, sums.slicing(SHAPES, on)
        means = [torch.empty(shape, device=on) for shape in SHAPES]
        done = sums.finish([tensors], EXPONENTS, float(TERMS), means, slicing.chunk, exact=True)
        figures = done.flatten().tolist()
        told = sums.decode(marks.tolist(), figures, slicing, EXPONENTS, TERMS, exact=True)
        found.append((means, told))
    (grads, here), (wanted, there) = found
    assert same(grads, wanted)
    assert here.exponents == there.exponents
    assert here.norms == pytest.approx(there.norms, rel=1e-12)


@pytest.mark.parametrize("size", [3, 4096, (1 << 22) + 5])
def test_norms_have_the_bits_of_torch_s_operations(device: torch.device, size: int) -> None:
    """With more numbers than are added up to one square, too."""
    size = min(size, (1 << 17) + 5) if device.type == "cpu" else size
    total = [torch.randn(size, device=device).mul(2.0**40).double().round()]
    kernels = kernels_of(device.type)
    if kernels is None:
        assert device.type == "cpu", "see the device's log"
        return
    mean, chunk = torch.empty(size, device=device), 1 << 15 if device.type == "cpu" else 1 << 20
    figures = kernels.finish([total], [math.ldexp(7.0, 34)], [mean], chunk)
    (grad,) = mean_grads(total, [34], 7.0, exact=True)
    assert same([mean], [grad])
    assert same([figures.largest], [torch.stack(largest(total[0], chunk))])
    assert figures.squares.tolist() == [float(square) for square in squares(grad, chunk)]


@pytest.mark.parametrize("when", ["between", "after"])
def test_a_flipped_bit_is_found(device: torch.device, when: str) -> None:
    total = added(sums.empty(SHAPES, True, device, guarded=True), terms(0), device)
    memory = total.memory()
    assert memory is not None
    memory.view(-1).view(torch.int64)[4097] ^= 1 << 40
    if when == "between":
        added(total, terms(1), device)
    assert changed(total)


def changed(total: sums.Sum) -> bool:
    """Whether a look at the sums says so: on a CPU at once, on a GPU in its marks."""
    try:
        _ = total.tensors
    except SumsChanged:
        return True
    return total.marks.tolist()[2] == 1


def test_a_gradient_that_lies_at_an_odd_place_is_added(device: torch.device) -> None:
    total = sums.empty([(4096,)], True, device)
    for dtype in (torch.float32, torch.bfloat16):
        total.add([torch.ones(4097, dtype=dtype, device=device)[1:]], (2,), 8)
    assert total.tensors[0].unique().tolist() == [8]

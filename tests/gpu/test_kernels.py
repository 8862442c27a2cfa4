"""Kernels for sums on a GPU, against the code that they replace."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oobleckd.worker import sums
from oobleckd.worker.device.context import DeviceContext, torch_device
from oobleckd.worker.sums import Fused, Whole, choice
from oobleckd.worker.sums.arithmetic import largest, mean_grads, squares
from oobleckd.worker.sums.guard import SumsChanged
from oobleckd.worker.sums.kernels import Kernels
from tests.helpers import gpu, kernels

pytestmark = pytest.mark.gpu
EXPONENTS = (sums.START_EXPONENT, 40, -3)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def device(tmp_path: Path) -> torch.device:
    """The device as a device process sets it up."""
    return torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))


@pytest.fixture
def found(device: torch.device) -> Kernels:
    if device.type == "cpu":  # a rehearsal
        return kernels.kernels()
    there = choice.kernels_of(device.type)
    assert there is not None, "the log says why Triton's kernels are not used"
    return there


def shapes(device: torch.device) -> list[tuple[int, ...]]:
    """The first of more numbers than are added up to one square on a GPU."""
    return [((1 << 17) + 5 if device.type == "cpu" else (1 << 25) + 5,), (300, 2048), (1,)]


def gradients(seed: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    draw = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(shape, generator=draw, device=device).pow(5).mul(2.0**-14).to(dtype)
        for shape in shapes(device)
    ]


def test_the_trial_is_passed(device: torch.device, found: Kernels) -> None:
    assert choice.as_torch(found, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_the_end_of_a_step_have_the_same_bits(
    device: torch.device, found: Kernels, dtype: torch.dtype
) -> None:
    one = Fused(shapes(device), device, found, guarded=True)
    other = Whole(shapes(device), exact=True, device=device, guarded=True)
    for seed in range(4):
        one.add(gradients(seed, dtype, device), EXPONENTS, 8)
        other.add([term.float() for term in gradients(seed, dtype, device)], EXPONENTS, 8)
    assert one.flags == other.flags == (False, False)
    mine, wanted = one.tensors, other.tensors
    assert all(map(torch.equal, mine, wanted))
    assert one.marks.tolist() == [0, 0, 0]
    means = found.finish(mine, [math.ldexp(7.0, exponent) for exponent in EXPONENTS])
    grads = mean_grads(wanted, EXPONENTS, 7.0, exact=True)
    assert all(map(torch.equal, means.grads, grads))
    assert torch.equal(means.largest, largest(wanted))
    assert means.squares.tolist() == [float(square) for grad in grads for square in squares(grad)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 2.0**48])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_term_holds_is_seen(
    device: torch.device, found: Kernels, dtype: torch.dtype, bad: float
) -> None:
    total = Fused([(5000,)], device, found)
    term = torch.zeros(5000, dtype=dtype, device=device)
    term[4999] = -bad
    total.add([term], (0,), 8)
    assert total.flags == (not math.isfinite(bad), math.isfinite(bad))


@pytest.mark.parametrize("when", ["between", "after"])
def test_a_flipped_bit_is_found(device: torch.device, found: Kernels, when: str) -> None:
    total = Fused([(5000,), (7,)], device, found, guarded=True)
    terms = [torch.ones(5000, device=device), torch.ones(7, device=device)]
    total.add(terms, (3, 3), 8)
    memory = total.memory()
    assert memory is not None
    memory.view(torch.int64)[4097] ^= 1 << 40
    if when == "between":
        total.add(terms, (3, 3), 8)
    assert changed(total)


def changed(total: sums.Sum) -> bool:
    """Whether a look at the sums says so: on a CPU at once, on a GPU in its marks."""
    try:
        _ = total.tensors
    except SumsChanged:
        return True
    return total.marks.tolist()[2] == 1


def test_a_gradient_that_lies_at_an_odd_place_is_added(device: torch.device, found: Kernels) -> None:
    total = Fused([(4096,)], device, found)
    for dtype in DTYPES:
        total.add([torch.ones(4097, dtype=dtype, device=device)[1:]], (2,), 8)
    assert total.tensors[0].unique().tolist() == [8]

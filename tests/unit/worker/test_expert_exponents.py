"""Experts share a tensor, and so the exponent of its sums: what becomes of one that is much smaller than its
neighbours, and of one that sleeps and wakes up.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from oobleckd.worker import sums
from tests.helpers.finishing import finished

CPU = torch.device("cpu")
EXPERTS, WIDTH = 4, 512
SHAPE = (EXPERTS, WIDTH)
USUAL = 2.0**-16
"""The largest gradient of most experts."""


def terms(largest: Sequence[float], count: int, seed: int) -> list[Tensor]:
    """Gradients of ``count`` micro-batches, by expert as large as said."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand((count, *SHAPE), generator=generator) * 2 - 1
    return [each * torch.tensor(largest)[:, None] for each in drawn]


def step(exponents: tuple[int, ...], grads: Sequence[Tensor]) -> tuple[Tensor, tuple[int, ...], int]:
    """Of one step the mean gradient, the exponents for the next, and how often it was done again."""
    again = 0
    while True:
        total = sums.empty([SHAPE], exact=True, device=CPU)
        for grad in grads:
            total.add([grad], exponents, len(grads))
        marks = total.marks.tolist()
        means, found = finished(
            total.tensors, exponents, len(grads), num_contributions=len(grads), marks=marks
        )
        if not found.overflow:
            return means[0], found.exponents, again
        exponents, again = sums.smaller_exponents(exponents), again + 1


def trained(largest: Sequence[float], num_steps: int, count: int) -> tuple[int, ...]:
    """Exponents after so many steps in which experts are so large."""
    exponents: tuple[int, ...] = (sums.START_EXPONENT,)
    for number in range(num_steps):
        _, exponents, _ = step(exponents, terms(largest, count, number))
    return exponents


def error_bits(found: Tensor, grads: Sequence[Tensor], expert: int) -> float:
    """The largest error of an expert's mean, by its own largest number, as a power of two."""
    exact = torch.stack([grad[expert].double() for grad in grads]).mean(0)
    return float(((found[expert].double() - exact).abs().max() / exact.abs().max()).log2())


@pytest.mark.parametrize(("rise", "repeats"), [(0, 0), (4, 0), (8, 1), (13, 2), (20, 3)])
def test_an_expert_that_wakes_up_keeps_its_bits(rise: int, repeats: int) -> None:
    """After 20 steps without a token, ``2**rise`` times as large as its neighbours: no bit of it is lost, and
    from a factor of 32 on its step is done again, once for every five powers of two.
    """
    exponents = trained([0.0, USUAL, USUAL, USUAL], 20, 4)
    grads = terms([USUAL * 2.0**rise, USUAL, USUAL, USUAL], 4, 99)
    found, following, again = step(exponents, grads)
    assert again == repeats
    assert all(error_bits(found, grads, expert) <= -23 for expert in range(EXPERTS))
    *_, later = step(following, terms([USUAL * 2.0**rise, USUAL, USUAL, USUAL], 4, 100))
    assert later == 0


@pytest.mark.parametrize(("count", "bits"), [(4, -23), (256, -15)])
def test_an_expert_that_is_much_smaller_than_its_neighbours_keeps_its_bits(count: int, bits: int) -> None:
    """By as many powers of two as the largest and the smallest of a tensor were ever seen apart
    (D-routers-003): float32 itself has 24.
    """
    largest = [USUAL * 2.0**-18, USUAL, USUAL, USUAL]
    exponents = trained(largest, 12, count)
    grads = terms(largest, count, 99)
    found, _, again = step(exponents, grads)
    assert again == 0
    assert error_bits(found, grads, 0) <= bits

"""The shape of a job whose copies take about as long as a step, on machines of any speed."""

from __future__ import annotations

import pytest

from planner.beforehand import pays
from planner.profile import Profile
from tests.helpers.manners import Manner
from tests.helpers.preparing import Shape

MANNERS = (Manner(), Manner("bamboo", "decoupled"))


@pytest.mark.parametrize("manner", MANNERS, ids=lambda manner: manner.name)
@pytest.mark.parametrize("fixed_s", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("flops_per_s", [2e9, 1e10, 1e11])
def test_a_shape_is_found(manner: Manner, fixed_s: float, flops_per_s: float) -> None:
    """Steps of one micro-batch may take as long as they like: there is a width at which copies are a match for them."""
    shape = Shape()
    for _ in range(5):
        copies_s = shape.num_bytes(manner) / Profile("", "", ()).link_bytes_per_s
        period_s = fixed_s / 4 + 6 * shape.tokens * shape.num_bytes(manner) / 12 / flops_per_s
        fill_s = fixed_s + 2 * period_s
        if pays(copies_s, fill_s + (shape.share - 1) * period_s):
            return
        shape = shape.next(copies_s, fill_s, period_s)
    raise AssertionError(f"{shape}: {copies_s} s, {fill_s} + n * {period_s} s")


def test_a_slow_machine() -> None:
    """Seen: a step of one micro-batch took three times as long as the copies, and fewer than one there cannot be."""
    assert Shape(256, 8, 1).next(0.0284, 0.0899, 0.04) == Shape(512, 4, 1)
    assert Shape(256, 8, 2).next(0.0567, 0.0567, 0.03) == Shape(256, 8, 1)

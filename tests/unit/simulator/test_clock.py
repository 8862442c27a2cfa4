"""Virtual time."""

from __future__ import annotations

from math import inf

import pytest

from oobleckd.simulator.clock import VirtualClock


def test_in_order_of_time_and_then_of_asking() -> None:
    clock, seen = VirtualClock(), []
    for when, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (-1.0, "now")):
        clock.at(when, lambda name=name: seen.append((clock.now, name)))
    while clock.next_at < inf:
        clock.step()
    assert seen == [(0.0, "now"), (1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_nothing_is_left_behind() -> None:
    clock = VirtualClock()
    clock.after(1.0, lambda: None)
    clock.pass_to(0.5)
    assert clock.now == 0.5
    with pytest.raises(AssertionError):
        clock.pass_to(1.5)

"""How far devices are in a step: what of a micro-batch is its forward, with and without recomputation.

Two stages of two layers with four micro-batches, as in ``test_sums``; layers are of 10 + 20 ms, so a block
that is computed again has a backward of 30.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from oobleckd.planner.plan import FORWARD, NOTHING, WEIGHTS, Layers, Layout, Range, Recompute, Route, Segment
from oobleckd.protocol.messages import Progress
from oobleckd.protocol.parts import Counters
from oobleckd.simulator.progress import ForwardShare, Moment, a_third, answers, ends, forward_share
from tests.unit.simulator.build import even_profile

STEP_S = 5.0
HOPS = (Segment("a/0", Range(0, 2)), Segment("b/0", Range(2, 4)))
ROUTES = tuple(Route(number, 1, HOPS) for number in range(4))


def layout_of(recompute: Mapping[str, Recompute]) -> Layout:
    return Layout(
        1, 4, {hop.device: Layers.of(hop.layers) for hop in HOPS}, ROUTES, recompute=dict(recompute)
    )


@pytest.mark.parametrize(
    ("recompute", "share"),
    [
        ({}, 1 / 3),
        ({"b/0": "blocks"}, 40 / 130),  # one block, the head never
        ({"a/0": "blocks", "b/0": "blocks"}, 40 / 140),
        ({"elsewhere/0": "blocks"}, 1 / 3),
    ],
)
def test_the_share_of_a_forward(recompute: Mapping[str, Recompute], share: float) -> None:
    assert forward_share(layout_of(recompute), even_profile())(HOPS) == pytest.approx(share)


def ends_of(device: str, forward_of: ForwardShare) -> list[float]:
    found = ends(ROUTES, ROUTES, STEP_S, forward_of)
    return [hop.at_s for hop in found[device]]


def test_weight_gradients_come_later_where_blocks_are_computed_again() -> None:
    """The last stage has those of a micro-batch after the forwards of both stages and its own backward."""
    again = forward_share(layout_of({"a/0": "blocks", "b/0": "blocks"}), even_profile())
    assert ends_of("b/0", a_third) == pytest.approx([4 / 3, 7 / 3, 10 / 3, 13 / 3])
    assert ends_of("b/0", again) == pytest.approx([9 / 7, 16 / 7, 23 / 7, 30 / 7])
    for forward_of in (a_third, again):
        assert ends_of("a/0", forward_of) == pytest.approx([2, 3, 4, 5])


def reached(at_s: float, forward_of: ForwardShare) -> list[int]:
    moment = Moment(Progress("", 1, Counters(0, 0, 0), {}, ()), at_s / STEP_S)
    told = answers(moment, ROUTES, ROUTES, ["b/0"], ["a/0"], {}, forward_of)
    return [hop.reached for hop in told["a/0"].hops]


def test_forwards_are_done_earlier() -> None:
    """The first stage has its first forward after 1/3 s, or after 2/7, and its second after twice that."""
    again = forward_share(layout_of({"a/0": "blocks", "b/0": "blocks"}), even_profile())
    assert reached(0.6, a_third) == [FORWARD, NOTHING, NOTHING, NOTHING]
    assert reached(0.6, again) == [FORWARD, FORWARD, NOTHING, NOTHING]
    assert reached(2.1, a_third) == reached(2.1, again) == [WEIGHTS, FORWARD, NOTHING, NOTHING]

"""Routes whose dead hops alone are replaced: when that is possible, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.planner.plan import (
    BACKWARD,
    FORWARD,
    NOTHING,
    WEIGHTS,
    HopState,
    Layers,
    Layout,
    Range,
    Route,
    Segment,
    holdings_of,
)
from oobleckd.planner.reroute.reroute import Rerouting, covers
from oobleckd.planner.reroute.splice import spliced

LAYERS = 6


def pipeline(name: str, cuts: Sequence[int]) -> tuple[Segment, ...]:
    edges = [0, *cuts, LAYERS]
    return tuple(
        Segment(f"{name}{i}/0", Range(start, stop)) for i, (start, stop) in enumerate(pairwise(edges))
    )


def layout(*pipelines: tuple[Segment, ...]) -> Layout:
    routes = tuple(Route(mb, 1, segments) for mb, segments in enumerate(pipelines))
    return Layout(1, LAYERS, holdings_of(s for p in pipelines for s in p), routes)


TWO = layout(pipeline("a", [2, 4]), pipeline("b", [3]))


def states(*reached: int, kept: bool = True) -> dict[tuple[str, int], HopState]:
    return {
        (f"a{at}/0", at): HopState(
            0, 1, at, so_far, False, kept and so_far >= FORWARD, kept and so_far >= BACKWARD
        )
        for at, so_far in enumerate(reached)
    }


def splice(known: dict[tuple[str, int], HopState], missing: Sequence[int]) -> Route | None:
    return spliced(Rerouting(TWO, ["a1/0"]), TWO.routes[0], ["a1/0"], known, missing, 7)


def test_only_the_dead_hop_is_replaced() -> None:
    found = splice(states(FORWARD, NOTHING, NOTHING), range(LAYERS))
    assert found is not None
    assert found.segments == (
        Segment("a0/0", Range(0, 2)),
        Segment("b0/0", Range(2, 3)),
        Segment("b1/0", Range(3, 4)),
        Segment("a2/0", Range(4, 6)),
    )
    assert (found.attempt, found.resumes, found.reached) == (7, 1, (FORWARD, NOTHING, NOTHING, NOTHING))
    assert covers(found, TWO)


def test_what_was_given_must_have_been_kept() -> None:
    assert splice(states(FORWARD, NOTHING, NOTHING, kept=False), range(LAYERS)) is None
    assert splice(states(NOTHING, NOTHING, NOTHING, kept=False), range(LAYERS)) is not None
    late = states(WEIGHTS, NOTHING, WEIGHTS)
    assert splice(late, [2, 3]) is not None
    assert splice(late | {("a2/0", 2): HopState(0, 1, 2, WEIGHTS)}, [2, 3]) is None


def test_a_gradient_that_nobody_needs_need_not_be_there() -> None:
    """The dead hop's layers were reduced: its activations are wanted, its gradients are not."""
    known = states(WEIGHTS, NOTHING, WEIGHTS) | {("a2/0", 2): HopState(0, 1, 2, FORWARD)}
    assert splice(known, [4, 5]) is not None


def test_whose_sums_are_with_a_peer_has_nothing_left_to_do() -> None:
    """Its layers are not missing, the one behind it is through, and the one before it has its gradient, or
    needs none.
    """
    through = states(FORWARD, NOTHING, WEIGHTS)
    for known, missing in (
        (through | {("a0/0", 0): HopState(0, 1, 0, FORWARD, has_input=True, has_output=True)}, [0, 1]),
        (states(BACKWARD, NOTHING, WEIGHTS), [0, 1]),
        (states(WEIGHTS, NOTHING, BACKWARD), [4, 5]),
    ):
        rerouting = Rerouting(TWO, ["a1/0"])
        found = spliced(rerouting, TWO.routes[0], ["a1/0"], known, missing, 7)
        assert found is not None
        assert found.segments[1].device.startswith("b")
        assert found.reached == (known["a0/0", 0].reached, WEIGHTS, WEIGHTS, known["a2/0", 2].reached)
        assert set(found.redone) == {NOTHING}
        assert rerouting.load == Rerouting(TWO, ["a1/0"]).load


def test_whose_sums_are_with_a_peer_is_computed_again_where_its_gradient_is_waited_for() -> None:
    found = splice(states(FORWARD, NOTHING, WEIGHTS), [0, 1])
    assert found is not None
    assert found.reached == (FORWARD, NOTHING, NOTHING, WEIGHTS)


def test_who_is_in_another_attempt_cannot_go_on() -> None:
    known = states(FORWARD, NOTHING, NOTHING)
    assert splice(known | {("a2/0", 2): HopState(0, 5, 2, NOTHING)}, range(LAYERS)) is None
    del known["a2/0", 2]
    assert splice(known, range(LAYERS)) is None


def test_without_a_holder_elsewhere_there_is_no_way() -> None:
    """The only other holder of the layer is a hop of the same route: a device is not sent to by itself."""
    own = (Segment("a0/0", Range(0, 2)), Segment("a1/0", Range(2, 4)), Segment("a2/0", Range(4, 6)))
    routes = (Route(0, 1, own),)
    holdings = {
        "a0/0": Layers.of(Range(0, 4)),
        "a1/0": Layers.of(Range(2, 4)),
        "a2/0": Layers.of(Range(4, 6)),
    }
    alone = Layout(1, LAYERS, holdings, routes)
    known = states(FORWARD, NOTHING, NOTHING)
    assert spliced(Rerouting(alone, ["a1/0"]), routes[0], ["a1/0"], known, range(LAYERS), 7) is None


@given(
    cuts=st.lists(st.integers(1, LAYERS - 1), unique=True, max_size=3).map(sorted),
    others=st.lists(st.integers(1, LAYERS - 1), unique=True, max_size=3).map(sorted),
    dead=st.sets(st.integers(0, 3), min_size=1, max_size=3),
    reached=st.lists(st.sampled_from([NOTHING, FORWARD, BACKWARD, WEIGHTS]), min_size=4, max_size=4),
    kept=st.booleans(),
)
def test_every_splice_is_a_route(
    cuts: list[int], others: list[int], dead: set[int], reached: list[int], kept: bool
) -> None:
    here = layout(pipeline("a", cuts), pipeline("b", others))
    lost = [f"a{at}/0" for at in dead if at <= len(cuts)]
    if not lost:
        return
    known = {place: state for place, state in states(*reached, kept=kept).items() if place[0] not in lost}
    standing = here.routes[0]
    found = spliced(Rerouting(here, lost), standing, lost, known, range(LAYERS), 7)
    if found is None:
        assert not kept
        return
    assert covers(found, here)
    assert not found.touches(lost)
    stays = [s for s in standing.segments if s.device not in lost]
    assert [s for s, so_far in zip(found.segments, found.reached, strict=True) if so_far] == [
        s for s in stays if known[s.device, standing.segments.index(s)].reached
    ]
    assert set(stays) <= set(found.segments)


@pytest.mark.parametrize("num", [2, 6])
def test_new_hops_spread_over_the_holders(num: int) -> None:
    pipelines = [pipeline("a", [3]), pipeline("b", [3]), pipeline("c", [3])]
    routes = tuple(Route(mb, 1, pipelines[mb % 3]) for mb in range(3 * num))
    here = Layout(1, LAYERS, holdings_of(s for p in pipelines for s in p), routes)
    rerouting = Rerouting(here, ["a1/0"])
    taken = []
    for route in routes[::3]:
        state = {("a0/0", 0): HopState(route.micro_batch, 1, 0, FORWARD, has_output=True)}
        found = spliced(rerouting, route, ["a1/0"], state, range(LAYERS), 7)
        assert found is not None
        taken.append(found.segments[1].device)
    assert sorted(taken) == ["b1/0"] * (num // 2) + ["c1/0"] * (num // 2)


def test_both_hops_of_a_device_with_two_chunks_are_replaced() -> None:
    def folded(name: str) -> tuple[Segment, ...]:
        return tuple(
            Segment(f"{name}{home}/0", Range(layer, layer + 1))
            for layer, home in enumerate((0, 1, 2, 2, 1, 0))
        )

    here = layout(folded("a"), folded("b"))

    def known(dead: int, *reached: int) -> dict[tuple[str, int], HopState]:
        """Of the survivors, with all that they sent still there."""
        return {
            (segment.device, at): HopState(
                0, 1, at, far, has_output=far >= FORWARD, has_gradient=far >= BACKWARD
            )
            for at, (segment, far) in enumerate(zip(folded("a"), reached, strict=True))
            if segment.device != f"a{dead}/0"
        }

    for dead, reached in (
        (0, (FORWARD, FORWARD, FORWARD, FORWARD, FORWARD, NOTHING)),
        (1, (FORWARD, FORWARD, FORWARD, FORWARD, BACKWARD, WEIGHTS)),
        (2, (FORWARD, FORWARD, FORWARD, NOTHING, NOTHING, NOTHING)),
    ):
        lost = [f"a{dead}/0"]
        found = spliced(Rerouting(here, lost), here.routes[0], lost, known(dead, *reached), range(LAYERS), 7)
        assert found is not None
        assert covers(found, here)
        assert found.segments == tuple(
            Segment(s.device.replace(f"a{dead}", f"b{dead}"), s.layers) for s in folded("a")
        )
        assert found.reached == tuple(
            NOTHING if s.device in lost else far for s, far in zip(folded("a"), reached, strict=True)
        )
        half = known(dead, *reached)
        half.pop(next(iter(half)))
        assert spliced(Rerouting(here, lost), here.routes[0], lost, half, range(LAYERS), 7) is None

"""Redundant layers in routes: who takes over, what can be run ahead, what that holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

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
from oobleckd.planner.profile import HeldBesides
from oobleckd.planner.reroute.redundant import ahead, graphs_of, heir
from oobleckd.planner.reroute.reroute import Rerouting, covers, detour, reroute
from oobleckd.planner.reroute.splice import spliced
from tests.unit.planner.build import even_profile, setup_of

LAYERS = 6


def pipeline(name: str, *cuts: int) -> tuple[Segment, ...]:
    edges = [0, *cuts, LAYERS]
    return tuple(Segment(f"{name}{i}/0", Range(*pair)) for i, pair in enumerate(pairwise(edges)))


def layout(*pipelines: tuple[Segment, ...], each: int = 2) -> Layout:
    """Micro-batches in turn; every device holds its successor's layers."""
    routes = tuple(Route(mb, 1, pipelines[mb % len(pipelines)]) for mb in range(each * len(pipelines)))
    redundant = {
        s.device: Layers.of(p[(at + 1) % len(p)].layers)
        for p in pipelines
        for at, s in enumerate(p)
        if len(p) > 1
    }
    held = holdings_of(s for p in pipelines for s in p)
    both = {device: layers.and_those(redundant.get(device, Layers())) for device, layers in held.items()}
    return Layout(1, LAYERS, both, routes, redundant)


TWO = layout(pipeline("a", 2, 4), pipeline("b", 3))


def devices(route: Route) -> list[str]:
    return [segment.device for segment in route.segments]


def test_the_heir_is_the_predecessor_and_of_the_first_the_last() -> None:
    route = TWO.routes[0]
    assert heir(route, Range(2, 4), TWO.redundant, ["a1/0"]) == "a0/0"
    assert heir(route, Range(0, 2), TWO.redundant, ["a0/0"]) == "a2/0"
    assert heir(route, Range(2, 4), TWO.redundant, ["a0/0", "a1/0"]) is None
    assert heir(route, Range(2, 4), {}, ["a1/0"]) is None


def test_what_a_device_can_run_ahead() -> None:
    route = TWO.routes[0]
    assert [list(ahead(route, f"a{at}/0", TWO.redundant[f"a{at}/0"])) for at in range(3)] == [[1], [2], [0]]
    around = Route(0, 2, (route.segments[0], Segment("b0/0", Range(2, 3)), Segment("b1/0", Range(3, 6))))
    assert list(ahead(around, "a0/0", TWO.redundant["a0/0"])) == [1]  # a part of what it holds redundantly
    assert list(ahead(around, "a2/0", TWO.redundant["a2/0"])) == []  # it does not compute the last hop


def test_a_detour_stays_in_its_pipeline_where_a_redundant_holder_lives() -> None:
    for dead, taker in (("a0/0", "a2/0"), ("a1/0", "a0/0"), ("a2/0", "a1/0")):
        found = detour(TWO, [dead], 7)
        assert [route.micro_batch for route in found] == [0, 2]
        for route in found:
            assert covers(route, TWO)
            assert [s.layers for s in route.segments] == [s.layers for s in TWO.routes[0].segments]
            assert devices(route) == [taker if d == dead else d for d in devices(TWO.routes[0])]


def test_two_neighbours_lost_go_to_other_holders_and_others_stay() -> None:
    here = layout(pipeline("a", 2, 4), pipeline("b", 2, 4), pipeline("c", 2, 4))
    found = {route.micro_batch: route for route in detour(here, ["a1/0", "a2/0", "b1/0"], 7)}
    assert devices(found[1]) == ["b0/0", "b0/0", "b2/0"]
    for micro_batch in (0, 3):
        assert covers(found[micro_batch], here)
        assert not found[micro_batch].touches(["a1/0", "a2/0", "b1/0"])


def test_a_whole_attempt_stays_there_too() -> None:
    (found,) = reroute(TWO, ["a1/0"], {0: (2, 3)}, 7)
    assert devices(found) == ["a0/0", "a0/0", "a2/0"]
    assert found.mask == (2, 3)


def states(*reached: int) -> dict[tuple[str, int], HopState]:
    return {
        (f"a{at}/0", at): HopState(0, 1, at, far, has_output=far >= FORWARD, has_gradient=far >= BACKWARD)
        for at, far in enumerate(reached)
    }


def splice(known: dict[tuple[str, int], HopState], missing: list[int]) -> Route:
    found = spliced(Rerouting(TWO, ["a1/0"]), TWO.routes[0], ["a1/0"], known, missing, 7)
    assert found is not None
    assert covers(found, TWO)
    assert devices(found) == ["a0/0", "a0/0", "a2/0"]
    return found


def test_a_splice_goes_on_from_the_redundant_forward() -> None:
    ran = {("a0/0", 1): HopState(0, 1, 1, FORWARD, has_output=True)}
    found = splice(states(FORWARD, NOTHING, NOTHING) | ran, [*range(LAYERS)])
    assert found.reached == (FORWARD, FORWARD, NOTHING)
    found = splice(states(WEIGHTS, NOTHING, WEIGHTS) | ran, [2, 3])
    assert found.reached == (WEIGHTS, FORWARD, WEIGHTS)
    assert found.redone == (NOTHING, BACKWARD, NOTHING)
    assert splice(states(FORWARD, NOTHING, NOTHING), [*range(LAYERS)]).reached == (FORWARD, NOTHING, NOTHING)


def test_a_pass_of_another_attempt_is_none() -> None:
    ran = {("a0/0", 1): HopState(0, 5, 1, FORWARD, has_output=True)}
    assert splice(states(FORWARD, NOTHING, NOTHING) | ran, [*range(LAYERS)]).reached[1] == NOTHING


def test_without_a_redundant_holder_a_splice_takes_any_holder() -> None:
    known = {("a0/0", 0): HopState(0, 1, 0, FORWARD, has_output=True)}
    lost = ["a1/0", "a2/0"]
    found = spliced(Rerouting(TWO, lost), TWO.routes[0], lost, known, range(LAYERS), 7)
    assert found is not None
    assert devices(found)[:2] == ["a0/0", "a0/0"]  # the first of the two has an heir
    assert set(devices(found)[2:]) <= {"b0/0", "b1/0"}
    assert covers(found, TWO)


@pytest.mark.parametrize(("limit", "wanted"), [(0, 0), (50, 50), (10**6, 2 * 40)])
def test_what_passes_ahead_hold(limit: int, wanted: int) -> None:
    """20 bytes a layer and micro-batch; on a GPU the outputs, 1000 bytes each, whatever the bound on the
    host's memory.
    """
    setup = setup_of(even_profile(LAYERS), held=HeldBesides(redundant_bytes=limit))
    assert graphs_of(TWO, setup)["a0/0"] == wanted
    gpu = replace(setup, profile=replace(setup.profile, device="NVIDIA H200"))
    assert graphs_of(TWO, gpu)["a0/0"] == (2 * 2 * 1000 if limit else 0)


def test_what_all_layers_of_a_pass_ahead_share_counts_once() -> None:
    setup = setup_of(even_profile(LAYERS), held=HeldBesides(redundant_bytes=10**6))
    with_masks = replace(setup, profile=replace(setup.profile, shared_bytes=7))
    assert graphs_of(TWO, with_masks)["a0/0"] == graphs_of(TWO, setup)["a0/0"] + 2 * 7

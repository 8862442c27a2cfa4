"""Copies of sums in a simulated cluster: when they leave and arrive, what is inherited of them, and what they
take.

Pipelines of two stages with two layers and four micro-batches each, in a step of 5 s: a micro-batch every
second. Last stages have the weight gradients of theirs at 4/3, 7/3, 10/3 and 13/3 s, first ones at 2, 3, 4
and 5 s.
"""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.planner.plan import Layers, Layout, Range, Route, Segment
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.simulator.outcome import Outcome
from oobleckd.simulator.sums import Inherited, Sums
from oobleckd.simulator.traces import TraceEvent
from oobleckd.simulator.world import simulate
from tests.unit.simulator.build import FREE, even_profile, job_of, question, trace_of

STEP_S = 5.0
STAGES = (Range(0, 2), Range(2, 4))


def layout_of(*pipelines: str) -> Layout:
    """Each a message for every device."""
    hops = [tuple(map(Segment, devices, STAGES)) for devices in pipelines]
    routes = tuple(Route(number, 1, hops[number // 4]) for number in range(4 * len(hops)))
    return Layout(1, 4, {s.device: Layers.of(s.layers) for each in hops for s in each}, routes)


def sums_of(per_step: int, *, layer_s: float = 0.0, output_s: float = 0.0) -> Sums:
    return Sums(per_step, (layer_s,) * 4, (output_s,) * 4, 0.0)


def inherited(sums: Sums, dead: str, at_s: float, layout: Layout) -> Inherited:
    survivors = layout.holdings.keys() - set(dead)
    return sums.inherited(layout, layout.routes, set(dead), survivors, at_s / STEP_S, STEP_S)


@pytest.mark.parametrize(
    ("per_step", "at_s", "micro_batches"),
    [
        (0, 4.0, []),
        (1, 2.0, []),
        (1, 3.0, [0, 1]),  # after half of the gradients
        (1, 5.0, [0, 1]),  # the last part is contributed at once
        (3, 2.0, [0]),
        (3, 3.0, [0, 1]),
        (3, 5.0, [0, 1, 2]),
        (9, 5.0, [0, 1, 2]),  # a copy after every hop is the most there can be
    ],
)
def test_what_a_peer_has(per_step: int, at_s: float, micro_batches: list[int]) -> None:
    found = inherited(sums_of(per_step), "b", at_s, layout_of("ab", "cd"))
    assert found == ({"d": {2: micro_batches, 3: micro_batches}} if micro_batches else {})


def test_a_copy_counts_once_it_is_there() -> None:
    sums, layout = sums_of(1, layer_s=0.5), layout_of("ab", "cd")
    assert inherited(sums, "b", 7 / 3 + 0.9, layout) == {}
    assert inherited(sums, "b", 7 / 3 + 1.1, layout) == {"d": {2: [0, 1], 3: [0, 1]}}


def test_the_next_leaves_when_the_one_before_has_arrived() -> None:
    """The first is on the link from 4/3 to 17/6 s, so none leaves at 7/3; that of 10/3 is there at 29/6."""
    sums, layout = sums_of(3, layer_s=0.75), layout_of("ab", "cd")
    assert inherited(sums, "b", 4.5, layout) == {"d": {2: [0], 3: [0]}}
    assert inherited(sums, "b", 4.9, layout) == {"d": {2: [0, 1, 2], 3: [0, 1, 2]}}


def test_what_a_dead_keeper_had_is_lost_and_its_own_is_not() -> None:
    """Holders of the last layers are b, d and f; d keeps what b had, f what d had."""
    found = inherited(sums_of(1), "bd", 3.0, layout_of("ab", "cd", "ef"))
    assert found == {"f": {2: [4, 5], 3: [4, 5]}}
    assert inherited(sums_of(1), "f", 3.0, layout_of("ab", "cd", "ef")) == {"b": {2: [8, 9], 3: [8, 9]}}


def test_layers_that_only_the_dead_held_have_no_keeper() -> None:
    assert inherited(sums_of(3), "b", 5.0, layout_of("ab")) == {}


def test_copies_make_a_step_longer_where_they_share_a_link() -> None:
    """A device sends four boundary tensors of 0.1 s; its copy is under way for 1 s, and meets them in 8 % of
    that.
    """
    layout = layout_of("ab", "cd")
    copying = sums_of(1, layer_s=0.5, output_s=0.1)
    assert copying.longer_s(layout, 1, lambda: layout.routes, STEP_S) == pytest.approx(0.08)
    assert sums_of(0, layer_s=0.5, output_s=0.1).longer_s(layout, 1, lambda: layout.routes, STEP_S) == 0.0


def test_what_is_still_under_way_holds_up_the_end_of_the_step() -> None:
    """First stages send theirs at 3 s, which takes 4 s."""
    layout = layout_of("ab", "cd")
    copying = sums_of(1, layer_s=2.0)
    assert copying.longer_s(layout, 1, lambda: layout.routes, STEP_S) == pytest.approx(2.0)


def test_it_is_worked_out_once_for_an_epoch() -> None:
    layout, asked = layout_of("ab", "cd"), []

    def standing() -> tuple[Route, ...]:
        asked.append(1)
        return layout.routes

    copying = sums_of(1, layer_s=2.0)
    for epoch in (1, 1, 2):
        copying.longer_s(layout, epoch, standing, STEP_S)
    assert len(asked) == 2


# ---------------------------------------------------------------------- whole runs

LOSS = TraceEvent(10.0, "fail", "node-2")


def run(policy: str, sum_copies: int, link_bytes_per_s: float = 1e30, num_micro_batches: int = 4) -> Outcome:
    job = job_of(num_micro_batches, schedule=Schedule(sum_copies=sum_copies))
    profile = even_profile(link_bytes_per_s=link_bytes_per_s)
    found = simulate(question(policy, trace_of(4, LOSS), job=job, profile=profile))
    booked = found.useful_device_s + sum(found.lost_device_s.values())
    assert booked == pytest.approx(found.live_device_s, abs=1e-9)
    return found


@pytest.mark.parametrize("policy", ["oobleck", "slipstream"])
def test_one_loss(policy: str) -> None:
    """As ``test_world.test_one_loss``, but that the other holder has the first micro-batch of the dead in its
    sums. What is left of the second is its way through both stages: 60 ms there and 40 ms for the backward of
    the first.
    """
    found = run(policy, 1)
    assert min(point.at_s for point in found.points if point.at_s > 10.0) == pytest.approx(10.0 + 0.1)
    assert found.rollbacks == 0


def test_more_copies_lose_less() -> None:
    """Eight micro-batches a pipeline: the other holder has to do all, four, or one of those that the dead had
    done.
    """
    runs = [run("slipstream", copies, num_micro_batches=16) for copies in (0, 1, 7)]
    mended = [min(point.at_s for point in found.points if point.at_s > 10.0) for found in runs]
    assert mended[0] > mended[1] > mended[2]


def test_traffic_is_charged() -> None:
    """A copy of two layers, 120 bytes, takes 0.1 s; steps get longer by what boundaries and the end of the
    step wait for it.
    """
    without, copying = (run("oobleck", copies, link_bytes_per_s=1200.0) for copies in (0, 3))
    assert copying.steps < without.steps
    assert copying.lost_device_s["degraded"] > without.lost_device_s["degraded"]


def test_an_engine_that_keeps_nothing_copies_nothing() -> None:
    costs = msgspec.structs.replace(FREE, keeps="nothing")
    profile = even_profile(link_bytes_per_s=1200.0)
    jobs = [job_of(schedule=Schedule(sum_copies=copies)) for copies in (0, 3)]
    runs = [
        simulate(question("oobleck", trace_of(4, LOSS), job=j, costs=costs, profile=profile)) for j in jobs
    ]
    assert runs[0] == runs[1]

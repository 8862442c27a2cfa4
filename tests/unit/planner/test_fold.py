"""Templates of decoupled jobs: the form that is faster, even chunks, memory kept, times as they run."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.placement.transfer import places, segments_on
from oobleckd.planner.plan import Layers, Range, Template, node_of
from oobleckd.planner.policies import adapt, prepare
from oobleckd.planner.policy import Setup, Situation
from oobleckd.planner.reroute.reroute import covers, layout_of
from oobleckd.planner.schedule import parse_ops
from oobleckd.planner.schedules.decoupled import EFFORT_AT_ONCE, best_orders, pipe_of
from oobleckd.planner.schedules.orders import run
from oobleckd.planner.schedules.timeline import dry_run_plan
from oobleckd.planner.schedules.validator import validate
from tests.unit.planner.build import even_profile, profile_of, profiles, setup_of


def decoupled_setup(num_layers: int = 8, **changes) -> Setup:
    return setup_of(
        even_profile(num_layers), decoupled=True, **{"f": 1, "max_nodes": 8, "min_nodes": 2} | changes
    )


def run_s(setup: Setup, template: Template, num: int) -> float:
    stages = [stage.layers for stage in template.stages]
    pipe = pipe_of(stages, template.chunks, setup.profile, setup.device_memory_bytes)
    return run(pipe, best_orders(pipe, num, EFFORT_AT_ONCE)).makespan_s


def test_two_chunks_where_they_are_faster():
    setup = decoupled_setup()
    plain, auto = (prepare("oobleck", decoupled_setup(chunks=chunks)) for chunks in (1, 0))
    assert [template.chunks for template in plain] == [1] * len(plain)
    assert [template.num_nodes for template in plain] == [template.num_nodes for template in auto]
    assert auto[0].chunks == 2
    for one, other in zip(plain, auto, strict=True):
        share = {2: 2, 3: 4}.get(one.num_nodes, 4)
        assert other.time_s(share) <= one.time_s(share) * (1 + 1e-9)
        assert other.chunks == 1 or run_s(setup, other, share) < run_s(setup, one, share)


def test_a_backward_as_a_whole_has_one_chunk_and_the_times_of_1f1b():
    fused = setup_of(even_profile(8), max_nodes=4, chunks=2)
    assert {template.chunks for template in prepare("oobleck", fused)} == {1}


def test_too_few_layers_and_a_single_device_have_one_chunk():
    made = prepare("oobleck", decoupled_setup(num_layers=5, chunks=2, min_nodes=1))
    assert {template.num_nodes: template.chunks for template in made} == {
        template.num_nodes: 2 if template.num_nodes == 2 else 1 for template in made
    }


def test_what_stands_where():
    made = {template.num_nodes: template for template in prepare("oobleck", decoupled_setup(chunks=2))}
    two = made[2]
    assert [stage.layers for stage in two.stages] == [Range(0, 2), Range(2, 4), Range(4, 6), Range(6, 8)]
    outer, inner = Layers.of(Range(0, 2), Range(6, 8)), Layers.of(Range(2, 4), Range(4, 6))
    assert places(two) == ((outer,), (inner,))
    assert [segment.device for segment in segments_on(two, ["a", "b"])] == ["a/0", "b/0", "b/0", "a/0"]
    # State of four layers, and in flight 4 and 1, or 3 and 2, micro-batches of two layers each.
    assert [stage.memory_bytes for stage in two.stages] == [4 * 180 + 5 * 40] * 4


def test_uneven_layers_are_even_by_device():
    rows = [(1e-3, 2e-3, 10, 20, 1000)] * 9 + [(4e-3, 8e-3, 10, 20, 1000)]
    setup = setup_of(profile_of(rows), decoupled=True, chunks=2, max_nodes=3, min_nodes=2)
    for template in prepare("oobleck", setup):
        if template.chunks == 2:
            times = [stage.time_s for stage in template.stages]
            sums = [one + other for one, other in zip(times, reversed(times), strict=True)]
            assert max(sums) <= 1.25 * 39e-3 / template.num_nodes


def test_memory_decides():
    """With room for the state and 1F1B's activations, but for no chunk more, there is one chunk a device."""
    for limit, chunks in ((4 * 180 + 5 * 40, 2), (4 * 180 + 5 * 40 - 1, 1)):
        made = prepare("oobleck", decoupled_setup(chunks=2, device_memory_bytes=limit))
        assert made[0].num_nodes == 2
        assert made[0].chunks == chunks


@settings(max_examples=40, deadline=None)
@given(profiles(max_layers=9), st.integers(1, 12), st.sampled_from([0, 2]), st.sampled_from([0, 1500, 4000]))
def test_templates_are_whole_fit_and_take_what_they_say(profile, num, chunks, limit):
    setup = setup_of(
        profile, num_micro_batches=num, decoupled=True, chunks=chunks, device_memory_bytes=limit, f=0
    )
    try:
        made = prepare("oobleck", setup)
    except ValueError:
        return
    for template in made:
        ranges = [stage.layers for stage in template.stages]
        assert [held.stop for held in ranges[:-1]] == [held.start for held in ranges[1:]]
        assert (ranges[0].start, ranges[-1].stop) == (0, len(profile.layers))
        held = Counter(layer for place in places(template) for each in place for layer in each.layers())
        assert held == Counter(range(len(profile.layers)))
        assert template.period_s > 0
        assert template.time_s(num + 1) > template.time_s(num)
        if limit:
            assert max(stage.memory_bytes for stage in template.stages) <= limit


@pytest.mark.parametrize("policy", ["oobleck", "slipstream"])
@pytest.mark.parametrize("devices", [1, 2])
def test_plans_of_two_chunks_run_and_a_loss_is_planned(policy: str, devices: int):
    setup = decoupled_setup(
        num_layers=16, num_micro_batches=24, devices_per_node=devices, chunks=2, max_nodes=7
    )
    made = prepare(policy, setup)
    nodes = tuple("abcdefg")
    found = adapt(policy, setup, made, Situation(nodes, {}))
    assert {pipeline.chunks for pipeline in found.plan.pipelines} == {2}
    ops = {device: parse_ops(text) for device, text in found.ops.items()}
    timed = dry_run_plan(found.plan, setup.profile, ops)
    for pipeline in found.plan.pipelines:
        pipe = pipe_of([segment.layers for segment in pipeline.segments], 2, setup.profile, 0)
        validate([ops[device] for device in pipeline.devices], pipeline.micro_batches, pipe.works, 2)
        for number, device in enumerate(pipeline.devices):
            assert pipe.fits(number, timed.peak_bytes[device])
    assert timed.makespan_s == pytest.approx(found.plan.step_s, rel=0.1)
    held = {device: layers for device, layers in found.plan.holdings().items() if node_of(device) != "b"}
    running = tuple(pipeline.nodes for pipeline in found.plan.pipelines)
    after = adapt(policy, setup, made, Situation(tuple("acdefg"), held, running))
    layout = layout_of(after.plan, 2, 16)
    assert all(covers(route, layout) for route in layout.routes)
    assert not any(route.touches([f"b/{index}" for index in range(devices)]) for route in layout.routes)
    coming = {(copy.target, copy.layer) for copy in after.transfers}
    for device, layers in after.plan.holdings().items():
        had = held.get(device, Layers())
        assert {layer for layer in layers.layers() if layer not in had} == {
            layer for target, layer in coming if target == device
        }
    if policy == "slipstream":
        assert after.plan.vacant == tuple(f"b/{index}" for index in range(devices))
        assert after.transfers == ()

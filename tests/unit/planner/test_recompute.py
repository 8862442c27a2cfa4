"""Blocks that are computed again in the backward: what they cost, and which stages do it, against everything
there is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from oobleckd.planner.costs.recompute import MODES, modes_for, recomputed
from oobleckd.planner.plan import Layout, Recompute, RecomputeWanted, Template
from oobleckd.planner.policies import policy, prepare
from oobleckd.planner.policy import PlanError, Setup, Situation
from oobleckd.planner.profile import LayerCost, Profile
from oobleckd.planner.reroute.reroute import Rerouting, layout_of
from oobleckd.planner.schedules.routed import device_s
from oobleckd.planner.schedules.timeline import dry_run_plan
from oobleckd.planner.templates.redundant import Room
from oobleckd.planner.templates.template import expected_share, templates, templates_for
from tests.unit.planner.build import even_profile, profiles, setup_of

EVEN = replace(
    even_profile(6, activation_bytes=100),
    layers=tuple(
        LayerCost(f"layer{n}", 1e-3, 2e-3, 40, 180, 100, 10, selective_bytes=60, selective_s=2e-4)
        for n in range(6)
    ),
)
"""Equal layers of 180 bytes of state; a block holds 100 bytes, or 60 for 0.2 ms, or 10 for 1 ms."""
SMALL_ENDS = replace(
    EVEN,
    layers=tuple(
        replace(layer, activation_bytes=100 if 0 < n < 5 else 10, weight_s=8e-4, kept_bytes=10)
        for n, layer in enumerate(EVEN.layers)
    ),
)
"""The same with an embedding and a head that hold 10, and 10 for weight gradients."""


def with_selective(profile: Profile, draw: st.DrawFn) -> Profile:
    """``profile`` with selective costs in all its blocks, below those of whole ones."""
    blocks = [
        replace(
            layer,
            selective_bytes=draw(st.integers(1, max(1, layer.activation_bytes))),
            selective_s=layer.forward_s * draw(st.sampled_from([0.1, 0.25, 0.5])),
        )
        for layer in profile.layers[1:-1]
    ]
    return replace(profile, layers=(profile.layers[0], *blocks, *profile.layers[1:][-1:]))


@st.composite
def setups(draw: st.DrawFn, wanted: Sequence[RecomputeWanted] = ("auto",)) -> Setup:
    profile = draw(profiles(max_layers=5))
    if draw(st.booleans()):
        profile = with_selective(profile, draw)
    return setup_of(
        profile,
        num_micro_batches=draw(st.integers(1, 6)),
        f=draw(st.integers(0, 2)),
        device_memory_bytes=draw(st.sampled_from([0, 300, 400, 600, 900, 1600])),
        devices_per_node=draw(st.integers(1, 2)),
        recompute=draw(st.sampled_from(wanted)),
    )


def splits(num_layers: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    for inner in itertools.combinations(range(1, num_layers), stages - 1):
        yield list(itertools.pairwise((0, *inner, num_layers)))


def extra_s(profile: Profile, layer: int, mode: Recompute) -> float:
    cost = profile.layers[layer]
    if mode == "none" or layer in {0, len(profile.layers) - 1}:
        return 0.0
    return cost.forward_s if mode == "blocks" or not cost.selective_bytes else cost.selective_s


def held_bytes(profile: Profile, layer: int, mode: Recompute) -> int:
    cost = profile.layers[layer]
    if mode == "none" or layer in {0, len(profile.layers) - 1}:
        return cost.activation_bytes
    if mode == "blocks":
        return profile.layers[layer - 1].output_bytes
    return cost.selective_bytes or cost.activation_bytes


def memory_bytes(profile: Profile, layers: range, mode: Recompute, flying: int) -> int:
    """A device of one stage, counted layer by layer."""
    costs = profile.layers
    held = sum(held_bytes(profile, layer, mode) for layer in layers)
    once = [max(0, costs[layer].activation_bytes - held_bytes(profile, layer, mode)) for layer in layers]
    state = sum(costs[layer].state_bytes for layer in layers)
    return profile.reserve_bytes + state + flying * (profile.shared_bytes + held) + max(once)


def time_s(profile: Profile, split: list[tuple[int, int]], modes: Sequence[Recompute], share: int) -> float:
    """The linear model's, counted layer by layer."""
    cut_s = [
        profile.link_latency_s + layer.output_bytes / profile.link_bytes_per_s
        for layer in profile.layers[:-1]
    ]
    periods, total_s = [], 0.0
    for (start, stop), mode in zip(split, modes, strict=True):
        took_s = sum(
            profile.layers[n].forward_s + profile.layers[n].backward_s + extra_s(profile, n, mode)
            for n in range(start, stop)
        )
        into = cut_s[start - 1] if start else 0.0
        out = cut_s[stop - 1] if stop < len(profile.layers) else 0.0
        total_s += took_s + 2 * into
        periods.append(took_s + into + out)
    return total_s + (share - 1) * max(periods)


@settings(max_examples=150, deadline=None)
@given(setups())
def test_auto_is_the_fastest_of_all_splits_and_modes(setup: Setup) -> None:
    profile, num_layers = setup.profile, len(setup.profile.layers)
    allowed, limit = modes_for(profile, "auto"), setup.device_memory_bytes or inf

    def best_s(nodes: int) -> float:
        stages, share = min(nodes * setup.devices_per_node, num_layers), expected_share(setup, nodes)
        found = inf
        for split in splits(num_layers, stages):
            fitting = [
                [
                    mode
                    for mode in allowed
                    if memory_bytes(
                        profile, range(*layers), mode, min(stages - place, setup.num_micro_batches)
                    )
                    <= limit
                ]
                for place, layers in enumerate(split)
            ]
            found = min(
                [found, *(time_s(profile, split, modes, share) for modes in itertools.product(*fitting))]
            )
        return found

    best = {nodes: best_s(nodes) for nodes in range(1, num_layers + 1)}
    fitting = [nodes for nodes in best if best[nodes] < inf]
    if not fitting:
        with pytest.raises(PlanError, match="fits no number of nodes"):
            templates(setup)
        return
    made = templates(setup)
    assert [t.num_nodes for t in made] == list(range(fitting[0], fitting[0] + len(made)))
    for template in made:
        share = expected_share(setup, template.num_nodes)
        split = [(stage.layers.start, stage.layers.stop) for stage in template.stages]
        modes = [stage.recompute for stage in template.stages]
        assert template.time_s(share) == pytest.approx(best[template.num_nodes])
        assert template.time_s(share) == pytest.approx(time_s(profile, split, modes, share))
        check_memory(setup, template)


def check_memory(setup: Setup, template: Template) -> None:
    """It is what is counted, within the limit, and no faster mode would fit."""
    limit = setup.device_memory_bytes or inf
    for place, stage in enumerate(template.stages):
        flying = min(len(template.stages) - place, setup.num_micro_batches)
        needs = {
            mode: memory_bytes(setup.profile, range(stage.layers.start, stage.layers.stop), mode, flying)
            for mode in MODES
        }
        assert stage.memory_bytes == needs[stage.recompute] <= limit
        if setup.recompute == "auto":
            allowed = modes_for(setup.profile, "auto")
            faster = allowed[: allowed.index(stage.recompute)]
            assert all(needs[mode] > limit for mode in faster)


@settings(max_examples=100, deadline=None)
@given(setups(wanted=("none", "auto", "blocks", "selective")))
def test_moved_to_where_1f1b_is_shortest_they_fit_as_well(setup: Setup) -> None:
    try:
        made = prepare("oobleck", setup)
    except PlanError:
        return
    for template in made:
        check_memory(setup, template)
        if setup.recompute != "auto":
            assert {stage.recompute for stage in template.stages} == {setup.recompute}


@settings(max_examples=50, deadline=None)
@given(setups(), st.booleans())
def test_where_everything_fits_auto_plans_what_none_does(setup: Setup, decoupled: bool) -> None:
    setup = replace(setup, device_memory_bytes=0, decoupled=decoupled)
    assert prepare("oobleck", setup) == prepare("oobleck", replace(setup, recompute="none"))


@pytest.mark.parametrize(
    ("limit", "modes"),
    [
        # The first stage, of two layers and with three in flight, needs 360 + 3 * 200 bytes; selective
        # 360 + 3 * 160 and 40 at a time; with the block computed again 360 + 3 * 110 and 90 at a time.
        (960, ["none", "none", "none"]),
        (880, ["selective", "none", "none"]),
        (879, ["blocks", "none", "none"]),
        (780, ["blocks", "none", "none"]),
    ],
)
def test_a_stage_computes_again_as_little_as_its_memory_allows(limit: int, modes: list[Recompute]) -> None:
    setup = setup_of(EVEN, f=0, min_nodes=3, max_nodes=3, device_memory_bytes=limit, recompute="auto")
    (template,) = templates(setup)
    assert [stage.recompute for stage in template.stages] == modes
    assert list(template.recompute) == modes


def test_n0_is_smaller_where_blocks_are_computed_again() -> None:
    tight = setup_of(EVEN, num_micro_batches=6, device_memory_bytes=700)
    sizes = {
        wanted: templates(replace(tight, recompute=wanted))[0].num_nodes
        for wanted in ("none", "selective", "blocks", "auto")
    }
    assert sizes == {"none": 5, "selective": 4, "blocks": 3, "auto": 3}


def test_selective_costs_that_nobody_measured_are_not_chosen() -> None:
    assert modes_for(EVEN, "auto") == MODES
    unknown = replace(EVEN, layers=tuple(replace(layer, selective_bytes=0) for layer in EVEN.layers))
    assert modes_for(unknown, "auto") == ("none", "blocks")
    dear = replace(EVEN, layers=tuple(replace(layer, selective_s=1e-3) for layer in EVEN.layers))
    assert modes_for(dear, "auto") == ("none", "blocks")
    asked = recomputed(unknown, "selective").profile.layers[1]
    assert (asked.activation_bytes, asked.backward_s) == (100, 3e-3)  # no less, and as long as all of it


def test_with_a_decoupled_backward_what_weight_gradients_need_is_held() -> None:
    fused, apart = recomputed(EVEN, "blocks"), recomputed(EVEN, "blocks", apart=True)
    assert [layer.activation_bytes for layer in fused.profile.layers] == [100, 10, 10, 10, 10, 100]
    assert [layer.activation_bytes for layer in apart.profile.layers] == [100, 77, 77, 77, 77, 100]
    assert fused.once_bytes(range(1, 3)) == apart.once_bytes(range(1, 3)) == 90
    assert fused.once_bytes([0]) == fused.once_bytes([]) == 0
    for layer in apart.profile.layers[1:-1]:  # computing again belongs to I
        assert layer.backward_s == pytest.approx(3e-3)
        assert layer.weight_s == pytest.approx(0.4 * 2e-3)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_plans_say_what_each_device_computes_again_and_keep_within_memory(
    decoupled: bool, chunks: int
) -> None:
    profile = SMALL_ENDS
    free = setup_of(profile, f=1, min_nodes=3, max_nodes=6, decoupled=decoupled, chunks=chunks, nodes_now=6)
    with pytest.raises(PlanError) as caught:
        prepare("oobleck", replace(free, device_memory_bytes=1))
    limit = int(re.findall(r"at least ([\d,]+) bytes", caught.value.memory)[0].replace(",", "")) - 1
    setup = replace(free, device_memory_bytes=limit, recompute="auto")
    made = prepare("oobleck", setup)
    situation = Situation(tuple(f"n{n}" for n in range(6)), {})
    plan = policy("oobleck").adapt(setup, made, situation).plan
    template = next(each for each in made if each.num_nodes == len(plan.pipelines[0].nodes))
    assert set(template.recompute) != {"none"}
    for pipeline in plan.pipelines:
        modes = dict(zip(pipeline.devices, template.recompute, strict=True))
        assert {device: plan.recompute.get(device, "none") for device in pipeline.devices} == modes
        assert plan.modes_of(pipeline) == tuple(modes[segment.device] for segment in pipeline.segments)
    layout = layout_of(plan, 7, 6)
    assert layout.recompute == plan.recompute
    if not decoupled:
        peaks = dry_run_plan(plan, profile).peak_bytes
        assert all(peak <= limit for peak in peaks.values())


def pipelines_in(modes: Sequence[Recompute]) -> Layout:
    """Two pipelines of three devices; those of the first compute again what ``modes`` say."""
    setup = setup_of(EVEN, min_nodes=3, max_nodes=6)
    plan = (
        policy("oobleck")
        .adapt(setup, prepare("oobleck", setup), Situation(tuple(f"n{n}" for n in range(6)), {}))
        .plan
    )
    devices = zip(plan.pipelines[0].devices, modes, strict=True)
    again = {device: mode for device, mode in devices if mode != "none"}
    return layout_of(replace(plan, recompute=again), 1, 6)


def test_who_computes_again_has_more_to_do() -> None:
    layout = pipelines_in(["blocks", "selective", "none"])
    plain = device_s(layout.routes, EVEN)
    busy = device_s(layout.routes, EVEN, layout.recompute)
    more = {device: busy[device] - plain[device] for device in busy}
    per_device = len(layout.routes) // 2
    first, second = layout.recompute
    # The first device has the embedding and a block, the second two blocks.
    assert more[first] == pytest.approx(per_device * 1e-3)
    assert more[second] == pytest.approx(per_device * 2 * 2e-4)
    assert sum(more.values()) == pytest.approx(more[first] + more[second])


def test_routes_count_passes_that_are_done_again() -> None:
    layout = pipelines_in(["blocks", "blocks", "none"])
    load = Rerouting(layout, []).load
    per_device = len(layout.routes) // 2
    first, second = layout.recompute
    assert load[first] == per_device * (6 + 1)
    assert load[second] == per_device * (6 + 2)
    others = [passes for device, passes in load.items() if device not in layout.recompute]
    assert others == [per_device * 6] * 4


def test_a_repair_goes_where_least_is_done_again() -> None:
    # The middle stage of the first pipeline is lost; without recomputation its name would decide.
    whole = pipelines_in(["none", "none", "none"])
    lost = whole.routes[0].segments[1].device
    peers = [route.segments[1].device for route in whole.routes if route.segments[1].device != lost]
    assert set(peers) == {peers[0]}
    again = replace(whole, recompute={peers[0]: "blocks"})
    rerouting = Rerouting(again, [lost])
    before = rerouting.load[peers[0]]
    rerouting.whole(whole.routes[0].micro_batch, range(6), 2)
    assert rerouting.load[peers[0]] - before == 3 * 2 + 2


@settings(max_examples=40, deadline=None)
@given(setups())
def test_redundant_devices_of_auto_fit_wherever_some_modes_do(setup: Setup) -> None:
    setup = replace(setup, device_memory_bytes=setup.device_memory_bytes or 900)
    profile, num_layers = setup.profile, len(setup.profile.layers)
    room, allowed = Room(setup), modes_for(profile, "auto")
    largest = {
        mode: max(
            max(0, profile.layers[n].activation_bytes - held_bytes(profile, n, mode))
            for n in range(num_layers)
        )
        for mode in allowed
    }

    def needed(split: list[tuple[int, int]], place: int, mode: Recompute) -> int:
        own, count = range(*split[place]), len(split)
        total = memory_bytes(profile, own, mode, min(count - place, setup.num_micro_batches))
        once = [max(0, profile.layers[n].activation_bytes - held_bytes(profile, n, mode)) for n in own]
        total += largest[mode] - max(once)
        if count > 1:
            behind = (place + 1) % count
            theirs = range(*split[behind])
            held = profile.shared_bytes + sum(held_bytes(profile, n, mode) for n in theirs)
            total += sum(profile.layers[n].state_bytes for n in theirs)
            total += setup.num_micro_batches * held  # all that is run ahead, without a bound
        return total

    for count in range(1, num_layers + 1):
        fits = [
            split
            for split in splits(num_layers, count)
            if all(
                any(needed(split, place, mode) <= setup.device_memory_bytes for mode in allowed)
                for place in range(count)
            )
        ]
        assert room.fits(count) == bool(fits)
        if fits:
            found = room.split(count)
            assert [(stage.start, stage.stop) for stage in found] in fits
            assert max(room.needed(found)) <= setup.device_memory_bytes


def hint_of(policy_name: str, profile: Profile, limit: int, **changes: Any) -> str:
    setup = setup_of(profile, num_micro_batches=3, device_memory_bytes=limit, **changes)
    with pytest.raises(PlanError) as caught:
        prepare(policy_name, setup)
    return caught.value.hint


def test_errors_of_models_that_are_too_large_say_what_recomputation_would_do() -> None:
    auto = 'set schedule.recompute = "auto"'
    # A block alone, with three in flight, needs 480 bytes, or 300. In five stages the last has the head, too.
    said = hint_of("oobleck", SMALL_ENDS, 479)
    assert said.startswith(f"{auto} (5 nodes are enough then, with 470 bytes of a device), raise ")
    assert "480 bytes, or lower" in said
    assert "480 bytes (300 bytes with schedule.recompute" in hint_of("oobleck", SMALL_ENDS, 299)
    assert "recompute" not in hint_of("oobleck", SMALL_ENDS, 299, recompute="auto")
    assert "recompute" not in hint_of("oobleck", EVEN, 479)  # the embedding is as large
    assert hint_of("bamboo", EVEN, 800).startswith(f"{auto} (5 nodes are enough then), raise")
    assert "recompute" not in hint_of("bamboo", EVEN, 700)
    with pytest.raises(PlanError) as caught:
        templates_for(setup_of(EVEN, num_micro_batches=3, device_memory_bytes=839), [(3, 3)])
    assert caught.value.hint.startswith(f"{auto} (it needs 690 bytes of a device), raise")


def test_too_few_nodes_hear_how_many_would_be_enough() -> None:
    setup = setup_of(EVEN, num_micro_batches=6, device_memory_bytes=700)
    for name in ("oobleck", "varuna", "adaptive"):
        with pytest.raises(PlanError, match="4 usable nodes, and the model needs 5") as caught:
            policy(name).adapt(setup, prepare(name, setup), Situation(("a", "b", "c", "d"), {}))
        assert caught.value.hint.endswith('or set schedule.recompute = "auto" (3 are enough then)')

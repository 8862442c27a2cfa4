"""Templates with room for redundant layers: exactly what is counted, and that a split is found where there is
one.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from oobleckd.planner.plan import Layers, Range
from oobleckd.planner.policies import policy, prepare
from oobleckd.planner.policy import PlanError, Setup
from oobleckd.planner.profile import HeldBesides
from oobleckd.planner.templates.redundant import Room, redundant_templates
from oobleckd.planner.templates.template import expected_share
from tests.unit.planner.build import even_profile, profiles, setup_of


def needed(setup: Setup, stages: list[Range]) -> list[float]:
    """What each device needs, counted layer by layer."""
    profile, count = setup.profile, len(stages)
    found = []
    for place, stage in enumerate(stages):
        own = [profile.layers[layer] for layer in stage.layers()]
        flying = min(count - place, setup.num_micro_batches)
        total = profile.reserve_bytes + setup.held.device_bytes
        total += (1 + setup.held.state_copies) * sum(layer.state_bytes for layer in own)
        total += flying * (profile.shared_bytes + sum(layer.activation_bytes for layer in own))
        if count > 1:
            behind = (place + 1) % count
            theirs = [profile.layers[layer] for layer in stages[behind].layers()]
            activations = profile.shared_bytes + sum(layer.activation_bytes for layer in theirs)
            total += setup.held.device_bytes
            total += (1 + setup.held.state_copies) * sum(layer.state_bytes for layer in theirs)
            ahead = min(setup.held.redundant_bytes, setup.num_micro_batches * activations)
            total += max(ahead, min(count - behind, setup.num_micro_batches) * activations)
        found.append(total)
    return found


def splits(num_layers: int, count: int) -> list[list[Range]]:
    return [
        [Range(*pair) for pair in pairwise((0, *cuts, num_layers))]
        for cuts in combinations(range(1, num_layers), count - 1)
    ]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    held = HeldBesides(
        draw(st.sampled_from([0.0, 0.5])),
        draw(st.sampled_from([0, 30])),
        draw(st.sampled_from([0, 100, 10**6])),
    )
    return setup_of(
        draw(profiles(max_layers=6)),
        num_micro_batches=draw(st.integers(1, 6)),
        held=held,
        f=draw(st.integers(0, 1)),
        devices_per_node=draw(st.sampled_from([1, 1, 2])),
        device_memory_bytes=draw(st.integers(200, 4000)),
    )


@settings(max_examples=200, deadline=None)
@given(setups())
def test_a_split_is_found_wherever_one_fits(setup: Setup) -> None:
    room, num_layers = Room(setup), len(setup.profile.layers)
    for count in range(1, num_layers + 1):
        fits = [s for s in splits(num_layers, count) if max(needed(setup, s)) <= setup.device_memory_bytes]
        assert room.fits(count) == bool(fits)
        if fits:
            found = room.split(count)
            assert found in fits
            assert room.needed(found) == pytest.approx(needed(setup, found))


@settings(max_examples=100, deadline=None)
@given(setups(), st.booleans())
def test_templates_fit_and_say_what_they_need(setup: Setup, decoupled: bool) -> None:
    setup = replace(setup, decoupled=decoupled)
    room, counts = Room(setup), range(1, len(setup.profile.layers) + 1)
    if not any(room.fits(room.num_stages(count)) for count in counts):
        with pytest.raises(PlanError) as caught:
            redundant_templates(setup)
        assert "schedule.redundant_memory" in caught.value.hint
        return
    made = redundant_templates(setup)
    assert [t.num_nodes for t in made] == [*range(made[0].num_nodes, made[-1].num_nodes + 1)]
    for template in made:
        stages = [stage.layers for stage in template.stages]
        assert template.chunks == 1
        assert template.redundant == (len(stages) > 1)
        assert [s.memory_bytes for s in template.stages] == pytest.approx(needed(setup, stages), abs=1)
        assert max(s.memory_bytes for s in template.stages) <= setup.device_memory_bytes
        assert template.time_s(expected_share(setup, template.num_nodes)) > 0
        assert 0 <= template.gap < 1


def test_each_device_holds_its_successor_s_stage_and_the_last_one_the_first_s() -> None:
    (template, *_) = prepare("bamboo", setup_of(even_profile(6), min_nodes=3, max_nodes=6))
    parts = [Layers.of(Range(start, start + 2)) for start in (0, 2, 4)]
    assert list(template.held) == parts
    assert list(template.redundant_layers) == [parts[1], parts[2], parts[0]]


def test_a_pipeline_of_one_stage_holds_nothing_redundant() -> None:
    (template, *_) = prepare("bamboo", setup_of(even_profile(6), max_nodes=2))
    assert not template.redundant
    assert template.redundant_layers == (Layers(),)
    assert replace(template, redundant=False) == template


def test_redundant_layers_count_in_n0() -> None:
    """180 bytes of state and 20 of activations a layer; two stages of four hold all eight layers each."""
    limit = 4 * 180 + 4 * 2 * 20
    plain = setup_of(even_profile(8), device_memory_bytes=limit)
    assert prepare("oobleck", plain)[0].num_nodes == 2
    assert prepare("bamboo", plain)[0].num_nodes > 2


def test_the_error_says_how_much_would_be_enough() -> None:
    setup = setup_of(even_profile(4), device_memory_bytes=300, held=HeldBesides(redundant_bytes=10**6))
    with pytest.raises(PlanError, match="successor's layers too the model fits no number of nodes") as caught:
        prepare("bamboo", setup)
    least = int(caught.value.hint.split(" bytes")[0].rsplit(" ", 1)[1].replace(",", ""))
    assert prepare("bamboo", replace(setup, device_memory_bytes=least))
    with pytest.raises(PlanError):
        prepare("bamboo", replace(setup, device_memory_bytes=least - 1))
    with pytest.raises(PlanError, match="no pipeline of 9 nodes or more"):
        prepare("bamboo", setup_of(even_profile(4), min_nodes=9))


def test_it_is_registered() -> None:
    assert policy("bamboo").reroutes

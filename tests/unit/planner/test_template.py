"""Templates: optimal and feasible against brute force and the reference; errors that help."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.brute import SplitCase, best_split_s
from oobleckd.planner.costs.model import copy_bytes, device_counts, stage_costs
from oobleckd.planner.plan import Range
from oobleckd.planner.policy import PlanError
from oobleckd.planner.profile import HeldBesides, LayerCost, Profile
from oobleckd.planner.templates import split as split_module
from oobleckd.planner.templates.refine import refined
from oobleckd.planner.templates.suffix import Menu, exact_split
from oobleckd.planner.templates.template import expected_share, node_stages, templates, templates_for
from tests.unit.planner.build import REFERENCE, even_profile, profile_of, profiles, setup_of

LINK = {"link_latency_s": 0.02e-3, "link_bytes_per_s": 25e9}


def split_time_s(profile: Profile, bounds: tuple[int, ...], m: int) -> float:
    """T(m) of PipeDream-flush written out term by term."""
    cuts = [
        profile.link_latency_s + layer.output_bytes / profile.link_bytes_per_s for layer in profile.layers
    ]
    times, periods = [], []
    for i, j in itertools.pairwise(bounds):
        time_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers[i:j])
        times.append(time_s)
        into, out = cuts[i - 1] if i else 0, cuts[j - 1] if j < len(cuts) else 0
        periods.append(time_s + into + out)
    return sum(times) + 2 * sum(cuts[i - 1] for i in bounds[1:-1]) + (m - 1) * max(periods)


def split_memory_bytes(profile: Profile, bounds: tuple[int, ...], num_micro_batches: int) -> list[int]:
    stages = list(itertools.pairwise(bounds))
    return [
        sum(x.state_bytes for x in profile.layers[i:j])
        + min(len(stages) - s, num_micro_batches)
        * (profile.shared_bytes + sum(x.activation_bytes for x in profile.layers[i:j]))
        + profile.reserve_bytes
        for s, (i, j) in enumerate(stages)
    ]


def all_splits(num_layers: int, stages: int):
    for inner in itertools.combinations(range(1, num_layers), stages - 1):
        yield (0, *inner, num_layers)


@settings(max_examples=150, deadline=None)
@given(
    profiles(), st.integers(1, 6), st.integers(0, 2), st.sampled_from([0, 400, 800, 1600]), st.integers(1, 2)
)
def test_against_every_split(profile: Profile, m: int, f: int, limit: int, per_node: int):
    setup = setup_of(profile, num_micro_batches=m, f=f, device_memory_bytes=limit, devices_per_node=per_node)

    def best_s(nodes: int) -> float:
        """The least time over the splits that fit; inf if none does."""
        share = expected_share(setup, nodes)
        fitting = (
            split_time_s(profile, bounds, share)
            for bounds in all_splits(len(profile.layers), min(nodes * per_node, len(profile.layers)))
            if not limit or max(split_memory_bytes(profile, bounds, m)) <= limit
        )
        return min(fitting, default=float("inf"))

    best = {nodes: best_s(nodes) for nodes in range(1, len(profile.layers) + 1)}
    fitting = [nodes for nodes in best if best[nodes] < float("inf")]
    if not fitting:
        with pytest.raises(PlanError, match="fits no number of nodes"):
            templates(setup)
        return
    made = templates(setup)
    assert [t.num_nodes for t in made] == list(range(fitting[0], fitting[0] + len(made)))
    for template in made:
        share = expected_share(setup, template.num_nodes)
        bounds = (0, *(stage.layers.stop for stage in template.stages))
        assert [stage.layers for stage in template.stages] == [Range(*p) for p in itertools.pairwise(bounds)]
        assert template.time_s(share) == pytest.approx(best[template.num_nodes])
        assert template.time_s(share) == pytest.approx(split_time_s(profile, bounds, share))
        assert [stage.memory_bytes for stage in template.stages] == split_memory_bytes(profile, bounds, m)
        assert not limit or max(stage.memory_bytes for stage in template.stages) <= limit


@pytest.mark.parametrize("case", REFERENCE["templates"], ids=lambda case: case["model"])
def test_reference_optima(case: dict):
    profile = profile_of(REFERENCE["profiles"][case["model"]], reserve_bytes=2_000_000_000, **LINK)
    for nodes, expected_s in case["optima"]:
        # With f = 0 and as many nodes as the size, the expected share is the whole step.
        changes = {"num_micro_batches": 8 * nodes, "f": 0, "max_nodes": nodes}
        made = templates(setup_of(profile, device_memory_bytes=case["memory_bytes"], **changes))
        assert made[-1].num_nodes == nodes
        assert made[-1].time_s(8 * nodes) == pytest.approx(expected_s, rel=1e-6)


@pytest.mark.parametrize("case", REFERENCE["small"])
def test_small_reference_cases(case: dict):
    profile = profile_of(case["layers"], reserve_bytes=case["reserve_bytes"], **LINK)
    changes = {"num_micro_batches": case["micro_batches"], "f": 0, "max_nodes": case["nodes"]}
    setup = setup_of(profile, device_memory_bytes=case["memory_bytes"], **changes)
    try:
        made = {t.num_nodes: t.time_s(case["micro_batches"]) for t in templates(setup)}
    except PlanError:
        made = {}
    if case["time_s"] is None:
        assert case["nodes"] not in made
    else:
        assert made[case["nodes"]] == pytest.approx(case["time_s"], rel=1e-6)


def test_n0_comes_from_memory_and_sizes_reach_2_n0_minus_1():
    # A stage of two layers in the first of three positions needs 2 * 180 + 3 * 40 = 480 bytes.
    made = templates(setup_of(even_profile(6), device_memory_bytes=480, f=2, max_nodes=7))
    assert [t.num_nodes for t in made] == [3, 4, 5]
    assert all(stage.memory_bytes <= 480 for t in made for stage in t.stages)


def test_templates_are_made_for_n0_even_when_there_are_fewer_nodes():
    made = templates(setup_of(even_profile(6), device_memory_bytes=480, max_nodes=2))
    assert [t.num_nodes for t in made] == [3]


def test_without_a_bound_on_nodes_the_layers_bound_the_sizes():
    made = templates(setup_of(even_profile(4), f=0, max_nodes=0))
    assert [t.num_nodes for t in made] == [1, 2, 3, 4]


def test_sizes_end_where_deeper_pipelines_hold_too_many_activations():
    # With three stages the first holds 18 + 3 * 100 bytes; with two it holds 18 + 2 * 100.
    rows = [(1, 1, 1, 100, 0), (1, 1, 1, 100, 0), (1, 1, 1, 0, 0)]
    made = templates(setup_of(profile_of(rows), device_memory_bytes=18 + 250, f=0))
    assert [t.num_nodes for t in made] == [1, 2]


def test_several_devices_a_node_share_the_stages():
    setup = setup_of(even_profile(5), devices_per_node=2)
    by_size = {t.num_nodes: t for t in templates(setup)}
    assert [len(by_size[n].stages) for n in (1, 2, 3, 4)] == [2, 4, 5, 5]
    assert [node_stages(by_size[n]) for n in (1, 2, 3, 4)] == [(2,), (2, 2), (2, 2, 1), (2, 1, 1, 1)]


def test_the_error_names_the_layer_and_the_memory_that_would_do():
    rows = [(1, 1, 10, 0, 0), (1, 1, 100, 7, 0), (1, 1, 10, 0, 0)]
    setup = setup_of(profile_of(rows), device_memory_bytes=1000)
    with pytest.raises(PlanError, match=r"layer 1 \(layer1\) needs 1,814 bytes .* limit is 1,000") as caught:
        templates(setup)
    assert "at least 1,814 bytes" in caught.value.hint
    assert templates(setup_of(profile_of(rows), device_memory_bytes=1814))


def test_the_error_names_a_range_of_layers_where_deeper_would_need_more():
    rows = [(1, 1, 1, 500, 0), (1, 1, 1, 0, 0)]
    with pytest.raises(PlanError, match=r"with 1 stage, .*layers 0 to 1 needs 536 bytes"):
        templates(setup_of(profile_of(rows), device_memory_bytes=100))


@pytest.mark.parametrize("changes", [{"num_micro_batches": 0}, {"devices_per_node": 0}])
def test_setups_without_work_or_devices_are_refused(changes: dict):
    with pytest.raises(PlanError, match="at least one layer"):
        templates(setup_of(even_profile(2), **changes))


def test_copies_move_weights_and_moments_and_never_more_than_the_state():
    costs = stage_costs(even_profile(2))
    assert costs.num_layers == 2
    layer = even_profile(1).layers[0]
    assert copy_bytes(layer) == 120


def shared_profile(
    rows: list[tuple[float, int, int]], allreduce_s: float, counts: tuple[int, ...] = (2,)
) -> Profile:
    """From rows of (seconds, state bytes, activation bytes); no cut takes time."""
    layers = tuple(
        LayerCost(f"layer{i}", s / 2, s / 2, 1, state, held, 0, tuple((g, allreduce_s) for g in counts))
        for i, (s, state, held) in enumerate(rows)
    )
    return Profile("test", "cpu", layers, link_latency_s=0.0)


def test_six_devices_a_node_share_stages_by_ones_twos_threes_and_sixes():
    # One layer takes three times what each of the others does: it gets three devices and they get one each.
    profile = shared_profile([(3.0, 1, 0), (1.0, 1, 0), (1.0, 1, 0), (1.0, 1, 0)], 0.01, (2, 3, 4, 6))
    assert device_counts(profile, 6, 6) == (1, 2, 3, 6)
    setup = setup_of(profile, devices_per_node=6, max_devices_per_stage=6)
    (made,) = templates_for(setup, [(1, 100)])
    assert [stage.num_devices for stage in made.stages] == [3, 1, 1, 1]
    assert (made.period_s, node_stages(made)) == (1.02, (4,))


def test_a_stage_has_as_many_devices_as_may_be_and_the_profile_knows_of():
    profile = shared_profile([(1.0, 1, 0)], 0.0, (2, 3))
    assert device_counts(profile, 6, 4) == (1, 3)
    assert device_counts(profile, 6, 6) == (1, 3)
    assert device_counts(profile, 8, 8) == (1, 2)
    assert device_counts(even_profile(2), 8, 8) == (1,)


def test_what_a_policy_holds_besides_counts():
    profile = shared_profile([(1.0, 100, 10)], 0.0)
    for held, needed in (
        (HeldBesides(), 110),
        (HeldBesides(state_copies=1), 210),
        (HeldBesides(device_bytes=7), 117),
    ):
        setup = setup_of(profile, device_memory_bytes=needed, held=held)
        assert templates(setup)[0].stages[0].memory_bytes == needed
        with pytest.raises(PlanError, match=f"needs {needed:,} bytes"):
            templates(setup_of(profile, device_memory_bytes=needed - 1, held=held))


def test_the_error_names_the_devices_that_share_the_stage():
    profile = shared_profile([(1.0, 100, 10), (1.0, 300, 10)], 0.0)
    setup = setup_of(profile, device_memory_bytes=150, devices_per_node=2, max_devices_per_stage=2)
    with pytest.raises(PlanError, match=r"layer 1 \(layer1\) needs 155 bytes of each of 2 devices"):
        templates(setup)
    with pytest.raises(PlanError, match=r"does not fit one node: with 1 stage, .* layers 0 to 1 needs 210"):
        templates_for(setup, [(1, 1)])


def test_more_nodes_than_layers_are_too_many():
    setup = setup_of(shared_profile([(1.0, 1, 0)], 0.0), devices_per_node=2, max_devices_per_stage=2)
    with pytest.raises(PlanError, match=r"2 nodes of 2 devices: too many .* 2 stages .* 1 layer"):
        templates_for(setup, [(2, 1)])


def test_a_split_that_the_table_finds_and_memory_forbids_is_replaced(monkeypatch: pytest.MonkeyPatch):
    # Sharing is dear, so three stages are cheaper than two; but the first has memory for two only.
    profile = shared_profile([(1.0, 10, 100), (1.0, 10, 0), (1.0, 10, 0)], 2.0)
    setup = setup_of(profile, device_memory_bytes=110, devices_per_node=4, max_devices_per_stage=2)
    asked = []

    def noted(menu: Menu, bound_s: float, num_devices: int) -> object:
        asked.append(num_devices)
        return exact_split(menu, bound_s, num_devices)

    monkeypatch.setattr(split_module, "exact_split", noted)
    (made,) = templates_for(setup, [(1, 4)])
    assert 4 in asked
    assert [stage.num_devices for stage in made.stages] == [2, 2]
    assert made.time_s(4) == pytest.approx(best_split_s(SplitCase(setup, 1, 4), (1, 2)))


def test_a_gap_is_certified_and_none_is_exact():
    profile = profile_of([(1e-3 * (7 + i * i % 5), 2e-3, 10, 20, 50_000 * (i % 4)) for i in range(24)])
    exact, near = (templates(setup_of(profile, num_micro_batches=64, gap=gap)) for gap in (0.0, 0.05))
    assert all(made.gap == 0.0 for made in exact)
    for best, made in zip(exact, near, strict=True):
        share = expected_share(setup_of(profile, num_micro_batches=64), made.num_nodes)
        assert made.gap <= 0.05
        assert made.time_s(share) * (1 - made.gap) <= best.time_s(share) * (1 + 1e-12)


def test_pipelines_of_a_least_number_of_nodes():
    setup = setup_of(even_profile(6), f=0, min_nodes=3)
    assert [template.num_nodes for template in templates(setup)][:2] == [3, 4]
    with pytest.raises(PlanError, match="no pipeline of 7 nodes or more") as refused:
        templates(setup_of(even_profile(6), f=0, min_nodes=7))
    assert "resources.min_pipeline_nodes" in refused.value.hint


def test_the_slowest_update_comes_on_top():
    plain = even_profile(4)
    layers = tuple(msgspec.structs.replace(layer, update_s=0.5 * i) for i, layer in enumerate(plain.layers))
    slow = msgspec.structs.replace(plain, layers=layers)
    for made, with_update in zip(
        templates(setup_of(plain, f=0)), templates(setup_of(slow, f=0)), strict=True
    ):
        slowest_s = max(sum(0.5 * i for i in stage.layers.layers()) for stage in made.stages)
        assert with_update.stages == made.stages
        assert with_update.time_s(3) == pytest.approx(made.time_s(3) + slowest_s)
        better = refined(setup_of(slow, f=0), with_update, 3)
        assert better.time_s(3) <= with_update.time_s(3) * (1 + 1e-9)

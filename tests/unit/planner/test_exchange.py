"""What the exchange of gradients costs: bytes by formula and message by message, and what of it hides.

Layers are of 1 + 2 s and 10 parameters unless said otherwise: with two holders and nothing compared a device
sends 60 bytes of a layer (40 of sums, 20 of means), so at 60 bytes a second a layer's exchange takes 1 s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.planner.costs.exchange import (
    buckets_of,
    device_bytes,
    layout_shown_s,
    sent_bytes,
    sent_parts,
    shown_s,
    waiting_bytes,
)
from oobleckd.planner.placement.transfer import segments_on
from oobleckd.planner.plan import Layers, Pipeline, Plan, Range, Template
from oobleckd.planner.policies import adapt, prepare
from oobleckd.planner.policies.grid import grid_of
from oobleckd.planner.policies.oobleck import Oobleck
from oobleckd.planner.policies.varuna import Varuna
from oobleckd.planner.policy import GradientExchange, Setup, Situation
from oobleckd.planner.profile import Profile
from oobleckd.planner.sizing.catalogue import entries
from oobleckd.planner.sizing.exchanged import exchange_s, exchanging, reduce_s_of
from oobleckd.planner.sizing.instantiate import instantiate, longer, slowest_s, split_micro_batches
from oobleckd.planner.templates.template import templates
from tests.unit.planner.build import bare_template, multisets, profile_of, setup_of

UNCHECKED = GradientExchange(8, 0)
RATE = 60.0


def even(num_layers: int = 4, **changes: Any) -> Profile:
    profile = profile_of([(1.0, 2.0, 10, 1, 1)] * num_layers, link_latency_s=0.0, link_bytes_per_s=1e30)
    return msgspec.structs.replace(profile, params=10 * num_layers, **changes)


def known(profile: Profile, *, rate: float = RATE, every: int = 0, **changes: Any) -> Setup:
    return setup_of(profile, exchange=GradientExchange(8, every, rate), **changes)


def held(*pipelines: Iterable[tuple[int, int]], devices: int = 1) -> dict[str, Layers]:
    """Stages of pipelines, on nodes of so many devices."""
    return {
        f"{number}-{stage // devices}/{stage % devices}": Layers.of(Range(*layers))
        for number, stages in enumerate(pipelines)
        for stage, layers in enumerate(stages)
    }


# --------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("holders", "exact", "checked", "floats", "floats_checked"),
    [
        (1, 0.0, 0.0, 0.0, 0.0),
        (2, 6.0, 8.0, 4.0, 4.0),
        (3, 8.0, 12.0, 16 / 3, 20 / 3),
        (4, 9.0, 14.0, 6.0, 8.0),
        (8, 10.5, 17.0, 7.0, 10.0),
    ],
)
def test_bytes_of_a_parameter(
    holders: int, exact: float, checked: float, floats: float, floats_checked: float
) -> None:
    assert sent_bytes(GradientExchange(8, 0), holders) == pytest.approx(exact)
    assert sent_bytes(GradientExchange(8, 1), holders) == pytest.approx(checked)
    assert sent_bytes(GradientExchange(4, 0), holders) == pytest.approx(floats)
    assert sent_bytes(GradientExchange(4, 1), holders) == pytest.approx(floats_checked)
    assert sent_bytes(GradientExchange(8, 4), holders) == pytest.approx((3 * exact + checked) / 4)


@given(holders=st.integers(1, 9), width=st.sampled_from([4, 8]), checks=st.booleans())
def test_the_formula_is_what_messages_add_up_to(holders: int, width: int, checks: bool) -> None:
    """Slice by slice: sums to whoever makes its mean, the mean from the owner to everybody else."""
    sent = [0] * holders
    for owner in range(holders):  # slices of one parameter, one of each owner
        makers = {owner, (owner + checks) % holders}
        for device in range(holders):
            sent[device] += width * len(makers - {device})
        sent[owner] += 4 * (holders - len(makers))
    found = sent_bytes(GradientExchange(width, int(checks)), holders)
    assert sent == [pytest.approx(found * holders)] * holders


@pytest.mark.parametrize(
    ("holders", "unchecked", "checked"), [(1, 0, 0), (2, 4, 8), (3, 8 / 3, 16 / 3), (4, 2, 4), (8, 1, 2)]
)
def test_sums_of_others_that_wait(holders: int, unchecked: float, checked: float) -> None:
    assert waiting_bytes(GradientExchange(8, 0), holders) == pytest.approx(unchecked)
    assert waiting_bytes(GradientExchange(8, 1), holders) == pytest.approx(checked)
    assert waiting_bytes(GradientExchange(8, 5), holders) == pytest.approx(checked)  # at most


def test_bytes_of_a_device_follow_what_it_holds() -> None:
    setup = known(even())
    parts = sent_parts(setup, held([(0, 3), (3, 4)], [(0, 1), (1, 4)], [(0, 4)]))
    of_layer = 10 * sent_bytes(UNCHECKED, 3)
    found = {device: device_bytes(UNCHECKED, each) for device, each in parts.items()}
    assert found == {
        device: pytest.approx(count * of_layer)
        for device, count in zip(("0-0/0", "0-1/0", "1-0/0", "1-1/0", "2-0/0"), (3, 1, 1, 3, 4), strict=True)
    }


def test_a_tied_weight_has_one_bucket_with_more_holders() -> None:
    """Of 10 parameters of the first and of the last layer 6 are the same: two pipelines of two stages
    exchange them among four, and one pipeline between its ends.
    """
    tied = even(buckets=((0,), (1,), (2,), (3,), (0, 3)))
    tied = msgspec.structs.replace(tied, params=34)
    assert buckets_of(tied).own == (4.0, 10.0, 10.0, 4.0)
    assert (buckets_of(tied).shared, buckets_of(tied).uses) == (6.0, (0, 3))
    pair = [(0, 2), (2, 4)]
    parts = sent_parts(known(tied), held(pair, pair))
    for each in parts.values():
        assert device_bytes(UNCHECKED, each) == pytest.approx(14 * 6.0 + 6 * 9.0)
    alone = sent_parts(known(tied), held(pair))
    assert [device_bytes(UNCHECKED, each) for each in alone.values()] == [pytest.approx(6 * 6.0)] * 2
    whole = sent_parts(known(tied), held([(0, 4)], [(0, 4)]))
    assert device_bytes(UNCHECKED, whole["0-0/0"]) == pytest.approx(34 * 6.0)  # and is there once


def test_who_does_not_say_how_many_parameters_there_are_has_no_tied_weight() -> None:
    tied = even(buckets=((0,), (1,), (2,), (3,), (0, 3)))
    assert buckets_of(msgspec.structs.replace(tied, params=0)).own == (10.0,) * 4
    assert buckets_of(tied).own == (10.0,) * 4  # 40 parameters: nothing is counted twice


def test_who_holds_a_layer_for_another_has_no_sums_of_it() -> None:
    """Four holders of each layer, two with sums: 8 * 3 / 4 bytes of these, and 4 * 3 / 4 of means."""
    pair = [(0, 2), (2, 4)]
    holdings = {device: Layers.of(Range(0, 2), Range(2, 4)) for device in held(pair, pair)}
    redundant = {d: Layers.of(Range(2, 4) if "-0/" in d else Range(0, 2)) for d in holdings}
    parts = sent_parts(known(even()), holdings, redundant)
    assert [device_bytes(UNCHECKED, each) for each in parts.values()] == [20 * 9.0 + 20 * 3.0] * 4


# --------------------------------------------------------------------------- time


def test_where_no_link_is_known_nothing_shows() -> None:
    setup = setup_of(even())
    assert layout_shown_s(setup, held([(0, 4)], [(0, 4)])) == 0.0
    made = templates(setup)
    assert reduce_s_of(setup, made, 4) is None
    assert exchanging(setup, made) is made
    assert exchange_s(setup, made[0], 8) == 0.0


@pytest.mark.parametrize(
    ("rate", "shown"),
    [
        (60.0, 1.0),  # 1 s a layer, 2 s of backward: the lowest layer shows
        (30.0, 2.0),  # as long as a backward: still the lowest alone
        (20.0, 6.0),  # 3 s a layer: four of them from 6 s before the end on
        (6e30, 0.0),
    ],
)
def test_what_does_not_fit_under_the_backward_shows(rate: float, shown: float) -> None:
    setup = known(even(), rate=rate)
    assert layout_shown_s(setup, held([(0, 4)], [(0, 4)])) == pytest.approx(shown)
    assert layout_shown_s(setup, held([(0, 4)])) == 0.0  # one holder of each layer


def test_later_stages_hide_under_the_earlier_ones() -> None:
    """The second stage is complete 4 s before the end, and takes 6 s for its two layers from 6 s before it
    on; the first from 2 s before it. Where all devices end at once both take 6 s from 2 s before on.
    """
    pair = [(0, 2), (2, 4)]
    setup = known(even(), rate=20.0)
    assert layout_shown_s(setup, held(pair, pair)) == pytest.approx(4.0)
    only_last = {device: layers for device, layers in held(pair, pair).items() if "-1/" in device}
    assert layout_shown_s(setup, only_last) == 0.0
    staggered = msgspec.structs.replace(setup, staggered=True)
    assert layout_shown_s(staggered, only_last) == pytest.approx(4.0)
    # Of a decoupled backward weight gradients alone are left at the end, four tenths of it.
    decoupled = msgspec.structs.replace(setup, decoupled=True)
    assert layout_shown_s(decoupled, only_last) == pytest.approx(6.0 - 0.8)


def test_devices_of_a_node_share_its_link() -> None:
    pair = [(0, 2), (2, 4)]
    one, two = (layout_shown_s(known(even(), rate=20.0), held(pair, pair, devices=d)) for d in (1, 2))
    assert one == pytest.approx(4.0)
    assert two == pytest.approx(6.0)  # one queue of four layers, from 6 s before the end on


def test_what_stays_in_a_node_takes_its_own_rate() -> None:
    """A tied weight of 10 parameters at both ends of a pipeline on one node of two devices."""
    tied = msgspec.structs.replace(even(2, buckets=((0,), (1,), (0, 1))), params=10)
    ends = held([(0, 1), (1, 2)], devices=2)
    assert layout_shown_s(known(tied, rate=1.0), ends) == 0.0  # nobody knows a rate: as with copies
    inside = msgspec.structs.replace(tied, node_bytes_per_s=30.0)
    # 60 bytes of either device in 2 s each, those of the second from 2 s before the end on.
    assert layout_shown_s(known(inside, rate=1.0), ends) == pytest.approx(2.0)
    # Of two pipelines a third of the three others is in the node: 90 bytes a device, 60 of them outside.
    ends = held([(0, 1), (1, 2)], [(0, 1), (1, 2)], devices=2)
    assert layout_shown_s(known(inside, rate=60.0), ends) == pytest.approx(2 * (1.0 + 1.0) - 2.0)


def test_the_way_there_and_back_comes_on_top() -> None:
    setup = known(even(link_latency_s=0.25))
    assert layout_shown_s(setup, held([(0, 4)], [(0, 4)])) == pytest.approx(1.5)


def test_many_alike_are_one_pipeline_so_many_times() -> None:
    setup = known(even(), every=3)
    stages = [(0, 1), (1, 4)]
    one = sent_parts(setup, held(stages))
    counts = np.arange(1.0, 9.0)
    whole = [layout_shown_s(setup, held(*[stages] * int(count))) for count in counts]
    assert shown_s(setup, one, counts) == pytest.approx(whole)
    assert whole == sorted(whole)


# --------------------------------------------------------------------------- plans


def by_hand(
    made: tuple[Template, ...], setup: Setup, total: int, least: int
) -> tuple[float, tuple[int, ...]]:
    """The best of all multisets of sizes."""
    by_size = {template.num_nodes: template for template in made}
    found = []
    for sizes in multisets(total, min(by_size), max(by_size)):
        if len(sizes) < least or len(sizes) > setup.num_micro_batches:
            continue
        members = [by_size[size] for size in sizes]
        timed = [longer(each, exchange_s(setup, each, len(sizes))) for each in members]
        found.append((slowest_s(timed, split_micro_batches(timed, setup.num_micro_batches)), sizes))
    return min(found)


@pytest.mark.parametrize("rate", [1e6, 100.0, 30.0, 10.0, 3.0])
@pytest.mark.parametrize("num_nodes", [4, 7, 8])
def test_sizes_are_the_best_with_the_exchange(rate: float, num_nodes: int) -> None:
    setup = known(even(6), rate=rate, every=1, num_micro_batches=12, f=0)
    made = templates(setup)
    found = instantiate(made, num_nodes, 0, 12, reduce_s_of(setup, made, num_nodes))
    best_s, sizes = by_hand(made, setup, num_nodes, 1)
    assert found.step_s == pytest.approx(best_s)
    assert len(found.sizes) == len(sizes)


@given(
    fills=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    more=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=10, max_size=10),
)
def test_of_any_times_by_size_and_number_the_best_is_found(fills: list[int], more: list[list[int]]) -> None:
    made = tuple(bare_template(size, fill, 2.0) for size, fill in enumerate(fills, 1))
    reduce_s = np.array(more, dtype=np.float64)
    best = []
    for sizes in multisets(9, 1, 4):
        members = [longer(made[size - 1], more[len(sizes)][size - 1]) for size in sizes]
        best.append(slowest_s(members, split_micro_batches(members, 10)))
    assert instantiate(made, 9, 0, 10, reduce_s).step_s == pytest.approx(min(best))


def test_more_pipelines_lose_because_of_the_exchange() -> None:
    """Eight nodes, each of which could hold the model. With nothing known of the link they are eight
    pipelines of one; over a slow one what eight exchange of four layers costs more than bubbles do.
    """

    def sizes(setup: Setup) -> tuple[int, ...]:
        found = adapt("oobleck", setup, prepare("oobleck", setup), Situation(nodes, {}))
        return tuple(len(pipeline.nodes) for pipeline in found.plan.pipelines)

    nodes = tuple(f"n{number}" for number in range(8))
    free = setup_of(even(), num_micro_batches=16)
    assert sizes(free) == (1,) * 8
    assert sizes(known(even(), rate=1e6, num_micro_batches=16)) == (1,) * 8
    slow = known(even(), rate=6.0, num_micro_batches=16)
    assert len(sizes(slow)) < 8


@pytest.mark.parametrize("policy", ["oobleck", "adaptive", "slipstream", "varuna"])
def test_a_step_of_a_plan_has_what_shows(policy: str) -> None:
    """Pipelines of two nodes, since no device holds more: two of them, whatever the link."""
    nodes = ("a", "b", "c", "d")
    free = setup_of(even(), device_memory_bytes=500, f=1)
    setup = known(even(), rate=60.0, device_memory_bytes=500, f=1)
    made = prepare(policy, free)
    assert prepare(policy, setup) == made
    plans = [adapt(policy, each, made, Situation(nodes, {})).plan for each in (free, setup)]
    assert [len(plan.pipelines) for plan in plans] == [2, 2]
    shown = layout_shown_s(setup, plans[1].holdings())
    assert shown == pytest.approx(1.0)
    assert plans[1].step_s - plans[0].step_s == pytest.approx(shown)


def test_pipelines_that_stay_wait_for_those_who_are_left() -> None:
    """Where one of two holders of the first layers is gone, those of the last two exchange alone."""
    nodes = ("a", "b", "c", "d")
    setup = known(even(), rate=20.0, device_memory_bytes=700, f=1)
    made = prepare("slipstream", setup)
    plan = adapt("slipstream", setup, made, Situation(nodes, {})).plan
    running = tuple(pipeline.nodes for pipeline in plan.pipelines)
    whole = grid_of(setup, made, Situation(nodes, plan.holdings(), running))
    assert whole is not None
    assert whole.exchange_s == pytest.approx(4.0)
    left = {device: layers for device, layers in plan.holdings().items() if device != "a/0"}
    hit = grid_of(setup, made, Situation(("b", "c", "d"), left, running))
    assert hit is not None
    assert hit.vacant
    assert hit.exchange_s == 0.0
    free = grid_of(msgspec.structs.replace(setup, exchange=UNCHECKED), made, Situation(nodes, left, running))
    assert free is not None
    assert free.exchange_s == 0.0
    assert hit.step_s >= hit.min_s


def test_what_is_computed_ahead_counts_it_too() -> None:
    setup = known(even(), rate=6.0, num_micro_batches=16)
    made = templates(setup)
    reduce_s = reduce_s_of(setup, made, 8)
    for entry in entries(made, [8, 5], setup.f, 16, reduce_s):
        assert entry.expand() == instantiate(made, entry.num_nodes, setup.f, 16, reduce_s)
    proposal = Oobleck().adapt(setup, made, Situation(tuple("abcdefgh"), {}))
    assert proposal.plan.step_s == pytest.approx(instantiate(made, 8, setup.f, 16, reduce_s).step_s)


def test_others_count_as_pipelines() -> None:
    setup = known(even(), rate=6.0)
    made = templates(setup)
    some, more = reduce_s_of(setup, made, 4), reduce_s_of(setup, made, 8)
    besides = reduce_s_of(setup, made, 4, 3)
    assert some is not None
    assert more is not None
    assert besides is not None
    assert (besides == more[3:8]).all()
    assert (some[1] == 0.0).all()


def test_varuna_weighs_it() -> None:
    """Depth and width: with a slow link fewer replicas, and deeper pipelines."""
    nodes = tuple(f"n{number}" for number in range(8))

    def width(setup: Setup) -> int:
        return len(Varuna().adapt(setup, Varuna().prepare(setup), Situation(nodes, {})).plan.pipelines)

    assert width(setup_of(even(), num_micro_batches=16)) == 8
    assert width(known(even(), rate=6.0, num_micro_batches=16)) < 8


def test_a_template_is_its_pipeline() -> None:
    setup = known(even(), rate=20.0, devices_per_node=2)
    made = {template.num_nodes: template for template in templates(setup)}
    for size, template in made.items():
        nodes = [tuple(f"{p}{n}" for n in range(size)) for p in range(2)]
        plan = Plan(tuple(Pipeline(each, segments_on(template, each), (0,)) for each in nodes))
        assert exchange_s(setup, template, 2) == pytest.approx(layout_shown_s(setup, plan.holdings()))

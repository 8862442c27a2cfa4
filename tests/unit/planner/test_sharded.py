"""Stages whose state several devices hold between them: what layers cost there, and that such a stage is
planned as a device is.
"""

from __future__ import annotations

import itertools
import random
from math import ceil

import pytest
from msgspec.structs import replace

from oobleckd.core.memory import held_besides
from oobleckd.planner.costs.forward import forward_s
from oobleckd.planner.costs.model import copy_bytes, stage_costs
from oobleckd.planner.costs.recompute import recomputed
from oobleckd.planner.costs.sharded import (
    NodeLink,
    Sharding,
    StageOption,
    best,
    possible,
    sharded,
    sharded_setup,
)
from oobleckd.planner.costs.work import stage_works
from oobleckd.planner.plan import Pipeline, Plan, Range, Segment
from oobleckd.planner.policy import PlanError
from oobleckd.planner.profile import LayerCost, Profile
from oobleckd.planner.templates.template import templates_for
from oobleckd.protocol.job import parse_job
from tests.unit.planner.build import setup_of

LINK = NodeLink(bytes_per_s=1000.0, latency_s=0.5)
BY_4 = Sharding(4, LINK)


def layer(params: int, seconds: float, *, rounded: int = 0, held: int = 0) -> LayerCost:
    """AdamW, exact: 24 bytes a parameter, and a copy in bfloat16 of ``rounded``."""
    state = 24 * params + 2 * rounded
    return LayerCost(
        "", seconds, 2 * seconds, 4 * params, state, held, 80, slot_bytes=8 * params, update_s=1.0
    )


def model(*layers: LayerCost) -> Profile:
    return Profile("", "", layers, link_latency_s=0.25, link_bytes_per_s=160.0, reserve_bytes=7)


SMALL = model(
    layer(1000, 1.0, held=30),
    layer(400, 8.0, rounded=400, held=50),
    layer(400, 8.0, rounded=300, held=50),
    layer(800, 6.0, rounded=800, held=40),
)
"""Gathered are 4,000, 800, 1,000 and 1,600 bytes, three quarters of them from others: in 3.5, 1.1, 1.25 and
1.7 s.
"""


def test_weights_are_gathered_as_they_are_computed_with() -> None:
    found = sharded(SMALL, BY_4)
    assert [each.gathered_bytes for each in found.layers] == [4000, 800, 1000, 1600]
    assert [each.gather_s for each in found.layers] == pytest.approx([3.5, 1.1, 1.25, 1.7])
    float_sums = model(replace(SMALL.layers[1], state_bytes=(20 + 2) * 400))
    assert sharded(float_sums, Sharding(4, LINK, exact=False)).layers[0].gathered_bytes == 800
    without = model(replace(SMALL.layers[1], state_bytes=24 * 400))  # a job in float32
    assert sharded(without, BY_4).layers[0].gathered_bytes == 1600


def test_only_the_first_gather_of_a_pass_shows_where_layers_take_longer() -> None:
    found = sharded(SMALL, BY_4).layers
    # Weights of the first block come while the embedding computes, which is 0.1 s too short.
    assert [each.forward_s for each in found] == pytest.approx([3.5 + 1.1, 8.0, 8.0, 6.0])
    # In the embedding's backward the gradients of the block behind it go; the head begins with a gather.
    assert [each.backward_s for each in found] == pytest.approx([2.0, 16.0, 16.0, 12.0 + 1.7])
    assert [each.update_s for each in found] == [0.25] * 4


def test_what_does_not_hide_shows() -> None:
    slow = sharded(SMALL, Sharding(4, NodeLink(100.0))).layers
    # 30, 6, 7.5 and 12 s: a backward has the gather of the layer before and the gradients of the one behind.
    assert [each.forward_s for each in slow] == pytest.approx([30 + 6, 8.0, 12.0, 6.0])
    assert [each.backward_s for each in slow] == pytest.approx([6.0, 30 + 7.5, 6 + 12, 12.0 + 12])


def run_s(computes_s: list[float], gathers_s: list[float], exchanges_s: list[float]) -> float:
    """When a device has computed all layers of a pass, in the order given. Its link fetches the next layer's
    weights when this layer begins, which is when the one before it needs no room any more, and then sends the
    gradients of that one.
    """
    link_s = begins_s = gathers_s[0]
    for here, computes in enumerate(computes_s):
        link_s = max(link_s, begins_s)
        if here + 1 < len(computes_s):
            link_s += gathers_s[here + 1]
        weights_s = link_s
        link_s += exchanges_s[here - 1] if here else 0.0
        begins_s = begins_s + computes if here + 1 == len(computes_s) else max(begins_s + computes, weights_s)
    return begins_s


def test_a_device_that_fetches_ahead_takes_what_is_planned() -> None:
    dice = random.Random(3)
    for _ in range(200):
        rows = [layer(dice.randint(1, 900), dice.uniform(0.1, 3)) for _ in range(dice.randint(1, 6))]
        found = sharded(model(*rows), BY_4).layers
        gathers = [each.gather_s for each in found]
        planned_s = sum(each.forward_s for each in found)
        ran_s = run_s([row.forward_s for row in rows], gathers, [0.0] * len(rows))
        assert planned_s == pytest.approx(ran_s)
        planned_s = sum(each.backward_s for each in found)
        ran_s = run_s([row.backward_s for row in rows][::-1], gathers[::-1], gathers[::-1])
        # As planned a layer waits for the gradients behind it to be away, and a device may go on before.
        assert ran_s <= planned_s * (1 + 1e-9)
        if all(each.backward_s == row.backward_s for each, row in zip(found[:-1], rows, strict=False)):
            assert ran_s == pytest.approx(planned_s)


def test_every_cut_shows_a_gather_on_both_its_sides() -> None:
    costs = stage_costs(sharded(SMALL, BY_4))
    # The four devices of a stage send 80 bytes each at once.
    assert costs.cut_s[2] == pytest.approx(0.25 + 4 * 80 / 160 + (1.1 + 1.25) / 2)
    assert costs.cut_s[[0, -1]].tolist() == [0.0, 0.0]


def test_a_device_holds_its_part_two_gathered_layers_and_gradients() -> None:
    costs = stage_costs(sharded(SMALL, BY_4))
    both = (24 * 400 + 2 * 400 + 24 * 400 + 2 * 300) / 4
    passing = 2 * 1000 + 800  # weights and gradients of one block, weights of the one before
    assert costs.memory_bytes(3, 8)[1, 3] == both + 3 * 100 + passing + 7
    alone = (24 * 400 + 2 * 300) / 4
    assert costs.memory_bytes(1, 8)[2, 3] == alone + 50 + 2 * 1000 + 7
    # The embedding's own weights and gradients, which are larger than those of the block with its weights.
    assert costs.once_bytes[0, 2] == 2 * 4000


def test_works_and_matrices_say_the_same() -> None:
    profile = sharded(SMALL, BY_4)
    for mode in ("none", "blocks"):
        costs = stage_costs(profile, recompute=mode)
        for start, stop in itertools.combinations(range(5), 2):
            (work,) = stage_works([Range(start, stop)], profile, recompute=[mode])
            assert work.peak_bytes("F") == ceil(costs.memory_bytes(1, 1)[start, stop])
            assert recomputed(profile, mode).once_bytes(range(start, stop)) == costs.once_bytes[start, stop]


def test_copies_move_all_of_the_state() -> None:
    assert list(map(copy_bytes, sharded(SMALL, BY_4).layers)) == list(map(copy_bytes, SMALL.layers))


def test_one_device_is_what_it_was() -> None:
    setup = setup_of(SMALL)
    assert sharded(SMALL, Sharding(1, LINK)) is SMALL
    assert sharded_setup(setup, Sharding(1, LINK)) is setup


def test_a_setup_counts_stages_and_turns() -> None:
    setup = setup_of(SMALL, devices_per_node=8, num_micro_batches=9)
    found = sharded_setup(setup, BY_4)
    assert (found.devices_per_node, found.num_micro_batches) == (2, 3)
    assert found.profile == sharded(SMALL, BY_4)
    with pytest.raises(PlanError, match="6 devices of a node do not divide into stages of 4") as caught:
        sharded_setup(setup_of(SMALL, devices_per_node=6), BY_4)
    assert caught.value.hint == "set resources.devices_per_stage to 1 or 2"
    assert possible(8) == (1, 2, 4, 8)


def test_free_links_and_little_memory_divide_the_step_by_as_many() -> None:
    """A model of one stage, without cuts: g devices of it take m micro-batches in the time of m / g."""
    profile = replace(SMALL, reserve_bytes=0)
    free = NodeLink(float("inf"))
    setup = setup_of(profile, num_micro_batches=16, devices_per_node=8, f=0)
    (alone,) = templates_for(replace(setup, devices_per_node=1), [(1, 16)])
    (made,) = templates_for(sharded_setup(setup, Sharding(8, free)), [(1, 2)])
    assert [stage.layers for stage in made.stages] == [stage.layers for stage in alone.stages]
    update_s = 4 * (1 - 1 / 8)
    assert made.time_s(2) == pytest.approx(alone.time_s(2) - update_s)


def test_a_layer_larger_than_a_device_fits() -> None:
    small = setup_of(SMALL, device_memory_bytes=14_700, devices_per_node=4, num_micro_batches=4)
    with pytest.raises(PlanError, match=r"layer 0 \(\) needs 24,127 bytes of a device"):
        templates_for(small, [(2, 4)])
    (made,) = templates_for(sharded_setup(small, BY_4), [(2, 1)])
    # A quarter of the embedding's state, its gathered weights and their gradients; of the others weights and
    # gradients of the head and weights of the block before it.
    assert [stage.memory_bytes for stage in made.stages] == [
        24_000 // 4 + 30 + 2 * 4000 + 7,
        (24 * 1600 + 2 * 1500) // 4 + 140 + 2 * 1600 + 1000 + 7,
    ]


def test_the_search_keeps_the_memory_of_every_device() -> None:
    dice = random.Random(5)
    for _ in range(20):
        rows = [
            layer(dice.randint(1, 50), 1.0, rounded=dice.randint(0, 20), held=dice.randint(0, 90))
            for _ in range(7)
        ]
        profile = sharded(model(*rows), Sharding(2, LINK))
        limit = dice.randint(800, 4000)
        setup = setup_of(profile, device_memory_bytes=limit, num_micro_batches=4)
        every = [
            cuts
            for cuts in itertools.combinations(range(1, 7), 2)
            if all(
                work.peak_bytes("F" * min(3 - place, 4)) <= limit
                for place, work in enumerate(
                    stage_works([Range(a, b) for a, b in itertools.pairwise((0, *cuts, 7))], profile)
                )
            )
        ]
        if not every:
            with pytest.raises(PlanError):
                templates_for(setup, [(3, 4)])
            continue
        (made,) = templates_for(setup, [(3, 4)])
        assert tuple(stage.layers.start for stage in made.stages[1:]) in every


def test_an_evaluation_takes_turns_too() -> None:
    profile = sharded(SMALL, Sharding(4, NodeLink(float("inf"))))
    plan = Plan((Pipeline(("a",), (Segment("a/0", Range(0, 4)),), (0, 1, 2)),))
    assert forward_s(plan, profile, 9) == 3 * 23.0
    assert forward_s(plan, profile, 8) == 2 * 23.0


def test_a_device_keeps_what_it_sent_of_its_own_turns() -> None:
    job = parse_job(
        {
            "name": "a",
            "train": {"steps": 1, "global_batch": 12, "micro_batch": 1, "sequence": 8},
            "checkpoint": {"every": 0},
        }
    )
    profile = replace(SMALL, device="cpu")
    assert held_besides(job, profile).device_bytes == 2 * 12 * 80
    assert held_besides(job, sharded(profile, BY_4)).device_bytes == 2 * 3 * 80


def test_the_fastest_is_chosen_of_those_that_can_lose_enough() -> None:
    slow, fast = StageOption(2, 1, 3.0, can_lose=1), StageOption(4, 1, 2.0, can_lose=0)
    assert best([StageOption(1, 0), slow, fast], f=0) == fast
    assert best([StageOption(1, 0), slow, fast], f=1) == slow
    assert best([replace(fast, devices_per_stage=8), fast], f=1) == fast
    assert best([StageOption(1, 0), StageOption(2, 5)], f=1) is None


def test_the_present_number_stays_unless_another_is_worth_it() -> None:
    present, little, much = (
        StageOption(g, 1, step_s, can_lose=1) for g, step_s in ((4, 1.0), (2, 0.95), (1, 0.8))
    )
    assert best([present, little], f=1, present=present) == present
    assert best([present, little, much], f=1, present=present) == much
    safer = replace(little, step_s=2.0, can_lose=2)
    assert best([present, safer], f=1, present=present) == present
    assert best([present, safer], f=2, present=present) == safer
    none = StageOption(4, 3)
    assert best([none, little], f=1, present=none) == little

"""How long copies beside training take, and who has room for them."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.planner.costs.model import copy_bytes
from oobleckd.planner.placement.precopy import (
    MAX_STEPS,
    MIN_S,
    MIN_STEPS,
    caught_up_s,
    has_room,
    hidden_s,
    pays,
    precopy_s,
    still_share,
)
from oobleckd.planner.plan import Layers, Range, Transfer
from oobleckd.planner.policies import adapt, prepare
from oobleckd.planner.policy import Situation
from oobleckd.planner.schedules.jobshop import base_bytes
from tests.unit.planner.build import even_profile, profile_of, setup_of
from tests.unit.planner.test_oobleck import alive
from tests.unit.planner.test_slipstream import started

STEP_S = 2.0


def sent_until_current_s(copies_s: float, step_s: float) -> float:
    """Step by step: every step's gradients, a third of the state, queue up behind what is left of
    the copy.
    """
    left_s, now_s = copies_s, 0.0
    for _ in range(10_000):
        if left_s <= step_s:
            return now_s + left_s
        now_s += step_s
        left_s += copies_s / 3 - step_s
    return math.inf


@given(copies_s=st.floats(0.01, 5.9))
def test_the_closed_form_is_the_queue(copies_s: float):
    """Within the gradients of a step: the closed form has them flow, and they come at commits."""
    model = caught_up_s(copies_s, STEP_S)
    queued = sent_until_current_s(copies_s, STEP_S)
    assert queued <= model + 1e-9
    assert model - queued <= copies_s / 3 / (1 - copies_s / 3 / STEP_S) + 1e-9


def test_with_three_steps_gradients_fill_the_link():
    assert caught_up_s(3 * STEP_S, STEP_S) == math.inf
    assert caught_up_s(1.0, 0.0) == math.inf
    assert caught_up_s(2 * STEP_S, STEP_S) == pytest.approx(6 * STEP_S)


@given(copies_s=st.floats(0.0, 9.0))
def test_what_is_hidden_is_the_mean_over_a_step(copies_s: float):
    """Wherever in a step a plan comes, copies have the rest of it; two thirds of what was sent by then is
    saved.
    """
    moments = [(k + 0.5) / 1000 * STEP_S for k in range(1000)]
    sent_s = sum(min(copies_s, STEP_S - moment) for moment in moments) / len(moments)
    profile = even_profile(4)
    assert hidden_s(profile, copies_s, STEP_S) == pytest.approx(2 / 3 * sent_s, abs=1e-3)
    assert hidden_s(profile, copies_s, 0.0) == 0.0
    slower = msgspec.structs.replace(profile, link_bytes_per_s=10e9, host_bytes_per_s=20e9)
    assert hidden_s(slower, copies_s, STEP_S) == pytest.approx(sent_s / 2, abs=1e-3)


def test_what_the_stop_still_has_to_do():
    """The update over the link and the way from the host's memory, whichever takes longer."""
    profile = msgspec.structs.replace(even_profile(4), link_bytes_per_s=10e9)
    shares = {}
    for host in (0.0, 5e9, 25e9, 100e9):
        there = msgspec.structs.replace(profile, host_bytes_per_s=host)
        shares[host] = still_share(there), still_share(there, updated=False)
    third = pytest.approx(1 / 3)
    assert shares == {0.0: (third, 0.0), 5e9: (1.0, 1.0), 25e9: (0.4, 0.4), 100e9: (third, 0.1)}


def test_what_pays():
    assert [pays(steps * STEP_S, STEP_S) for steps in (0, MIN_STEPS, 1, MAX_STEPS, 2.1)] == [
        False, True, True, True, False,
    ]  # fmt: skip
    short_s = MIN_S / 10  # as a step
    assert [pays(share * short_s, short_s) for share in (0.99 * MIN_STEPS, MIN_STEPS)] == [False, True]
    assert [pays(seconds, 10.0) for seconds in (0.99 * MIN_S, MIN_S)] == [False, True]


def test_who_has_room():
    profile = msgspec.structs.replace(even_profile(4), device="cpu")
    held = {"a/0": Layers((Range(0, 2),)), "b/0": Layers((Range(2, 4),))}
    situation = Situation(("a", "b", "c"), held)
    copies = (Transfer(0, "a/0", "c/0", 120), Transfer(1, "a/0", "c/0", 120))
    setup = setup_of(profile)
    assert has_room(setup, {}, situation, copies)
    base = base_bytes(setup, held["a/0"])

    def room(limit: int, needed: dict[str, int], moved=copies) -> bool:
        limited = msgspec.structs.replace(setup, device_memory_bytes=limit)
        return has_room(limited, needed, situation, moved)

    assert room(base + 240, {"a/0": base})
    assert not room(base + 239, {"a/0": base})
    most = setup.num_micro_batches * 40  # of the activations of two layers
    assert room(base + most + 240, {})
    assert not room(base + most + 239, {})
    to_b = (Transfer(0, "a/0", "b/0", 120),)
    assert room(base + 160, {"a/0": base, "b/0": base}, to_b)  # a state and a gradient
    assert not room(base + 159, {"a/0": base, "b/0": base}, to_b)


def test_beside_a_gpu_the_snapshot_lies_in_the_host_s_memory():
    profile = msgspec.structs.replace(even_profile(4), device="cuda: H200")
    held = {"a/0": Layers((Range(0, 4),))}
    setup = setup_of(profile, device_memory_bytes=base_bytes(setup_of(profile), held["a/0"]))
    copies = (Transfer(0, "a/0", "c/0", 120),)
    assert has_room(setup, {}, Situation(("a", "c"), held), copies)


def test_the_other_policies_precopy_as_well():
    setup = setup_of(
        profile_of([(1e-3, 2e-3, 10, 20, 0)] * 8), min_nodes=4, num_micro_batches=24, max_nodes=7
    )
    plan = started(setup, list("abcdefgh"))
    link = 4 * 30 * 2 / plan.step_s
    profile = msgspec.structs.replace(setup.profile, link_latency_s=0.0, link_bytes_per_s=link)
    setup = msgspec.structs.replace(setup, profile=profile)
    nodes = tuple("abcdefghwxyz")
    running = tuple(pipeline.nodes for pipeline in plan.pipelines)
    situation = Situation(nodes, alive(plan, list(nodes)), running)
    for name in ("oobleck", "slipstream"):
        found = adapt(name, setup, prepare(name, setup), situation)
        copies_s = sum(copy.num_bytes for copy in found.transfers if copy.target == "w/0") / link
        assert pays(copies_s, found.plan.step_s)
        assert found.precopy_s > copies_s
    assert precopy_s(setup, dict, situation, (), 1.0) == 0.0


def one_copied(step_s: float, setup, plan):
    """``setup`` with a link on which the layers of a stage take one step."""
    stage = sum(copy_bytes(layer) for layer in setup.profile.layers[:2])
    profile = msgspec.structs.replace(setup.profile, link_latency_s=0.0, link_bytes_per_s=stage / step_s)
    return msgspec.structs.replace(setup, profile=profile), tuple(p.nodes for p in plan.pipelines)


@pytest.mark.parametrize("name", ["oobleck", "slipstream"])
def test_a_drain_with_a_standby_loses_nothing_while_copies_are_made(name: str):
    """Whoever is to leave trains until then: no step is longer than those of the plan that follows."""
    setup = setup_of(
        profile_of([(1e-3, 2e-3, 10, 20, 0)] * 8), min_nodes=4, num_micro_batches=24, max_nodes=7
    )
    plan = started(setup, list("abcdefgh"))
    setup, running = one_copied(plan.step_s, setup, plan)
    situation = Situation(tuple("abcdefgx"), plan.holdings(), running)
    found = adapt(name, setup, prepare(name, setup), situation)
    assert {copy.target for copy in found.transfers} == {"x/0"}
    assert found.precopy_s == pytest.approx(caught_up_s(plan.step_s, plan.step_s), rel=0.1)


def test_whoever_is_back_is_not_at_work_yet():
    """Under its old name as under a new one: until it has its copies steps are as long as without it."""
    setup = setup_of(
        profile_of([(1e-3, 2e-3, 10, 20, 0)] * 8), min_nodes=4, num_micro_batches=24, max_nodes=7
    )
    plan = started(setup, list("abcdefghijkl"))
    setup, running = one_copied(plan.step_s, setup, plan)
    held = alive(plan, list("abcdefghijk"))
    waits = [
        adapt("slipstream", setup, prepare("slipstream", setup), Situation(tuple(nodes), held, running))
        for nodes in ("abcdefghijkl", "abcdefghijkx")
    ]
    assert waits[0].precopy_s == waits[1].precopy_s


@pytest.mark.parametrize(("name", "goes_on"), [("oobleck", False), ("slipstream", True)])
def test_after_a_loss_there_is_a_meanwhile_only_where_the_job_goes_on(name: str, goes_on: bool):
    setup = setup_of(
        profile_of([(1e-3, 2e-3, 10, 20, 0)] * 8), min_nodes=4, num_micro_batches=24, max_nodes=7
    )
    plan = started(setup, list("abcdefghijkl"))
    setup, running = one_copied(plan.step_s, setup, plan)
    nodes = tuple("abcdefghijkx")
    found = adapt(name, setup, prepare(name, setup), Situation(nodes, alive(plan, list(nodes)), running))
    assert found.transfers
    assert (found.precopy_s > 0) == goes_on


@pytest.mark.parametrize(("slots", "state_copies"), [(-1, 3.0), (800, 3.0), (400, 2.0), (0, 1.0)])
def test_of_a_smaller_state_updates_are_a_larger_part(slots: int, state_copies: float):
    """What counts is how much of the link they take."""
    profile = even_profile(4)
    layers = [msgspec.structs.replace(layer, param_bytes=400, slot_bytes=slots) for layer in profile.layers]
    smaller = msgspec.structs.replace(profile, layers=tuple(layers))
    assert smaller.state_copies == state_copies
    assert smaller.copied_bytes == 4 * 400 * state_copies
    assert still_share(smaller) == pytest.approx(1 / state_copies)
    longest_s = MAX_STEPS * state_copies / 3 * STEP_S
    assert pays(longest_s, STEP_S, state_copies)
    assert not pays(1.01 * longest_s, STEP_S, state_copies)
    assert caught_up_s(longest_s, STEP_S, state_copies) == pytest.approx(3 * longest_s)

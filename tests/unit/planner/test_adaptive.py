"""Policy adaptive: the cheapest way until the next loss is expected, and the promise before the cost."""

import pickle

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.costs.model import copy_bytes
from oobleckd.planner.placement.precopy import MIN_S, caught_up_s, hidden_s
from oobleckd.planner.placement.transfer import copy_s
from oobleckd.planner.plan import Plan, node_of
from oobleckd.planner.policies import adapt, adaptive, policy, prepare
from oobleckd.planner.policies.adaptive import STOP_S, stop_s
from oobleckd.planner.policy import Action, PlanError, Proposal, Setup, Situation
from oobleckd.planner.schedules.jobshop import base_bytes
from tests.unit.planner.build import even_profile, profile_of, setup_of
from tests.unit.planner.test_oobleck import alive, n0_of_2
from tests.unit.planner.test_slipstream import check, places, started


def asked(setup: Setup, plan: Plan, nodes: str, name: str = "adaptive", **more: float) -> Proposal:
    held = alive(plan, list(nodes))
    situation = Situation(tuple(nodes), held, tuple(places(plan)), **more)
    found = adapt(name, setup, prepare(name, setup), situation)
    check(setup, list(nodes), held, found)
    return found


def moving(**more: int) -> Setup:
    """Eight heavy layers in pipelines of four: a copy takes as long as dozens of steps."""
    heavy = msgspec.structs.replace(even_profile(8, params=10**8), link_bytes_per_s=1e9)
    memory = 2 * 18 * 10**8 + 4 * 2 * 20
    return setup_of(
        heavy, **({"device_memory_bytes": memory, "f": 1, "num_micro_batches": 24, "max_nodes": 7} | more)
    )


def test_it_is_registered_and_says_that_it_re_routes():
    assert policy("adaptive").reroutes
    assert prepare("adaptive", n0_of_2()) == prepare("oobleck", n0_of_2())
    assert pickle.loads(pickle.dumps(policy("adaptive"))).name == "adaptive"


def test_the_start_is_oobleck_s():
    setup, nodes = n0_of_2(), list("abcdefg")
    theirs = adapt("oobleck", setup, prepare("oobleck", setup), Situation(tuple(nodes), {}))
    assert adapt("adaptive", setup, prepare("adaptive", setup), Situation(tuple(nodes), {})) == theirs


def test_what_is_not_expected_to_last_is_not_moved_and_what_is_gets_the_best_plan():
    setup = moving()
    plan = started(setup, list("abcdefghijkl"))
    assert [len(p.nodes) for p in plan.pipelines] == [4, 4, 4]
    left = "abcdefghijk"
    short = asked(setup, plan, left, horizon_steps=2)
    assert short.transfers == ()
    assert short.plan.vacant == ("l/0",)
    (action,) = short.actions
    assert (short.way, action.kind, action.whose) == ("re-route", "re-route", ("l",))
    assert set(action.nodes) < set(left)
    long = asked(setup, plan, left, horizon_steps=1e6)
    assert long.plan.vacant == ()
    assert long.way == "re-instantiate"
    assert long.plan.step_s < short.plan.step_s
    assert [other.way for other in short.rejected] == ["re-instantiate"]
    assert "re-route" in [other.way for other in long.rejected]


def test_whoever_comes_fills_the_place_where_that_pays_and_stands_by_where_not():
    setup = moving()
    plan = started(setup, list("abcdefghijkl"))
    hurt = asked(setup, plan, "abcdefghijk", horizon_steps=2).plan
    fills = asked(setup, hurt, "abcdefghijkx", horizon_steps=1e5)
    assert (fills.way, fills.actions) == ("fill", (Action("take-place", ("x",), ("l",)),))
    waits = asked(setup, hurt, "abcdefghijkx", horizon_steps=2)
    assert waits.way == "re-route"
    assert waits.plan.idle == ("x",)
    assert waits.transfers == ()


def test_nodes_that_come_stand_by_until_what_they_add_pays():
    setup = moving()
    plan = started(setup, list("abcdefghijkl"))
    found = asked(setup, plan, "abcdefghijklwxyz", horizon_steps=2)
    assert (found.way, found.actions) == ("stay", (Action("keep"),))
    assert places(found.plan) == places(plan)
    assert found.plan.idle == tuple("wxyz")
    joined = asked(setup, plan, "abcdefghijklwxyz", horizon_steps=1e6)
    assert (joined.way, joined.actions) == ("re-instantiate", (Action("join", tuple("wxyz")),))
    assert [len(p.nodes) for p in joined.plan.pipelines] == [4, 4, 4, 4]


def test_the_promise_comes_before_the_cost():
    setup = moving(f=2)
    plan = started(setup, list("abcdefghijklmno"))  # three pipelines, so two can be lost
    assert len(plan.pipelines) == 3
    found = asked(setup, plan, "abcdefghijklmn", horizon_steps=1)
    assert found.way == "re-instantiate"
    (stay,) = [other for other in found.rejected if other.way == "re-route"]
    assert stay.cost_s < found.cost_s
    assert (stay.cause, stay.can_lose) == ("can-lose", 1)


def test_what_the_next_loss_may_take_along_is_part_of_the_cost():
    setup = moving(f=0, max_nodes=5)
    plan = started(setup, list("abcdefghi"))
    assert sorted(len(p.nodes) for p in plan.pipelines) == [4, 5]
    left = [n for n in "abcdefghi" if n != plan.pipelines[-1].nodes[-1]]
    calm = asked(setup, plan, "".join(left), horizon_steps=1, redo_s=0.0)
    assert calm.plan.vacant
    risky = asked(setup, plan, "".join(left), horizon_steps=1, redo_s=1e5)
    assert not risky.plan.vacant
    (stay,) = [other for other in risky.rejected if other.way == "re-route"]
    assert stay.risk_s > 0
    (back,) = [other for other in risky.rejected if other.way == "rollback"]
    assert back.cost_s == pytest.approx(risky.cost_s + 1e5)


def test_a_pipeline_that_is_gone_whole_leaves_no_choice():
    setup = moving()
    plan = started(setup, list("abcdefghijkl"))
    found = asked(setup, plan, "efghijkl", horizon_steps=1)
    assert (found.way, found.actions) == ("re-instantiate", (Action("drop", tuple("abcd")),))
    with pytest.raises(PlanError, match="1 usable node, and the model needs 4"):
        adapt("adaptive", setup, prepare("adaptive", setup), Situation(("a",), {}, tuple(places(plan))))


def test_a_stop_is_no_step_where_pipelines_run_empty_at_each_boundary_anyway():
    setup = moving()
    plan = started(setup, list("abcdefghijkl"))
    long = msgspec.structs.replace(plan, step_s=20.0)
    assert stop_s(setup, long) == STOP_S
    assert stop_s(setup, msgspec.structs.replace(plan, step_s=0.01)) == 0.01
    stages, share = len(plan.pipelines[0].segments), len(plan.pipelines[0].micro_batches)
    staggered = msgspec.structs.replace(setup, decoupled=True, staggered=True)
    assert stop_s(staggered, long) == pytest.approx(STOP_S + 20.0 * (stages - 1) / share)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_other_policy_s_way_is_cheaper(data: st.DataObject):
    """Random losses and joins: what it takes costs no more, and leaves no fewer copies than it promises, than
    what the others would do.
    """
    _through_losses_and_joins(data, n0_of_2(f=data.draw(st.integers(0, 2))), 4)


@settings(max_examples=5, deadline=None)  # a search of some tenths of a second in each step
@given(data=st.data())
def test_staggered_updates_are_weighed_alike(data: st.DataObject):
    setup = n0_of_2(f=1, num_micro_batches=6, decoupled=True, staggered=True)
    _through_losses_and_joins(data, setup, 2)


def _through_losses_and_joins(data: st.DataObject, setup: Setup, max_changes: int) -> None:
    nodes = list("abcdefg")
    plan, fresh = started(setup, nodes), iter("uvwxyz")
    for _ in range(data.draw(st.integers(1, max_changes))):
        gone = data.draw(st.sets(st.sampled_from(nodes), max_size=2)) if len(nodes) > 4 else set()
        nodes = sorted({*nodes, *([next(fresh)] if data.draw(st.booleans()) else [])} - gone)
        held = alive(plan, nodes)
        if len(nodes) < 2 or any(not any(n in r for r in held.values()) for n in range(8)):
            return
        horizon = data.draw(st.sampled_from([1.0, 10.0, 1000.0]))
        found = asked(setup, plan, "".join(nodes), horizon_steps=horizon)
        for name in ("oobleck", "slipstream"):
            other = asked(setup, plan, "".join(nodes), name, horizon_steps=horizon)
            if not setup.staggered and _kept(found.plan) <= min(setup.f, _kept(other.plan)):
                steps_s = horizon * other.plan.step_s + stop_s(setup, other.plan)
                bound_s = copy_s(other.transfers, setup.profile) + steps_s
                assert found.cost_s <= bound_s * (1 + 1e-9), (found.reason, other.reason)
            assert min(_kept(found.plan), setup.f) >= min(_kept(other.plan), setup.f)
        plan = found.plan


def _kept(plan: Plan) -> int:
    """Losses that leave every layer a node."""
    holdings = plan.holdings()
    layers = {layer for held in holdings.values() for layer in held.layers()}
    return min(len({node_of(d) for d, held in holdings.items() if layer in held}) for layer in layers) - 1


def stepwise(copy_steps: float, **more: int) -> tuple[Setup, Plan]:
    """Three pipelines of four, without a bound on memory, and links on which a stage of two layers takes so
    many steps to copy.
    """
    rows = [(1e-3, 2e-3, 10, 20, 0)] * 8  # what links carry in a step takes no time
    setup = setup_of(profile_of(rows), min_nodes=4, num_micro_batches=24, **({"f": 1, "max_nodes": 7} | more))
    plan = started(setup, list("abcdefghijkl"))
    assert [len(p.nodes) for p in plan.pipelines] == [4, 4, 4]
    stage = sum(copy_bytes(layer) for layer in setup.profile.layers[:2])
    profile = msgspec.structs.replace(
        setup.profile, link_latency_s=0.0, link_bytes_per_s=stage / (copy_steps * plan.step_s)
    )
    return msgspec.structs.replace(setup, profile=profile), plan


def test_a_plan_is_precopied_where_the_job_loses_little_meanwhile():
    setup, plan = stepwise(1.6)
    hurt = asked(setup, plan, "abcdefghijk", horizon_steps=1).plan
    found = asked(setup, hurt, "abcdefghijkx", horizon_steps=1e5)
    assert found.precopy_s > copy_s(found.transfers, setup.profile)
    (at_once,) = [other for other in found.rejected if other.way == found.way]
    assert at_once.precopy_s == 0
    assert at_once.cost_s > found.cost_s
    assert at_once.cost_s - found.cost_s < copy_s(found.transfers, setup.profile)


@pytest.mark.parametrize("copy_steps", [0.1, 4.0])
def test_short_copies_and_those_that_never_catch_up_are_made_in_the_stop(copy_steps: float):
    setup, plan = stepwise(copy_steps)
    hurt = asked(setup, plan, "abcdefghijk", horizon_steps=1).plan
    found = asked(setup, hurt, "abcdefghijkx", horizon_steps=1e5)
    assert found.transfers
    assert found.precopy_s == 0.0
    assert not any(other.precopy_s for other in found.rejected)


def test_nothing_is_precopied_that_the_next_loss_comes_before():
    setup, plan = stepwise(1.6)
    hurt = asked(setup, plan, "abcdefghijk", horizon_steps=1).plan
    found = asked(setup, hurt, "abcdefghijkx", horizon_steps=0.5)
    assert found.precopy_s == 0.0
    assert not any(other.precopy_s for other in found.rejected)


def test_whoever_is_to_leave_works_until_the_copies_are_there():
    """A drain with a node that stands by: steps are as long meanwhile as they will be, so nothing is lost but
    the switch.
    """
    setup, plan = stepwise(1.6)
    situation = Situation(tuple("abcdefghijkx"), plan.holdings(), tuple(places(plan)), horizon_steps=1e5)
    found = adapt("adaptive", setup, prepare("adaptive", setup), situation)
    assert {copy.target for copy in found.transfers} == {"x/0"}
    copies_s = copy_s(found.transfers, setup.profile)
    assert found.precopy_s == pytest.approx(caught_up_s(copies_s, plan.step_s), rel=0.1)
    (at_once,) = [other for other in found.rejected if other.way == found.way]
    hidden = hidden_s(setup.profile, copies_s, found.plan.step_s)
    assert at_once.cost_s - found.cost_s == pytest.approx(2 / 3 * copies_s - hidden, rel=0.1)


@pytest.mark.parametrize(
    ("copy_steps", "horizon_steps", "begins"), [(0.4, 0.5, False), (0.6, 0.5, True), (4.0, 1e5, True)]
)
def test_copies_begin_in_the_step_under_way_though_nobody_waits_for_them(
    copy_steps: float, horizon_steps: float, begins: bool
):
    setup, plan = stepwise(copy_steps)
    assert 0.5 * plan.step_s < MIN_S
    nodes, running = tuple("abcdefghijkx"), tuple(places(plan))
    drained = Situation(nodes, plan.holdings(), running, horizon_steps=horizon_steps)
    found = adapt("adaptive", setup, prepare("adaptive", setup), drained)
    assert found.transfers
    assert (found.at_once, found.begins, found.precopy_s) == (begins, begins, 0.0)


def test_of_what_is_begun_so_much_less_is_weighed():
    setup, plan = stepwise(0.6)
    drained = Situation(tuple("abcdefghijkx"), plan.holdings(), tuple(places(plan)), horizon_steps=0.5)
    found = adapt("adaptive", setup, prepare("adaptive", setup), drained)
    copies_s = copy_s(found.transfers, setup.profile)
    hidden = hidden_s(setup.profile, copies_s, found.plan.step_s)
    min_s = copies_s + 0.5 * found.plan.step_s - hidden
    assert hidden > 0
    assert found.cost_s == pytest.approx(min_s + stop_s(setup, found.plan))


def test_who_has_no_room_for_copies_beside_training_begins_none():
    setup, plan = stepwise(0.6)
    tight = msgspec.structs.replace(
        setup,
        profile=msgspec.structs.replace(setup.profile, device="cpu"),
        device_memory_bytes=max(base_bytes(setup, held) for held in plan.holdings().values()),
    )
    situation = Situation(tuple("abcdefghijkx"), plan.holdings(), tuple(places(plan)), horizon_steps=0.5)
    templates = prepare("adaptive", setup)
    assert adapt("adaptive", setup, templates, situation).at_once
    assert not adapt("adaptive", tight, templates, situation).at_once


@given(data=st.data())
@settings(max_examples=12)
def test_a_bound_rules_out_what_would_not_be_chosen(data: st.DataObject):
    """Ways whose bound is dearer than to re-instantiate are not looked at; had they been, they would not have
    been taken.
    """
    setup = moving()
    plan = started(setup, list("abcdefghijkl"))
    gone = data.draw(st.sets(st.sampled_from("abcdefghijkl"), min_size=1, max_size=3))
    nodes = "".join(sorted(set("abcdefghijkl") - gone)) + data.draw(st.sampled_from(["", "x"]))
    horizon = data.draw(st.sampled_from([1.0, 20.0, 300.0, 1e5]))
    held = alive(plan, list(nodes))
    if any(not any(n in r for r in held.values()) for n in range(len(setup.profile.layers))):
        return
    found = asked(setup, plan, nodes, horizon_steps=horizon)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "_is_dearer", lambda *_: False)
        looked = asked(setup, plan, nodes, horizon_steps=horizon)
    assert (found.plan, found.cost_s) == (looked.plan, looked.cost_s)
    for bound in found.rejected:
        if bound.at_least:
            same = [other for other in looked.rejected if (other.way, other.precopy_s) == (bound.way, 0)]
            assert [bound.cost_s <= other.cost_s * (1 + 1e-9) for other in same] == [True]


def test_whoever_comes_back_has_its_place():
    setup = moving()
    plan = started(setup, list("abcdefghijkl"))
    hurt = asked(setup, plan, "abcdefghijk", horizon_steps=2).plan
    back = asked(setup, hurt, "abcdefghijkl", horizon_steps=1e5)
    assert (back.way, back.actions) == ("fill", (Action("copy-back", ("l",)),))
    assert places(back.plan) == places(plan)


def test_copies_for_whoever_comes_back_are_weighed_by_the_steps_without_it():
    setup, plan = stepwise(1.6)
    hurt = asked(setup, plan, "abcdefghijk", horizon_steps=1).plan
    fresh, back = (asked(setup, hurt, f"abcdefghijk{node}", horizon_steps=1e5) for node in ("x", "l"))
    assert back.precopy_s == fresh.precopy_s > 0
    assert back.cost_s == pytest.approx(fresh.cost_s)

"""How long a step of a grid is modelled to take, with and without vacant places: what ``adaptive`` weighs
must be alike.
"""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oobleckd.planner.placement.transfer import copy_s
from oobleckd.planner.policies import adapt, prepare
from oobleckd.planner.policies.adaptive import stop_s
from oobleckd.planner.policies.grid import Grid
from oobleckd.planner.policy import Setup, Situation
from oobleckd.planner.reroute.reroute import layout_of
from oobleckd.planner.schedule import parse_ops
from oobleckd.planner.schedules.evaluate import period
from oobleckd.planner.schedules.jobshop import orders_of, shop_of
from oobleckd.planner.schedules.routed import busiest_s, ready_first_s
from oobleckd.planner.schedules.written import NOTHING
from oobleckd.planner.sizing.instantiate import slowest_s
from tests.unit.planner.build import even_profile, setup_of
from tests.unit.planner.test_oobleck import alive, n0_of_2
from tests.unit.planner.test_slipstream import places, started

FORMS = [{}, {"decoupled": True}, {"decoupled": True, "staggered": True}]


def staggered(num_micro_batches: int = 16) -> Setup:
    return setup_of(
        even_profile(8), decoupled=True, staggered=True, num_micro_batches=num_micro_batches, min_nodes=2
    )


@settings(max_examples=15, deadline=None)
@given(num_nodes=st.integers(4, 12), num_micro_batches=st.integers(6, 24))
def test_with_staggered_updates_a_whole_plan_takes_about_what_templates_say(
    num_nodes: int, num_micro_batches: int
):
    setup, nodes = staggered(num_micro_batches), tuple(f"n{number:02}" for number in range(num_nodes))
    found = adapt("oobleck", setup, prepare("oobleck", setup), Situation(nodes, {}))
    shop = shop_of(layout_of(found.plan, 1, 8), setup)
    ran = period(shop, orders_of(shop, {device: parse_ops(text) for device, text in found.ops.items()}))
    assert ran is not None
    assert found.plan.step_s == pytest.approx(ran.seconds, rel=0.1)


def test_a_whole_plan_is_weighed_with_its_schedule_and_not_as_ready_first():
    """For two nodes that came there is a faster plan. Its devices keep to a schedule; if they did whatever is
    ready it would be no faster than the one at work.
    """
    setup, nodes = staggered(), list("abcdefghxy")
    plan = started(setup, nodes[:8])
    situation = Situation(tuple(nodes), alive(plan, nodes), tuple(places(plan)), horizon_steps=1e5)
    templates = prepare("adaptive", setup)
    chosen, anew = (adapt(name, setup, templates, situation) for name in ("adaptive", "oobleck"))
    ready_s = ready_first_s(shop_of(layout_of(anew.plan, 1, 8), setup), staggered=True)
    assert anew.plan.step_s < plan.step_s < ready_s
    assert chosen.way == "re-instantiate"
    assert chosen.plan.step_s == anew.plan.step_s
    bound_s = copy_s(anew.transfers, setup.profile) + 1e5 * anew.plan.step_s + stop_s(setup, anew.plan)
    assert chosen.cost_s == pytest.approx(bound_s)


@pytest.mark.parametrize("changes", FORMS)
def test_a_step_of_too_many_hops_to_run_is_not_taken_for_its_busiest_device(
    changes: dict[str, bool], monkeypatch: pytest.MonkeyPatch
):
    """Else vacant places would look better than a whole plan, which is charged with filling and draining."""
    setup = n0_of_2(num_micro_batches=24, **changes)
    template = {template.num_nodes: template for template in prepare("slipstream", setup)}[3]
    running, whole_s = (("a", "b", "c"), ("d", "e", "f")), slowest_s([template] * 2, [12, 12])

    def grid(here: str) -> Grid:
        return Grid(setup, (template, template), running, dict(enumerate(here)), {}, 100.0)

    as_run_s = grid("abcde").step_s
    monkeypatch.setattr("oobleckd.planner.policies.grid.MAX_HOPS", 10)
    estimated = grid("abcde")
    assert estimated.written == NOTHING
    assert estimated.step_s > max(whole_s, busiest_s(estimated.routes, setup.profile))
    assert estimated.step_s == pytest.approx(as_run_s, rel=0.25)
    assert grid("abcdef").step_s == whole_s


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_routes_lie_below_the_bound_by_which_moves_are_ruled_out(data: st.DataObject):
    setup = n0_of_2(num_micro_batches=data.draw(st.integers(3, 24)))
    by_size = {template.num_nodes: template for template in prepare("slipstream", setup)}
    members = [by_size[size] for size in data.draw(st.lists(st.sampled_from([2, 3]), min_size=2, max_size=3))]
    names = iter("abcdefghi")
    running = tuple(tuple(next(names) for _ in range(template.num_nodes)) for template in members)
    nodes = [name for each in running for name in each]
    gone = data.draw(st.sets(st.sampled_from(nodes), max_size=3))
    here = {slot: name for slot, name in enumerate(nodes) if name not in gone}
    grid = Grid(setup, tuple(members), running, here, {}, 100.0)
    assume(grid.whole)
    assert grid.min_busy_s <= grid.busiest_s * (1 + 1e-12)
    if len(set(members)) == 1 and not gone:
        assert grid.min_busy_s >= 0.6 * grid.busiest_s, "of some use"

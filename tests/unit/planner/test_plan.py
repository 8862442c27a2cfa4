"""The vocabulary of plans: names, copies, tolerance, the layout that a plan leads to."""

from oobleckd.planner.plan import (
    Layout,
    Pipeline,
    Plan,
    Range,
    Route,
    Segment,
    Template,
    device_name,
    node_of,
    tolerance,
)
from oobleckd.planner.reroute.reroute import layout_of

FIRST = (Segment("a/0", Range(0, 2)), Segment("b/0", Range(2, 3)))
SECOND = (Segment("c/0", Range(0, 3)),)
PLAN = Plan((Pipeline(("a", "b"), FIRST, (0, 2)), Pipeline(("c",), SECOND, (1,))))


def test_device_names_split_at_the_last_slash():
    assert node_of(device_name("rack/7", 1)) == "rack/7"


def test_the_layout_of_a_plan_has_a_route_for_every_micro_batch_in_order():
    layout = layout_of(PLAN, 4, 3)
    assert [(r.micro_batch, r.attempt, r.segments) for r in layout.routes] == [
        (0, 4, FIRST),
        (1, 4, SECOND),
        (2, 4, FIRST),
    ]
    assert PLAN.nodes() == ("a", "b", "c")
    assert layout.holders(2) == ("b/0", "c/0")
    assert layout.copies() == (2, 2, 2)
    assert layout.copies({"b/0"}) == (2, 2, 1)


def test_tolerance_is_the_fewest_copies_minus_one():
    assert tolerance(layout_of(PLAN, 1, 3).copies(["c/0"])) == 0
    assert tolerance({0: 3, 1: 2}) == 1
    assert tolerance(Layout(1, 0, {}, ()).copies()) == -1


def test_routes_know_what_they_touch_and_want():
    route = Route(0, 1, FIRST, (1, 2))
    assert route.touches(["b/0"])
    assert not route.touches(["c/0"])
    assert [route.wants(layer) for layer in range(3)] == [False, True, True]
    assert Route(0, 1, FIRST).wants(0)


def test_no_micro_batches_take_no_time():
    template = Template(1, 1, (), fill_s=2.0, period_s=0.5)
    assert [template.time_s(m) for m in (0, 1, 3)] == [0.0, 2.0, 3.0]

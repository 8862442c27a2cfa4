"""Dry runs: by hand, against the cost model, and deadlocks that explain themselves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.costs.work import StageWork
from oobleckd.planner.placement.transfer import segments_on
from oobleckd.planner.plan import Pipeline, Plan
from oobleckd.planner.profile import Profile
from oobleckd.planner.schedule import Op, one_f_one_b, parse_ops
from oobleckd.planner.schedules.timeline import Deadlock, dry_run, dry_run_plan, dry_run_works
from oobleckd.planner.templates.template import templates
from tests.unit.planner.build import profiles, setup_of


def unit_cost(_device: str, op: Op) -> float:
    return {"F": 1.0, "B": 2.0, "R": 0.5, "U": 0.25}.get(op.kind, 0.0)


def test_two_stages_by_hand():
    ops = {"a/0": one_f_one_b(2, 0, [0, 1]), "b/0": one_f_one_b(2, 1, [0, 1])}
    run = dry_run(ops, unit_cost)
    # a: F0 F1 . . B0 . B1      b: . F0 B0 B0 F1 B1 B1, then R and U.
    assert run.makespan_s == 1 + 3 + 3 + 2 + 0.75
    assert run.bubble["a/0"] == pytest.approx(3 / 9.75)
    assert run.in_flight == {"a/0": 2, "b/0": 1}
    assert [(str(s.op), s.start_s) for s in run.spans["b/0"]][:3] == [
        ("1RA0", 1.0),
        ("1F0", 1.0),
        ("1B0", 2.0),
    ]


def test_pipelines_wait_for_each_other_only_to_reduce():
    ops = {"a/0": one_f_one_b(1, 0, [0, 1, 2]), "b/0": one_f_one_b(1, 0, [3])}
    run = dry_run(ops, unit_cost)
    assert [s.start_s for s in run.spans["b/0"] if s.op.kind == "R"] == [9.0]
    assert run.bubble == {"a/0": 0.0, "b/0": pytest.approx(6 / 9.75)}


def test_an_empty_run_takes_no_time():
    assert dry_run({}, unit_cost).makespan_s == 0.0
    assert dry_run({"a/0": ()}, unit_cost).bubble == {"a/0": 0.0}


@settings(max_examples=100, deadline=None)
@given(profiles(even_cuts=True), st.integers(1, 9))
def test_the_model_bounds_the_dry_run_from_above_where_cuts_are_alike(profile: Profile, m: int):
    for template in templates(setup_of(profile, num_micro_batches=m, f=0)):
        nodes = tuple(f"n{k}" for k in range(template.num_nodes))
        plan = Plan((Pipeline(nodes, segments_on(template, nodes), tuple(range(m))),))
        run = dry_run_plan(plan, profile)
        assert run.makespan_s <= template.time_s(m) * (1 + 1e-9)
        assert run.makespan_s >= template.fill_s * (1 - 1e-9)
        assert list(run.in_flight.values()) == [
            min(template.num_nodes - s, m) for s in range(template.num_nodes)
        ]


def test_a_decoupled_backward_by_hand():
    ops = {
        "a/0": parse_ops("0F0 0SA0 0F1 0SA1 0RG0 0I0 0RG1 0I1 0W0 0W1 R U"),
        "b/0": parse_ops("1RA0 1F0 1I0 1SG0 1RA1 1F1 1I1 1SG1 1W0 1W1 R U"),
    }
    work = StageWork(1.0, 1.0, 1.0, 0.0, 0.0, activation_bytes=10, kept_bytes=7, base_bytes=100)
    run = dry_run_works(ops, {"a/0": work, "b/0": work})
    # a: F0 F1 . I0 . I1 W0 W1      b: . F0 I0 F1 I1 W0 W1
    assert run.makespan_s == 8.0
    assert run.bubble == {"a/0": 0.25, "b/0": 0.25}
    assert run.peak_bytes == {"a/0": 120, "b/0": 117}


@settings(max_examples=30, deadline=None)
@given(profiles(), st.integers(1, 5))
def test_the_peak_is_what_the_template_says(profile: Profile, m: int):
    for template in templates(setup_of(profile, num_micro_batches=m, f=0)):
        nodes = tuple(f"n{k}" for k in range(template.num_nodes))
        plan = Plan((Pipeline(nodes, segments_on(template, nodes), tuple(range(m))),))
        peak = dry_run_plan(plan, profile).peak_bytes
        assert list(peak.values()) == [stage.memory_bytes for stage in template.stages]


def test_a_deadlock_names_the_ops_that_wait_for_each_other():
    first = parse_ops("0RG0 0F0 0SA0 0B0 R U")
    with pytest.raises(Deadlock) as caught:
        dry_run({"a/0": first, "b/0": one_f_one_b(2, 1, [0])}, unit_cost)
    assert str(caught.value) == (
        "deadlock: a/0 at 0RG0 waits for 1SG0 of b/0; b/0 at 1RA0 waits for 0SA0 of a/0"
    )


def test_a_receive_without_a_send_and_a_reduce_that_others_miss():
    with pytest.raises(Deadlock) as caught:
        dry_run({"a/0": parse_ops("R U"), "b/0": parse_ops("1RA0 R"), "c/0": parse_ops("U")}, unit_cost)
    assert str(caught.value) == (
        "deadlock: a/0 at R waits for b/0, c/0; b/0 at 1RA0 waits for 0SA0, which nobody sends"
    )

"""Decoupled schedules: valid, within memory, no slower than 1F1B, and the best of all small ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.decoupled import best_orders, decoupled, decoupled_plan
from planner.orders import durations, improve, least_makespan_s, run
from planner.plan import Pipeline, Plan, Range, Segment
from planner.schedule import Op, ScheduleError, format_ops, one_f_one_b
from planner.timeline import dry_run_plan, dry_run_works
from planner.validator import validate
from planner.work import StageWork, most_in_flight
from tests.unit.planner.brute import shortest_s
from tests.unit.planner.build import even_profile


def by_stage(each):
    return {f"n{stage}/0": item for stage, item in enumerate(each)}


@st.composite
def pipelines(draw: st.DrawFn, num_stages: int) -> list[StageWork]:
    whole = st.integers(1, 9)
    room = draw(st.sampled_from([0, 12, 17, 24, 40]))
    cuts = [0, *(draw(st.integers(0, 2)) for _ in range(num_stages - 1)), 0]
    return [
        StageWork(
            draw(whole),
            draw(whole),
            draw(whole),
            cuts[stage + 1],
            cuts[stage],
            activation_bytes=draw(st.integers(6, 12)),
            kept_bytes=draw(st.integers(0, 6)),
            base_bytes=5,
            limit_bytes=room and room + 5,
        )
        for stage in range(num_stages)
    ]


def test_two_stages_and_two_micro_batches():
    works = [StageWork(1.0, 1.0, 1.0)] * 2
    first, last = decoupled(works, [4, 7])
    assert format_ops(first) == "0F4 0SA4 0F7 0SA7 0RG4 0I4 0W4 0RG7 0I7 0W7 R U"
    assert format_ops(last) == "1RA4 1F4 1I4 1SG4 1RA7 1F7 1I7 1SG7 1W4 1W7 R U"
    assert dry_run_works(by_stage([first, last]), by_stage(works)).makespan_s == 7.0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5).flatmap(pipelines), st.integers(0, 6))
def test_valid_within_memory_and_no_slower_than_1f1b(works: list[StageWork], num: int):
    ops = decoupled(works, range(num), effort=20_000)
    validate(ops, range(num), works)
    timed = dry_run_works(by_stage(ops), by_stage(works))
    caps = most_in_flight(works)
    coupled = [one_f_one_b(len(works), s, range(num), cap) for s, cap in enumerate(caps)]
    assert timed.makespan_s <= dry_run_works(by_stage(coupled), by_stage(works)).makespan_s
    assert timed.makespan_s >= least_makespan_s(works, num)
    assert ops == decoupled(works, range(num), effort=20_000)


@pytest.mark.parametrize(("num_stages", "num"), [(2, 3), (3, 2)])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_best_of_all_orders(data: st.DataObject, num_stages: int, num: int):
    works = data.draw(pipelines(num_stages))
    best_s = shortest_s(works, num)
    found = run(durations(works), best_orders(works, num))
    assert found is not None
    assert best_s <= found.makespan_s <= 1.02 * best_s
    assert least_makespan_s(works, num) <= best_s


def test_the_search_mends_a_poor_order():
    works = [StageWork(2.0, 3.0, 1.0), StageWork(3.0, 2.0, 2.0), StageWork(1.0, 2.0, 4.0)]
    poor = ("FIWFIWFIWFIW",) * 3
    bound_s = least_makespan_s(works, 4)
    assert run(durations(works), poor).makespan_s == 56.0
    assert improve(works, poor, 0, bound_s) == (56.0, poor, 0)
    found = improve(works, poor, 200_000, bound_s)
    assert found.makespan_s == bound_s
    assert found.ops_left > 0
    assert run(durations(works), found.orders).makespan_s == bound_s


def test_orders_that_wait_for_each_other_do_not_run():
    assert run(durations([StageWork(1, 1, 1)] * 2), ("FIWFIW", "FFIWIW")) is None


def test_no_room_for_one_micro_batch():
    with pytest.raises(ScheduleError, match="stage 0 needs 10 bytes for one micro-batch in flight"):
        decoupled([StageWork(1, 1, 1, activation_bytes=10, limit_bytes=9)], [0])


def test_pipelines_of_a_plan_and_one_without_micro_batches():
    profile = even_profile(4)
    stages = (Range(0, 2), Range(2, 4))
    nodes = [("a", "b"), ("c", "d"), ("e", "f")]
    shares = [(0, 1, 2), (3, 4, 5), ()]
    plan = Plan(
        tuple(
            Pipeline(
                names, tuple(Segment(f"{n}/0", held) for n, held in zip(names, stages, strict=True)), share
            )
            for names, share in zip(nodes, shares, strict=True)
        )
    )
    ops = decoupled_plan(plan, profile, 0)
    for pipeline in plan.pipelines:
        validate([ops[s.device] for s in pipeline.segments], pipeline.micro_batches, [StageWork(1, 1, 1)] * 2)
    assert [op.kind for op in ops["a/0"]] == [op.kind for op in ops["c/0"]]
    assert ops["e/0"] == (Op("R"), Op("U"))
    assert dry_run_plan(plan, profile, ops).makespan_s < dry_run_plan(plan, profile).makespan_s

"""Decoupled schedules: valid, within memory, no slower than 1F1B, and the best of all small ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from oobleckd.planner.costs.work import DeviceWork, StageWork, max_in_flight
from oobleckd.planner.plan import Pipeline, Plan, Range, Segment
from oobleckd.planner.schedule import Op, ScheduleError, format_ops, one_f_one_b, parse_op
from oobleckd.planner.schedules import orders
from oobleckd.planner.schedules.decoupled import best_orders, decoupled, decoupled_orders, ops_of
from oobleckd.planner.schedules.orders import improve, min_makespan_s, run
from oobleckd.planner.schedules.pipe import Pipe
from oobleckd.planner.schedules.timeline import dry_run_plan, dry_run_works
from oobleckd.planner.schedules.validator import validate
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
    caps = max_in_flight(works)
    coupled = [one_f_one_b(len(works), s, range(num), cap) for s, cap in enumerate(caps)]
    assert timed.makespan_s <= dry_run_works(by_stage(coupled), by_stage(works)).makespan_s
    assert timed.makespan_s >= min_makespan_s(Pipe.of(works), num)
    assert ops == decoupled(works, range(num), effort=20_000)


@pytest.mark.parametrize(("num_stages", "num"), [(2, 3), (3, 2)])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_best_of_all_orders(data: st.DataObject, num_stages: int, num: int):
    works = data.draw(pipelines(num_stages))
    best_s = shortest_s(works, num)
    found = run(Pipe.of(works), best_orders(Pipe.of(works), num))
    assert found is not None
    assert best_s <= found.makespan_s <= 1.02 * best_s
    assert min_makespan_s(Pipe.of(works), num) <= best_s


def test_the_search_mends_a_poor_order():
    works = [StageWork(2.0, 3.0, 1.0), StageWork(3.0, 2.0, 2.0), StageWork(1.0, 2.0, 4.0)]
    poor = ("FIWFIWFIWFIW",) * 3
    bound_s = min_makespan_s(Pipe.of(works), 4)
    assert run(Pipe.of(works), poor).makespan_s == 56.0
    assert improve(Pipe.of(works), poor, 0, bound_s) == (56.0, poor, 0)
    found = improve(Pipe.of(works), poor, 200_000, bound_s)
    assert found.makespan_s == bound_s
    assert found.ops_left > 0
    assert run(Pipe.of(works), found.orders).makespan_s == bound_s


def test_of_a_long_round_the_likeliest_changes_are_tried(monkeypatch: pytest.MonkeyPatch):
    works = [StageWork(2.0, 3.0, 1.0), StageWork(3.0, 2.0, 2.0), StageWork(1.0, 2.0, 4.0)]
    poor, size = ("FIWFIWFIWFIW",) * 3, 36
    bound_s = min_makespan_s(Pipe.of(works), 4)
    every = improve(Pipe.of(works), poor, 1, bound_s)
    monkeypatch.setattr(orders, "MAX_PER_ROUND", 5 * size)
    few = improve(Pipe.of(works), poor, 1, bound_s)
    assert every.ops_left < few.ops_left == 1 - 5 * size
    assert few.makespan_s <= 56.0


def test_orders_that_wait_for_each_other_do_not_run():
    assert run(Pipe.of([StageWork(1, 1, 1)] * 2), ("FIWFIW", "FFIWIW")) is None


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
    ops = ops_of(plan, decoupled_orders(plan, profile, 0))
    for pipeline in plan.pipelines:
        validate([ops[s.device] for s in pipeline.segments], pipeline.micro_batches, [StageWork(1, 1, 1)] * 2)
    assert [op.kind for op in ops["a/0"]] == [op.kind for op in ops["c/0"]]
    assert ops["e/0"] == (Op("R"), Op("U"))
    assert dry_run_plan(plan, profile, ops).makespan_s < dry_run_plan(plan, profile).makespan_s


# ---------------------------------------------------------------------- two chunks a device


def timed_v(works, ops):
    """The run of ``ops`` on devices with two stages of ``works`` each."""
    stages = Pipe.of(works, 2).stages
    return dry_run_works(by_stage(ops), by_stage(DeviceWork({s: works[s] for s in each}) for each in stages))


def halves(num_devices: int, *, memory: int) -> list[StageWork]:
    """Two equal stages a device, F, I and W of one second each together; ``memory`` in micro-batches of a
    device.
    """
    return [StageWork(0.5, 0.5, 0.5, activation_bytes=50, kept_bytes=50, limit_bytes=memory * 100)] * (
        2 * num_devices
    )


@pytest.mark.parametrize(
    ("num_devices", "num", "at_least"), [(2, 4, 0.96), (4, 8, 0.94), (4, 16, 0.969), (8, 16, 0.93)]
)
def test_two_chunks_leave_half_the_bubble_in_the_memory_of_1f1bs_first_stage(num_devices, num, at_least):
    works = halves(num_devices, memory=num_devices)
    ops = decoupled(works, range(num), effort=20_000, chunks=2)
    validate(ops, range(num), works, chunks=2)
    validate(ops, range(num), chunks=2)
    timed = timed_v(works, ops)
    assert at_least <= 3 * num / timed.makespan_s
    assert timed.makespan_s == pytest.approx(min_makespan_s(Pipe.of(works, 2), num)), "nothing is shorter"
    assert max(timed.peak_bytes.values()) <= 100 * num_devices
    whole = [StageWork(1.0, 1.0, 1.0, activation_bytes=100, kept_bytes=100, limit_bytes=100 * num_devices)]
    plain = decoupled(whole * num_devices, range(num), effort=20_000)
    waits = dry_run_works(by_stage(plain), by_stage(whole * num_devices)).makespan_s - 3 * num
    assert timed.makespan_s - 3 * num <= 0.6 * waits


def test_two_chunks_of_one_micro_batch_as_text():
    works = [StageWork(1.0, 1.0, 1.0)] * 4
    first, last = decoupled(works, [5], chunks=2)
    assert format_ops(first) == "0F5 0SA5 3RA5 3F5 3I5 3SG5 3W5 0RG5 0I5 0W5 R U"
    assert format_ops(last) == "1RA5 1F5 1SA5 2RA5 2F5 2SA5 2RG5 2I5 2SG5 1RG5 1I5 1SG5 2W5 1W5 R U"
    assert timed_v(works, [first, last]).makespan_s == 9.0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4).flatmap(lambda devices: pipelines(2 * devices)), st.integers(0, 6))
def test_two_chunks_are_valid_and_within_memory(works: list[StageWork], num: int):
    roomy = [replace(work, limit_bytes=work.limit_bytes and work.limit_bytes + 17) for work in works]
    ops = decoupled(roomy, range(num), effort=5_000, chunks=2)
    validate(ops, range(num), roomy, chunks=2)
    assert timed_v(roomy, ops).makespan_s >= min_makespan_s(Pipe.of(roomy, 2), num)
    assert ops == decoupled(roomy, range(num), effort=5_000, chunks=2)


@pytest.mark.parametrize("num_devices", [2, 3])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_one_micro_batch_over_two_chunks_takes_as_long_as_it_must(data: st.DataObject, num_devices: int):
    works = [replace(work, limit_bytes=0) for work in data.draw(pipelines(2 * num_devices))]
    pipe = Pipe.of(works, 2)
    found = run(pipe, best_orders(pipe, 1))
    assert found is not None
    assert min_makespan_s(pipe, 1) <= shortest_s(works, 1, 2) == found.makespan_s


def test_no_room_for_one_micro_batch_in_each_chunk():
    work = StageWork(1, 1, 1, activation_bytes=10, limit_bytes=19)
    with pytest.raises(ScheduleError, match="stage 0 and 3 needs 20 bytes for one micro-batch in flight"):
        decoupled([work] * 4, [0], chunks=2)


def test_what_two_chunks_owe_is_checked():
    works = halves(2, memory=2)
    first, last = decoupled(works, [0, 1], chunks=2)
    with pytest.raises(ScheduleError, match="stage 0 and 3: 3W1 is missing"):
        validate([[op for op in first if str(op) != "3W1"], last], [0, 1], works, 2)
    swapped = list(last)
    at, behind = swapped.index(parse_op("2F0")), swapped.index(parse_op("2I0"))
    swapped[at], swapped[behind] = swapped[behind], swapped[at]
    with pytest.raises(ScheduleError, match=r"stage 2: 2(I|SA)0 comes before 2F0"):
        validate([first, swapped], [0, 1], works, 2)
    with pytest.raises(
        ScheduleError, match="stage 0 and 3 holds 200 bytes at its peak and its device has 150"
    ):
        validate([first, last], [0, 1], [replace(work, limit_bytes=150) for work in works], 2)


def test_a_plan_with_a_pipeline_of_each_form():
    profile = even_profile(4)
    cuts = [Range(layer, layer + 1) for layer in range(4)]
    v = tuple(Segment(f"{node}/0", cut) for node, cut in zip("abba", cuts, strict=True))
    plain = (Segment("c/0", Range(0, 2)), Segment("d/0", Range(2, 4)))
    plan = Plan((Pipeline(("a", "b"), v, (0, 1, 2)), Pipeline(("c", "d"), plain, (3, 4))))
    ops = ops_of(plan, decoupled_orders(plan, profile, 0))
    assert sorted(ops) == ["a/0", "b/0", "c/0", "d/0"]
    validate([ops["a/0"], ops["b/0"]], (0, 1, 2), chunks=2)
    timed = dry_run_plan(plan, profile, ops)
    assert timed.peak_bytes["a/0"] <= 2 * 180 + 2 * 2 * 20
    assert timed.bubble["a/0"] < timed.bubble["c/0"]
    # Between the two stages of b nothing is on its way.
    spans = {str(span.op): span for span in timed.spans["b/0"]}
    assert spans["1SA0"].stop_s == spans["1SA0"].start_s
    assert spans["2SA0"].stop_s > spans["2SA0"].start_s

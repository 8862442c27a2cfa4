"""Schedules: text form, 1F1B within memory, and a validator that finds every kind of fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.planner.costs.work import StageWork, max_in_flight
from oobleckd.planner.plan import Pipeline, Plan, Range, Segment
from oobleckd.planner.schedule import (
    Op,
    ScheduleError,
    format_ops,
    in_flight,
    one_f_one_b,
    parse_op,
    parse_ops,
    schedules,
)
from oobleckd.planner.schedules.timeline import dry_run
from oobleckd.planner.schedules.validator import validate


def test_text_of_the_middle_stage_of_three():
    text = "1RA0 1F0 1SA0 1RA1 1F1 1SA1 1RG0 1B0 1SG0 1RG1 1B1 1SG1 R U"
    assert format_ops(one_f_one_b(3, 1, [0, 1])) == text
    assert parse_ops(text) == one_f_one_b(3, 1, [0, 1])


@pytest.mark.parametrize("word", ["F0", "2F", "2X0", "2SF0", "2R0", "-1F0", "RU", "2f0"])
def test_words_that_are_no_ops(word: str):
    with pytest.raises(ScheduleError, match=r"is no op: it reads <stage><kind><micro-batch>"):
        parse_op(word)


def test_decoupled_ops_have_a_text_form_too():
    assert parse_ops("2I0  2W13\nU") == (Op("I", 2, 0), Op("W", 2, 13), Op("U"))


@given(st.integers(1, 6), st.lists(st.integers(0, 99), unique=True, max_size=9))
def test_1f1b_is_valid_and_reads_back(num_stages: int, micro_batches: list[int]):
    stages = [one_f_one_b(num_stages, stage, micro_batches) for stage in range(num_stages)]
    validate(stages, micro_batches)
    for stage, ops in enumerate(stages):
        assert parse_ops(format_ops(ops)) == ops
        assert in_flight(ops) == min(num_stages - stage, len(micro_batches))


def test_a_receive_names_the_send_it_waits_for():
    assert Op("RA", 2, 5).source() == Op("SA", 1, 5)
    assert Op("RG", 2, 5).source() == Op("SG", 3, 5)
    assert Op("F", 2, 5).source() is None


LAST = "1RA0 1F0 1B0 1SG0 R U"


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        ("0F0 0SA0 0RG0 R U", "stage 0: 0B0 is missing"),
        ("0F0 0F0 0SA0 0RG0 0B0 R U", "stage 0: 0F0 is there twice"),
        ("0F0 0SA0 0RG0 0B0 0F1 R U", "stage 0: 0F1 is not asked for"),
        ("0F0 0RG0 0B0 R U", "stage 0: 0SA0 is missing"),
        ("0SA0 0F0 0RG0 0B0 R U", "stage 0: 0SA0 comes before 0F0"),
        ("0F0 0SA0 0B0 0RG0 R U", "stage 0: 0B0 comes before 0RG0"),
        ("0F0 0SA0 0RG0 R 0B0 U", "stage 0: ends with 0B0 U, not with R U"),
        ("0F0 0SA0 0RG0 0W0 0I0 R U", "stage 0: 0W0 comes before 0I0"),
        ("0F0 0SA0 0RG0 0B0 0W0 R U", "stage 0: 0B0 is not asked for"),
    ],
)
def test_the_validator_names_the_fault(first: str, problem: str):
    with pytest.raises(ScheduleError) as caught:
        validate([parse_ops(first), parse_ops(LAST)], [0])
    assert str(caught.value) == problem


def test_a_decoupled_backward_is_valid():
    validate([parse_ops("0F0 0SA0 0RG0 0I0 0W0 R U"), parse_ops(LAST)], [0])


def test_too_many_in_flight_are_found():
    last = "1RA0 1F0 1RA1 1F1 1B0 1SG0 1B1 1SG1 R U"
    with pytest.raises(ScheduleError, match="stage 1 holds 2 micro-batches in flight, 1F1B at most 1"):
        validate([one_f_one_b(2, 0, [0, 1]), parse_ops(last)], [0, 1])


def test_too_many_bytes_are_found():
    work = StageWork(1.0, 1.0, 1.0, activation_bytes=1000, kept_bytes=600, base_bytes=50, limit_bytes=2000)
    with pytest.raises(ScheduleError) as caught:
        validate([parse_ops("0F0 0F1 0I0 0I1 0W0 0W1 R U")], [0, 1], [work])
    assert str(caught.value) == "stage 0 holds 2,050 bytes at its peak and its device has 2,000"
    validate([parse_ops("0F0 0I0 0W0 0F1 0B1 R U")], [0, 1], [work])
    with pytest.raises(ScheduleError, match="2,050"):
        validate([one_f_one_b(2, 0, [0, 1]), one_f_one_b(2, 1, [0, 1])], [0, 1], [work, work])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 9))
def test_1f1b_within_memory_runs_and_fits(room: list[int], num: int):
    works = [StageWork(1.0, 1.0, 1.0, activation_bytes=10, limit_bytes=10 * each) for each in room]
    caps = max_in_flight(works)
    stages = [one_f_one_b(len(works), s, range(num), cap) for s, cap in enumerate(caps)]
    validate(stages, range(num), works)
    dry_run({f"n{s}/0": ops for s, ops in enumerate(stages)}, lambda _device, _op: 1.0)
    if min(room) >= len(room):
        assert stages == [one_f_one_b(len(works), s, range(num)) for s in range(len(works))]


def test_no_room_for_one_micro_batch():
    works = [StageWork(1.0, 1.0, 1.0), StageWork(1.0, 1.0, 1.0, activation_bytes=1500, limit_bytes=1000)]
    with pytest.raises(ScheduleError) as caught:
        max_in_flight(works)
    assert str(caught.value) == (
        "stage 1 needs 1,500 bytes for one micro-batch in flight and the device has 1,000: raise "
        "resources.device_memory, or lower train.micro_batch"
    )


def test_every_device_of_a_plan_gets_a_schedule():
    segments = (Segment("a/0", Range(0, 2)), Segment("b/0", Range(2, 4)))
    plan = Plan(
        (Pipeline(("a", "b"), segments, (0, 1)), Pipeline(("c",), (Segment("c/0", Range(0, 4)),), ()))
    )
    made = schedules(plan)
    assert format_ops(made["b/0"]) == "1RA0 1F0 1B0 1SG0 1RA1 1F1 1B1 1SG1 R U"
    assert format_ops(made["c/0"]) == "R U"

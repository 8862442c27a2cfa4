"""What the exchange of gradients costs: from readings and op times, worked out by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.exchange import (
    BLOCKS,
    Cost,
    Reading,
    cost_of,
    counted,
    exchange_s,
    goals_of,
    job_of,
    num_parameters,
    quartiles,
)
from oobleckd.protocol.watch import LaneView, OpKind, OpView, ScheduleView
from oobleckd.worker.models import load_spec

METRICS = """# TYPE oobleck_job_gradient_bytes_total counter
oobleck_job_gradient_bytes_total{job="j",device="a/0"} 700.0
# TYPE oobleck_job_gradient_messages_total counter
oobleck_job_gradient_messages_total{job="j",device="a/0"} 4.0
# TYPE oobleck_job_step gauge
oobleck_job_step{job="j"} 4.0
"""


def lane(device: str, *ops: tuple[OpKind, float, float]) -> LaneView:
    views = tuple(OpView(kind, 0, 0, start_s, stop_s) for kind, start_s, stop_s in ops)
    return LaneView(device, 0, (0,), views, 0.0)


def test_an_exchange_lasts_from_the_last_backward_to_the_last_update() -> None:
    lanes = (
        lane("a/0", ("F", 0.0, 1.0), ("B", 1.0, 3.0), ("U", 5.5, 5.6)),
        lane("b/0", ("F", 0.0, 1.0), ("B", 1.0, 2.5), ("U", 5.0, 6.6)),
    )
    assert exchange_s(ScheduleView("job", 1, 1, 0.0, True, 6.6, lanes)) == pytest.approx(2.5)


def test_cost_of_a_step_and_device() -> None:
    unit = num_parameters()
    begin = Reading(
        {"a": 10 * unit, "b": 0, "c": 0}, {"a": 1.0, "b": 2.0}, {"a": 0, "b": 0}, {"a": 3, "b": 3}
    )
    end = Reading(
        {"a": 26 * unit, "b": 8 * unit, "c": 99}, {"a": 2.0, "b": 4.0}, {"a": 12 * unit, "b": 16 * unit},
        {"a": 11, "b": 7},
    )  # fmt: skip
    assert cost_of(begin, end, ["a", "b"], 2, [1.0, 3.0], [4.0, 4.0]) == Cost(
        2.0, 4.0, 7.0, 8.0, 6.0, 8.0, 3.0, 4.0, 0.75, 1.0
    )


def test_what_a_daemon_does_not_count_is_not_told() -> None:
    one = Reading({"a": 0}, {"a": 0}, {}, {})
    found = cost_of(one, one, ["a"], 1, [1.0], [1.0])
    assert math.isnan(found.bytes)
    assert math.isnan(found.most_messages)
    assert found.link_bytes == 0


def test_counters_by_node() -> None:
    assert dict(counted(METRICS)) == {("bytes", "a"): 700.0, ("messages", "a"): 4.0}


def test_parameters_are_the_model_s() -> None:
    spec = load_spec(job_of(2, 1, 1))
    assert num_parameters() == sum(math.prod(shape) for bucket in spec.buckets for shape in bucket.shapes)
    assert spec.num_layers == BLOCKS + 2


@pytest.mark.parametrize(
    ("replicas", "what", "ratio", "met"),
    [
        (8, "exchange_s", (0.1, 0.33, 0.9), [True]),
        (8, "exchange_s", (0.1, 0.34, 0.9), [False]),
        (2, "exchange_s", (2.0, 3.0, 4.0), []),
        (2, "bytes", (1.0, 1.0, 1.0), [True]),
        (2, "cpu_s", (0.98, 1.03, 1.1), [True]),
        (2, "cpu_s", (1.01, 1.03, 1.1), [False]),
        (8, "messages", (1.5, 1.5, 1.5), []),
        (2, "messages", (math.nan, math.nan, math.nan), []),
    ],
)
def test_goals(replicas: int, what: str, ratio: tuple[float, float, float], met: list[bool]) -> None:
    found = goals_of({"replicas": replicas, "what": what, "ratio": ratio})
    assert [is_met for _, is_met in found] == met


def test_quartiles() -> None:
    assert quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert quartiles([5.0, 1.0, 2.0, 3.0, 4.0]) == (2.0, 3.0, 4.0)

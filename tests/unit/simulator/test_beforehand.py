"""Copies beforehand in a simulated cluster: training goes on meanwhile, and the stop has none."""

from __future__ import annotations

import pytest

from oobleckd.simulator.outcome import Outcome
from oobleckd.simulator.traces import Event
from oobleckd.simulator.world import simulate
from planner import beforehand
from tests.unit.simulator.build import even_profile, job_of, question, trace_of

LINK_BYTES_PER_S = 320.0
"""A stage of two layers, 180 bytes, takes 0.56 s; with six micro-batches a pipeline a step takes 0.42 s, with four 0.30."""
JOINS = (Event(10.0, "join", "node-5"), Event(10.0, "join", "node-6"))


def run(*events: Event) -> Outcome:
    profile = even_profile(link_bytes_per_s=LINK_BYTES_PER_S)
    found = simulate(question("oobleck", trace_of(4, *events), profile=profile, job=job_of(12)))
    booked = found.useful_device_s + sum(found.lost_device_s.values())
    assert booked == pytest.approx(found.live_device_s, abs=1e-9)
    return found


def test_a_join_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = run(*JOINS)
    assert ahead.plans == 2
    assert ahead.lost_device_s["copy"] == 0.0
    monkeypatch.setattr(beforehand, "MOST_STEPS", 0.0)
    stopped = run(*JOINS)
    assert stopped.plans == 2
    assert stopped.lost_device_s["copy"] == pytest.approx(6 * 180 / LINK_BYTES_PER_S)


@pytest.mark.parametrize("after_s", [0.35, 0.5, 0.7, 0.9, 1.1])
def test_a_target_that_is_lost_meanwhile_is_not_waited_for(after_s: float) -> None:
    found = run(*JOINS, Event(10.0 + after_s, "fail", "node-6"))
    assert found.rollbacks == 0
    assert found.steps > 30


@pytest.mark.parametrize("after_s", [0.35, 0.5, 0.7, 0.9, 1.1])
def test_a_source_that_is_lost_meanwhile(after_s: float) -> None:
    found = run(*JOINS, Event(10.0 + after_s, "fail", "node-1"))
    assert found.rollbacks == 0
    assert found.plans >= 2

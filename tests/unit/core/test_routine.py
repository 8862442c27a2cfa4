"""What the core does not look at when thousands of devices say the same: it must not matter."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from oobleckd.core.machine import Machine
from oobleckd.core.membership import Membership
from oobleckd.core.state import JobRecord
from oobleckd.planner.plan import Layers, Layout, Range
from oobleckd.protocol.parts import Counters
from oobleckd.simulator.failures import memoryless
from oobleckd.simulator.world import simulate
from tests.unit.simulator.build import job_of, question


def test_survivors_follow_the_layout_and_the_dead() -> None:
    job = JobRecord("job-1", job_of(), 0.0, "init", Counters(), Counters())
    assert job.survivors() == ()
    held = Layers.of(Range(0, 1))
    job.layout = Layout(1, 1, {"b/0": held, "a/0": held, "c/0": held}, ())
    assert job.survivors() == ("a/0", "b/0", "c/0") == job.survivors()
    job.dead = ("b/0",)
    assert job.survivors() == ("a/0", "c/0")
    assert job.surviving_nodes() == {"a", "c"}
    job.layout = msgspec.structs.replace(job.layout, holdings={"b/0": held, "d/0": held})
    assert job.survivors() == ("d/0",)
    assert job.surviving_nodes() == {"d"}
    job.undeploy("init")
    assert job.survivors() == ()
    assert job.surviving_nodes() == frozenset()


@pytest.mark.parametrize("policy", ["oobleck", "slipstream"])
def test_a_core_that_looks_at_everything_every_time_decides_the_same(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = question(policy, memoryless(6, 10.0, 15.0, 120.0, seed=5), job=job_of(12, every=20))
    found = simulate(asked)
    assert found.losses > 5
    monkeypatch.setattr(Machine, "_is_routine", lambda _machine, _event: False)
    assert simulate(asked) == found
    always_new = count()
    turns = property(lambda _members: next(always_new), lambda _members, _value: None)
    monkeypatch.setattr(Membership, "turns", turns)  # so all incarnations are looked at as well
    assert simulate(asked) == found
    assert next(always_new) > 100

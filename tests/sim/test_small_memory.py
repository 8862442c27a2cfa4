"""A daemon that keeps next to nothing in memory, under failures: what is older is in its journal, also that
which it goes back to.
"""

from __future__ import annotations

from typing import get_args

import pytest

from oobleckd.core import apply, state
from oobleckd.core.entries import RolledBack
from oobleckd.daemon import stepstore
from oobleckd.protocol.job import PolicyName
from tests.helpers.world import World
from tests.sim.test_chaos import stormy

NUM_KEPT = 8


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "KEPT_STEPS", NUM_KEPT)
    monkeypatch.setattr(apply, "KEPT_INCIDENTS", 3)


@pytest.mark.thin(32)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_storm(policy: PolicyName, seed: int) -> None:
    stormy(1000 + seed, policy)


@pytest.mark.parametrize("every", [0, 12])
def test_back_to_before_all_that_is_in_memory(every: int) -> None:
    """To the start, or to a checkpoint; and the daemon begins anew before it trains again."""
    world = World(4, 4, snapshot_every=20)
    world.run_for(1.0)
    world.submit(steps=60, every=every, policy="varuna")
    world.run(lambda: world.job().counters.step >= 22)
    world.kill("n02")
    world.run(lambda: any(isinstance(each, RolledBack) for each in world.daemon.disk.entries()))
    job = world.job()
    assert stepstore.before_memory(job) == max(every - 2, -1)
    assert [step.step for step in job.steps] == ([every - 1] if every else [])
    world.daemon.restart()
    world.until_state("done")
    world.check_done()
    assert len(world.job().steps) <= NUM_KEPT

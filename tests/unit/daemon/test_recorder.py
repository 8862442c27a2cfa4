"""What is kept for replay: the state as the views show it, every change once, and repaired rounds
op by op.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oobleckd.core import view
from oobleckd.daemon.past import PastBatch, PastStore
from oobleckd.daemon.recorder import Recorder, snapshot
from oobleckd.protocol.changes import Change
from oobleckd.protocol.watch import Past
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


@pytest.fixture
def world() -> World:
    made = World(1, 6)
    made.run_for(1.0)
    made.submit(make_job(steps=400, memory=350, policy="slipstream"))
    made.until_step(25)
    return made


def recorder(world: World, folder: Path) -> Recorder:
    assert world.machine is not None
    core = world.machine.core
    store = PastStore(folder, 2**26, 86400.0, lambda _text: None)
    return Recorder(store, core, lambda: view.status(core), lambda: world.now)


async def read(made: Recorder, at: float, span_s: float) -> Past:
    """As whoever looks."""
    await made.reach()
    return made.store.read(at, span_s)


def core_of(world: World) -> Any:
    assert world.machine is not None
    return world.machine.core


@pytest.mark.asyncio
async def test_a_loss_can_be_looked_at_afterwards(world: World, tmp_path: Path) -> None:
    made = recorder(world, tmp_path)
    seen = len(world.daemon.changes)
    made.start()
    await read(made, world.now, 1.0)  # the first snapshot is there by now
    before = snapshot(core_of(world), view.status(core_of(world)), world.now)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()) and not world.incidents()[0].open)
    world.run_for(1.0)
    for change in world.daemon.changes[seen:]:
        made.add(change)
    found = await read(made, before.at, 600.0)
    assert found.snapshot.seq == before.seq
    assert found.snapshot.nodes == before.nodes
    assert found.snapshot.layers == before.layers
    assert [change.seq for change in found.changes] == [change.seq for change in world.daemon.changes[seen:]]
    repaired = [
        each
        for each in found.schedules
        if any(op.again or op.origin for lane in each.lanes for op in lane.ops)
    ]
    assert repaired
    await made.close()
    assert (await _reopened(world, tmp_path)).snapshot.seq == core_of(world).state.seq


async def _reopened(world: World, folder: Path) -> Any:
    made = recorder(world, folder)
    made.start()
    found = await read(made, world.now, 0.0)
    await made.close()
    return found


def test_a_snapshot_of_many_nodes_does_not_stop_the_loop() -> None:
    """Twenty milliseconds would be fine; ten times as much on a busy machine."""
    world = World(1, 120)
    world.run_for(1.0)
    world.submit(make_job(steps=400, memory=350))
    world.until_step(1)
    core = core_of(world)
    began = time.perf_counter()
    made = snapshot(core, view.status(core), world.now)
    assert time.perf_counter() - began < 0.2
    assert len(made.nodes) == 120


def test_there_is_a_snapshot_soon_after_what_no_change_says_in_full(world: World) -> None:
    core, taken = core_of(world), list[PastBatch]()
    store: Any = SimpleNamespace(put=taken.append)
    made = Recorder(store, core, lambda: view.status(core), lambda: world.now)

    def ticks(seconds: float, *kinds: str) -> int:
        """How many snapshots there are in so many seconds, in each of which there are changes of
        ``kinds``.
        """
        taken.clear()
        for _ in range(round(seconds)):
            world.run_for(1.0)
            for kind in kinds:
                made.add(Change(0, world.now, kind, "info", "", ()))
            made.tick()
        return sum(batch.snapshot is not None for batch in taken)

    assert ticks(1) == 1
    assert ticks(29, "step") == 0
    assert ticks(1) == 1
    assert ticks(20, "step", "node") == 10
    assert ticks(28) == 0
    assert ticks(3) == 1

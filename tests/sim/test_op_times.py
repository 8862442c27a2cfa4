"""Op times of whole worlds: complete, in an order that data could have taken, and told again after a loss."""

from typing import Any

import pytest

from oobleckd.core.schedules import sampled_view
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.watch import OpView, ScheduleView
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def running(num_nodes: int = 6, seed: int = 0, **spec: Any) -> World:
    world = World(seed, num_nodes, codec=bool(seed % 2))
    world.run_for(1.0)
    world.submit(make_job(**{"steps": 60, "f": 1, "memory": 350} | spec))
    return world


def views(world: World) -> list[ScheduleView]:
    return [sampled_view(sample) for sample in world.machine.core.samples.of("job-1")]


def check_flow(view: ScheduleView) -> None:
    """Every forward follows that of the hop before it, every backward that of the hop behind it."""
    stops: dict[tuple[str, int, int], float] = {}
    ops: list[OpView] = [op for lane in view.lanes for op in lane.ops]
    last = {}
    for op in ops:
        if op.kind in {"F", "B", "I"} and not op.again:
            stops[op.kind, op.stage, op.micro_batch] = op.stop_s
            last[op.micro_batch] = max(last.get(op.micro_batch, 0), op.stage)
    for op in ops:
        if op.again or op.kind not in {"F", "B", "I"}:
            continue
        before = op.stage - 1 if op.kind == "F" else op.stage + 1
        waited_for = stops.get((op.kind, before, op.micro_batch))
        if waited_for is not None and op.micro_batch in last:
            assert op.start_s >= waited_for - 1e-9, op


@pytest.mark.thin(6)
@pytest.mark.parametrize(
    "schedule", [Schedule(), Schedule(backward="decoupled"), Schedule(update="staggered")]
)
@pytest.mark.parametrize("seed", range(4))
def test_sampled_steps_are_whole(seed: int, schedule: Schedule) -> None:
    world = running(seed=seed, schedule=schedule)
    world.until_state("done")
    world.check_done()
    found = views(world)
    assert [view.step for view in found] == [1, 11, 21, 31, 41, 51]
    for view in found:
        assert all(lane.ops for lane in view.lanes)
        kinds = {"F", "I", "W", "U"} if schedule.apart else {"F", "B", "U"}
        assert {op.kind for lane in view.lanes for op in lane.ops} == kinds
        forwards = {op.micro_batch for lane in view.lanes for op in lane.ops if op.kind == "F"}
        assert forwards == set(range(world.num_micro_batches))
        assert all(0.0 <= lane.bubble < 1.0 for lane in view.lanes)
        assert view.span_s > 0
        check_flow(view)


@pytest.mark.thin(6)
@pytest.mark.parametrize("policy", ["oobleck", "slipstream"])
@pytest.mark.parametrize("seed", range(6))
def test_a_repaired_round_shows_who_stepped_in(seed: int, policy: str) -> None:
    world = running(9, seed, policy=policy, steps=40)
    world.until_step(12)
    world.strikes = lambda device, point, _round: device.name == "n02/0" and point == "backward"
    world.run(lambda: bool(world.fired))
    world.strikes = lambda _device, _point, _round: False
    world.run(
        lambda: any(sample.repaired and sample.complete for sample in world.machine.core.samples.of("job-1"))
    )
    (repaired,) = (sample for sample in world.machine.core.samples.of("job-1") if sample.repaired)
    view = sampled_view(repaired)
    (dead,) = (lane for lane in view.lanes if lane.dead)
    assert dead.device == "n02/0"
    moved = [op for lane in view.lanes for op in lane.ops if op.origin]
    assert {op.origin for op in moved} == {"n02/0"}
    world.until_state("done")
    world.check_done()


def test_a_layout_that_is_over_is_not_drawn_with_the_plan_of_the_next() -> None:
    world = running(seed=3, steps=70)
    world.until_step(30)
    before = {view.step for view in views(world)}
    world.kill("n02")
    world.until_state("done")
    world.check_done()
    for sample in world.machine.core.samples.of("job-1"):
        assert set(sample.told) <= set(sample.layout.holdings)
        assert all(message.layout == sample.layout.epoch for message in sample.told.values())
    assert before <= {view.step for view in views(world)} | {1}


def test_detours_keep_their_origin_in_the_steps_that_follow() -> None:
    world = running(seed=2, policy="slipstream", steps=200)
    world.until_step(12)
    world.kill("n02")
    world.run(lambda: bool(world.job().settled))
    step = world.job().counters.step
    world.run(lambda: world.job().counters.step > step + 25)
    view = views(world)[-1]
    assert view.step > step
    origins = {op.origin for lane in view.lanes for op in lane.ops}
    assert origins == {"", "n02/0"}
    assert [lane.device for lane in view.lanes if lane.dead] == ["n02/0"]

"""What is asked of a running world: layers, goodput, schedules as they were and as modelled, and what would
follow a loss.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from oobleckd.core import watching
from oobleckd.core.impact import impact_view
from oobleckd.core.modelled import modelled_view
from oobleckd.core.schedules import sampled_view
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.watch import ImpactView, ScheduleView
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def running(num_nodes: int = 6, step: int = 25, **spec: Any) -> World:
    """350 bytes a device make n0 = 2."""
    world = World(1, num_nodes)
    world.run_for(1.0)
    world.submit(make_job(**{"steps": 400, "memory": 350} | spec))
    world.until_step(step)
    return world


def core_of(world: World) -> Any:
    assert world.machine is not None
    return world.machine.core


def impact(world: World, *nodes: str) -> ImpactView:
    core = core_of(world)
    question = watching.loss_of(core, core.run, nodes)
    assert question is not None
    question = msgspec.msgpack.decode(msgspec.msgpack.encode(question), type=type(question))
    return impact_view(question, world.job().setup, world.job().templates)


def modelled(world: World, step: int = 0) -> ScheduleView:
    core = core_of(world)
    question = watching.step_question(core, world.job(), core.samples.step("job-1", step) if step else None)
    assert question is not None
    return modelled_view(msgspec.msgpack.decode(msgspec.msgpack.encode(question), type=type(question)))


def test_a_pause_is_modelled_by_losses_and_not_by_the_time_that_a_cluster_was_down() -> None:
    world = running()
    world.kill("n02")
    world.run(lambda: bool(world.incidents()) and not world.incidents()[0].open)
    before_s = impact(world, "n03").stall_s
    core = core_of(world)
    [view] = core.state.incidents.values()
    detect = next(phase for phase in view.phases if phase.phase == "detect")
    night = msgspec.structs.replace(detect, duration_s=36_000.0)
    core.state.incidents["inc-9"] = msgspec.structs.replace(
        view, id="inc-9", phases=(night,), total_s=36_000.0
    )
    assert impact(world, "n03").stall_s == pytest.approx(before_s)


def test_who_holds_a_layer() -> None:
    world = running()
    before = watching.layer_views(world.job())
    assert [view.layer for view in before] == list(range(6))
    assert all(view.copies == len(view.devices) == 3 for view in before)
    world.kill("n02")
    world.run(lambda: bool(world.job().dead))
    after = watching.layer_views(world.job())
    assert {view.copies for view in after} == {2, 3}
    assert not any("n02/0" in view.devices for view in after)


def test_where_the_time_went_adds_up() -> None:
    world = running()
    found = watching.goodput_view(core_of(world), world.job())
    assert found.total_s == pytest.approx(found.useful_s + sum(found.lost_s.values()))
    assert found.useful_s > 0
    assert 0 < found.lost_s["bubble"] < found.total_s
    world.kill("n02")
    world.run(lambda: bool(world.incidents()) and not world.incidents()[0].open)
    world.run_for(1.0)
    after = watching.goodput_view(core_of(world), world.job())
    assert after.total_s == pytest.approx(after.useful_s + sum(after.lost_s.values()))
    assert sum(after.lost_s[cause] for cause in ("detect", "plan", "reconfigure", "copy", "redone")) > 0
    assert after.total_s > found.total_s


def test_a_restarted_daemon_has_the_same_book() -> None:
    world = running()
    world.kill("n02")
    world.run(lambda: bool(world.incidents()) and not world.incidents()[0].open)
    before = world.job().book
    world.daemon.restart(down_s=0.1)
    world.run(lambda: world.machine is not None)
    after = world.job().book
    assert after.lost_s == before.lost_s
    assert after.total_s >= before.total_s


@pytest.mark.parametrize("backward", ["fused", "decoupled"])
def test_a_modelled_step_has_every_op(backward: Any) -> None:
    world = running(schedule=Schedule(backward=backward))
    found = modelled(world)
    plan = world.job().plan
    kinds = {"F", "I", "W"} if backward == "decoupled" else {"F", "B"}
    done = {(op.kind, op.stage, op.micro_batch) for lane in found.lanes for op in lane.ops if op.kind != "U"}
    wanted = {
        (kind, stage, mb)
        for pipeline in plan.pipelines
        for stage in range(len(pipeline.segments))
        for mb in pipeline.micro_batches
        for kind in kinds
    }
    assert done == wanted
    assert not any(op.origin for lane in found.lanes for op in lane.ops)
    assert not found.measured
    assert found.span_s == max(op.stop_s for lane in found.lanes for op in lane.ops)


def test_a_modelled_step_around_the_dead() -> None:
    world = running(policy="slipstream")
    world.kill("n02")
    world.run(lambda: bool(world.job().settled))
    found = modelled(world)
    (dead,) = (lane for lane in found.lanes if lane.dead)
    assert dead.device == "n02/0"
    moved = [op for lane in found.lanes for op in lane.ops if op.origin]
    assert moved
    assert {op.origin for op in moved} == {"n02/0"}


def test_a_measured_step_and_the_modelled_one_have_the_same_ops() -> None:
    world = running(step=40)
    core = core_of(world)
    step = core.samples.step("job-1", 0).counters.step + 1
    measured, expected = sampled_view(core.samples.step("job-1", step)), modelled(world, step)
    assert (measured.step, expected.step) == (step, step)
    for lane, other in zip(measured.lanes, expected.lanes, strict=True):
        assert (lane.device, lane.pipeline, lane.stages) == (other.device, other.pipeline, other.stages)
        done = {(op.kind, op.stage, op.micro_batch) for op in lane.ops if op.kind != "U"}
        assert done == {(op.kind, op.stage, op.micro_batch) for op in other.ops if op.kind != "U"}


def test_a_loss_that_costs_no_state() -> None:
    world = running()
    found = impact(world, "n02")
    assert (found.stops, found.lost_layers, found.steps_back) == (False, (), 0)
    assert 0 < found.throughput < 1
    assert found.stall_s > 0
    assert found.can_lose == 1
    assert not any("n02" in pipeline.nodes for pipeline in found.plan)
    assert (found.way, found.actions != ()) == ("re-instantiate", True)
    world.kill("n02")
    world.run(lambda: bool(world.incidents()) and not world.incidents()[0].open)
    assert [p.nodes for p in world.view().pipelines] == [p.nodes for p in found.plan], (
        "what was said comes true"
    )


def test_a_loss_of_every_copy() -> None:
    world = running()
    stages = world.view().pipelines
    nodes = [pipeline.stages[0].device.rpartition("/")[0] for pipeline in stages]
    found = impact(world, *nodes)
    assert found.lost_layers
    assert found.steps_back == world.job().counters.step
    assert (found.way, found.stops) == ("re-instantiate", False)


def test_too_few_are_left() -> None:
    world = running()
    found = impact(world, *(f"n0{number}" for number in range(1, 6)))
    assert found.stops
    assert found.throughput == 0
    assert (found.way, found.actions) == ("wait", ())


def test_a_policy_that_rolls_back_goes_back() -> None:
    world = running(policy="varuna", every=10)
    found = impact(world, "n01")
    assert 0 <= found.steps_back <= 20
    assert found.copied_bytes == 0
    assert found.can_lose == 0


def test_a_policy_that_re_routes_names_the_place() -> None:
    world = running(policy="slipstream")
    found = impact(world, "n02")
    assert found.copied_bytes == 0
    assert any("n02/0" in pipeline.vacant for pipeline in found.plan)


def test_questions_about_nothing() -> None:
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(make_job(steps=20, memory=350))
    core = core_of(world)
    assert watching.layer_views(world.job()) == []
    assert watching.step_question(core, world.job(), None) is None
    assert watching.unknown_nodes(core, world.job(), ["n01", "x"]) == ["x"]
    assert watching.goodput_view(core, world.job()).total_s == 0


def test_who_holds_nothing_costs_nothing() -> None:
    world = running(max_nodes=4)
    found = impact(world, "n06")
    assert (found.stops, found.stall_s, found.throughput, found.copied_bytes) == (False, 0.0, 1.0, 0)
    assert [p.nodes for p in found.plan] == [p.nodes for p in world.view().pipelines]
    assert (found.way, found.actions) == ("stay", ())

"""Stages that several devices share: what dies of one, and how it comes back."""

from __future__ import annotations

import pytest

from oobleckd.core import view, watching
from oobleckd.core.impact import impact_view
from oobleckd.core.modelled import modelled_view
from oobleckd.planner.plan import standing_routes
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def running(devices: int = 2, num_nodes: int = 4, seed: int = 1, **spec: object) -> World:
    """n0 = 2."""
    world = World(seed, num_nodes, num_devices=devices)
    world.run_for(1.0)
    world.submit(devices_per_stage=devices, **({"steps": 20, "memory": 350} | spec))
    world.until_step(5)
    return world


def finish(world: World) -> None:
    world.run(lambda: world.state() in {"done", "failed"}, limit_s=60)
    world.check_done()


@pytest.mark.parametrize("devices", [2, 4])
def test_nothing_happens(devices: int) -> None:
    world = running(devices)
    layout = world.job().layout
    assert layout.devices_per_stage == devices
    assert set(layout.copies()) == {2}
    finish(world)


@pytest.mark.parametrize("policy", ["oobleck", "adaptive", "slipstream", "bamboo"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_device_dies_and_its_spare_gets_its_shard_again(policy: str, rank: int) -> None:
    world = running(policy=policy, memory=700 if policy == "bamboo" else 350)
    before = world.job()
    nodes, layout = before.plan.pipelines, before.layout
    world.spare_takes_place("n02", rank)
    world.run(lambda: bool(world.incidents()) and not world.incidents()[0].open)
    (incident,) = world.incidents()
    assert world.job().plan.pipelines == nodes
    held = layout.holdings[f"n02/{rank}"]
    assert incident.copied_bytes == len(held)  # a layer counts one: the other device copied nothing
    assert world.checks.rollbacks == 0
    finish(world)


@pytest.mark.parametrize("policy", ["oobleck", "adaptive", "slipstream", "bamboo", "varuna"])
def test_a_node_dies(policy: str) -> None:
    world = running(num_nodes=5, policy=policy, memory=700 if policy == "bamboo" else 350)
    world.kill("n02")
    finish(world)
    assert world.job().steps_lost == 0 or policy == "varuna"


def test_two_stages_of_one_layer_lose_a_device_each_and_the_job_goes_back() -> None:
    world = running(num_nodes=4, f=1, every=2)
    layout = world.job().layout
    (first, second) = [p.segments[0].device.partition("/")[0] for p in world.job().plan.pipelines]
    assert layout.holdings[f"{first}/0"] == layout.holdings[f"{second}/1"]
    world.spare_takes_place(first, 0)
    world.spare_takes_place(second, 1)
    finish(world)
    assert world.checks.rollbacks == 1


def test_more_pipelines_than_losses_lose_nothing() -> None:
    world = running(num_nodes=6, f=2)
    first, second, _ = [p.segments[0].device.partition("/")[0] for p in world.job().plan.pipelines]
    world.spare_takes_place(first, 0)
    world.spare_takes_place(second, 1)
    finish(world)
    assert world.job().steps_lost == 0


def test_who_lacks_a_device_is_seen_until_it_is_back() -> None:
    world = running(num_nodes=4, policy="slipstream", steps=60)
    world.spare_takes_place("n02", 1, up_s=3.0)
    world.run(lambda: bool(world.job().settled))
    shown = [stage for pipeline in view.pipeline_views(world.job()) for stage in pipeline.shown]
    broken = [stage for stage in shown if stage.missing]
    assert [(stage.name, stage.absence) for stage in broken] == [("n02/0-1", "without n02/1")]
    layers = {held.layer: held for held in watching.layer_views(world.job())}
    less = [number for number, held in layers.items() if held.copies == 1]
    assert less == list(range(broken[0].start, broken[0].stop))
    assert "n02/0" in layers[less[0]].devices
    assert view.node_tolerance(world.job()) == 0
    finish(world)


def test_devices_that_do_not_divide_into_stages_are_an_error() -> None:
    world = World(1, 4, num_devices=3)
    world.run_for(1.0)
    world.submit(make_job(devices_per_stage=2))
    world.run(lambda: world.state() == "failed")
    assert world.job().cause == "no-plan"


def test_a_number_that_is_left_open_is_chosen_once() -> None:
    """A device has no room for a layer of its own."""
    world = World(1, 6, num_devices=4)
    world.run_for(1.0)
    world.submit(make_job(devices_per_stage="auto", steps=20, memory=100, f=0))
    world.until_step(3)
    setup, layout = world.job().setup, world.job().layout
    assert setup.profile.devices_per_stage == layout.devices_per_stage > 1
    assert (setup.whole_batch, setup.whole_node) == (world.num_micro_batches, 4)
    world.spare_takes_place("n02", 3)  # of the only copy: the job goes back, and is planned anew
    finish(world)
    assert world.job().setup == setup


@pytest.mark.parametrize("policy", ["oobleck", "slipstream"])
def test_what_a_loss_would_lead_to_is_what_it_leads_to(policy: str) -> None:
    world = running(num_nodes=6, policy=policy)
    core = world.machine.core
    found = impact_view(watching.loss_of(core, core.run, ["n02"]), world.job().setup, world.job().templates)
    assert (found.stops, found.lost_layers, found.steps_back) == (False, (), 0)
    assert 0 < found.throughput < 1
    world.kill("n02")
    world.run(lambda: bool(world.incidents()) and not world.incidents()[0].open)
    shown = world.view().pipelines
    assert [p.nodes for p in shown] == [p.nodes for p in found.plan]
    assert [p.micro_batches for p in shown] == [p.micro_batches for p in found.plan]
    assert [p.vacant for p in shown] == [p.vacant for p in found.plan]


@pytest.mark.parametrize("dead", [False, True])
def test_a_modelled_step_has_every_op_of_every_device(dead: bool) -> None:
    world = running(num_nodes=6, policy="slipstream", steps=60)
    if dead:
        world.spare_takes_place("n02", 1, up_s=5.0)
        world.run(lambda: bool(world.job().settled))
    core = world.machine.core
    step = modelled_view(watching.step_question(core, world.job(), None))
    layout = world.job().layout
    assert {lane.device for lane in step.lanes} == set(layout.holdings)
    forward = [(op.micro_batch, op.stage) for lane in step.lanes for op in lane.ops if op.kind == "F"]
    standing = standing_routes(layout, world.job().detours, world.job().counters.round + 2)
    assert sorted(forward) == [(r.micro_batch, at) for r in standing for at in range(len(r.segments))]
    assert [lane.device for lane in step.lanes if lane.dead] == (["n02/1"] if dead else [])
    moved = {op.origin for lane in step.lanes for op in lane.ops if op.origin}
    assert moved == ({"n02/0", "n02/1"} if dead else set())

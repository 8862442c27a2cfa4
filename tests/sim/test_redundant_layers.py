"""Policy bamboo, followed to its end: the predecessor computes for the dead, from what it ran ahead; nothing
is lost.
"""

from __future__ import annotations

import pytest

from oobleckd.core.entries import AnyEntry, LayoutDeployed
from oobleckd.core.machine import Machine
from oobleckd.planner.plan import Layers
from oobleckd.planner.policy import Action
from oobleckd.protocol.changes import JobWentBack
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.requests import Control, Drain
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


def running(num_nodes: int = 6, seed: int = 0, step: int = 3, **spec: object) -> World:
    """A world whose job has committed a few steps, in pipelines of three."""
    config = {
        key: spec.pop(key)
        for key in ("num_devices", "overflows", "nans", "lease_s", "grace_s", "zones")
        if key in spec
    }
    world = World(seed, num_nodes, **config)
    world.run_for(3.0)
    defaults = {"steps": 30, "f": 1, "policy": "bamboo", "min_pipeline_nodes": 3}
    world.submit(make_job(**defaults | spec))
    world.until_step(step)
    return world


def written(world: World, kind: type[AnyEntry]) -> list[AnyEntry]:
    return [entry for entry in world.daemon.disk.entries() if isinstance(entry, kind)]


def until_closed(world: World, num_incidents: int = 1) -> None:
    def closed() -> bool:
        found = world.incidents() if world.machine is not None else ()
        return len(found) == num_incidents and not any(incident.open for incident in found)

    world.run(closed)


def ring(world: World, pipeline: int = 0) -> tuple[str, ...]:
    return world.view().pipelines[pipeline].nodes


def placed(world: World) -> list[str]:
    """Nodes that the plan in force names, be their places vacant."""
    return [node for pipeline in world.job().plan.pipelines for node in pipeline.nodes]


def test_everybody_holds_its_successor_s_layers_and_runs_its_forwards_ahead() -> None:
    world = running(seed=1, step=10)
    layout = world.job().layout
    for pipeline in world.job().plan.pipelines:
        parts = [Layers.of(segment.layers) for segment in pipeline.segments]
        for at, segment in enumerate(pipeline.segments):
            assert layout.redundant[segment.device] == parts[(at + 1) % len(parts)]
            assert len(layout.holdings[segment.device].ranges) == 2
    assert all(world.device(name).ahead > 0 for name in layout.holdings)
    assert world.view().tolerance == 3
    node = world.node(ring(world)[0])
    assert [len(part) for part in (node.layers, node.redundant)] == [1, 1]
    assert node.layers != node.redundant
    world.until_state("done")
    world.check_done()


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("silent", [False, True])
def test_a_loss_costs_no_deployment_and_the_predecessor_takes_over(
    seed: int, place: int, silent: bool
) -> None:
    world = running(seed=seed)
    nodes, epoch = ring(world), world.job().layout.epoch
    victim, heir = nodes[place], nodes[place - 1]
    world.run_for(0.003 * seed)
    world.kill(victim, silent=silent)
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    assert world.state() == "running"
    assert world.job().layout.epoch == epoch or written(world, LayoutDeployed)[-1].plan.vacant == (
        f"{victim}/0",
    )
    (incident,) = world.incidents()
    assert incident.copied_bytes == 0
    assert incident.parts.actions == (Action("take-over", (heir,), (victim,)),)
    job = world.job()
    routes = job.detours.routes if job.detours is not None else job.layout.routes
    hit = [route for route in routes if route.touches([f"{nodes[place - 2]}/0"])]
    assert hit
    assert all(
        {s.device for s in route.segments} == {f"{n}/0" for n in nodes if n != victim} for route in hit
    )
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    "manner", [Schedule(), Schedule("decoupled"), Schedule("decoupled", update="staggered")]
)
@pytest.mark.parametrize("seed", range(4))
def test_two_that_are_no_neighbours_one_after_the_other(seed: int, manner: Schedule) -> None:
    world = running(8, seed, min_pipeline_nodes=4, f=1, steps=25, schedule=manner)
    nodes = ring(world)
    world.kill(nodes[1])
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.kill(nodes[3])
    world.run(lambda: len(world.incidents()) == 2)
    until_closed(world, 2)
    assert {device for p in world.view().pipelines for device in p.vacant} == {
        f"{nodes[1]}/0",
        f"{nodes[3]}/0",
    }
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("apart_s", [0.0, 0.005, 0.02, 0.3])
def test_two_neighbours_come_from_another_pipeline(seed: int, apart_s: float) -> None:
    """Then the pipelines are made anew, with redundant layers."""
    world = running(seed=seed, steps=25)
    nodes = ring(world)
    at = seed % 3
    world.kill(nodes[at])
    world.after(apart_s, world.kill, nodes[at - 1])
    gone = {nodes[at], nodes[at - 1]}
    world.run(lambda: world.job().plan is not None and not gone & {*placed(world)}, limit_s=20)
    assert world.job().layout.redundant
    assert not any(pipeline.vacant for pipeline in world.view().pipelines)
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("seed", range(6))
def test_two_neighbours_without_another_pipeline_go_back_to_the_checkpoint(seed: int) -> None:
    world = running(4, seed, f=0, every=4, steps=25, step=7, min_pipeline_nodes=3, max_nodes=3)
    nodes = ring(world)
    world.kill(nodes[1])
    world.kill(nodes[2])
    world.add("n77")
    world.run(lambda: world.job().steps_lost > 0 or bool(world.job().reason))
    world.add(nodes[1])
    world.until_state("done")
    world.check_done()
    assert "last-copy-lost" in {back.cause for back in world.told(JobWentBack)}


@pytest.mark.parametrize("seed", range(6))
def test_one_pipeline_alone_goes_on_with_fewer_nodes_than_n0(seed: int) -> None:
    """No other replica of any layer: the redundant layers are the only copy."""
    world = running(4, seed, f=0, steps=40, min_pipeline_nodes=4)
    assert world.job().n0 == 4
    assert world.view().tolerance == 1
    victim = ring(world)[seed % 4]
    world.run_for(0.004 * seed)
    world.kill(victim)
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    assert world.state() == "running"
    world.until_step(world.job().counters.step + 3)
    world.ask(Control("job-1", "pause"))
    world.until_state("paused")
    world.ask(Control("job-1", "resume"))
    world.until_step(world.job().counters.step + 3)
    if seed % 2:
        world.daemon.restart(down_s=0.1)
    else:
        world.add("n99")
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_standby_takes_the_place_at_once(seed: int) -> None:
    world = running(7, seed, max_nodes=6, steps=20)
    victim = ring(world)[1]
    world.kill(victim)
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    (incident,) = world.incidents()
    assert incident.parts.actions == (Action("take-place", ("n07",), (victim,)),)
    assert [phase.phase for phase in incident.phases][-2:] == ["copy", "resume"]
    assert incident.copied_bytes == 4  # layers: its stage and its successor's
    world.until_state("done")
    world.check_done()


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_spare_gets_back_what_its_device_held(seed: int, num_devices: int) -> None:
    world = running(6, seed, num_devices=num_devices, min_pipeline_nodes=4 - num_devices, steps=20)
    pipelines = world.view().pipelines
    world.spare_takes_place("n02")
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    (incident,) = world.incidents()
    assert incident.parts.actions == (Action("copy-back", ("n02",)),)
    assert incident.copied_bytes > 0
    assert world.view().pipelines == pipelines
    world.until_state("done")
    world.check_done()


@pytest.mark.thin(8)
@pytest.mark.parametrize("phase", ["report", "run"])
@pytest.mark.parametrize("seed", range(10))
def test_the_daemon_restarts_in_the_middle(phase: str, seed: int) -> None:
    world = running(seed=seed, steps=30, lease_s=1.5, grace_s=2.0)
    world.kill(ring(world)[seed % 3])
    world.run(lambda: world.job().dead != ())
    world.run(lambda: world.machine.core.run.phase == phase)
    world.run_for(0.002 * (seed % 3))
    world.daemon.restart(down_s=0.1)
    world.run_for(0.05)
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_node_comes_back_while_another_dies(seed: int) -> None:
    world = running(seed=seed, steps=30)
    nodes = ring(world)
    world.kill(nodes[1])
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    world.add(nodes[1])
    world.run(lambda: world.machine.core.run.phase == "deploy")
    world.after(0.004 * seed, world.kill, ring(world, 1)[0])
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0


@pytest.mark.parametrize("seed", range(4))
def test_overflow_and_nan_after_a_takeover(seed: int) -> None:
    world = running(seed=seed, overflows=(8, 12), nans=(15,))
    world.kill(ring(world)[seed % 3])
    world.until_state("done")
    world.check_done()


@pytest.mark.parametrize("seed", range(2))
def test_a_drain_leaves_the_work_to_the_predecessor(seed: int) -> None:
    world = running(seed=seed, steps=25)
    nodes = ring(world)
    world.ask(Drain(nodes[2]))
    world.run(lambda: nodes[2] not in world.view().nodes)
    assert {device for p in world.view().pipelines for device in p.vacant} == {f"{nodes[2]}/0"}
    world.ask(Control("job-1", "checkpoint"))
    world.run(lambda: bool(world.job().checkpoint))
    world.ask(Drain(nodes[2], undo=True))
    world.run(lambda: nodes[2] in world.view().nodes)
    assert ring(world) == nodes
    world.until_state("done")
    world.check_done()


def test_neighbours_are_in_different_zones() -> None:
    zones = {f"n0{number}": "east" if number < 5 else "west" for number in range(1, 9)}
    world = running(8, zones=zones, min_pipeline_nodes=4)
    for pipeline in world.view().pipelines:
        placed = [zones[node] for node in pipeline.nodes]
        assert all(one != other for one, other in zip(placed, [*placed[1:], placed[0]], strict=True)), placed
    assert world.node("n01").zone == "east"


@pytest.mark.parametrize("seed", range(4))
def test_of_those_who_stand_by_one_in_another_zone_takes_the_place(seed: int) -> None:
    zones = {f"n0{number}": "east" if number < 5 else "west" for number in range(1, 9)} | {
        "n09": "east",
        "n10": "west",
    }
    world = running(10, seed, zones=zones, max_nodes=8, min_pipeline_nodes=4, steps=20)
    victim = ring(world)[seed % 4]
    world.kill(victim)
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    follows = "n09" if zones[victim] == "east" else "n10"
    assert world.incidents()[0].parts.actions == (Action("take-place", (follows,), (victim,)),)
    world.until_state("done")
    world.check_done()


@pytest.mark.parametrize("seed", range(4))
def test_nodes_that_join_after_two_losses_take_the_places_that_suit_their_zones(seed: int) -> None:
    zones = {f"n0{number}": "east" if number < 5 else "west" for number in range(1, 9)} | {
        "n09": "west",
        "n10": "east",
    }
    world = running(8, seed, zones=zones, min_pipeline_nodes=4, steps=30)
    east, west = (
        next(n for n in ring(world, index) if zones[n] == zone) for index, zone in ((0, "east"), (1, "west"))
    )
    for count, victim in enumerate((east, west), 1):
        world.kill(victim)
        world.run(lambda: len(world.incidents()) == count)  # noqa: B023 - run at once
        until_closed(world, count)
    world.add("n09")
    world.add("n10")
    world.run(lambda: {"n09", "n10"} <= set(world.view().nodes))
    for pipeline in world.view().pipelines:
        placed = [zones[node] for node in pipeline.nodes]
        assert all(one != other for one, other in zip(placed, [*placed[1:], placed[0]], strict=True)), placed
    world.until_state("done")
    world.check_done()


def test_the_journal_builds_the_same_jobs_again() -> None:
    world = running(steps=60)
    world.kill(ring(world)[0])
    for _ in range(6):
        world.run_for(0.02)
        again = Machine.restore(world.daemon.disk.entries(), world.now, world.config)
        assert again.core.state.jobs == world.machine.core.state.jobs

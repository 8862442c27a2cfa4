"""Stages of several devices: bits for any number of them, with losses in the middle of a step."""

from __future__ import annotations

import gc
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from oobleckd.host.checkpoint import complete
from oobleckd.planner.plan import Range
from oobleckd.protocol.checkpoint import manifest_of
from oobleckd.protocol.job import Job
from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.parts import Counters, Flags
from oobleckd.worker.round.passes import Passes
from oobleckd.worker.round_machine.tasks import Task
from oobleckd.worker.runtime.descriptors import Lender
from oobleckd.worker.sharding import group
from oobleckd.worker.state import shard_memory
from oobleckd.worker.state.window import CardWindow, of_card
from tests.helpers.cudadriver import CudaDriver, HostCard
from tests.helpers.engine import Cuts, World, flag_all
from tests.helpers.engine_jobs import GATHERS, GOAL, SCHEDULES, Reference, check, job, random_deaths

ONE: dict[str, Cuts] = {"a": [(0, 4)]}
TWO: dict[str, Cuts] = {"a": [(0, 4)], "b": [(0, 4)]}
DEEP: dict[str, Cuts] = {"a": [(0, 1), (1, 3), (3, 4)]}
UNEQUAL: dict[str, Cuts] = {"a": [(0, 2), (2, 4)], "b": [(0, 1), (1, 3), (3, 4)]}


FOUR: dict[str, Cuts] = {"a": [(0, 2), (2, 4)], "b": [(0, 2), (2, 4)], "c": [(0, 4)]}
POINTS = (*GATHERS, "forward", "backward", "reduce", "means", "reduced", "commit", "update", "updated")
DYING_REDUCED = {
    "c0/0": "reduced",
    "c0/1": "reduced",
    "c0/2": "reduced",
    "a0/0": "reduced",
    "a0/1": "reduced",
    "a0/2": "means",
    "a0/3": "reduced",
}
RECIPES: dict[str, dict[str, Any]] = {"muon": {"name": "muon"}, "adafactor": {"name": "adafactor"}}


def recipe(tmp_path: Path, name: str, **train: Any) -> Job:
    spec = job(tmp_path, **train)
    table = {"lr": 0.01, "warmup_steps": 2, **RECIPES.get(name, {})}
    return msgspec.structs.replace(spec, optimizer=Optimizer(**table))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    tmp_path = tmp_path_factory.mktemp("alone")
    world = World(job(tmp_path, global_batch=24), ONE, 0, tmp_path)
    world.run()
    return world.job, world.losses, world.weights()


@pytest.mark.parametrize(("stages", "each"), [(ONE, 4), (TWO, 2), (DEEP, 2), (UNEQUAL, 4)])
def test_bits_do_not_show_how_many_devices_a_stage_has(
    alone: Reference, tmp_path: Path, stages: dict[str, Cuts], each: int
) -> None:
    world = World(alone[0], stages, each, tmp_path, devices_per_stage=each)
    world.run()
    check(world, alone)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_under_every_kind_of_rule_and_in_both_precisions(tmp_path: Path, name: str, precision: str) -> None:
    spec = recipe(tmp_path, name, precision=precision)
    world = World(spec, ONE, 0, tmp_path)
    world.run()
    reference = spec, world.losses, world.weights()
    for stages, each in ((ONE, 4), (UNEQUAL, 2)):
        world = World(spec, stages, each, tmp_path, devices_per_stage=each)
        world.run()
        check(world, reference)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(alone: Reference, tmp_path: Path, schedule: str) -> None:
    changed = msgspec.structs.replace(alone[0], schedule=Schedule(**SCHEDULES[schedule]))
    world = World(changed, UNEQUAL, 3, tmp_path, devices_per_stage=2)
    world.run()
    check(world, alone)


@pytest.mark.thin(6)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("go_on", [False, True])
def test_a_death_in_a_group_does_not_show(alone: Reference, tmp_path: Path, point: str, go_on: bool) -> None:
    """The rest of its group computes nothing more, and keeps its shards."""
    seed = zlib.crc32(f"{point} {go_on}".encode()) % 1000
    world = World(alone[0], FOUR, seed, tmp_path, go_on=go_on, devices_per_stage=2)
    victim = f"{('a0', 'b1', 'c0')[seed % 3]}/{seed % 2}"
    world.nodes[victim].faults.arm(point, 1 + seed % 3)
    world.run()
    assert (victim, point) in world.fired
    check(world, alone)


@pytest.mark.thin(10)
@pytest.mark.parametrize("seed", range(60))
def test_random_deaths(alone: Reference, tmp_path: Path, seed: int) -> None:
    each = (2, 4)[seed % 2]
    schedule = sorted(SCHEDULES)[seed % len(SCHEDULES)]
    changed = msgspec.structs.replace(alone[0], schedule=Schedule(**SCHEDULES[schedule]))
    world = World(changed, FOUR, seed, tmp_path, go_on=seed % 4 > 1, devices_per_stage=each)
    random_deaths(world)
    world.run()
    check(world, alone)


@pytest.mark.parametrize("point", ["gather", "gather-backward", "update"])
def test_with_memory_of_gpus(
    alone: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Windows that CUDA's driver maps, here one of ours: a death shows as little, and no mapping is left of a
    layout that is over.
    """
    card, lender, made = HostCard(CudaDriver()), Lender(), set[int]()

    def window(num_bytes: int, _device: torch.device) -> CardWindow:
        found = CardWindow(num_bytes, card, lender)
        made.add(found.memory.data_ptr())
        return found

    monkeypatch.setattr(shard_memory, "window", window)
    monkeypatch.setattr(group, "opened", lambda handle, _: of_card(handle, card))
    world = World(alone[0], FOUR, 5, tmp_path, devices_per_stage=2)
    world.nodes["b1/1"].faults.arm(point, 2)
    world.run()
    assert world.fired == [("b1/1", point)]
    check(world, alone)
    groups = [node.executor.group for node in world.nodes.values()]
    opened = sum(len(each._memory) for each in groups)
    memories = [node.executor.store.memory for node in world.nodes.values()]
    own = sum(len(memory.handles) for memory in memories if memory is not None)
    del groups, memories
    gc.collect()
    assert len(card._cuda.mapped) == own + opened  # type: ignore[arg-type]
    assert opened >= len(made) // 2 > 0


def test_a_checkpoint_is_what_it_is_without_groups(alone: Reference, tmp_path: Path) -> None:
    """Byte for byte; and it can be begun from with another number of devices a stage."""
    spec, middle, found = alone[0], 3, {}
    for each in (1, 2):
        place = msgspec.structs.replace(spec.checkpoint, dir=str(tmp_path / str(each)), every=middle)
        world = World(
            msgspec.structs.replace(spec, checkpoint=place), UNEQUAL, 1, tmp_path, devices_per_stage=each
        )
        world.run()
        check(world, alone)
        parts = [part for part in world.parts if part.counters.step == middle]
        found[each] = complete(Path(parts[0].directory), manifest_of(world.job, parts), keep=2)
    for path in sorted(found[1].glob("*.safetensors")):
        assert path.read_bytes() == (found[2] / path.name).read_bytes()
    start = Counters(middle, middle, middle), str(found[2])
    for each in (1, 4):
        resumed = World(spec, TWO, 0, tmp_path, start=start, devices_per_stage=each)
        resumed.run()
        check(resumed, (spec, {step: alone[1][step] for step in range(middle, GOAL)}, alone[2]))


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_another_number_of_devices_a_stage_after_a_loss(tmp_path: Path, name: str) -> None:
    """Of two nodes of four devices, with a stage each, one is left: two pipelines of two, then one of one."""
    spec = recipe(tmp_path, name, global_batch=24)
    world = World(spec, ONE, 0, tmp_path)
    world.run()
    reference = spec, world.losses, world.weights()
    world = World(spec, {"a": [(0, 4)], "b": [(0, 4)]}, 1, tmp_path, devices_per_stage=4, go_on=True)
    for rank in range(4):
        world.nodes[f"b0/{rank}"].faults.arm("means", 1)
    stops_at(world, 2)
    every = Range(0, 4)
    world.reshard([[("a0/0", every)], [("a0/2", every)]], 2)
    stops_at(world, 3)
    world.reshard([[("a0/0", Range(0, 2)), ("a0/3", Range(2, 4))]], 1)
    world.run()
    check(world, reference)


def stops_at(world: World, round_: int) -> None:
    """Run to a boundary from round ``round_`` on."""
    while min(world.nodes[device].executor.counters.round for device in world.live()) < round_:
        world.step()
    flag_all(world, Flags(hold=True))
    while not all(world.nodes[device].executor.holding for device in world.live()):
        world.step()


@pytest.mark.parametrize("each", [2, 4])
def test_what_overflows_in_one_shard_is_made_again_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: int
) -> None:
    """A step whose sums have no room is repeated with smaller scales, which all ranks agree on."""
    monkeypatch.setattr("oobleckd.worker.sums.START_EXPONENT", 56)
    spec = job(tmp_path, global_batch=24)
    alone = World(spec, ONE, 0, tmp_path)
    alone.run()
    repeated = alone.nodes["a0/0"].executor.counters.round - GOAL
    assert repeated > 0
    world = World(spec, UNEQUAL, each, tmp_path, devices_per_stage=each)
    world.run()
    check(world, (spec, alone.losses, alone.weights()))
    assert {node.executor.counters.round - GOAL for node in world.nodes.values()} == {repeated}
    exponents = {
        (bucket, state.exponents)
        for node in (*world.nodes.values(), *alone.nodes.values())
        for bucket, state in node.executor.store.buckets.items()
    }
    assert len(exponents) == len(world.spec.buckets)


def test_a_nan_in_one_shard_is_seen_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is skipped, and nobody's weights or scales change."""
    spec = job(tmp_path, global_batch=24)
    add = Passes._add

    def with_nan(self: Passes, task: Task, layer: int, grads: list[Tensor]) -> None:
        if self.counters.step == 2:
            grads[-1].view(-1)[-1] = torch.nan
        add(self, task, layer, grads)

    monkeypatch.setattr(Passes, "_add", with_nan)
    found = []
    for stages, each in ((ONE, 1), (TWO, 2)):
        world = World(spec, stages, each, tmp_path, devices_per_stage=each)
        world.run()
        counters = {node.executor.counters.applied for node in world.nodes.values()}
        found.append((counters, world.losses.keys(), {k: w.tolist() for k, w in world.weights().items()}))
    assert found[0] == found[1]
    assert found[0][0] == {GOAL - 1}


def test_a_shard_that_was_voted_on_is_not_made_anew_for_others(alone: Reference, tmp_path: Path) -> None:
    """Two stages lose all of their devices when some have reduced: whoever has voted gives what it has to
    those whose means died with somebody.
    """
    world = World(alone[0], FOUR, 7, tmp_path, go_on=True, devices_per_stage=4)
    for victim, point in DYING_REDUCED.items():
        world.nodes[victim].faults.arm(point, 2)
    world.run()
    assert {victim for victim, _ in world.fired} == set(DYING_REDUCED)
    check(world, alone)


def test_what_was_gathered_for_a_hop_that_halted_is_not_taken_in_the_next_round(
    alone: Reference, tmp_path: Path
) -> None:
    """It went to another device after its second layer, and the next round begins with its first."""
    world = World(alone[0], ONE, 0, tmp_path, devices_per_stage=2)
    world.run()
    executor = world.nodes["a0/0"].executor
    group, memory = executor.group, executor.store.memory
    assert memory is not None
    with group.weights(1, following=0):
        pass
    with torch.no_grad():
        for node in world.nodes.values():
            for state in node.executor.store.buckets.values():
                for param in state.params:
                    param.fill_(7.0)
    group.say(executor.counters.round)
    with group.weights(0):
        assert all(bool((leaf == 7.0).all()) for leaf in memory.layers[0].leaves.values())

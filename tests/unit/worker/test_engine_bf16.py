"""Jobs in bf16 survive with the bits of a run without failures in which autocast rounds the weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from oobleckd.protocol.job import Job
from oobleckd.worker.models import ModelSpec
from oobleckd.worker.round_machine.early import UpdatePredictor
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.training import executor
from tests.helpers.engine import World
from tests.helpers.engine_jobs import SCHEDULES, Reference, any_deaths, check, job, random_deaths, scheduled
from tests.helpers.evaluations import Evaluated, check_all, on_texts, world_of


def autocast(spec: Job, folder: Path) -> World:
    """``spec`` on one device, which has no rounded copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelSpec, "rounded", lambda *_: frozenset())
        world = World(spec, {"x": [(0, 4)]}, 0, folder)
        world.run()
    assert not any(state.rounded for state in states_of(world))
    return world


def states_of(world: World) -> list[BucketState]:
    return [state for device in world.live() for state in world.nodes[device].executor.store.buckets.values()]


def reference_of(world: World) -> Reference:
    return world.job, world.losses, world.weights()


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("bf16")
    return reference_of(autocast(job(folder, precision="bf16"), folder))


@pytest.mark.thin(20)
@pytest.mark.parametrize("redundant", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(6))
def test_deaths_do_not_show(bf16, tmp_path: Path, seed: int, schedule: str, redundant: bool) -> None:
    any_deaths(bf16, tmp_path, seed, schedule, redundant=redundant)


def test_everybody_computes_with_copies(bf16, tmp_path: Path) -> None:
    """The tests here would be empty without."""
    world = scheduled(bf16, tmp_path, 0)
    world.run()
    check(world, bf16)
    found = [state for state in states_of(world) if state.rounded]
    assert len(found) >= len(world.live())
    assert [int(state.wrong_copies()) for state in found] == [0] * len(found)


def test_nor_do_updates_that_are_taken_back(bf16, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most rounds are clipped, which nobody knows who updates early."""
    optimizer = msgspec.structs.replace(bf16[0].optimizer, clip_norm=0.8)
    train = msgspec.structs.replace(bf16[0].train, steps=8)
    changed = msgspec.structs.replace(bf16[0], optimizer=optimizer, train=train)
    clipped = reference_of(autocast(changed, tmp_path))
    monkeypatch.setattr(UpdatePredictor, "expects_a_commit", True)
    restored: list[int] = []
    restore = executor.restore
    monkeypatch.setattr(executor, "restore", lambda *args: restored.append(1) or restore(*args))
    for seed in range(2):
        world = scheduled(clipped, tmp_path, seed, update="staggered", backward="decoupled")
        random_deaths(world, seed)
        world.run()
        check(world, clipped)
    assert len(restored) > 10


def test_nor_do_evaluations(bf16, tmp_path: Path) -> None:
    alone = autocast(on_texts(bf16[0], tmp_path), tmp_path)
    evaluated: Evaluated = (alone.job, bf16, alone.evaluations)
    world = world_of(evaluated, tmp_path, 1, "staggered")
    random_deaths(world)
    world.run()
    check_all(world, evaluated)

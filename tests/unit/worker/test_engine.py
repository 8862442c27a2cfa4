"""The exact engine under losses, many interleavings, one process."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from oobleckd.protocol.job import Job, parse_job
from tests.helpers.engine import World
from worker import twin
from worker.faults import POINTS

STAGES = {"a": [(0, 2), (2, 4)], "b": [(0, 1), (1, 3), (3, 4)]}
GOAL = 5


def job(tmp_path: Path, **train: object) -> Job:
    path = tmp_path / "text"
    if not path.exists():
        path.write_bytes(bytes(range(32, 127)) * 40)
    return parse_job(
        {
            "name": "tiny",
            "model": {
                "family": "gpt2",
                "config": {
                    "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 128,
                    "bos_token_id": 0, "eos_token_id": 0,
                },
            },
            "data": {"source": "text", "path": str(path)},
            "train": {"steps": GOAL, "global_batch": 8, "micro_batch": 2, "sequence": 16, **train},
            "optimizer": {"lr": 0.01, "warmup_steps": 2},
            "checkpoint": {"dir": str(tmp_path / "ckpt")},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Job, dict[int, float], dict[str, torch.Tensor]]:
    tmp_path = tmp_path_factory.mktemp("reference")
    world = World(job(tmp_path), STAGES, 0, tmp_path)
    world.run()
    return world.job, world.losses, world.weights()


def check(world: World, reference: tuple[Job, dict[int, float], dict[str, torch.Tensor]]) -> None:
    _, losses, weights = reference
    assert world.losses == losses
    found = world.weights()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_training_learns(reference) -> None:
    losses = reference[1]
    assert sorted(losses) == list(range(GOAL))
    assert losses[GOAL - 1] < losses[0]


@pytest.mark.parametrize("seed", range(5))
def test_order_of_work_does_not_show(reference, tmp_path: Path, seed: int) -> None:
    world = World(reference[0], STAGES, seed, tmp_path)
    world.run()
    check(world, reference)
    assert world.redone == 0


def test_single_process_twin_is_equal(reference, tmp_path: Path) -> None:
    recorded = []
    twin.run(reference[0], tmp_path, recorded.append)
    losses = {m.counters.step: m.loss for m in recorded if type(m).__name__ == "StepDone"}
    assert losses == reference[1]


@pytest.mark.parametrize("point", [p for p in POINTS if p not in {"deploy", "copy", "ready"}])
@pytest.mark.parametrize("victim", ["a0/0", "a1/0", "b0/0", "b1/0", "b2/0"])
def test_kill_at_every_point(reference, tmp_path: Path, point: str, victim: str) -> None:
    """One death at a fault point of round 2 (checkpoint and frozen need a first death or the end)."""
    world = World(reference[0], STAGES, zlib.crc32(f"{point} {victim}".encode()) % 1000, tmp_path)
    if point == "frozen":
        first = "b1/0" if victim.startswith("a") else "a1/0"
        if {first, victim} in ({"a1/0", "b1/0"}, {"a1/0", "b2/0"}):
            first = "a0/0"
        if not survivable(world, {first, victim}):
            return
        world.nodes[first].faults.arm("backward", 2)
    world.nodes[victim].faults.arm(point, 2)
    world.run()
    if point != "checkpoint":
        assert (victim, point) in world.fired
    check(world, reference)


def survivable(world: World, dead: set[str]) -> bool:
    return min(world.layout.copies(dead)) > 0


@pytest.mark.parametrize("seed", range(30))
def test_random_deaths(reference, tmp_path: Path, seed: int) -> None:
    world = World(reference[0], STAGES, seed, tmp_path)
    rng = world.random
    points = [p for p in POINTS if p not in {"deploy", "copy", "ready"}]
    dead: set[str] = set()
    for _ in range(2):
        choice = rng.choice(
            [d for d in world.live() if d not in dead and survivable(world, dead | {d})] or [""]
        )
        if choice:
            dead.add(choice)
            world.nodes[choice].faults.arm(rng.choice(points), rng.randrange(GOAL))
    world.run()
    check(world, reference)

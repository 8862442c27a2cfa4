"""What the tests of the engine train, what it comes to without failures, and deaths at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.messages import StepDone
from oobleckd.worker.runtime.faults import POINTS
from oobleckd.worker.tools import reference as reference_run
from tests.helpers.engine import World

Reference = tuple[Job, dict[int, float], dict[str, Tensor]]
"""A job, its losses by step, and its weights in the end."""

STAGES = {"a": [(0, 2), (2, 4)], "b": [(0, 1), (1, 3), (3, 4)]}
GOAL = 5
SCHEDULES: dict[str, dict[str, Any]] = {
    "fused": {},
    "decoupled": {"backward": "decoupled"},
    "staggered": {"update": "staggered", "backward": "decoupled"},
    "copies": {"sum_copies": 3},
    "unkept": {"boundary_memory": 0},
}
GATHERS = ("gather", "gather-backward")
ELSEWHERE = {"weights", "means", "backup", "validate", "deploy", "copy", "ready", "ahead", "stage", *GATHERS}
"""Fault points of other schedules, of steps in which each mean is made once, and between layouts."""


def job(tmp_path: Path, schedule: dict[str, object] | None = None, **train: object) -> Job:
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
            "schedule": schedule or {},
            "checkpoint": {"dir": str(tmp_path / "ckpt")},
        }
    )  # fmt: skip


def check(world: World, reference: Reference) -> None:
    _, losses, weights = reference
    assert world.losses == losses
    found = world.weights()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def survivable(world: World, dead: set[str]) -> bool:
    return min(world.layout.copies(world.layout.unable(dead))) > 0


def random_deaths(world: World, max_deaths: int = 2) -> None:
    """Arm up to ``max_deaths`` deaths, at any points and rounds, that leave a copy of every layer."""
    elsewhere = {"deploy", "copy", "ready", *(() if world.devices_per_stage > 1 else GATHERS)}
    points = [p for p in POINTS if p not in elsewhere]
    dead: set[str] = set()
    for _ in range(max_deaths):
        able = [d for d in world.live() if d not in dead and survivable(world, dead | {d})]
        if able:
            victim = world.random.choice(able)
            dead.add(victim)
            world.nodes[victim].faults.arm(world.random.choice(points), world.random.randrange(GOAL))


def any_deaths(reference: Reference, tmp_path: Path, seed: int, schedule: str, *, redundant: bool) -> None:
    """Deaths at random, under one of ``SCHEDULES``, do not show: after some a layout is begun anew, after
    others the job goes on re-routed.
    """
    changed = msgspec.structs.replace(reference[0], schedule=Schedule(**SCHEDULES[schedule]))
    world = World(changed, STAGES, seed, tmp_path, go_on=seed % 2 == 1, redundant=redundant)
    random_deaths(world)
    world.run()
    check(world, reference)


def told_by(spec: Job, tmp_path: Path) -> dict[int, float]:
    """The losses of ``spec`` trained by one process alone."""
    told: list[Any] = []
    reference_run.run(spec, tmp_path, told.append)
    return {message.counters.step: message.loss for message in told if isinstance(message, StepDone)}


def stays_re_routed(world: World, max_deaths: int = 2) -> None:
    """The layout of the start is in force to the end, and nobody waits at a boundary for another."""
    random_deaths(world, max_deaths)
    world.run()
    assert world.layout.epoch == 1
    assert not world.dead or world.settled == world.dead


def redundant(
    reference, tmp_path: Path, seed: int, stages: Any = STAGES, *, go_on: bool = False, **schedule: Any
) -> World:
    """The same job, each device with its successor's layers besides."""
    changed = msgspec.structs.replace(reference[0], schedule=Schedule(**schedule))
    return World(changed, stages, seed, tmp_path, go_on=go_on, redundant=True)


def scheduled(reference, tmp_path: Path, seed: int, **schedule: Any) -> World:
    """The same job with another schedule."""
    changed = msgspec.structs.replace(reference[0], schedule=Schedule(**schedule))
    return World(changed, STAGES, seed, tmp_path)


def ran_ahead(world: World) -> None:
    """Work until every forward pass of the present round that can be run ahead was; nobody contributes
    anything.
    """
    executors = [world.nodes[device].executor for device in world.live()]
    for executor in executors:
        executor.machine.exchange.open = False
    for _ in range(10_000):
        for executor in executors:
            found = executor.now.board.next(executor.now.has_input)
            if found is not None:
                executor.now.run(*found)
            else:
                executor.now.advance_redundant()
        while world.late:
            world.deliver_late()
        if not any(executor.now.board.redundant for executor in executors):
            break
    for executor in executors:
        executor.machine.exchange.open = True

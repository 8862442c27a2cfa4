"""Small mixtures of experts on the exact engine, and what their routers came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.parts import RouterFigures
from tests.helpers.engine import World
from tests.helpers.engine_jobs import SCHEDULES, STAGES, Reference, check, job
from tests.helpers.models import small_config

RECOMPUTED = ("blocks", "selective")
COEFFICIENTS = {"router_aux_loss_coef": 0.05, "router_z_loss_coef": 0.01}


class Routed(NamedTuple):
    """A job, what it trains to, and by step what its routers came to and the tokens of each expert, by
    layer.
    """

    reference: Reference
    routers: dict[int, dict[int, RouterFigures]]
    experts: dict[int, dict[int, tuple[int, ...]]]


def routed_job(folder: Path, family: str = "mixtral", **train: Any) -> Job:
    """Two blocks of four experts, of which each token goes to two."""
    raw = msgspec.to_builtins(job(folder, **{**COEFFICIENTS, **train}))
    raw["optimizer"]["eps"] = 1e-5  # or gradients that are 0 but for rounding would move weights as others do
    config = small_config(family, hidden_size=16, vocab_size=128, n_group=1)
    raw["model"] = {"family": family, "config": config}
    return parse_job(raw)


def alone(spec: Job, folder: Path) -> Routed:
    """On one device, without failures."""
    world = World(spec, {"x": [(0, 4)]}, 0, folder)
    world.run()
    if not spec.eval.wanted:  # no step was done again, whatever experts have got of tokens
        assert world.nodes["x0/0"].executor.counters.round == spec.train.steps
    return Routed((spec, world.losses, world.weights()), world.routers, world.experts)


def world_on(routed: Routed, folder: Path, seed: int, schedule: str = "fused", **more: Any) -> World:
    """The job on two pipelines, under one of ``SCHEDULES``, or with blocks that are computed again."""
    again = {"backward": "decoupled"} if schedule == "selective" else {}
    known = {**SCHEDULES, **{each: {"recompute": each, **again} for each in RECOMPUTED}}
    spec = msgspec.structs.replace(routed.reference[0], schedule=Schedule(**known[schedule]))
    return World(spec, STAGES, seed, folder, **more)


def check_routed(world: World, routed: Routed) -> None:
    """Losses, weights, router losses and tokens have the bits that they have on one device. Who dies in a
    commit may have been the one to speak for a layer.
    """
    check(world, routed.reference)
    assert world.routers == routed.routers
    for step, by_layer in routed.experts.items():
        found = world.experts.get(step, {})
        assert found.items() <= by_layer.items()
        if not world.dead | world.gone:
            assert found == by_layer

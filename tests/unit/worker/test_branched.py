"""A job that goes on from another one's checkpoint with a decay, in the real engine: the bits are those of a
run that was told so at its start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from oobleckd.host.checkpoint import complete
from oobleckd.protocol.branching import same_rates
from oobleckd.protocol.checkpoint import manifest_of
from oobleckd.protocol.job import Job
from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.protocol.spikes import resumed
from tests.helpers.engine import World
from tests.helpers.engine_jobs import check, job

ALONE: dict[str, Any] = {"x": [(0, 4)]}
STABLE, STEPS = 200, 300


def recipe(tmp_path: Path, steps: int, **optimizer: Any) -> Job:
    spec = job(tmp_path, steps=steps, global_batch=2)
    return msgspec.structs.replace(spec, optimizer=Optimizer(lr=0.01, warmup_steps=10, **optimizer))


def finished(spec: Job, seed: int, tmp_path: Path) -> tuple[World, str]:
    """A run of it, and its last checkpoint."""
    world = World(spec, ALONE, seed, tmp_path)
    world.run()
    parts = sorted(world.parts, key=lambda part: part.bucket)
    manifest = manifest_of(world.job, parts, (world.corpus.inputs.part,))
    return world, str(complete(Path(parts[0].directory), manifest, keep=9))


def test_a_decay_from_step_200_on_has_the_bits_of_a_run_with_it_from_the_start(tmp_path: Path) -> None:
    stable, folder = finished(recipe(tmp_path, STABLE, schedule="wsd"), 0, tmp_path)
    decayed = recipe(tmp_path, STEPS, schedule="wsd", decay_steps=STEPS - STABLE)
    assert same_rates(stable.job, decayed, STABLE)
    whole, _ = finished(decayed, 1, tmp_path)
    assert {step: whole.losses[step] for step in range(STABLE)} == stable.losses
    start = resumed(decayed, stable.parts[0].counters)
    assert (start.round, start.step, start.applied) == (0, STABLE, STABLE)
    branch = World(decayed, ALONE, 2, tmp_path, start=(start, folder))
    branch.run()
    later = {step: loss for step, loss in whole.losses.items() if step >= STABLE}
    assert sorted(later) == list(range(STABLE, STEPS))
    check(branch, (decayed, later, whole.weights()))

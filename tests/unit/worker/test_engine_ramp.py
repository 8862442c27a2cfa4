"""The batch is ramped up in the exact engine: a step has the first micro-batches of a whole one, and whatever
dies in it, or where the batch grows, does not show.
"""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from oobleckd.protocol.job import Job
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.learningrate import lr_at
from oobleckd.worker import sums
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.models import load_spec
from oobleckd.worker.runtime.faults import POINTS
from tests.helpers.engine import World
from tests.helpers.engine_jobs import (
    ELSEWHERE,
    SCHEDULES,
    STAGES,
    Reference,
    check,
    job,
    random_deaths,
    redundant,
    stays_re_routed,
    told_by,
)
from tests.helpers.evaluations import Evaluated, check_all, on_texts, world_of
from tests.helpers.models import all_params, undivided

ALONE = {"x": [(0, 4)]}
STEPS, SIZES = 7, [2, 2, 4, 6, 8, 8, 8]
RAMP = {"start": 2, "increment": 2, "samples": 9}
VICTIMS = ("a0/0", "a1/0", "b0/0", "b1/0", "b2/0")


@pytest.fixture(scope="module")
def ramped(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """On one device, without failures."""
    tmp_path = tmp_path_factory.mktemp("ramped")
    world = World(job(tmp_path, steps=STEPS, batch_ramp=RAMP), ALONE, 0, tmp_path)
    world.run()
    return world.job, world.losses, world.weights()


@pytest.fixture(scope="module")
def evaluated(ramped: Reference, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    folder = tmp_path_factory.mktemp("evaluated")
    world = World(on_texts(ramped[0], folder), ALONE, 0, folder)
    world.run()
    check(world, ramped)
    return world.job, ramped, world.evaluations


def world_on(ramped: Reference, tmp_path: Path, seed: int, schedule: str = "fused", **more: Any) -> World:
    changed = msgspec.structs.replace(ramped[0], schedule=Schedule(**SCHEDULES[schedule]))
    return World(changed, STAGES, seed, tmp_path, **more)


# ---------------------------------------------------------------- what it is


def test_a_plain_loop_has_the_same_losses_and_weights(ramped: Reference, tmp_path: Path) -> None:
    """transformers' model and torch's own AdamW, clipping and accumulation over the same sequences."""
    spec = ramped[0]
    still = {**spec.model.config, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, config=still))
    world = World(spec, STAGES, 0, tmp_path)
    world.run()
    model = undivided(load_spec(spec), all_params(load_spec(spec)))
    corpus, optimizer = open_corpus(spec), spec.optimizer
    plain = torch.optim.AdamW(
        model.parameters(), betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )
    for step, size in enumerate(SIZES):
        plain.zero_grad()
        total = 0.0
        for micro_batch in range(size // 2):
            tokens = corpus.tokens(step, micro_batch)
            loss = model(input_ids=tokens, labels=tokens).loss / (size // 2)
            loss.backward()
            total += loss.item()
        assert world.losses[step] == pytest.approx(total, abs=1e-6)
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_norm)
        plain.param_groups[0]["lr"] = lr_at(step, spec)
        plain.step()
    for key, weight in world.weights().items():
        torch.testing.assert_close(weight, model.get_parameter(key).detach(), rtol=0, atol=2e-5)


def test_no_sample_is_trained_on_twice_and_none_is_left_out(tmp_path: Path) -> None:
    """Two passes over 40 rows: a step begins where the one before it ended."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 7)
    spec = job(tmp_path, steps=30, batch_ramp={**RAMP, "samples": 40})
    corpus, sizes = open_corpus(spec), spec.batch_sizes
    rows = corpus.sources[0].count
    drawn: list[int] = []
    for step in range(sizes.steps_for(2 * rows) + 1):
        assert len(corpus.of_step(step)) == sizes.micro_batches(step)
        drawn += [sample for micro_batch in corpus.of_step(step) for sample in micro_batch]
    assert len(drawn) == len(set(drawn)) == sizes.before(step + 1)
    counts = Counter(sample % rows for sample in drawn[: 2 * rows])
    assert counts == Counter(dict.fromkeys(range(rows), 2))


def test_one_process_alone(ramped: Reference, tmp_path: Path) -> None:
    assert told_by(ramped[0], tmp_path) == ramped[1]


def test_exponents_leave_room_for_the_step_that_follows(
    ramped: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those for as many terms as there were, one of a larger step could be too large, and the step would
    have to be done again.
    """
    decode, chosen = sums.decode, list[int]()

    def seen(*said: Any, exact: bool) -> sums.BucketFigures:
        chosen.append(said[-1])
        return decode(*said, exact=exact)

    monkeypatch.setattr(sums, "decode", seen)
    world = World(ramped[0], ALONE, 0, tmp_path)
    world.run()
    uses = sorted(len(bucket.uses) for bucket in world.spec.buckets)
    parts = [sorted(chosen[at : at + len(uses)]) for at in range(0, len(chosen), len(uses))]
    following = [*SIZES[1:], SIZES[-1]]
    assert parts == [[num * size // 2 for num in uses] for size in following]


# ---------------------------------------------------------------- deaths


@pytest.mark.thin(8)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shadowed", [False, True])
def test_two_pipelines(ramped: Reference, tmp_path: Path, schedule: str, shadowed: bool) -> None:
    world = world_on(ramped, tmp_path, 3, schedule, redundant=shadowed)
    world.run()
    check(world, ramped)
    assert world.redone == world.forwards_again == 0


@pytest.mark.thin(90)
@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("round_", [1, 2, 3])
@pytest.mark.parametrize("point", [p for p in POINTS if p not in {*ELSEWHERE, "frozen", "checkpoint"}])
@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_at_every_point(
    ramped: Reference, tmp_path: Path, victim: str, point: str, round_: int, go_on: bool
) -> None:
    """In a small step, in the last of its size, and in one that is larger than the one before."""
    seed = zlib.crc32(f"{victim} {point} {round_}".encode()) % 1000
    world = world_on(ramped, tmp_path, seed, go_on=go_on)
    world.nodes[victim].faults.arm(point, round_)
    world.run()
    idle = round_ == 1 and victim.startswith("b")  # one micro-batch, and it is the other pipeline's
    if not idle and not point.startswith("checkpoint"):
        assert (victim, point) in world.fired
    check(world, ramped)


@pytest.mark.thin(60)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shadowed", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_random_deaths(ramped: Reference, tmp_path: Path, seed: int, shadowed: bool, schedule: str) -> None:
    world = world_on(ramped, tmp_path, seed, schedule, go_on=seed % 2 == 1, redundant=shadowed)
    random_deaths(world)
    world.run()
    check(world, ramped)


@pytest.mark.thin(10)
@pytest.mark.parametrize("seed", range(10))
def test_a_job_that_goes_on_re_routed(ramped: Reference, tmp_path: Path, seed: int) -> None:
    world = world_on(ramped, tmp_path, seed, ["fused", "staggered"][seed % 2], go_on=True)
    stays_re_routed(world)
    check(world, ramped)


@pytest.mark.thin(10)
@pytest.mark.parametrize("seed", range(10))
def test_forward_passes_that_were_run_ahead(ramped: Reference, tmp_path: Path, seed: int) -> None:
    world = redundant(ramped, tmp_path, seed, go_on=seed % 2 == 1, backward="decoupled")
    random_deaths(world)
    world.run()
    check(world, ramped)


@pytest.mark.thin(20)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_evaluations_between_steps_of_other_sizes(
    evaluated: Evaluated, tmp_path: Path, seed: int, schedule: str
) -> None:
    """An evaluation's rounds have as many micro-batches as a whole step, whatever the step before has."""
    world = world_of(evaluated, tmp_path, seed, schedule, go_on=seed % 2 == 1)
    random_deaths(world)
    world.run()
    check_all(world, evaluated)


def without_ramp(spec: Job) -> Job:
    return msgspec.structs.replace(spec, train=msgspec.structs.replace(spec.train, batch_ramp=msgspec.UNSET))


def test_a_ramp_that_is_left_out_is_another_run(ramped: Reference, tmp_path: Path) -> None:
    world = World(without_ramp(ramped[0]), STAGES, 0, tmp_path)
    world.run()
    assert world.losses[0] != ramped[1][0]
    assert world.job.num_micro_batches == ramped[0].num_micro_batches == 4

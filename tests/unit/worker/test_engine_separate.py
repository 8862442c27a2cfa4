"""The exact engine on packed rows whose documents are kept apart: who makes a mask does not show, be it the
first attempt, the second, or a pass that was run ahead.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from oobleckd.protocol.job import Job
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.worker.data.packed import Packed
from oobleckd.worker.models import ModelSpec
from tests.helpers.engine import World
from tests.helpers.engine_jobs import GOAL, Reference, check, ran_ahead, random_deaths
from tests.helpers.prepared import planned, prepared
from tests.helpers.separate import separate_spec

ALONE = {"a": [(0, 5)]}
CUT = {"a": [(0, 2), (2, 5)], "b": [(0, 1), (1, 4), (4, 5)]}
"""Of the second pipeline one hop has embedding alone, one blocks, and one the head."""
FAMILIES = ("gemma3_text", pytest.param("opt", marks=pytest.mark.slow))
"""One that makes its masks of borders, with sliding windows; and one that is given a mask."""


def job(folder: Path, family: str) -> Job:
    """Packed rows of documents of 1 to 9 tokens, in micro-batches of 2."""
    lengths = np.random.default_rng(7).integers(1, 10, 200)
    documents = [
        np.full(length, number % 60 + 2) + np.arange(length) % 2 for number, length in enumerate(lengths)
    ]
    spec = separate_spec(family)
    train = msgspec.structs.replace(spec.job.train, steps=GOAL, global_batch=8)
    data = msgspec.structs.replace(
        spec.job.data, prepared=str(prepared(folder / ("0" * 32), documents, "uint16"))
    )
    checkpoint = msgspec.structs.replace(spec.job.checkpoint, dir=str(folder / "ckpt"))
    found = msgspec.structs.replace(spec.job, train=train, data=data, checkpoint=checkpoint)
    planned(found)
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def apart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A run on one device, without failures."""
    folder = tmp_path_factory.mktemp("apart")
    world = World(job(folder, request.param), ALONE, 0, folder)
    world.run()
    return world.job, world.losses, world.weights()


def scheduled(
    apart: Reference, tmp_path: Path, seed: int, *, redundant: bool = False, **schedule: Any
) -> World:
    changed = msgspec.structs.replace(apart[0], schedule=Schedule(**schedule))
    return World(changed, CUT, seed, tmp_path, redundant=redundant)


def test_where_a_model_is_cut_does_not_show(apart: Reference, tmp_path: Path) -> None:
    assert len(set(apart[1].values())) == GOAL
    world = scheduled(apart, tmp_path, 1)
    world.run()
    check(world, apart)


def test_documents_that_are_joined_come_to_something_else(apart: Reference, tmp_path: Path) -> None:
    """The tests here would be empty if it were not so."""
    joined = msgspec.structs.replace(apart[0].data, documents="joined")
    changed = msgspec.structs.replace(apart[0], data=joined)
    planned(changed)
    world = World(changed, ALONE, 0, tmp_path)
    world.run()
    assert not set(world.losses.values()) & set(apart[1].values())


@pytest.mark.thin(6)
@pytest.mark.parametrize("backward", ["fused", "decoupled"])
@pytest.mark.parametrize("seed", range(8))
def test_second_attempts_do_not_show(apart: Reference, tmp_path: Path, seed: int, backward: str) -> None:
    world = scheduled(apart, tmp_path, seed, backward=backward)
    random_deaths(world)
    world.run()
    check(world, apart)


@pytest.mark.thin(8)
@pytest.mark.parametrize("victim", ["a0/0", "a1/0", "b1/0", "b2/0"])
@pytest.mark.parametrize("point", ["forward", "backward", "reduce"])
def test_passes_that_were_run_ahead_do_not_show(
    apart: Reference, tmp_path: Path, point: str, victim: str
) -> None:
    seed = zlib.crc32(f"{point} {victim}".encode()) % 1000
    world = scheduled(apart, tmp_path, seed, redundant=True, redundant_memory="1MiB")
    ran_ahead(world)
    world.nodes[victim].faults.arm(point, 0)
    world.run()
    assert (victim, point) in world.fired
    check(world, apart)


def test_a_hop_in_the_middle_reads_no_token_and_one_without_blocks_makes_no_mask(
    apart: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    masks: list[int] = []
    row, calls = Packed.row, ModelSpec.calls
    monkeypatch.setattr(Packed, "row", lambda self, number: rows.append(number) or row(self, number))
    monkeypatch.setattr(ModelSpec, "calls", lambda *args: masks.append(1) or calls(*args))
    World(apart[0], {"b": CUT["b"]}, 3, tmp_path).run()
    num_micro_batches = GOAL * apart[0].num_micro_batches
    assert len(masks) == num_micro_batches
    assert len(rows) == 2 * num_micro_batches * apart[0].train.micro_batch

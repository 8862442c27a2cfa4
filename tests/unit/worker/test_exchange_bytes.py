"""What devices send each other of gradients, by their own counters, and that no number of replicas shows in
the weights: one job over 1, 2, 3, 4 and 8 pipelines of one stage, with parameters far beyond a slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from oobleckd.protocol.job import Job
from oobleckd.worker.models import load_spec
from tests.helpers.engine import World
from tests.helpers.engine_jobs import job

STEPS = 2
REPLICAS = (1, 2, 3, 4, 8)
CONFIG: dict[str, Any] = {"n_layer": 1, "n_embd": 192, "n_head": 2, "n_positions": 8, "vocab_size": 128}
BESIDE = 1.001
"""Norms' marks, losses and headers, over the bytes of parameters: less than this times them."""
BYTES: dict[str, Mapping[int, float]] = {
    "exact, checked": {r: (20 * r - 24) / r for r in (2, 3, 4, 8)},
    "exact, not checked": {r: 12 * (r - 1) / r for r in (2, 3, 4, 8)},
    "float, not checked": {4: 8 * 3 / 4},
}
"""Of gradients a parameter, device and step, by the kind of sums, whether ``check_every`` divides the step,
and the number of replicas.
"""


def spec(tmp_path: Path, *, check_every: int = 1, exact: bool = True) -> Job:
    made = job(tmp_path, steps=STEPS, micro_batch=1, sequence=8, exact=exact)
    config = {**made.model.config, **CONFIG}
    tolerance = msgspec.structs.replace(made.fault_tolerance, check_every=check_every)
    model = msgspec.structs.replace(made.model, config=config)
    return msgspec.structs.replace(made, model=model, fault_tolerance=tolerance)


def trained(spec_: Job, replicas: int, tmp_path: Path) -> World:
    num_layers = load_spec(spec_).num_layers
    world = World(spec_, {chr(97 + r): [(0, num_layers)] for r in range(replicas)}, replicas, tmp_path)
    world.run()
    return world


def sent(world: World) -> list[float]:
    """Bytes of gradients a parameter and device, of each step, as their mean over the devices."""
    parameters = sum(math.prod(shape) for bucket in world.spec.buckets for shape in bucket.shapes)
    told = list(world.gradients.values())
    assert {len(steps) for steps in told} == {STEPS}
    return [
        sum(num_bytes for _, num_bytes in step) / len(told) / parameters for step in zip(*told, strict=True)
    ]


def holds(world: World, least: float) -> None:
    for num_bytes in sent(world):
        assert least <= num_bytes <= least * BESIDE


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, World]:
    tmp_path = tmp_path_factory.mktemp("replicas")
    made = spec(tmp_path)
    return {replicas: trained(made, replicas, tmp_path) for replicas in REPLICAS}


def test_what_is_sent_is_cut_into_more_slices_than_there_are_replicas(worlds: dict[int, World]) -> None:
    """Else nothing would be tested: what is small has one owner."""
    (node,) = worlds[1].nodes.values()
    store = node.executor.store
    assert max(len(store.slicing(bucket).slices) for bucket in store.buckets) > max(REPLICAS)


def test_the_number_of_replicas_does_not_show(worlds: dict[int, World]) -> None:
    alone: dict[str, Tensor] = worlds[1].weights()
    for replicas in REPLICAS[1:]:
        assert worlds[replicas].losses == worlds[1].losses
        weights = worlds[replicas].weights()
        assert weights.keys() == alone.keys()
        assert all(torch.equal(weights[key], alone[key]) for key in alone), replicas


def test_who_is_alone_sends_nothing(worlds: dict[int, World]) -> None:
    assert list(worlds[1].gradients.values()) == [[(0, 0)] * STEPS]


@pytest.mark.parametrize("replicas", BYTES["exact, checked"])
def test_bytes_of_a_step_that_is_checked(worlds: dict[int, World], replicas: int) -> None:
    holds(worlds[replicas], BYTES["exact, checked"][replicas])


@pytest.mark.parametrize("replicas", BYTES["exact, not checked"])
def test_bytes_of_a_step_that_is_not_checked(tmp_path: Path, replicas: int) -> None:
    holds(trained(spec(tmp_path, check_every=0), replicas, tmp_path), BYTES["exact, not checked"][replicas])


@pytest.mark.parametrize("replicas", BYTES["float, not checked"])
def test_bytes_of_float_sums(tmp_path: Path, replicas: int) -> None:
    made = spec(tmp_path, check_every=0, exact=False)
    holds(trained(made, replicas, tmp_path), BYTES["float, not checked"][replicas])

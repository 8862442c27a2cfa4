"""Micro-batches that ask for unequally many tokens: a step's loss and gradients are the means over all of
them, with the same bits whatever the grouping, whoever dies.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.worker import sums
from oobleckd.worker.data.corpus import Corpus
from oobleckd.worker.round.weights import Weights, weights_of
from oobleckd.worker.sums import START_EXPONENT
from tests.helpers.asking import asking_unequally
from tests.helpers.engine import World
from tests.helpers.engine_jobs import SCHEDULES, STAGES, Reference, any_deaths, job, told_by
from tests.helpers.models import CPU, small_job

TARGETS = st.lists(st.integers(0, 2**20), min_size=1, max_size=12)


def weights(targets: list[int], tokens: int = 2**20) -> Weights:
    """Of micro-batches of one row of ``tokens`` that ask for so many."""
    train = {"micro_batch": 1, "sequence": tokens, "global_batch": len(targets)}
    spec = small_job(train=train)
    spec = msgspec.structs.replace(spec, data=msgspec.structs.replace(spec.data, sequences="padded"))
    corpus = SimpleNamespace(targets_of=lambda _step: tuple(targets))
    return weights_of(spec, cast("Corpus", corpus))(0)


# --------------------------------------------------------------------------- the numbers


@given(TARGETS)
def test_weights_are_exact_and_below_one(targets: list[int]) -> None:
    found = weights(targets)
    assert [Fraction(weight) for weight in found.each] == [Fraction(n, 2**21) for n in targets]
    assert max(found.each) < 1
    assert [float(np.float32(weight)) for weight in found.each] == list(found.each)
    assert Fraction(found.total) == (Fraction(sum(targets), 2**21) or 1)


@given(TARGETS, st.data(), st.randoms(use_true_random=False))
def test_a_loss_is_the_mean_over_targets_in_any_order(
    targets: list[int], data: st.DataObject, rng: random.Random
) -> None:
    some = st.floats(0, 100, width=32)
    losses = dict(enumerate(data.draw(st.lists(some, min_size=len(targets), max_size=len(targets)))))
    found, told = weights(targets), weights(targets).mean(losses)
    wanted = sum(Fraction(loss) * targets[mb] for mb, loss in losses.items()) / (sum(targets) or 1)
    assert told == pytest.approx(float(wanted), rel=2**-51, abs=0.0)
    assert found.mean(dict(rng.sample(sorted(losses.items()), len(losses)))) == told


def test_where_all_ask_for_equally_many_each_weighs_one() -> None:
    found = weights_of(small_job(), cast("Corpus", None))(0)
    assert found == Weights((1.0, 1.0))
    assert found.mean({0: 0.1, 1: 0.2}) == math.fsum([0.1, 0.2]) / 2


@settings(max_examples=20)
@given(st.lists(st.integers(0, 64), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_no_grouping_of_weighed_gradients_shows(targets: list[int], rng: random.Random) -> None:
    """Nor is the mean further off than by the rounding of its terms."""
    found, exponents = weights(targets, 64), (START_EXPONENT,)
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    terms = [torch.randn(33, generator=generator) * 1e-2 * weight for weight in found.each]
    everything = range(len(targets))

    def grads(groups: list[list[int]]) -> torch.Tensor:
        parts = [sums.empty([(33,)], True, CPU) for _ in groups]
        for part, group in zip(parts, groups, strict=True):
            for mb in group:
                part.add([terms[mb]], exponents, len(targets))
        return sums.mean_grads(sums.total([part.tensors for part in parts]), exponents, found.total, True)[0]

    alone = grads([list(everything)])
    for _ in range(3):
        order = rng.sample(everything, len(targets))
        cut = rng.randrange(len(targets))
        assert torch.equal(grads([order[:cut], order[cut:]]), alone)
    wanted = torch.stack([term.double() for term in terms]).sum(0) / found.total
    rounded = len(targets) * 0.5**START_EXPONENT / found.total
    torch.testing.assert_close(alone.double(), wanted, rtol=1.2e-7, atol=rounded)


def test_a_step_that_asks_for_nothing_has_zeros() -> None:
    found = weights([0, 0])
    assert found.mean({0: 4.0, 1: 5.0}) == 0.0
    assert sums.mean_grads([torch.zeros(1).double()], (34,), found.total, True)[0].tolist() == [0.0]


# --------------------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """A job whose micro-batches ask for unequally many tokens, and what it comes to without failures."""
    tmp_path = tmp_path_factory.mktemp("weighed")
    spec = job(tmp_path, global_batch=16)
    spec = msgspec.structs.replace(spec, optimizer=msgspec.structs.replace(spec.optimizer, clip_norm=0.0))
    with asking_unequally():
        world = World(spec, STAGES, 0, tmp_path)
        world.run()
        yield spec, world.losses, world.weights()


def test_a_process_alone_has_the_same_losses(weighed: Reference, tmp_path: Path) -> None:
    assert told_by(weighed[0], tmp_path) == weighed[1]
    assert all(map(math.isfinite, weighed[1].values()))


@pytest.mark.thin(50)
@pytest.mark.parametrize("redundant", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(10))
def test_random_deaths_do_not_show(
    weighed: Reference, tmp_path: Path, seed: int, schedule: str, redundant: bool
) -> None:
    any_deaths(weighed, tmp_path, seed, schedule, redundant=redundant)


def test_float_sums_have_the_same_mean(weighed: Reference, tmp_path: Path) -> None:
    spec = msgspec.structs.replace(weighed[0], train=msgspec.structs.replace(weighed[0].train, exact=False))
    assert told_by(spec, tmp_path) == pytest.approx(weighed[1], rel=1e-4)

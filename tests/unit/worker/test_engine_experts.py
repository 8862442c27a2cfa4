"""Mixtures of experts survive with the bits of a run without failures: each token goes to the experts that it
went to before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from oobleckd.protocol.job import Job, Model
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.worker.models import ModelSpec, load_spec
from tests.helpers.engine import World
from tests.helpers.engine_jobs import SCHEDULES, STAGES, Reference, check, job, random_deaths
from tests.helpers.experts import tie_routers
from tests.helpers.models import small_config

KILLS = 50
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Trained:
    """A family, and its job in each precision with what it comes to without failures."""

    family: str
    references: dict[str, Reference]


def mixture(family: str, folder: Path, precision: str) -> Job:
    spec = job(folder, precision=precision)
    return msgspec.structs.replace(spec, model=Model(family, small_config(family, vocab_size=128)))


def undisturbed(spec: Job, folder: Path) -> Reference:
    """Of one device, which in bf16 leaves all rounding to autocast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelSpec, "rounded", lambda *_: frozenset())
        world = World(spec, {"x": [(0, 4)]}, 0, folder)
        world.run()
    return world.job, world.losses, world.weights()


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    family, folder = request.param, tmp_path_factory.mktemp("experts")
    jobs = {precision: mixture(family, folder, precision) for precision in PRECISIONS}
    return Trained(family, {precision: undisturbed(spec, folder) for precision, spec in jobs.items()})


def kills_of(trained: Trained, folder: Path, seed: int) -> int:
    """How many devices died in the run ``seed``, which ended as it would have without; each has a schedule, a
    precision and a way to go on.
    """
    reference = trained.references[PRECISIONS[seed % 2]]
    schedule = Schedule(**list(SCHEDULES.values())[seed // 2 % len(SCHEDULES)])
    changed = msgspec.structs.replace(reference[0], schedule=schedule)
    world = World(changed, STAGES, seed, folder, go_on=seed % 3 == 1, redundant=seed % 3 == 2)
    random_deaths(world)
    world.run()
    check(world, reference)
    return len(world.fired)


@pytest.mark.parametrize("seed", range(2))
def test_deaths_do_not_show(trained: Trained, tmp_path: Path, seed: int) -> None:
    kills_of(trained, tmp_path, seed)


def test_nor_do_they_where_routers_see_no_difference(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To begin with all experts are equally good for every token; those that nobody chose still are later."""
    tie_routers(monkeypatch)
    spec, *_ = trained.references["fp32"]
    tied = Trained(trained.family, {"fp32": undisturbed(spec, tmp_path)})
    assert kills_of(tied, tmp_path, 0)


@pytest.mark.slow
def test_nor_do_fifty(trained: Trained, tmp_path: Path) -> None:
    kills, seed = 0, 2
    while kills < KILLS:
        kills += kills_of(trained, tmp_path, seed)
        seed += 1


def test_experts_learn(trained: Trained, tmp_path: Path) -> None:
    """The tests above would say little if all tokens went to the same."""
    spec, losses, weights = trained.references["fp32"]
    assert losses[max(losses)] < losses[min(losses)]
    model = load_spec(spec)
    for bucket in model.buckets[1:-1]:
        for key, before in zip(bucket.keys, model.init(bucket.index, torch.device("cpu")), strict=True):
            if "experts" in key:
                changed = (weights[key] != before).flatten(1).any(1)
                assert changed.all(), key

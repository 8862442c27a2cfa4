"""Under every rule no death, split or schedule shows in a bit, and a checkpoint gives all of it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from oobleckd.host.checkpoint import complete
from oobleckd.protocol.checkpoint import manifest_of
from oobleckd.protocol.joboptimizer import Optimizer, OptimizerGroup
from oobleckd.protocol.parts import Counters, Vote
from oobleckd.worker.device.measure import measure
from oobleckd.worker.round.reduce import Reducer
from tests.helpers.engine import World
from tests.helpers.engine_jobs import GOAL, SCHEDULES, STAGES, Reference, any_deaths, check, job
from tests.helpers.models import CPU

plain_vote = Reducer.vote
ALONE = {"x": [(0, 4)]}
TWICE = {"x": [(0, 4)], "y": [(0, 4)]}
MIDDLE = 3
GROUPS = (
    OptimizerGroup(match="*.wpe.weight", frozen=True),
    OptimizerGroup(match="*.ln_*", lr_scale=0.5, weight_decay=0.1),
    OptimizerGroup(match="*.h.1.mlp.c_fc.*", frozen=True),
)
RECIPES: dict[str, dict[str, Any]] = {
    "adam": {"name": "adam"},
    "nesterov": {"name": "sgd", "momentum": 0.9, "nesterov": True, "state": "bf16"},
    "plain": {"name": "sgd"},
    "lion": {"name": "lion", "state": "bf16", "lr": 0.001},
    "muon": {"name": "muon", "decay": "matrices"},
    "adafactor": {"name": "adafactor"},
    "groups": {"decay": "matrices", "group": GROUPS, "state": "bf16"},
}


@pytest.fixture(scope="session", params=RECIPES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A job of each recipe, and what it comes to on one device."""
    tmp_path = tmp_path_factory.mktemp("recipe")
    table = {"lr": 0.01, "warmup_steps": 2, **RECIPES[request.param]}
    world = World(msgspec.structs.replace(job(tmp_path), optimizer=Optimizer(**table)), ALONE, 0, tmp_path)
    world.run()
    return world.job, world.losses, world.weights()


@pytest.mark.thin(8)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(2))
def test_deaths_do_not_show(trained: Reference, tmp_path: Path, seed: int, schedule: str) -> None:
    any_deaths(trained, tmp_path, seed, schedule, redundant=seed % 2 == 0)


def test_a_checkpoint_gives_all_of_it_back(trained: Reference, tmp_path: Path) -> None:
    spec, losses, _ = trained
    place = msgspec.structs.replace(spec.checkpoint, dir=str(tmp_path), every=MIDDLE)
    world = World(msgspec.structs.replace(spec, checkpoint=place), STAGES, 1, tmp_path)
    world.run()
    parts = [part for part in world.parts if part.counters.step == MIDDLE]
    folder = complete(Path(parts[0].directory), manifest_of(world.job, parts), keep=2)
    resumed = World(world.job, ALONE, 0, tmp_path, start=(Counters(MIDDLE, MIDDLE, MIDDLE), str(folder)))
    resumed.run()
    check(resumed, (spec, {step: losses[step] for step in range(MIDDLE, GOAL)}, trained[2]))


def test_what_is_frozen_stays_and_does_not_count_in_the_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch, where its gradient is none."""
    spec = job(tmp_path)
    groups = (OptimizerGroup(match="*.wte.weight", frozen=True),)
    frozen = Optimizer(lr=0.01, clip_norm=0.1, group=groups)
    world = World(msgspec.structs.replace(spec, optimizer=frozen), STAGES, 0, tmp_path)
    store = world.nodes["a0/0"].executor.store
    seen: dict[int, tuple[tuple[float, ...], int]] = {}

    def vote(reducer: Reducer, **more: Any) -> Vote:
        seen.update({b: (part.told.figures.norms, len(part.grads)) for b, part in reducer.reduced.items()})
        return plain_vote(reducer, **more)

    monkeypatch.setattr(Reducer, "vote", vote)
    before = {key: value.clone() for key, value in world.weights().items()}
    world.run()
    after = world.weights()
    still = {key for key in before if torch.equal(before[key], after[key])}
    assert {key.rpartition("wte")[1] for key in still} == {"wte"}
    bucket = next(b.index for b in world.spec.buckets if any("wte" in key for key in b.keys))
    assert seen[bucket] == ((0.0,), 1)
    assert store.shape(bucket).frozen == {0}
    assert store.buckets[bucket].num_bytes == 4 * store.buckets[bucket].params[0].numel()


def test_memory_is_what_is_planned_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose layers another one has, too, at the end of a step, within five percent."""
    spec = job(tmp_path)
    config = {**spec.model.config, "n_embd": 64, "n_positions": 64, "tie_word_embeddings": False}
    model = msgspec.structs.replace(spec.model, config=config)
    held: list[int] = []

    def vote(reducer: Reducer, **more: Any) -> Vote:
        states = [flat for state in reducer.store.buckets.values() for flat in state.storages()]
        reduced = [t for each in reducer.reduced.values() for t in (*each.grads, each.means.figures)]
        sums = [tensor for part in reducer.parts.values() for tensor in part.tensors]
        owned = {tensor.untyped_storage().data_ptr(): tensor for tensor in (*states, *reduced, *sums)}
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in owned.values()))
        return plain_vote(reducer, **more)

    monkeypatch.setattr(Reducer, "vote", vote)
    for name, table in RECIPES.items():
        optimizer = Optimizer(**{"lr": 0.01, **table})
        world = World(msgspec.structs.replace(spec, model=model, optimizer=optimizer), TWICE, 0, tmp_path)
        world.run()
        planned = sum(layer.state_bytes for layer in measure(world.spec, world.job, CPU).layers)
        assert planned == pytest.approx(max(held), rel=0.05), name
        if name == "adam":
            params = sum(param.numel() for param in world.weights().values())
            assert max(held) == pytest.approx(24 * params, rel=0.05)
        held.clear()

"""Losses of routers, and how many tokens each expert got."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as f
from torch import Tensor, nn
from transformers import PreTrainedModel

from oobleckd.planner.plan import Range
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.learningrate import lr_at
from oobleckd.protocol.modelnotes import words
from oobleckd.protocol.parts import RouterFigures
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.models import load_spec
from oobleckd.worker.models.config import EXPERTS
from oobleckd.worker.models.routers.losses import load_balancing_loss, tokens_by_expert, z_loss
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.asking import asking_unequally
from tests.helpers.engine import World
from tests.helpers.engine_jobs import SCHEDULES, STAGES, random_deaths, stays_re_routed
from tests.helpers.evaluations import on_texts
from tests.helpers.models import (
    all_layers,
    all_params,
    held_layers,
    layered_step,
    small_config,
    small_job,
    some_batch,
    undivided,
)
from tests.helpers.routers import COEFFICIENTS, RECOMPUTED, Routed, alone, check_routed, routed_job, world_on

BLOCKS = {"mixtral": (1, 2), "glm4_moe": (2,)}
"""With a router: in the last family the first block has none, and scores are by sigmoid."""
NUM_EXPERTS = 4
OFF = dict.fromkeys(COEFFICIENTS, 0.0)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Routed:
    folder = tmp_path_factory.mktemp("routed")
    return alone(routed_job(folder), folder)


# ---------------------------------------------------------------- what they are


def test_balance_costs_1_and_one_expert_for_all_as_many_as_there_are() -> None:
    even = torch.tensor([[0, 1], [2, 3]])
    assert tokens_by_expert(even, 4).tolist() == [1, 1, 1, 1]
    assert float(load_balancing_loss(torch.zeros(2, 4), tokens_by_expert(even, 4), "softmax")) == 1
    one = torch.zeros((3, 1), dtype=torch.int64)
    logits = torch.tensor([[100.0, 0, 0, 0]] * 3)
    assert float(load_balancing_loss(logits, tokens_by_expert(one, 4), "softmax")) == 4
    assert float(z_loss(logits)) == 10_000


def test_scores_by_sigmoid_are_shares_of_their_sum() -> None:
    logits = torch.tensor([[0.0, 0.0], [100.0, -100.0]])
    counts = torch.tensor([2, 0])
    assert float(load_balancing_loss(logits, counts, "sigmoid")) == pytest.approx(2 * (0.5 + 1) / 2)


@pytest.mark.parametrize("family", EXPERTS)
def test_the_router_of_every_family_is_found(family: str) -> None:
    """And what it is told to have chosen adds up; losses of its own change no number that comes out."""
    spec = load_spec(small_job(family, train=COEFFICIENTS))
    without = load_spec(small_job(family))
    layers, plain = (held_layers(each, Range(0, each.num_layers)) for each in (spec, without))
    batch, x, same, found = some_batch(spec), None, None, 0
    for layer, other in zip(layers[:-1], plain, strict=False):
        x, same = layer(x, batch), other(same, batch)
        assert torch.equal(x, same)
        assert (layer.router is not None) == bool(spec.num_experts(layer.index)) == (other.router is not None)
        if layer.router is not None and layer.router.told is not None:
            found += 1
            aux_loss, z_loss_, *tokens = layer.router.told.tolist()
            assert len(tokens) == spec.num_experts(layer.index)
            assert sum(tokens) == batch.inputs.numel() * layer.router.place.top_k
            assert aux_loss > 0
            assert z_loss_ > 0
    assert found == spec.num_layers - 2 - int(getattr(spec.config, "first_k_dense_replace", 0) or 0)


# ---------------------------------------------------------------- against a plain loop


def plain(spec: Job, steps: int) -> Iterator[tuple[float, dict[int, RouterFigures], PreTrainedModel]]:
    """transformers' whole model, torch's AdamW and clipping, and losses of every router as anybody would
    write them: after each step its loss, what routers came to, and the model.
    """
    model = undivided(load_spec(spec), all_params(load_spec(spec)))
    corpus, optimizer, train = open_corpus(spec), spec.optimizer, spec.train
    blocks, by_sigmoid = BLOCKS[spec.model.family], spec.model.family == "glm4_moe"
    adamw = torch.optim.AdamW(
        model.parameters(), betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )
    for step in range(steps):
        adamw.zero_grad()
        weights = corpus.targets_of(step) if spec.data.weighs_targets else [1] * len(corpus.of_step(step))
        shares = [weight / sum(weights) for weight in weights]
        of_step, losses = 0.0, torch.zeros((len(blocks), 2), dtype=torch.float64)
        counts = torch.zeros(len(blocks), 4)
        for micro_batch, share in enumerate(shares):
            batch = corpus.batch(step, micro_batch)
            labels = batch.labels if share else batch.with_a_target().labels
            logits_of: list[Tensor] = []
            with routers_seen(model, logits_of):
                out = model(input_ids=batch.inputs, labels=labels)
            found = [_router(logits, by_sigmoid=by_sigmoid) for logits in logits_of]
            of_routers = sum(
                train.router_aux_loss_coef * aux_loss + train.router_z_loss_coef * z_loss_
                for aux_loss, z_loss_, _ in found
            )
            (share * (out.loss + of_routers)).backward()
            of_step += share * out.loss.item()
            losses += share * torch.tensor([[aux.item(), z.item()] for aux, z, _ in found])
            counts += torch.stack([tokens for _, _, tokens in found])
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_norm)
        adamw.param_groups[0]["lr"] = lr_at(step, spec)
        adamw.step()
        routers = {
            layer: RouterFigures(*of_losses, float(of.max() / of.mean()), int((of == 0).sum()))
            for layer, of_losses, of in zip(blocks, losses.tolist(), counts, strict=True)
        }
        yield of_step, routers, model


@contextmanager
def routers_seen(model: nn.Module, logits_of: list[Tensor]) -> Iterator[None]:
    """What linear layers of as many outputs as there are experts come to, wherever the model has them."""
    linear = f.linear

    def seen(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = linear(x, weight, bias)
        if weight.shape[0] == NUM_EXPERTS:
            logits_of.append(out)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f, "linear", seen)
        yield


def _router(logits: Tensor, *, by_sigmoid: bool) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.sigmoid(logits) if by_sigmoid else torch.exp(logits)
    shares = scores / scores.sum(-1, keepdim=True)
    chosen = torch.zeros_like(shares)
    for token, best in enumerate(shares.topk(2).indices):
        chosen[token, best] = 1
    aux_loss = NUM_EXPERTS * sum(shares[:, e].mean() * chosen[:, e].mean() / 2 for e in range(NUM_EXPERTS))
    return aux_loss, torch.log(torch.exp(logits).sum(-1)).pow(2).mean(), chosen.sum(0)


def assert_as_plain(world: World, spec: Job) -> None:
    model = None
    for step, (loss, routers, model) in enumerate(plain(spec, spec.train.steps)):  # noqa: B007 - the last one
        assert world.losses[step] == pytest.approx(loss, abs=1e-6)
        assert world.routers[step].keys() == routers.keys()
        for layer, wanted in routers.items():
            found = world.routers[step][layer]
            assert msgspec.to_builtins(found) == pytest.approx(msgspec.to_builtins(wanted), abs=1e-6)
    assert model is not None
    for key, weight in world.weights().items():
        torch.testing.assert_close(weight, model.get_parameter(key).detach(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", BLOCKS)
def test_a_plain_loop_has_the_same(family: str, tmp_path: Path) -> None:
    spec = routed_job(tmp_path, family)
    world = World(spec, STAGES, 0, tmp_path)
    world.run()
    assert_as_plain(world, spec)
    off = World(routed_job(tmp_path, family, **OFF), STAGES, 0, tmp_path)
    off.run()
    assert abs(off.losses[4] - world.losses[4]) > 1e-5  # or nothing would have been compared
    assert {figures.aux_loss for figures in off.routers[0].values()} == {0.0}


def test_micro_batches_count_for_as_much_as_they_ask_for(tmp_path: Path) -> None:
    """One that asks for nothing counts for nothing, and its tokens are counted all the same."""
    spec = routed_job(tmp_path, steps=3)
    with asking_unequally():
        world = World(spec, STAGES, 0, tmp_path)
        world.run()
        assert_as_plain(world, spec)


def test_a_step_of_a_batch_that_is_ramped_up(tmp_path: Path) -> None:
    spec = routed_job(tmp_path, batch_ramp={"start": 2, "increment": 2, "samples": 6})
    world = World(spec, STAGES, 0, tmp_path)
    world.run()
    assert_as_plain(world, spec)
    assert len({sum(tokens[1]) for tokens in world.experts.values()}) > 1


# ---------------------------------------------------------------- deaths


@pytest.mark.thin(40)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("schedule", [*SCHEDULES, *RECOMPUTED])
@pytest.mark.parametrize("seed", range(12))
def test_deaths_do_not_show(routed: Routed, tmp_path: Path, seed: int, schedule: str, ahead: bool) -> None:
    world = world_on(routed, tmp_path, seed, schedule, go_on=seed % 2 == 1, redundant=ahead)
    random_deaths(world)
    world.run()
    check_routed(world, routed)


def test_a_job_that_goes_on_re_routed(routed: Routed, tmp_path: Path) -> None:
    world = world_on(routed, tmp_path, 3, go_on=True)
    stays_re_routed(world)
    check_routed(world, routed)


@pytest.mark.thin(2)
@pytest.mark.parametrize("schedule", ["staggered", "selective"])
def test_bf16(tmp_path: Path, schedule: str) -> None:
    lowered = alone(routed_job(tmp_path, "qwen3_moe", precision="bf16"), tmp_path)
    world = world_on(lowered, tmp_path, 1, schedule)
    random_deaths(world)
    world.run()
    check_routed(world, lowered)


def test_evaluations_have_none(routed: Routed, tmp_path: Path) -> None:
    evaluated = on_texts(routed.reference[0], tmp_path)
    world = World(evaluated, STAGES, 5, tmp_path)
    random_deaths(world)
    world.run()
    check_routed(world, routed)
    other = alone(on_texts(routed_job(tmp_path, **OFF), tmp_path), tmp_path)
    assert world.evaluations
    assert other.reference[1] != world.losses


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "phimoe"])
def test_routers_that_are_linear_modules_leave_their_weights_to_w(family: str) -> None:
    """And have the gradients of a whole backward: their losses come through what W is made of."""
    found = []
    for schedule in ({}, {"backward": "decoupled"}):
        spec = load_spec(small_job(family, train=COEFFICIENTS, schedule=schedule))
        found.append(layered_step(spec, all_layers(spec, all_params(spec)), some_batch(spec))[1])
    assert all(torch.equal(grad, found[1][key]) for key, grad in found[0].items())
    without = load_spec(small_job(family))
    plain_grads = layered_step(without, all_layers(without, all_params(without)), some_batch(without))[1]
    (router,) = [
        key for key in plain_grads if "layers.1." in key and key.endswith(("gate.wg.weight", "router.weight"))
    ]
    assert not torch.equal(plain_grads[router], found[0][router])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it uses itself
def test_compiled_blocks_have_the_same() -> None:
    """What a compiled block's router decides comes out of its graph; twice it is the same."""
    plain_spec, spec = (
        load_spec(small_job(train={**COEFFICIENTS, **more}, family="mixtral"))
        for more in ({}, {"compile": True})
    )
    params, batch = all_params(spec), some_batch(spec)
    wanted = layered_step(plain_spec, all_layers(plain_spec, params), batch)
    layers = all_layers(spec, params)
    one, other = (layered_step(spec, layers, batch) for _ in range(2))
    for key, grad in wanted[1].items():
        assert torch.equal(one[1][key], other[1][key])
        torch.testing.assert_close(one[1][key], grad, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("key", COEFFICIENTS)
def test_a_model_without_routers_is_refused(key: str) -> None:
    with pytest.raises(UserError, match=rf"^train\.{key}: no block of gpt2 has a router") as caught:
        load_spec(small_job("gpt2", train={key: 0.01}))
    assert "docs/experts.md" in (caught.value.hint or "")


def test_a_folder_with_a_loss_of_its_own_is_told_of(tmp_path: Path) -> None:
    first = load_spec(small_job("mixtral"))
    undivided(first, all_params(first)).save_pretrained(tmp_path)
    (note,) = load_spec(small_job("mixtral", {}, model={"checkpoint": str(tmp_path)})).notes
    assert words(note) == (
        "of the configuration not used, and train.router_aux_loss_coef is 0: router_aux_loss_coef = 0.001"
    )
    own = small_job("mixtral", {}, model={"checkpoint": str(tmp_path)}, train=COEFFICIENTS)
    assert load_spec(own).notes == ()


def test_the_models_own_loss_is_refused() -> None:
    config = small_config("mixtral", router_aux_loss_coef=0.02)
    with pytest.raises(UserError, match=r"model\.config\.router_aux_loss_coef: .* not computed") as caught:
        load_spec(small_job("mixtral", config))
    assert "train.router_aux_loss_coef" in (caught.value.hint or "")


def test_a_negative_one_is_refused() -> None:
    with pytest.raises(JobError, match=r"train\.router_z_loss_coef"):
        small_job("mixtral", train={"router_z_loss_coef": -0.1})

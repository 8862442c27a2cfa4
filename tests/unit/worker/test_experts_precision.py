"""Experts that compute in bfloat16: as transformers' own do whose parameters are, whatever fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oobleckd.ctl.output import Failure
from oobleckd.ctl.profiles import analytic
from oobleckd.planner.costs.devices import SHEETS
from oobleckd.planner.plan import Range, Recompute
from oobleckd.protocol.branching import changes
from oobleckd.protocol.canonical import canonical
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobtable import JobError
from oobleckd.worker.canary.canary import subject
from oobleckd.worker.device.compiling import _graphs
from oobleckd.worker.models import ModelSpec, load_spec
from oobleckd.worker.models.config import EXPERTS
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.engine_jobs import random_deaths
from tests.helpers.models import (
    CPU,
    all_layers,
    all_params,
    held_layers,
    layered_step,
    seed_like_layers,
    small_config,
    small_job,
    some_batch,
    undivided,
)
from tests.helpers.routers import alone, check_routed, routed_job, world_on

BF16 = {"precision": "bf16", "experts_precision": "bf16"}


def mixture(family: str, **tables: Any) -> Job:
    return small_job(family, train=BF16, **tables)


def is_of_experts(key: str) -> bool:
    return bool(re.search(r"\.experts\.(gate_up|down)_proj", key))


def whole(spec: ModelSpec) -> list[Any]:
    return held_layers(spec, Range(0, spec.num_layers))


# --------------------------------------------------------------------------- against transformers


def with_bf16_experts(model: PreTrainedModel) -> PreTrainedModel:
    """As anybody would: their modules are told so."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.to(torch.bfloat16)
    return model


@pytest.mark.parametrize("family", EXPERTS)
def test_they_compute_as_transformers_has_them(family: str) -> None:
    """Loss and gradients of all parameters, bit for bit."""
    spec = load_spec(mixture(family))
    model, batch = with_bf16_experts(undivided(spec, all_params(spec))), some_batch(spec)
    loss, grads = layered_step(spec, whole(spec), batch)
    seed_like_layers(model, spec)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(input_ids=batch.inputs, labels=batch.labels, use_cache=False).loss
    expected.backward()
    assert torch.equal(loss, expected)
    for key, grad in grads.items():
        wanted = cast("Tensor", model.get_parameter(key).grad)
        assert grad.dtype == torch.bfloat16 or not is_of_experts(key), key
        assert torch.equal(grad.float(), wanted.float()), key


@pytest.mark.parametrize("family", EXPERTS)
def test_all_of_their_parameters_have_copies_and_no_others_than_before(family: str) -> None:
    spec, before = load_spec(mixture(family)), load_spec(small_job(family, train={"precision": "bf16"}))
    experts = {key for bucket in spec.buckets for key in bucket.keys if is_of_experts(key)}
    assert experts
    for layer in range(spec.num_layers):
        more = spec.rounded(layer) - before.rounded(layer)
        assert more == {key for key in experts if spec.layer_of(key) == layer}
        assert before.rounded(layer) <= spec.rounded(layer)


def test_their_products_are_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes in, what it is multiplied with and what comes out."""
    seen: set[torch.dtype] = set()
    product = nn.functional.grouped_mm

    def noting(x: Tensor, weight: Tensor, **more: Any) -> Tensor:
        out = product(x, weight, **more)
        seen.update((x.dtype, weight.dtype, out.dtype))
        return out

    for train, dtype in ((BF16, torch.bfloat16), ({"precision": "bf16"}, torch.float32)):
        spec = load_spec(small_job("mixtral", train=train))
        layers, batch = whole(spec), some_batch(spec)
        with monkeypatch.context() as patch:
            patch.setattr(nn.functional, "grouped_mm", noting)
            layered_step(spec, layers, batch)
        assert seen == {dtype}
        seen.clear()


# --------------------------------------------------------------------------- whatever fails


@pytest.mark.parametrize("recompute", ["blocks", "selective"])
@pytest.mark.parametrize("backward", ["fused", "decoupled"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_blocks_that_are_computed_again_have_the_same_bits(
    family: str, backward: str, recompute: Recompute
) -> None:
    plain, changed = (load_spec(mixture(family, schedule={"backward": each})) for each in ("fused", backward))
    batch = some_batch(plain)
    loss, grads = layered_step(plain, whole(plain), batch)
    again, found = layered_step(changed, whole(changed), batch, recompute)
    assert torch.equal(again, loss)
    assert [key for key, grad in grads.items() if not torch.equal(found[key], grad)] == []


def test_deaths_do_not_show(tmp_path: Path) -> None:
    reference = alone(routed_job(tmp_path, **BF16), tmp_path)
    assert reference.reference[1] != alone(routed_job(tmp_path, precision="bf16"), tmp_path).reference[1]
    kills = 0
    for seed, schedule in enumerate(("fused", "decoupled", "blocks", "selective")):
        world = world_on(reference, tmp_path, seed, schedule, go_on=seed % 2 == 1)
        random_deaths(world)
        world.run()
        check_routed(world, reference)
        kills += len(world.fired)
    assert kills


# --------------------------------------------------------------------------- what a job says


def test_it_is_another_job_with_costs_and_bits_of_its_own() -> None:
    plain, other = small_job("mixtral", train={"precision": "bf16"}), mixture("mixtral")
    assert canonical(plain) == canonical(small_job("mixtral", train=BF16 | {"experts_precision": "fp32"}))
    for what in (canonical, subject, _graphs, lambda job: job.costs_depend_on):
        assert what(plain) != what(other)
    assert [(str(each), each.effect) for each in changes(plain, other)] == [
        ("train.experts_precision fp32 -> bf16", "bits")
    ]


def test_products_in_float32_have_no_experts_in_bf16() -> None:
    with pytest.raises(JobError, match=r"train\.experts_precision: .* train\.precision is fp32") as raised:
        small_job("mixtral", train={"experts_precision": "bf16"})
    assert 'train.precision = "bf16"' in raised.value.hint


def test_a_model_without_experts_is_refused() -> None:
    """By a node, and by a plan without one."""
    with pytest.raises(UserError, match=r"train\.experts_precision: llama, .* has no experts"):
        load_spec(mixture("llama"))
    with pytest.raises(Failure, match=r"train\.experts_precision: llama, .* has no experts"):
        analytic(mixture("llama"), SHEETS["h100"])


def test_sizes_that_the_product_does_not_take_are_named() -> None:
    config = small_config("qwen3_moe", moe_intermediate_size=20)
    spec = load_spec(small_job("qwen3_moe", config, train={"precision": "bf16"}))
    layered_step(spec, all_layers(spec, all_params(spec, CPU)), some_batch(spec))
    with pytest.raises(UserError, match=r"a side of 20 cannot compute in bf16: .* multiples of 8"):
        load_spec(small_job("qwen3_moe", config, train=BF16))

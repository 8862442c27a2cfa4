"""Which parameters are weights and biases of linear products alone, whoever calls them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from oobleckd.planner.plan import Layers, Range
from oobleckd.worker.models import FAMILIES, ModelSpec, load_spec
from oobleckd.worker.models.config import TIED
from oobleckd.worker.models.products import product_parameters
from oobleckd.worker.state.store import Store
from tests.helpers.experts import ROUTER
from tests.helpers.models import (
    CPU,
    all_layers,
    all_params,
    held_layers,
    layered_step,
    small_config,
    small_job,
    some_batch,
)

META = torch.device("meta")


class Uses(nn.Module):
    """Calls ``use`` with itself and an input; all else in it are linear modules as they are meant."""

    def __init__(self, use: Callable[[Uses, Tensor], object]) -> None:
        super().__init__()
        self.use = use
        self.first, self.second, self.norm = nn.Linear(4, 4), Conv1D(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> None:
        self.use(self, self.second(self.first(self.norm(x))))


def found(use: Callable[[Uses, Tensor], object]) -> set[str]:
    layer = Uses(use)
    return set(product_parameters(layer, partial(layer, torch.zeros(2, 3, 4))))


ALL = {"first.weight", "first.bias", "second.weight", "second.bias"}


@pytest.mark.parametrize(
    ("use", "gone"),
    [
        (lambda _s, _x: None, set()),
        (lambda s, x: f.linear(x, weight=s.first.weight, bias=s.second.bias), set()),
        (lambda s, x: s.first.weight.shape, {"first.weight"}),
        (lambda s, x: x.to(s.second.weight.dtype), {"second.weight"}),
        (lambda s, x: x @ s.first.weight, {"first.weight"}),
        (lambda s, x: f.linear(s.second.bias, s.first.weight), {"second.bias"}),
        (lambda s, x: torch.addmm(s.first.bias, s.first.weight, s.second.weight), {"first.weight"}),
        (lambda s, x: torch.cat([s.first.weight, s.second.weight]), {"first.weight", "second.weight"}),
        (lambda s, x: None if s.training else s.first.bias + 1, {"first.bias"}),
        (lambda s, x: s.first.bias.add_(1) if s.training else None, {"first.bias"}),
    ],
)
def test_whatever_else_is_done_with_a_parameter_is_seen(
    use: Callable[[Uses, Tensor], object], gone: set[str]
) -> None:
    assert found(use) == ALL - gone


def test_a_product_without_autocast_is_another_use() -> None:
    def exact(layer: Uses, x: Tensor) -> None:
        with torch.autocast("cpu", enabled=False):
            layer.first(x.float())

    assert found(exact) == ALL - {"first.weight", "first.bias"}


def test_a_layer_that_fails_has_none() -> None:
    assert found(lambda _, x: x.view(1, 1)) == set()


def test_what_nobody_calls_is_not_among_them() -> None:
    layer = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    assert product_parameters(layer, partial(layer["used"], torch.zeros(2, 4))) == {
        "used.weight",
        "used.bias",
    }


def test_nothing_is_drawn_for_it_that_others_would_draw() -> None:
    layer = Uses(lambda _, x: f.dropout(x, 0.5, training=True))
    before = torch.random.get_rng_state()
    assert product_parameters(layer, partial(layer, torch.zeros(2, 3, 4))) == ALL
    assert torch.equal(torch.random.get_rng_state(), before)


ELSEWHERE = {
    **dict.fromkeys(("bert", "ernie"), "cls.predictions.bias"),
    **dict.fromkeys(TIED - {"bert", "ernie"}, "lm_head.bias"),
}
"""Biases that one module owns and another's product takes in: ownership would show neither."""

ROUNDED_ROUTERS = {"gpt_oss", "granitemoe", "minimax", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"}
"""Families that leave the precision of their router to autocast."""


def owned_by_linear(spec: ModelSpec, layer: int) -> set[str]:
    """Keys of ``layer`` that no module but plain linear ones owns there, without routers: another way to the
    same set, as long as nobody reaches into a module of another.
    """
    cut = spec._split
    same = {id(param): param for param in cut.model.parameters()}
    module = cut.head(same, META) if layer == spec.num_layers - 1 else cut.blocks[layer - 1]
    owners: dict[int, set[type[nn.Module]]] = {}
    for part in module.modules():
        for param in part.parameters(recurse=False):
            owners.setdefault(id(param), set()).add(type(part))
    return {
        key
        for bucket in spec.buckets_of(layer)
        for key in spec.buckets[bucket].keys
        if owners[id(cut.model.get_parameter(key))] <= {nn.Linear, Conv1D} and not ROUTER.search(key)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_family_they_are_those_of_its_linear_modules(family: str) -> None:
    config = small_config(family, tie_word_embeddings=family in TIED)
    spec = load_spec(small_job(family, config, train={"precision": "bf16"}))
    head = spec.num_layers - 1
    assert spec.rounded(0) == set()
    for layer in range(1, head):
        of_router = {key for key in spec.rounded(layer) if ROUTER.search(key)}
        assert spec.rounded(layer) - of_router == owned_by_linear(spec, layer)
        assert bool(of_router) == (family in ROUNDED_ROUTERS)
    assert (
        spec.rounded(head) == owned_by_linear(spec, head) | {ELSEWHERE[family]}
        if family in ELSEWHERE
        else {*owned_by_linear(spec, head)}
    )
    # Falcon's linear class is a product of its own with a transposed weight, which is left to autocast.
    of_block = sum(math.prod(spec._split.model.get_parameter(key).shape) for key in spec.rounded(1))
    whole = sum(param.numel() for param in spec._split.blocks[0].parameters())
    # Autocast leaves experts as they are.
    of_experts = sum(p.numel() for p in spec._split.blocks[0].parameters() if p.dim() == 3)
    assert of_block == 0 if family == "falcon" else of_block > 0.8 * (whole - of_experts)


def test_fp32_rounds_nothing() -> None:
    spec = load_spec(small_job("gpt2"))
    assert [spec.rounded(layer) for layer in range(spec.num_layers)] == [set()] * spec.num_layers


class Casts(TorchDispatchMode):
    """Counts casts: ``num_bytes`` that they read and write, and ``shapes`` of what they round."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype != args[0].dtype:
            self.num_bytes += args[0].nbytes + out.nbytes
            if out.dtype == torch.bfloat16:
                self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("llama", False)])
def test_a_micro_batch_casts_no_weight(family: str, tied: bool) -> None:
    """Autocast's casts are 12 bytes a weight: 4 read and 2 written in the forward pass, and back in the
    backward pass, and what is left is of activations.
    """
    spec = load_spec(
        small_job(family, small_config(family, tie_word_embeddings=tied), train={"precision": "bf16"})
    )
    whole = Range(0, spec.num_layers)
    weights = [
        tuple(spec._split.model.get_parameter(key).shape)
        for layer in range(spec.num_layers)
        for key in spec.rounded(layer)
    ]
    counted = []
    for layers in (all_layers(spec, all_params(spec)), held_layers(spec, whole)):
        with Casts() as casts:
            layered_step(spec, layers, some_batch(spec))
        counted.append(casts)
    autocast, ours = counted
    assert autocast.num_bytes - ours.num_bytes == 12 * sum(map(math.prod, weights))
    assert not set(ours.shapes) & set(weights)
    assert set(autocast.shapes) >= set(weights)


def test_of_a_tied_weight_the_head_alone_has_a_copy() -> None:
    spec = load_spec(
        small_job("gpt2", small_config("gpt2", tie_word_embeddings=True), train={"precision": "bf16"})
    )
    shared, head = len(spec.buckets) - 1, spec.num_layers - 1
    assert spec.buckets[shared].uses == (0, head)
    store = Store(spec, CPU)
    held = Layers.of(Range(0, spec.num_layers))
    store.adopt(held, {bucket: store.fresh(bucket) for bucket in store.needed(held)})
    state = store.buckets[shared]
    assert any(leaf is state.params[0] for leaf in store.layers[0].leaves)
    assert any(leaf is state.rounded[0] for leaf in store.layers[head].leaves)
    store.adopt(Layers.of(Range(0, head)), {})
    assert not state.rounded
    store.adopt(held, {bucket: store.fresh(bucket) for bucket in store.needed(held) if bucket != shared})
    assert torch.equal(state.rounded[0], state.params[0].bfloat16())

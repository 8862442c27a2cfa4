"""Small jobs and models for tests of the worker's computing pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from oobleckd.planner.plan import Layers, Range, Recompute
from oobleckd.protocol.job import Job, parse_job
from oobleckd.worker.data.masking import Masking
from oobleckd.worker.models import (
    MASKED,
    Batch,
    Layer,
    ModelSpec,
    Owed,
    gradients,
    input_gradients,
    seed_layer,
)
from oobleckd.worker.recompute.block import BlockInput, Held, LayerGraph, computed
from oobleckd.worker.state.store import Store

CPU = torch.device("cpu")

GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

DROPOUTS = (
    "dropout", "hidden_dropout", "attention_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "resid_dropout", "embed_dropout", "residual_dropout", "attention_probs_dropout_prob",
    "hidden_dropout_prob", "embedding_dropout", "mlp_dropout",
)  # fmt: skip

_SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "ffn_dim": 48, "word_embed_proj_dim": 32, "vocab_size": 64,
    "max_position_embeddings": 16, "pad_token_id": 0, "rotary_dim": 4, **dict.fromkeys(DROPOUTS, 0.0),
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_SMALLER = {"deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4}, "minimax": {"block_size": 4}}


def small_config(family: str, **more: Any) -> dict[str, Any]:
    """A two-block configuration of any family, without dropout."""
    kind = CONFIG_MAPPING[family]
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    given = {**_SMALL, **_SMALLER.get(family, {}), **more}
    return {key: value for key, value in given.items() if key in known}


def small_job(family: str = "gpt2", config: dict[str, Any] | None = None, **tables: Any) -> Job:
    """A job of 3 steps of 2 micro-batches of 2 sequences of 8 tokens; ``tables`` update its tables."""
    raw: dict[str, Any] = {
        "name": "small",
        "model": {"family": family, "config": small_config(family) if config is None else config},
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 8},
    }
    for table, values in tables.items():
        raw[table] = {**raw.get(table, {}), **values}
    return parse_job(raw)


def all_params(spec: ModelSpec, device: torch.device = CPU) -> dict[str, Tensor]:
    """Fresh leaves of the whole model by key, float32."""
    return {
        key: value.requires_grad_()
        for bucket in spec.buckets
        for key, value in zip(bucket.keys, spec.init(bucket.index, device), strict=True)
    }


def all_layers(spec: ModelSpec, params: dict[str, Tensor], device: torch.device = CPU) -> list[Layer]:
    """Every layer of the model, computing with ``params``, which in a bf16 job autocast rounds."""
    keys = [[key for b in spec.buckets_of(i) for key in spec.buckets[b].keys] for i in range(spec.num_layers)]
    return [spec.layer(i, {key: params[key] for key in keys[i]}, device) for i in range(spec.num_layers)]


def held_layers(spec: ModelSpec, layers: Range, device: torch.device = CPU) -> list[Layer]:
    """A device's share: layers with fresh weights of their own, as if there were no other device."""
    store, held = Store(spec, device), Layers.of(layers)
    store.adopt(held, {bucket: store.fresh(bucket) for bucket in store.needed(held)})
    return list(store.layers.values())


def some_batch(spec: ModelSpec) -> Batch:
    """A micro-batch of 2 sequences of 8 tokens, some of them hidden where that is how the family
    is trained.
    """
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, spec.config.vocab_size, (2, 8), generator=generator)
    if spec.job.model.family in MASKED:
        return Masking(spec.job.train.seed, spec.config.vocab_size - 1, spec.config.vocab_size)(
            tokens, [8, 8], 0, 0
        )
    return Batch(tokens, tokens)


def undivided(spec: ModelSpec, params: dict[str, Tensor]) -> PreTrainedModel:
    """The model of transformers itself, in training, with copies of ``params``."""
    auto = AutoModelForMaskedLM if spec.job.model.family in MASKED else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(spec.config, dtype=torch.float32).train()
    with torch.no_grad():
        for key, param in params.items():
            model.get_parameter(key).copy_(param)
    return model


def seed_like_layers(model: PreTrainedModel, spec: ModelSpec) -> None:
    """From now on dropout of the undivided ``model`` draws what that of the layers draws."""

    def seed(layer: int) -> None:
        seed_layer(spec.job.train.seed, 0, 0, layer, CPU)

    cut = spec._split
    names = {id(module): name for name, module in cut.model.named_modules()}
    model.get_submodule(names[id(cut.body)]).register_forward_pre_hook(lambda *_: seed(0))
    for index, meta in enumerate(cut.blocks):
        block = model.get_submodule(names[id(meta)])
        block.register_forward_pre_hook(lambda *_, layer=index + 1: seed(layer))
    block.register_forward_hook(lambda *_: seed(spec.num_layers - 1))


def layered_step(
    spec: ModelSpec, layers: list[Layer], batch: Batch, recompute: Recompute = "none"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by key, one layer at a time as a device computes them, dropout seeded by layer.

    Where the backward is decoupled, all of W comes after all of I. ``recompute``: what blocks compute again.
    """
    apart = batch.positions is not None and batch.documents is not None
    calls = spec.calls(batch.positions, batch.documents) if apart else {}
    x: Tensor | None = None
    passes: list[tuple[Layer, Held]] = []

    def seed(layer: Layer) -> None:
        seed_layer(spec.job.train.seed, 0, 0, layer.index, layer.device)

    for layer in layers:
        into = None if x is None else x.detach().requires_grad_()
        seed(layer)
        call = calls.get(layer.index)
        if recompute != "none" and into is not None and not layer.is_head:
            keeps = recompute == "selective"
            x, held = computed(layer, into, call, 1.0, apart=layer.apart, keeps_products=keeps)
            passes.append((layer, held))
            continue
        x, owed = layer.forward_apart(into, batch, call) if layer.apart else (layer(into, batch, call), None)
        passes.append((layer, LayerGraph(into, x, owed)))
    assert x is not None
    gradient: Tensor | None = None
    sums: dict[str, Tensor] = {}
    debts: list[tuple[Layer, Sequence[Tensor | None], Owed]] = []
    for layer, held in reversed(passes):
        ran = held.again(layer, partial(seed, layer)) if isinstance(held, BlockInput) else held
        into, out, owed = ran.into, ran.out, ran.owed
        through = [] if into is None else [into]
        inputs = layer.leaves + through
        grads = (
            gradients(out, inputs, gradient) if owed is None else input_gradients(out, inputs, gradient, owed)
        )
        gradient = grads.pop() if through else None
        debts.append((layer, grads, Owed() if owed is None else owed))
    for layer, found, owed in debts:
        grads = owed.complete(layer.leaves, found)
        for (bucket, position, _), grad in zip(layer.params, grads, strict=True):
            key = spec.buckets[bucket].keys[position]
            sums[key] = sums[key] + grad if key in sums else grad
    return x, sums

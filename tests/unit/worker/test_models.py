"""Buckets, layers and weights of a cut model; that all families are cut right is in test_families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from oobleckd.worker.models import ModelSpec, load_spec, seed_layer
from oobleckd.worker.models.split import split
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import (
    CPU,
    GPT2,
    NO_DROPOUT,
    all_layers,
    all_params,
    layered_step,
    small_config,
    small_job,
    some_batch,
    undivided,
)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bf16_is_the_undivided_model_under_autocast(family: str) -> None:
    spec = load_spec(small_job(family, train={"precision": "bf16"}))
    params = all_params(spec)
    batch = some_batch(spec)
    model = undivided(spec, params)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(input_ids=batch.inputs, labels=batch.labels).loss
    expected.backward()
    loss, grads = layered_step(spec, all_layers(spec, params), batch)
    assert torch.equal(loss, expected)
    assert loss.dtype == torch.float32  # so that its weight is exact
    assert all(torch.equal(grads[key], param.grad) for key, param in model.named_parameters())
    assert all(grad.dtype == torch.float32 for grad in grads.values())


# --------------------------------------------------------------------------- buckets


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_buckets_partition_the_parameters(family: str, tied: bool) -> None:
    spec = load_spec(small_job(family, small_config(family, tie_word_embeddings=tied)))
    keys = [key for bucket in spec.buckets for key in bucket.keys]
    assert len(keys) == len(set(keys))
    assert [bucket.index for bucket in spec.buckets] == list(range(len(spec.buckets)))
    for layer in range(spec.num_layers):
        assert spec.buckets[layer].uses == (layer,)
        assert layer in spec.buckets_of(layer)
    for bucket in spec.buckets:
        assert all(bucket.index in spec.buckets_of(use) for use in bucket.uses)
        assert len(bucket.keys) == len(bucket.shapes)


def test_gpt2_buckets_have_the_names_of_the_undivided_model() -> None:
    spec = load_spec(small_job("gpt2"))
    assert spec.num_layers == 4
    assert spec.buckets[0].keys == ("transformer.wpe.weight",)
    assert all(key.startswith("transformer.h.1.") for key in spec.buckets[2].keys)
    assert spec.buckets[3].keys == ("transformer.ln_f.weight", "transformer.ln_f.bias")
    assert spec.buckets[4].keys == ("transformer.wte.weight",)
    assert spec.buckets[4].uses == (0, 3)


def test_tied_llama_embedding_has_an_empty_bucket() -> None:
    spec = load_spec(small_job("llama", small_config("llama", tie_word_embeddings=True)))
    assert spec.buckets[0].keys == ()
    assert spec.init(0, CPU) == []
    assert spec.buckets_of(0) == (0, spec.num_layers)


# --------------------------------------------------------------------------- layers


def test_a_layer_computes_with_the_leaves_themselves() -> None:
    spec = load_spec(small_job("gpt2"))
    params = all_params(spec)
    for layer in all_layers(spec, params):
        held = {id(leaf) for _, _, leaf in layer.params}
        assert {id(tensor) for tensor in layer.module.parameters()} == held
        assert [entry[:2] for entry in layer.params] == sorted(entry[:2] for entry in layer.params)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_block_holds_nothing_but_its_own(family: str) -> None:
    spec = load_spec(small_job(family))
    params = all_params(spec)
    block = all_layers(spec, params)[1]
    own = {id(params[key]) for key in spec.buckets[1].keys}
    assert {id(tensor) for tensor in (*block.module.parameters(), *block.module.buffers())} <= own


def test_an_update_in_place_is_seen_by_the_layer() -> None:
    spec = load_spec(small_job("llama"))
    params = all_params(spec)
    layers = all_layers(spec, params)
    batch = some_batch(spec)
    before = layered_step(spec, layers, batch)[0]
    with torch.no_grad():
        params["model.norm.weight"].mul_(2)
    assert not torch.equal(layered_step(spec, layers, batch)[0], before)


# --------------------------------------------------------------------------- dropout


def test_dropout_depends_on_step_micro_batch_and_layer_alone() -> None:
    spec = load_spec(small_job("gpt2", GPT2))
    layer = all_layers(spec, all_params(spec))[1]
    x = torch.randn((2, 8, 16), generator=torch.Generator().manual_seed(0))

    def run(*numbers: int) -> Tensor:
        seed_layer(*numbers, CPU)
        return layer(x, None).detach()

    first = run(7, 1, 2, 1)
    torch.rand(5)
    assert torch.equal(run(7, 1, 2, 1), first)
    for other in [(8, 1, 2, 1), (7, 2, 2, 1), (7, 1, 3, 1), (7, 1, 2, 2), (7, 2, 1, 1)]:
        assert not torch.equal(run(*other), first)


# --------------------------------------------------------------------------- weights


def test_weights_are_a_function_of_seed_and_name() -> None:
    first, second = load_spec(small_job("gpt2")), load_spec(small_job("gpt2"))
    torch.default_generator.manual_seed(1)
    state = torch.get_rng_state()
    forward = {b.index: first.init(b.index, CPU) for b in first.buckets}
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    backward = {b.index: second.init(b.index, CPU) for b in reversed(second.buckets)}
    assert all(torch.equal(a, b) for i in forward for a, b in zip(forward[i], backward[i], strict=True))
    other = load_spec(small_job("gpt2", train={"seed": 1})).init(1, CPU)
    assert not all(torch.equal(a, b) for a, b in zip(forward[1], other, strict=True))


def test_blocks_start_different() -> None:
    spec = load_spec(small_job("gpt2"))
    index = next(i for i, key in enumerate(spec.buckets[1].keys) if key.endswith("c_attn.weight"))
    assert not torch.equal(spec.init(1, CPU)[index], spec.init(2, CPU)[index])


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "bloom", "qwen3"])
def test_weights_follow_the_family(family: str) -> None:
    """Constants are equal, random weights have the family's mean and spread."""
    spec = load_spec(small_job(family, small_config(family, hidden_size=64, head_dim=16)))
    params = all_params(spec)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = AutoModelForCausalLM.from_config(spec.config, dtype=torch.float32)
    for key, param in model.state_dict().items():
        value = params.get(key, param).detach()
        if param.std() == 0 or param.numel() < 2:
            assert torch.equal(value, param), key
        else:
            assert float(value.std()) == pytest.approx(float(param.std()), rel=0.15), key


def test_weights_lie_in_aligned_memory_of_their_own() -> None:
    spec = load_spec(small_job("gpt2"))
    values = [value for bucket in spec.buckets for value in spec.init(bucket.index, CPU)]
    assert all(value.data_ptr() % 64 == 0 and value.is_contiguous() for value in values)
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in values)
    assert len({value.data_ptr() for value in values}) == len(values)


# --------------------------------------------------------------------------- a folder to start from


def saved(folder: Path, spec: ModelSpec, **how: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(spec.config, dtype=torch.float32)
    model.save_pretrained(folder, **how)
    return model


@pytest.mark.parametrize(("family", "how"), [("gpt2", {}), ("llama", {"max_shard_size": "20KB"})])
def test_a_folder_gives_its_weights(tmp_path: Path, family: str, how: dict[str, Any]) -> None:
    model = saved(tmp_path, load_spec(small_job(family)), **how)
    spec = load_spec(
        small_job(family, {}, model={"family": family, "config": {}, "checkpoint": str(tmp_path)})
    )
    params = all_params(spec)
    assert all(torch.equal(params[key], param) for key, param in model.named_parameters())


def test_a_folder_may_lack_the_prefix(tmp_path: Path) -> None:
    model = saved(tmp_path / "whole", load_spec(small_job("gpt2")))
    model.base_model.save_pretrained(tmp_path / "base")
    table = {"family": "gpt2", "config": {}, "checkpoint": str(tmp_path / "base")}
    params = all_params(load_spec(small_job("gpt2", {}, model=table)))
    assert all(torch.equal(params[key], param) for key, param in model.named_parameters())


def test_a_folder_of_another_shape_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, load_spec(small_job("gpt2")))
    table = {"family": "gpt2", "config": {"n_embd": 64}, "checkpoint": str(tmp_path)}
    with pytest.raises(UserError, match=r"has shape .* the model needs"):
        load_spec(small_job("gpt2", {}, model=table))


def test_a_folder_of_another_family_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, load_spec(small_job("llama")))
    table = {"family": "gpt2", "config": {}, "checkpoint": str(tmp_path)}
    with pytest.raises(UserError, match="'llama' model") as raised:
        load_spec(small_job("gpt2", {}, model=table))
    assert raised.value.hint == 'set model.family = "llama"'


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "No such file"),
        ({"config.json": "{"}, "is not JSON"),
        ({"config.json": json.dumps({"model_type": "gpt2"})}, "does not exist"),
        ({"config.json": json.dumps({"model_type": "gpt2"}), "model.safetensors": "x"}, "cannot be read"),
        (
            {"config.json": json.dumps({"model_type": "gpt2"}), "model.safetensors.index.json": "x"},
            "is damaged",
        ),
    ],
)
def test_a_broken_folder_is_named(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    table = {"family": "gpt2", "config": {}, "checkpoint": str(tmp_path)}
    with pytest.raises(UserError, match=problem) as raised:
        load_spec(small_job("gpt2", {}, model=table))
    assert raised.value.hint


def test_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    saved(tmp_path, load_spec(small_job("gpt2")))
    table = {"family": "gpt2", "config": {"n_layer": 7}, "checkpoint": str(tmp_path)}
    with pytest.raises(UserError, match=r"has 24 of the 84 tensors of the blocks \(no transformer\.h\.2\."):
        load_spec(small_job("gpt2", {}, model=table))


# --------------------------------------------------------------------------- what a user can get wrong


@pytest.mark.parametrize(
    ("family", "config", "problem", "hint"),
    [
        ("gpt-2", {}, r"model\.family: 'gpt-2'", "did you mean 'gpt2'?"),
        ("zebra", {}, r"model\.family: 'zebra'", "supported families: arcee, bert, biogpt"),
        ("gpt2", {"n_embdd": 4}, r"model\.config\.n_embdd: gpt2 has no such field", "did you mean 'n_embd'?"),
        ("gpt2", {"use_cache": True}, r"model\.config\.use_cache", "known fields"),
        ("opt", {"layerdrop": 0.1}, r"model\.config\.layerdrop", ""),
        ("gpt2", {"n_embd": "wide"}, r"n_embd.*expected int", "GPT2Config"),
        (
            "gpt2",
            {"n_embd": 30, "n_head": 7},
            r"model\.config\.n_head: 7 does not divide n_embd = 30",
            "change",
        ),
        ("gpt2", {"n_layer": 0}, "no blocks", "1 or more"),
        ("gpt2", {"n_positions": 4}, r"train\.sequence = 8, but the model has only 4 positions", "4 or less"),
        ("roberta", {"max_position_embeddings": 9}, "the model has only 7 positions", "7 or less"),
        ("roberta", {"pad_token_id": None}, r"model\.config\.pad_token_id: roberta counts", "1 is usual"),
        (
            "bert",
            {"tie_word_embeddings": False},
            "bert is trained with tied embeddings alone",
            "leave it out",
        ),
        ("bert", {"is_decoder": True}, r"model\.config\.is_decoder: bert has no such field to set", ""),
        ("gpt2", {"attn_pdrop": 1.5}, r"attn_pdrop: 1\.5 is not in", "dropout off"),
    ],
)
def test_mistakes_are_named(family: str, config: dict[str, Any], problem: str, hint: str) -> None:
    with pytest.raises(UserError, match=problem) as raised:
        load_spec(small_job(family, config))
    assert hint in raised.value.hint


def test_small_vocabularies_need_no_special_tokens() -> None:
    config = load_spec(small_job("gpt2", {**GPT2, **NO_DROPOUT})).config
    assert config.bos_token_id is None
    assert config.vocab_size == 64


def cuts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every model that is cut from now on, none being known from before."""
    made: list[object] = []
    monkeypatch.setattr("oobleckd.worker.models.spec._last", [])
    monkeypatch.setattr(
        "oobleckd.worker.models.spec.split", lambda config: made.append(config) or split(config)
    )
    return made


def test_the_model_that_was_cut_last_is_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cuts(monkeypatch)
    one, again = load_spec(small_job()), load_spec(small_job(train={"seed": 5}))
    assert len(made) == 1
    assert one.buckets == again.buckets
    mine, yours = all_params(one), all_params(again)
    assert mine.keys() == yours.keys()
    assert any(not torch.equal(mine[key], yours[key]) for key in mine), "each has its own seed"


def test_another_model_is_cut_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cuts(monkeypatch)
    config = small_config("gpt2")
    for fields in (config, {**config, "tie_word_embeddings": False}, {**config, "resid_pdrop": 0.25}):
        load_spec(small_job(config=fields))
    load_spec(small_job("llama"))
    assert len(made) == 4


def test_a_folder_s_model_is_cut_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is found in the folder decides how it is cut."""
    config = load_spec(small_job()).config
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    made = cuts(monkeypatch)
    for _ in range(2):
        load_spec(small_job(model={"family": "gpt2", "config": {}, "checkpoint": str(tmp_path)}))
    assert len(made) == 2

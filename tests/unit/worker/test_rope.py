"""Rotary positions and other tables and lists of ``[model.config]``: taken as transformers takes them, or refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from oobleckd.ctl.reference import to_toml
from oobleckd.host.jobfile import load_job
from oobleckd.protocol.checkpoint import model_digest
from oobleckd.protocol.job import parse_job, table_of
from oobleckd.protocol.jobtable import JobError
from oobleckd.worker.models import FAMILIES, load_config, load_spec
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import (
    all_layers,
    all_params,
    layered_step,
    small_config,
    small_job,
    some_batch,
)

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
ROTARY = tuple(
    family for family in FAMILIES if "rope_parameters" in CONFIG_MAPPING[family].__dataclass_fields__
)
OTHERWISE = {"gpt_neox": "rotary_emb_base", "modernbert": "global_rope_theta"}
"""Families whose older configurations call the base something else."""


@pytest.mark.parametrize("theta", [500000.0, 500000])
@pytest.mark.parametrize("family", ROTARY)
def test_a_base_is_taken_as_transformers_takes_it(family: str, theta: float) -> None:
    given = {**small_config(family), OTHERWISE.get(family, "rope_theta"): theta}
    config = load_config(small_job(family, given))
    theirs = AutoConfig.for_model(family, **copy.deepcopy(given))
    assert config.rope_parameters == theirs.rope_parameters
    assert f"{float(theta)}" in str(json.loads(json.dumps(config.rope_parameters), parse_int=float))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(ROTARY)))
def test_a_family_without_rotary_positions_has_no_base(family: str) -> None:
    with pytest.raises(UserError, match=r"model\.config\.rope_theta: .* has no such field"):
        load_config(small_job(family, {**small_config(family), "rope_theta": 5e5}))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"rope_theta": 5e5}),
        ("llama", {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
        ("mistral", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}}),
        ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("phi3", {"rope_scaling": {"rope_type": "longrope", "short_factor": [2.0] * 4, "long_factor": [3.0] * 4}}),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}),
        (
            "gemma3_text",
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("mpt", {"attn_config": {"alibi": True, "clip_qkv": 0.5}}),
    ],
)  # fmt: skip
def test_tables_and_lists_compute_what_transformers_computes(family: str, more: dict[str, Any]) -> None:
    given = {**small_config(family), **more}
    spec = load_spec(small_job(family, given))
    plain = load_spec(small_job(family, small_config(family)))
    params, batch = all_params(spec), some_batch(spec)
    config = AutoConfig.for_model(family, **copy.deepcopy(given), use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for key, param in params.items():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3)
            model.get_parameter(key).copy_(param)
    expected = model(input_ids=batch.inputs, labels=batch.labels).loss
    expected.backward()
    loss, grads = layered_step(spec, all_layers(spec, params), batch)
    assert torch.equal(loss, expected)
    assert all(torch.equal(grads[key], model.get_parameter(key).grad) for key in params)
    assert not torch.equal(loss, layered_step(plain, all_layers(plain, params), batch)[0]), "they do not show"


@pytest.mark.parametrize(
    ("family", "more", "problem", "hint"),
    [
        ("llama", {"rope_thetta": 1.0}, r"model\.config\.rope_thetta: llama has no such field", "'rope_theta'"),
        ("llama", {"rope_theta": 0.0}, r"model\.config\.rope_theta: 0\.0 is no number above 0", "10000.0"),
        ("llama", {"rope_theta": "big"}, r"'big' is no number above 0", "10000.0"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factr": 2.0}}, r"rope_scaling\.factr: is nothing", "'factor'"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "8"}}, r"rope_scaling\.factor: '8' is no number", "10000"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, r"Missing required keys .*'factor'", "LlamaConfig"),
        ("llama", {"rope_scaling": {"factor": 2.0}}, r"rope_scaling\.factor: is nothing to positions of type 'default'", "rope_theta"),
        ("llama", {"rope_scaling": {"rope_type": "zoo"}}, r"rope_scaling\.rope_type: there is no 'zoo'", "llama3"),
        ("llama", {"rope_scaling": 2.0}, r"rope_scaling: 2\.0 is no table", "rope_type"),
        ("llama", {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1.0}}, r"another name of rope_parameters", "leave"),
        ("llama", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, r"rope_theta: llama does not take it so", "rope_theta"),
        ("gpt_neox", {"rope_theta": 5.0}, r"rope_theta: gpt_neox does not take it so", "model.config.rope_parameters"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 5.0}}, r"gemma3_text does not take it", "each kind of layer"),
        ("stablelm", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}}, "long_factor: has 4 numbers", "pair"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types", "Qwen3Config"),
        ("qwen3", {"layer_types": ["full", "full"]}, "layer_types", "Qwen3Config"),
        ("qwen3", {"layer_types": 2}, "layer_types.*expected a list", "Qwen3Config"),
        ("qwen3", {"layer_types": ["linear_attention"] * 2}, "cannot be built", "mend"),
        ("gpt2", {"num_hidden_layers": {"a": 1}}, "num_hidden_layers: {'a': 1} is no whole number", "write one"),
        ("gpt2", {"n_layer": 2, "num_hidden_layers": 3}, "is another name of n_layer|is another name of num_hidden_layers", "leave"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(family: str, more: dict[str, Any], problem: str, hint: str) -> None:
    with pytest.raises(UserError, match=problem) as raised:
        load_spec(small_job(family, {**small_config(family), **more}))
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("stored", "given", "found"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 1e4}, {"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e6},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
            {"rope_type": "default", "rope_theta": 1e5},
        ),
        ({"rope_scaling": None, "rope_theta": 1e6}, {}, {"rope_type": "default", "rope_theta": 1e6}),
    ],
)  # fmt: skip
def test_a_job_outweighs_its_folder(
    tmp_path: Path, stored: dict[str, Any], given: dict[str, Any], found: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**small_config("llama"), **stored, "model_type": "llama"})
    )
    job = small_job("llama", given, model={"checkpoint": str(tmp_path)})
    assert load_config(job).rope_parameters == found


def test_another_name_of_a_field_outweighs_the_folder_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**small_config("gpt2"), "model_type": "gpt2"}))
    job = small_job("gpt2", {"num_hidden_layers": 3}, model={"checkpoint": str(tmp_path)})
    assert load_config(job).n_layer == 3


def test_what_a_job_says_stays_as_it_was() -> None:
    """Transformers writes into the tables that it is given; the job's digest would change."""
    job = small_job("llama", {**small_config("llama"), "rope_scaling": {"type": "linear", "factor": 2.0}})
    before = msgspec.json.encode(job)
    load_config(job)
    assert msgspec.json.encode(job) == before


def test_a_clone_has_the_tables_too(tmp_path: Path) -> None:
    tables = {
        "rope_parameters": {"full_attention": LLAMA3},
        "layer_types": ["full_attention"],
        "eos_token_id": [1, 2],
    }
    job = small_job("llama", {**small_config("llama"), **tables})
    (tmp_path / "job.toml").write_text(to_toml(table_of(job)))
    assert load_job(tmp_path / "job.toml") == job
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=type(job)) == job


def test_a_model_without_tables_has_the_digest_that_it_had() -> None:
    config = {
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 2,
        "tie_word_embeddings": True,
        "resid_pdrop": 0.1,
        "pad_token_id": None,
    }
    assert model_digest(small_job("gpt2", config)) == "3b31a216efd6a3eb79ad71cc9ca7b7ed"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([{"a": 1}], r"model\.config\.key\[0\]: cannot be a table here"),
        ({"a": {"b": {"c": 1}}}, r"model\.config\.key\.a\.b: cannot be a table here"),
        ([[[1]]], r"model\.config\.key\[0\]\[0\]: cannot be a list here"),
        ({"a": float("nan")}, r"model\.config\.key\.a: is no finite number"),
        (b"1", r"model\.config\.key: cannot be a bytes here"),
    ],
)
def test_what_is_no_field_is_named(value: Any, problem: str) -> None:
    raw = {
        "name": "a",
        "model": {"config": {"key": value}},
        "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "sequence": 8},
    }
    with pytest.raises(JobError, match=problem):
        parse_job(raw)

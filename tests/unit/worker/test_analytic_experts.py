"""The analytic profile of mixtures of experts against a measured one, and their parameters against those of
transformers.
"""

from __future__ import annotations

from typing import Any

import pytest

from oobleckd.ctl.expertshapes import DEFAULTS
from oobleckd.ctl.profiles import workload_of
from oobleckd.ctl.shapes import shape_of
from oobleckd.planner.costs.analytic import analytic_profile
from oobleckd.planner.costs.devices import SHEETS
from oobleckd.protocol.job import Job
from oobleckd.worker.device.measure import measure
from oobleckd.worker.models import load_spec
from oobleckd.worker.models.config import EXPERTS
from tests.helpers.models import CPU, small_config, small_job

WIDE = {
    "num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 320, "moe_intermediate_size": 96, "vocab_size": 500,
    "shared_expert_intermediate_size": 160, "max_position_embeddings": 32, "q_lora_rank": 48,
    "kv_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16,
    "attention_bias": True, "lm_head_bias": True, "use_qk_norm": True, "decoder_sparse_step": 2,
}  # fmt: skip
SEPARATE = {"source": "jsonl", "path": "a.jsonl", "tokenizer": "tokenizer.json", "sequences": "packed"}
OWN = {"deepseek_v3": {"num_key_value_heads": 4}}


FP32: dict[str, Any] = {"precision": "fp32"}
BF16 = {"precision": "bf16"}
ALL_BF16 = BF16 | {"experts_precision": "bf16"}


def job_of(family: str, precision: dict[str, Any] = FP32, **tables: Any) -> Job:
    train = {"steps": 1, "global_batch": 2, "micro_batch": 2, "sequence": 32, **precision}
    return small_job(family, small_config(family, **WIDE | OWN.get(family, {})), train=train, **tables)


def test_every_family_has_a_shape_but_the_one_that_is_measured() -> None:
    assert set(EXPERTS) - DEFAULTS.keys() == {"minimax"}


@pytest.mark.parametrize("family", DEFAULTS)
def test_parameters_are_those_of_transformers(family: str) -> None:
    """Of the job's configuration, and of the family's own defaults."""
    job = job_of(family)
    spec, shape = load_spec(job), shape_of(job)
    assert (shape.params, shape.active_params) == (spec.num_params, spec.num_active_params)
    assert shape.active_params < shape.params
    assert shape.weights == spec.num_weights
    assert shape.attention == spec.attention
    if family not in {"dots1", "hunyuan_v1_moe"}:  # whose defaults make no model
        published = small_job(family, {"num_hidden_layers": 4})
        assert shape_of(published).params == load_spec(published).num_params


@pytest.mark.thin(8)
@pytest.mark.parametrize("data", [{}, SEPARATE], ids=["joined", "separate"])
@pytest.mark.parametrize("precision", [FP32, BF16, ALL_BF16], ids=["fp32", "bf16", "experts-too"])
@pytest.mark.parametrize("family", DEFAULTS)
def test_bytes_are_those_that_a_worker_measures(
    family: str, precision: dict[str, Any], data: dict[str, Any]
) -> None:
    job = job_of(family, precision, data=data, schedule={"recompute": "auto"})
    measured = measure(load_spec(job), job, CPU)
    expected = analytic_profile(shape_of(job), workload_of(job, shape_of(job)), SHEETS["cpu"])
    assert expected.shared_bytes == pytest.approx(measured.shared_bytes, rel=0.02)
    assert (expected.params, expected.active_params) == (measured.params, measured.active_params)
    assert expected.flops_per_token == measured.flops_per_token
    for found, real in zip(expected.layers, measured.layers, strict=True):
        assert (found.name, found.param_bytes, found.state_bytes, found.output_bytes) == (
            real.name, real.param_bytes, real.state_bytes, real.output_bytes,
        )  # fmt: skip
        assert found.activation_bytes == pytest.approx(real.activation_bytes, rel=0.05), found.name
        assert found.selective_bytes == pytest.approx(real.selective_bytes, rel=0.02), found.name


@pytest.mark.parametrize("optimizer", [{"name": "muon"}, {"name": "adafactor"}], ids=["muon", "adafactor"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
def test_what_an_optimizer_keeps_is_planned_as_it_is_measured(family: str, optimizer: dict[str, str]) -> None:
    """Experts are one tensor of three dimensions, which muon leaves to adamw; blocks are of two kinds."""
    job = job_of(family, optimizer=optimizer)
    measured = measure(load_spec(job), job, CPU)
    expected = analytic_profile(shape_of(job), workload_of(job, shape_of(job)), SHEETS["cpu"])
    for found, real in zip(expected.layers, measured.layers, strict=True):
        assert found.state_bytes == pytest.approx(real.state_bytes, rel=0.01), found.name
        assert found.copied_bytes == pytest.approx(real.copied_bytes, rel=0.02), found.name

"""The analytic profile against a measured one: bytes are the same, and layers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from oobleckd.ctl.profiles import workload_of
from oobleckd.ctl.shapes import shape_of
from oobleckd.planner.costs.analytic import analytic_profile
from oobleckd.planner.costs.devices import SHEETS
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.worker.device.measure import measure, profile_key
from oobleckd.worker.models import load_spec

GPT2 = {"vocab_size": 500, "n_positions": 32, "n_embd": 128, "n_layer": 2, "n_head": 4}
LLAMA = {
    "vocab_size": 500, "max_position_embeddings": 32, "hidden_size": 128, "intermediate_size": 320,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SEPARATE = {"source": "jsonl", "path": "a.jsonl", "tokenizer": "tokenizer.json", "sequences": "packed"}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.mark.parametrize(
    ("family", "config", "precision"),
    [
        ("gpt2", GPT2, "fp32"),
        ("gpt2", GPT2 | STILL | {"n_inner": 320, "tie_word_embeddings": False}, "bf16"),
        ("gpt2", GPT2, "bf16"),
        ("llama", LLAMA, "fp32"),
        ("llama", LLAMA | {"head_dim": 16, "tie_word_embeddings": True}, "bf16"),
        ("mistral", LLAMA, "fp32"),
        ("qwen2", LLAMA, "bf16"),
    ],
)
@pytest.mark.parametrize("data", [{}, SEPARATE], ids=["joined", "separate"])
def test_bytes_are_those_that_a_worker_measures(
    family: str, config: dict[str, Any], precision: str, data: dict[str, Any]
) -> None:
    train = {"steps": 1, "global_batch": 2, "micro_batch": 2, "sequence": 32, "precision": precision}
    model = {"family": family, "config": config}
    said = {"name": "x", "model": model, "train": train, "data": data, "schedule": {"recompute": "auto"}}
    job = parse_job(said)
    measured = measure(load_spec(job), job, torch.device("cpu"))
    expected = analytic_profile(shape_of(job), workload_of(job, shape_of(job)), SHEETS["cpu"])
    assert expected.buckets == measured.buckets
    assert expected.shared_bytes == pytest.approx(measured.shared_bytes, rel=0.05)
    for found, real in zip(expected.layers, measured.layers, strict=True):
        assert (found.name, found.param_bytes, found.state_bytes, found.output_bytes) == (
            real.name, real.param_bytes, real.state_bytes, real.output_bytes,
        )  # fmt: skip
        assert found.activation_bytes == pytest.approx(real.activation_bytes, rel=0.05), found.name
        assert found.selective_bytes == pytest.approx(real.selective_bytes, rel=0.02), found.name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("family", "config"), [("gpt2", GPT2), ("llama", LLAMA)])
def test_so_are_those_of_a_head_in_chunks(family: str, config: dict[str, Any], precision: str) -> None:
    train = {
        "steps": 1, "global_batch": 8, "micro_batch": 8, "sequence": 32, "precision": precision,
        "loss_chunk_size": 48,
    }  # fmt: skip
    job = parse_job({"name": "x", "model": {"family": family, "config": config}, "train": train})
    whole = parse_job(
        {"name": "x", "model": {"family": family, "config": config}, "train": train | {"loss_chunk_size": 0}}
    )
    head, of_whole = (measure(load_spec(each), each, torch.device("cpu")).layers[-1] for each in (job, whole))
    expected = analytic_profile(shape_of(job), workload_of(job, shape_of(job)), SHEETS["cpu"]).layers[-1]
    assert expected.activation_bytes == pytest.approx(head.activation_bytes, rel=0.05)
    assert head.activation_bytes < of_whole.activation_bytes
    assert expected.backward_s < expected.forward_s
    assert profile_key(job, torch.device("cpu")) != profile_key(whole, torch.device("cpu"))


@pytest.mark.parametrize(("family", "config"), [("gpt2", GPT2), ("llama", LLAMA)])
@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": "bf16"},
        {"name": "sgd"},
        {"name": "lion"},
        {"name": "muon"},
        {"name": "muon", "state": "bf16"},
        {"name": "adafactor"},
    ],
    ids=lambda table: " ".join(table.values()),
)
def test_what_an_optimizer_keeps_is_planned_as_it_is_measured(
    family: str, config: dict[str, Any], optimizer: dict[str, str]
) -> None:
    train = {"steps": 1, "global_batch": 2, "micro_batch": 2, "sequence": 32}
    model = {"family": family, "config": config}
    job = parse_job({"name": "x", "model": model, "train": train, "optimizer": optimizer})
    measured = measure(load_spec(job), job, torch.device("cpu"))
    expected = analytic_profile(shape_of(job), workload_of(job, shape_of(job)), SHEETS["cpu"])
    assert measured.key != measure_key(job)
    for found, real in zip(expected.layers, measured.layers, strict=True):
        assert found.state_bytes == pytest.approx(real.state_bytes, rel=0.01), found.name
        assert found.copied_bytes == pytest.approx(real.copied_bytes, rel=0.02), found.name
    assert measured.copied_bytes < 3 * sum(layer.param_bytes for layer in measured.layers)


def measure_key(job: Job) -> str:
    """Of the same job with AdamW."""
    return profile_key(msgspec.structs.replace(job, optimizer=Optimizer()), torch.device("cpu"))

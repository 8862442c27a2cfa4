"""FLOPs of a token, worked out by hand and as papers have them, and cards by the names of their drivers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from oobleckd.ctl.shapes import shape_of
from oobleckd.planner.costs import flops
from oobleckd.planner.costs.analytic import Workload, analytic_profile
from oobleckd.planner.costs.devices import CARDS, SHEETS, sheet_of
from oobleckd.protocol.job import parse_job

TRAIN = {"steps": 1, "global_batch": 1, "micro_batch": 1, "sequence": 16}


def per_token(family: str, sequence: int, **config: Any) -> float:
    job = parse_job({"name": "x", "model": {"family": family, "config": config}, "train": TRAIN})
    work = Workload(1, sequence, "bf16", 32)
    return flops.of_profile(analytic_profile(shape_of(job), work, SHEETS["h100"]))


def test_gpt2_124m() -> None:
    blocks = 12 * (4 * 768 * 768 + 2 * 768 * 3072)
    assert blocks == 84_934_656
    head = 768 * 50257
    assert per_token("gpt2", 1024) == 6 * (blocks + head) + 12 * 12 * 768 * 1024 == 854_438_400


def test_gpt2_124m_is_what_nanogpt_counts() -> None:
    """Its ``estimate_mfu`` has norms and biases in N, 124,439,808 parameters without 1024 x 768 positions."""
    nanogpt = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert per_token("gpt2", 1024) == pytest.approx(nanogpt, rel=1e-3)


def test_llama_7b() -> None:
    blocks = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    assert blocks == 6_476_005_376
    assert per_token("llama", 2048) == 6 * (blocks + 4096 * 32000) + 12 * 32 * 4096 * 2048 == 42_863_689_728


def test_megatrons_formula_for_gpt3_175b() -> None:
    """Narayanan et al. 2021, section 5.1: 96 B s l h^2 (1 + s / 6h + V / 16lh) with recomputation, whose
    second forward is a quarter of the blocks' share.
    """
    depth, h, s, v = 96, 12288, 2048, 51200
    blocks = 96 * depth * h * h * (1 + s / (6 * h)) * 3 / 4
    head = 96 * depth * h * h * v / (16 * depth * h)
    found = per_token("gpt2", s, n_layer=depth, n_embd=h, n_head=96, n_positions=s, vocab_size=v)
    assert found == pytest.approx(blocks + head, rel=1e-12)


def test_few_key_heads_and_wide_heads_count_as_they_are() -> None:
    small = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100,
    }  # fmt: skip
    block = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 96  # q, k and v, the output, the gated MLP
    assert per_token("llama", 16, **small) == 6 * (2 * block + 64 * 100) + 12 * 2 * 128 * 16


def test_tied_embeddings_change_nothing() -> None:
    tied = per_token("gpt2", 1024, tie_word_embeddings=True)
    assert tied == per_token("gpt2", 1024, tie_word_embeddings=False)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2"])
def test_of_an_older_profile_the_sizes_of_layers_tell_all_but_attention(family: str) -> None:
    job = parse_job({"name": "x", "model": {"family": family}, "train": TRAIN})
    shape = shape_of(job)
    profile = analytic_profile(shape, Workload(1, 1024, "bf16", 32), SHEETS["h100"])
    older = msgspec.structs.replace(profile, flops_per_token=0.0)
    weights = 6 * shape.weights
    assert weights <= flops.of_profile(older) <= 1.002 * weights
    assert profile.flops_per_token == weights + 12 * shape.num_blocks * shape.attention * 1024


def test_a_share_of_the_peak_by_hand() -> None:
    """Llama-7B at 3,000 tokens a second on each H100, in bfloat16: 128.6 of 989 TFLOPS."""
    h100 = sheet_of("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    assert per_token("llama", 2048) * 3000 / h100.peak("bf16") == pytest.approx(0.1300, abs=1e-4)
    assert h100.peak("fp32") == 67e12


def test_cards_by_their_drivers_names() -> None:
    assert set(CARDS.values()) < SHEETS.keys()
    assert sheet_of("NVIDIA H200") is SHEETS["h200"]
    for other in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu", ""):
        assert sheet_of(other) is None, f"{other} has another peak"

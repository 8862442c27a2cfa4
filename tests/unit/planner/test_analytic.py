"""Profiles from shapes: known numbers of parameters, and how times follow from the data sheet.

That bytes are those of real layers is tested in tests/unit/worker/test_analytic.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleckd.ctl.shapes import shape_of
from oobleckd.planner.costs.analytic import Shape, Workload, analytic_profile
from oobleckd.planner.costs.devices import SHEETS
from oobleckd.protocol.job import parse_job

GPT2 = Shape(12, 768, 3072, 12, 768, 768, 50257, positions=1024, bias=True, tied=True)
LLAMA_7B = Shape(32, 4096, 11008, 32, 4096, 4096, 32000, gated=True)
MISTRAL_7B = Shape(32, 4096, 14336, 32, 4096, 1024, 32000, gated=True)
QWEN2_7B = Shape(28, 3584, 18944, 28, 3584, 512, 152064, gated=True, qkv_bias=True)
PAGE = Path(__file__).parents[3] / "docs" / "experts.md"
TRAIN = {"steps": 1, "global_batch": 1, "micro_batch": 1, "sequence": 16}
WORK = Workload(2, 1024, "bf16", 24)


@pytest.mark.parametrize(
    ("shape", "params"),
    [
        (GPT2, 124_439_808),
        (LLAMA_7B, 6_738_415_616),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN2_7B, 7_615_616_512),
    ],
)
def test_parameters_are_those_of_the_published_models(shape: Shape, params: int) -> None:
    head = shape.norm if shape.tied else shape.head_params
    assert shape.embedding_params + shape.num_blocks * shape.block_params + head == params
    profile = analytic_profile(shape, WORK, SHEETS["h100"])
    assert len(profile.layers) == shape.num_blocks + 2
    twice = shape.vocab * shape.hidden if shape.tied else 0
    assert sum(layer.param_bytes for layer in profile.layers) == 4 * (params + twice)
    norms = (2 * shape.num_blocks + 1) * shape.norm
    rounded = params + twice - shape.embedding_params - norms
    assert sum(layer.state_bytes for layer in profile.layers) == 24 * (params + twice) + 2 * rounded
    wide = analytic_profile(shape, msgspec.structs.replace(WORK, precision="fp32"), SHEETS["h100"])
    assert sum(layer.state_bytes for layer in wide.layers) == 24 * (params + twice)


@pytest.mark.parametrize(
    ("family", "config", "params", "active"),
    [
        ("mixtral", {}, 46_702_792_704, 12_879_925_248),
        (
            "qwen3_moe",
            {"num_hidden_layers": 48, "head_dim": 128},
            30_532_122_624,
            3_353_032_704,
        ),
        ("olmoe", {"intermediate_size": 1024}, 6_919_161_856, 1_282_017_280),
        ("deepseek_v3", {}, 671_026_404_352, 37_552_282_624),
    ],
)
def test_parameters_of_mixtures_are_those_that_they_are_known_by(
    family: str, config: dict[str, Any], params: int, active: int
) -> None:
    """Mixtral-8x7B (46.7 and 12.9 B), Qwen3-30B-A3B (30.5 and 3.3 B), OLMoE-1B-7B (6.9 and 1.3 B),
    DeepSeek-V3 (671 and 37 B).
    """
    shape = shape_of(parse_job({"name": "x", "model": {"family": family, "config": config}, "train": TRAIN}))
    assert (shape.params, shape.active_params) == (params, active)
    profile = analytic_profile(shape, WORK, SHEETS["h100"])
    assert (profile.params, profile.active_params) == (params, active)
    assert sum(layer.param_bytes for layer in profile.layers) == 4 * params
    # Two a weight and token, three times over, beside attention itself; the embedding is looked up.
    of_weights = profile.flops_per_token - 12 * shape.num_blocks * shape.attention * WORK.length
    assert of_weights == pytest.approx(6 * (active - shape.embedding_params), rel=1e-3)


def test_blocks_without_experts_cost_what_they_are() -> None:
    """Of DeepSeek-V3 the first three; a token's products of the others are those of eight experts."""
    config = {"num_hidden_layers": 5}
    job = parse_job({"name": "x", "model": {"family": "deepseek_v3", "config": config}, "train": TRAIN})
    plain, mixed = analytic_profile(shape_of(job), WORK, SHEETS["h100"]).layers[3:5]
    assert plain.param_bytes == 4 * 583_483_392
    assert mixed.param_bytes == 4 * 11_507_286_016
    assert mixed.activation_bytes > plain.activation_bytes
    assert mixed.forward_s > plain.forward_s


@pytest.mark.parametrize(
    ("row", "precision"), [("sums, of the time of a block", "bf16"), ("sums, with experts in fp32", "fp32")]
)
def test_what_the_page_says_of_sums_in_blocks_with_experts(row: str, precision: str) -> None:
    """docs/experts.md: their share by the tokens of a micro-batch; a dense block has none of its own."""
    [cells] = re.findall(rf"^[|] {row} [|](.*)[|]$", PAGE.read_text(), re.MULTILINE)
    config = {"num_hidden_layers": 3, "head_dim": 128}
    job = parse_job({"name": "x", "model": {"family": "qwen3_moe", "config": config}, "train": TRAIN})
    shares = []
    for sequences in (1, 2, 4, 8, 16, 32):
        work = msgspec.structs.replace(WORK, sequences=sequences, experts_precision=precision)
        without = msgspec.structs.replace(work, added_bytes_per_param=0)
        found, less = (
            analytic_profile(shape_of(job), each, SHEETS["h100"]).layers[1] for each in (work, without)
        )
        sums_s = found.backward_s - less.backward_s
        assert sums_s == pytest.approx(20 * found.param_bytes / 4 / SHEETS["h100"].memory_bytes_per_s)
        shares.append(f"{sums_s / (found.forward_s + found.backward_s):.0%}".replace("%", " %"))
        dense = (analytic_profile(LLAMA_7B, each, SHEETS["h100"]) for each in (work, without))
        assert next(dense) == next(dense)
    assert [cell.strip() for cell in cells.split("|")] == shares


def test_experts_in_bf16_are_costed_at_its_rate_and_keep_half_the_bytes() -> None:
    """Of Mixtral-8x7B: two of its eight experts are most of the operations of a token."""
    job = parse_job(
        {"name": "x", "model": {"family": "mixtral", "config": {"num_hidden_layers": 1}}, "train": TRAIN}
    )
    shape, sheet = shape_of(job), msgspec.structs.replace(SHEETS["h100"], memory_bytes_per_s=1e30)
    wide, narrow = (
        analytic_profile(shape, msgspec.structs.replace(WORK, experts_precision=each), sheet).layers[1]
        for each in ("fp32", "bf16")
    )
    weights = 3 * 4096 * 14336
    flops = 2 * WORK.tokens * 2 * weights
    saved_s = flops / sheet.flops("fp32") - flops / sheet.flops("bf16")
    assert wide.forward_s - narrow.forward_s == pytest.approx(saved_s)
    rows = WORK.tokens * 2 * (2 * 4096 + 4 * 14336)
    assert wide.activation_bytes - narrow.activation_bytes == 2 * rows
    assert narrow.state_bytes - wide.state_bytes == 2 * 8 * weights


@pytest.mark.parametrize("name", SHEETS)
def test_no_pass_is_quicker_than_the_peak_and_none_absurdly_slow(name: str) -> None:
    sheet = SHEETS[name]
    for precision, peak in (("fp32", sheet.fp32_flops), ("bf16", sheet.bf16_flops)):
        work = msgspec.structs.replace(WORK, precision=precision)
        layers = analytic_profile(LLAMA_7B, work, sheet).layers
        took_s = sum(layer.forward_s + layer.backward_s for layer in layers)
        min_flops = 6 * work.tokens * 6.6e9  # six operations a weight and token
        assert 0.1 < min_flops / took_s / peak < sheet.utilisation


def test_the_times_of_a_block_follow_the_sheet() -> None:
    sheet = SHEETS["a100"]
    block = analytic_profile(LLAMA_7B, WORK, sheet).layers[1]
    assert block.backward_s == 2 * block.forward_s
    endless = msgspec.structs.replace(sheet, memory_bytes_per_s=1e30)
    weights = 4 * 4096 * 4096 + 3 * 4096 * 11008
    flops = 2048 * (2 * weights + 4 * 1024 * 4096)
    assert analytic_profile(LLAMA_7B, WORK, endless).layers[1].forward_s == pytest.approx(
        flops / (0.35 * 312e12)
    )


def test_what_is_small_takes_as_long_as_starting_it() -> None:
    small = Shape(2, 64, 256, 4, 64, 64, 256, positions=32, bias=True)
    work = Workload(1, 32, "fp32", 32)
    for layer in analytic_profile(small, work, SHEETS["h200"]).layers:
        assert layer.forward_s == layer.backward_s == SHEETS["h200"].dispatch_s


def test_what_a_block_keeps_that_computes_again_what_is_cheap() -> None:
    block = analytic_profile(LLAMA_7B, WORK, SHEETS["a100"]).layers[1]
    # Its input in float32; q, k, v, attention's result, and the output projection's; gate, up and down; a
    # number of attention for each head.
    assert block.selective_bytes == 2048 * (4 * 4096 + 2 * (5 * 4096 + 2 * 11008 + 4096) + 4 * 32)
    moved = 2 * (block.activation_bytes - block.selective_bytes) / SHEETS["a100"].memory_bytes_per_s
    assert block.selective_s == pytest.approx(max(moved, SHEETS["a100"].dispatch_s))
    assert block.selective_s < block.forward_s / 4
    compiled = msgspec.structs.replace(WORK, selective=False)
    assert analytic_profile(LLAMA_7B, compiled, SHEETS["a100"]).layers[1].selective_bytes == 0
    # Attention whose dropout is no kernel's is made again.
    dropping = msgspec.structs.replace(GPT2, attention_dropout=0.1)
    kept, without = (
        analytic_profile(s, WORK, SHEETS["cpu"]).layers[1].selective_bytes for s in (GPT2, dropping)
    )
    assert kept - without == 2048 * (2 * 768 + 4 * 12)


def test_dropout_of_attention_costs_memory_where_it_is_not_fused() -> None:
    dropping = msgspec.structs.replace(GPT2, attention_dropout=0.1)
    kept = {
        (name, shape.attention_dropout > 0): analytic_profile(shape, WORK, SHEETS[name])
        .layers[1]
        .activation_bytes
        for name in ("cpu", "h100")
        for shape in (GPT2, dropping)
    }
    assert kept["h100", True] == kept["h100", False]
    assert kept["cpu", True] == kept["cpu", False] + 12 * 12 * 1024 * 2048

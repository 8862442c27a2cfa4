"""Layers that compute with rounded copies of their weights have the bits of autocast, on a GPU too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oobleckd.planner.plan import Range
from oobleckd.worker.device.context import DeviceContext, torch_device
from oobleckd.worker.models import load_spec
from oobleckd.worker.models.config import TIED
from oobleckd.worker.models.routers import NUM_LOSSES
from tests.helpers import gpu
from tests.helpers.models import (
    DROPOUTS,
    all_layers,
    all_params,
    held_layers,
    layered_step,
    small_config,
    small_job,
    some_batch,
)

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 503,
    "ffn_dim": 344, "word_embed_proj_dim": 128, "rotary_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("backward", ["fused", "decoupled"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "gemma2", "falcon", "qwen3"])
def test_copies_have_the_bits_of_autocast(family: str, backward: str, tmp_path: Path) -> None:
    device = torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))
    sizes = SIZES | dict.fromkeys(DROPOUTS, 0.1)
    config = small_config(family, **sizes, tie_word_embeddings=family in TIED)
    spec = load_spec(small_job(family, config, train={"precision": "bf16"}, schedule={"backward": backward}))
    batch = some_batch(spec).to(device)
    loss, grads = layered_step(spec, all_layers(spec, all_params(spec, device), device), batch)
    copied, others = layered_step(spec, held_layers(spec, Range(0, spec.num_layers), device), batch)
    assert any(grad.dtype == torch.bfloat16 for grad in others.values())
    assert torch.equal(loss, copied)
    assert [key for key in grads if not torch.equal(grads[key].float(), others[key].float())] == []


@pytest.mark.parametrize(
    ("family", "backward"), [("mixtral", "fused"), ("gpt_oss", "decoupled"), ("qwen3_moe", "decoupled")]
)
def test_experts_in_bf16_have_the_same_bits_twice(family: str, backward: str, tmp_path: Path) -> None:
    """And gradients of 0 where an expert has got no token, whatever was in the memory before."""
    device = torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))
    more = dict.fromkeys(("num_experts", "num_local_experts"), 64)
    train = {"precision": "bf16", "experts_precision": "bf16"}
    config = small_config(family, **SIZES, **more)
    spec = load_spec(small_job(family, config, train=train, schedule={"backward": backward}))
    batch = some_batch(spec).to(device)
    once = held_layers(spec, Range(0, spec.num_layers), device)
    (loss, grads), (again, others) = (
        layered_step(spec, layers, batch)
        for layers in (once, held_layers(spec, Range(0, spec.num_layers), device))
    )
    assert torch.isfinite(loss)
    assert torch.equal(loss, again)
    assert [key for key in grads if not torch.equal(grads[key], others[key])] == []
    router = once[2].router
    assert router is not None
    assert router.told is not None
    idle = router.told[NUM_LOSSES:] == 0
    assert idle.any()
    for key, grad in grads.items():
        if ".layers.1." in key and ".experts." in key:
            assert grad.dtype == torch.bfloat16
            assert not grad[idle].any()
            assert grad.any()

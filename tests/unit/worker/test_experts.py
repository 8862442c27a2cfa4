"""What is particular to mixtures of experts: how they compute, ties, and folders as the hub has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oobleckd.worker.models import load_config
from oobleckd.worker.models.config import EXPERTS
from oobleckd.worker.models.experts import check_implementation
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.experts import saved
from tests.helpers.models import all_layers, layered_step, small_config, small_job, some_batch
from tests.unit.worker.test_export import checkpoint_of, loaded, logits, write

HUB = {
    "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj",
    "granitemoe": "model.layers.1.block_sparse_moe.input_linear.weight",
    **dict.fromkeys(("minimax", "mixtral", "phimoe"), "model.layers.1.block_sparse_moe.experts.3.w1.weight"),
}
"""A name in folders of the hub, which have all experts in one tensor, or each by itself, as most do."""
EACH = "model.layers.1.mlp.experts.3.gate_proj.weight"


def refused(family: str = "mixtral", **fields: Any) -> UserError:
    with pytest.raises(UserError) as raised:
        load_config(small_job(family, {**small_config(family), **fields}))
    return raised.value


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_compute_by_grouped_mm_alone(family: str) -> None:
    config = load_config(small_job(family))
    assert config._experts_implementation == "grouped_mm"
    assert load_config(small_job(family, {**small_config(family), "experts_implementation": "grouped_mm"}))
    for how in ("eager", "batched_mm"):
        error = refused(family, experts_implementation=how)
        assert str(error).startswith(
            "model.config.experts_implementation: experts compute by grouped_mm alone"
        )
        config._experts_implementation = how
        with pytest.raises(UserError, match=f"would compute by '{how}', and only grouped_mm"):
            check_implementation(config)


@pytest.mark.parametrize("key", ["output_router_logits"])
def test_the_router_loss_of_transformers_is_refused_by_name(key: str) -> None:
    error = refused(**{key: 1})
    assert str(error).startswith(f"model.config.{key}: transformers' loss of routers is one of all layers")
    assert "train.router_aux_loss_coef" in error.hint


def test_other_families_know_nothing_of_experts() -> None:
    assert "llama has no such field" in str(refused("llama", experts_implementation="grouped_mm"))


# --------------------------------------------------------------------------- folders


@pytest.mark.parametrize("family", EXPERTS)
def test_a_folder_of_the_hub_is_read_and_an_export_is_one(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path / "hub")
    stored = load_file(tmp_path / "hub/model.safetensors")
    assert HUB.get(family, EACH) in stored
    job = small_job(family, {}, model={"checkpoint": str(tmp_path / "hub")})
    checkpoint, spec, params = checkpoint_of(job, tmp_path / "checkpoints")
    assert [note.kind for note in spec.notes] in ([], ["router-loss"])
    for key, value in params.items():
        assert torch.equal(value, model.get_parameter(key)), key
    batch = some_batch(spec)
    loss, _ = layered_step(spec, all_layers(spec, params), batch)
    if family != "phimoe":  # which draws its experts, seeded layer by layer here
        model.train()
        assert torch.equal(loss, model(input_ids=batch.inputs, labels=batch.labels, use_cache=False).loss)
    write(checkpoint, tmp_path / "out", shard_bytes=20_000)
    exported = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        exported |= load_file(file)
    assert exported.keys() == stored.keys()
    assert [name for name in stored if not torch.equal(exported[name], stored[name])] == []
    again = loaded(tmp_path / "out", family)
    assert torch.equal(logits(again, batch.inputs), logits(model.eval(), batch.inputs))

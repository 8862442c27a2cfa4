"""What is particular to mixtures of experts: how they compute, ties, and folders as the hub has them."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor

from oobleckd.ctl.starter import init
from oobleckd.protocol.job import parse_job
from oobleckd.worker.models import ModelSpec, load_config, load_spec
from oobleckd.worker.models.config import EXPERTS
from oobleckd.worker.models.experts.grouped import check_implementation
from oobleckd.worker.models.folders import files
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.experts import saved
from tests.helpers.models import (
    CPU,
    all_layers,
    all_params,
    layered_step,
    seed_like_layers,
    small_config,
    small_job,
    some_batch,
)
from tests.unit.worker.test_export import checkpoint_of, loaded, logits, write
from tests.unit.worker.test_folder import Change, rewrite

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


@pytest.mark.parametrize("family", EXPERTS)
def test_init_writes_a_job_of_each_family(family: str) -> None:
    page = CliRunner().invoke(init, ["--family", family, "--to", "-"], catch_exceptions=False).stdout
    spec = load_spec(parse_job(tomllib.loads(page)))
    spec.try_blocks()
    experts = {shape[0] for bucket in spec.buckets for shape in bucket.shapes if len(shape) == 3}
    assert (experts, spec.num_layers) == ({8}, 10)


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
    seed_like_layers(model, spec)  # Phi-MoE draws its experts
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


EXPERT = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def of_folder(family: str, folder: Path) -> ModelSpec:
    return load_spec(small_job(family, {}, model={"checkpoint": str(folder)}))


def test_what_nothing_trains_comes_from_the_folder_and_goes_into_the_export(tmp_path: Path) -> None:
    """In float32, whatever the weights are rounded to: a correction decides between experts."""
    model = saved("glm4_moe", tmp_path / "hub")
    correction = model.get_buffer(BIAS)
    assert correction.any()
    spec = of_folder("glm4_moe", tmp_path / "hub")
    assert spec.constants == {BIAS: (4,)}
    block = all_layers(spec, all_params(spec))[2].module
    assert torch.equal(block.get_buffer(BIAS.removeprefix("model.layers.1.")), correction)
    checkpoint, _, _ = checkpoint_of(spec.job, tmp_path / "checkpoints")
    write(checkpoint, tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[BIAS], correction)
    shutil.rmtree(tmp_path / "hub")
    with pytest.raises(UserError, match=r"hub/config\.json"):
        write(checkpoint, tmp_path / "again")
    assert not load_spec(small_job("glm4_moe")).constant(BIAS).any()


def test_a_block_reads_its_own_experts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor once, and each file once for all experts of a parameter."""
    saved("mixtral", tmp_path)
    spec = of_folder("mixtral", tmp_path)
    read: list[str] = []
    opened = files.opened

    class Noting:
        def __init__(self, file: Path) -> None:
            self.tensors = opened(file)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.tensors.get_tensor(name)

    monkeypatch.setattr(files, "opened", Noting)
    spec.init(1, CPU)
    stored = load_file(tmp_path / "model.safetensors")
    assert sorted(read) == sorted(name for name in stored if ".layers.0." in name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(EXPERT), r"3 tensors such as \S+ make, has shape \(3, 32, 48\), the model needs"),
        (lambda t: t.update({EXPERT: torch.ones(32, 40)}), "tensors of shapes .* do not go together"),
    ],
)
def test_an_expert_that_lacks_or_does_not_fit_is_named(tmp_path: Path, change: Change, said: str) -> None:
    saved("mixtral", tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=said):
        of_folder("mixtral", tmp_path)

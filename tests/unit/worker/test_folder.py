"""Folders of models, case by case: which file is read, what is refused, what is said. ``test_random_folders`` mixes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from oobleckd.ctl.reference import to_toml
from oobleckd.protocol.job import table_of
from oobleckd.protocol.modelnotes import FolderNote, words
from oobleckd.worker.models import MASKED, ModelSpec, load_spec
from oobleckd.worker.models.folders import names
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.tools import look
from tests.helpers.models import all_params, small_config, small_job

Change = Callable[[dict[str, Tensor]], Any]


def saved(folder: Path, family: str = "llama", **more: Any) -> PreTrainedModel:
    """A model of ``family`` as ``save_pretrained`` leaves it."""
    config = load_spec(small_job(family, small_config(family, **more))).config
    auto = AutoModelForMaskedLM if family in MASKED else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return model


def rewrite(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def settle(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def shard(folder: Path, *names: str) -> None:
    """The model's one file as shards with these names: the first has all, the others nothing."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for index, name in enumerate(names):
        if not Path(name).is_absolute() and ".." not in name:
            (folder / name).parent.mkdir(exist_ok=True)
            save_file(dict(tensors) if index == 0 else {f"x{index}": torch.ones(1)}, folder / name)
    table = dict.fromkeys(tensors, names[0]) | {
        f"x{index}": name for index, name in enumerate(names) if index
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def spec_of(folder: Path, family: str = "llama", **config: Any) -> ModelSpec:
    return load_spec(small_job(family, config, model={"checkpoint": str(folder)}))


def refused(folder: Path, family: str = "llama") -> UserError:
    with pytest.raises(UserError) as raised:
        spec_of(folder, family)
    assert raised.value.hint
    return raised.value


def gives(spec: ModelSpec, model: PreTrainedModel) -> bool:
    return all(torch.equal(value, model.get_parameter(key)) for key, value in all_params(spec).items())


# --------------------------------------------------------------------------- files


def test_one_whole_file_counts_before_an_index(tmp_path: Path) -> None:
    model = saved(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"x": "gone.safetensors"}}'
    )
    assert gives(spec_of(tmp_path), model)


def test_files_that_are_links_are_followed(tmp_path: Path) -> None:
    """As in the cache of the hub, where a snapshot is links to blobs outside of it."""
    model = saved(tmp_path / "real")
    snapshot = tmp_path / "snapshots" / "4f2a"
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "real").iterdir():
        (snapshot / file.name).symlink_to(Path("..") / ".." / "real" / file.name)
    assert gives(spec_of(snapshot), model)


def test_shards_may_lie_below(tmp_path: Path) -> None:
    model = saved(tmp_path)
    shard(tmp_path, "weights/a.safetensors", "weights/b.safetensors")
    assert gives(spec_of(tmp_path), model)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../../../etc/passwd", "../other.safetensors", "a/../../b.safetensors", "/m.safetensors", "..\\b.safetensors", ""]
)  # fmt: skip
def test_shards_outside_the_folder_are_never_opened(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    shard(tmp_path, "a.safetensors")
    table = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    table["weight_map"]["x"] = name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    monkeypatch.setattr("oobleckd.worker.models.folders.files.safe_open", None)
    assert f"names {name!r}, which is not inside the folder" in str(refused(tmp_path))


def test_a_file_that_config_json_names(tmp_path: Path) -> None:
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    settle(tmp_path, transformers_weights="other.safetensors")
    assert gives(spec_of(tmp_path), model)
    settle(tmp_path, transformers_weights="../other.safetensors")
    assert "not inside the folder" in str(refused(tmp_path))


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        ({}, r"model.safetensors does not exist"),
        ({"pytorch_model.bin": ""}, "pytorch_model.bin is a pickle, which may hold a program"),
        ({"model-q4.gguf": ""}, "model-q4.gguf is of another format"),
        ({"model.fp16.safetensors": ""}, "model.fp16.safetensors has another name"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "pytorch_model-1.bin"}}'}, "no safetensors file"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "a.safetensors"}}'}, "a.safetensors does not exist"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": 1}}'}, "is damaged"),
        ({"model.safetensors.index.json": "[" * 100_000}, "is damaged"),
        ({"model.safetensors.index.json": '{"weight_map": {}}'}, "has 0 of the 18 tensors"),
        ({"shard-00001-model-00001-of-00002.safetensors": ""}, "shards of ranks"),
        ({"adapter_config.json": "{}"}, "holds an adapter"),
        ({"config.json": "[1]"}, "is no configuration"),
        ({"config.json": "\ufeff{}"}, "is not JSON"),
        ({"config.json": "[" * 100_000}, "is not JSON"),
    ],
)  # fmt: skip
def test_what_is_there_instead_is_named(tmp_path: Path, there: dict[str, str], problem: str) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name, text in there.items():
        (tmp_path / name).write_text(text)
    assert problem in str(refused(tmp_path))


def test_a_shard_that_is_a_folder_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    shard(tmp_path, "a.safetensors")
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "a.safetensors").mkdir()
    assert "a.safetensors is no file" in str(refused(tmp_path))


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "model.safetensors cannot be read" in str(refused(tmp_path))


# --------------------------------------------------------------------------- names


def test_gpt_neox_as_it_is_saved(tmp_path: Path) -> None:
    model = saved(tmp_path, "gpt_neox")
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")
    spec = spec_of(tmp_path, "gpt_neox")
    assert gives(spec, model)
    assert not spec.notes


def test_norms_as_they_were_called(tmp_path: Path) -> None:
    model = saved(tmp_path, "bert")

    def older(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            tensors[old] = tensors.pop(name)

    rewrite(tmp_path, older)
    spec = spec_of(tmp_path, "bert")
    assert gives(spec, model)
    assert not spec.notes


def test_of_two_names_of_one_parameter_the_other_is_told(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    rewrite(tmp_path, lambda t: t.update({"ln_f.weight": torch.full((32,), 2.0)}))
    spec = spec_of(tmp_path, "gpt2")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert gives(spec, theirs)
    assert spec.notes == (FolderNote("unread", 1, ("transformer.ln_f.weight",)),)


def test_another_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setattr(names, "_lacks", "cannot import name 'rename_source_key'")
    assert "loads folders otherwise: cannot import name 'rename_source_key'" in str(refused(tmp_path))


# --------------------------------------------------------------------------- tied parameters


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_parameter_is_read_under_either_name(tmp_path: Path, kept: str) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    value = torch.randn(64, 32)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop("model.embed_tokens.weight")
        tensors[kept] = value

    rewrite(tmp_path, change)
    spec = spec_of(tmp_path)
    assert torch.equal(all_params(spec)["model.embed_tokens.weight"], value)
    assert not spec.notes


def test_tied_parameters_that_differ_are_trained_apart(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    spec = spec_of(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert gives(spec, model)
    assert {bucket.uses for bucket in spec.buckets} == {(layer,) for layer in range(4)}
    assert spec.notes == (FolderNote("apart", 2, ("model.embed_tokens.weight", "lm_head.weight")),)
    assert not spec.config.tie_word_embeddings


def test_tied_parameters_that_are_equal_stay_one(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    spec = spec_of(tmp_path)
    assert spec.buckets[-1].uses == (0, 3)
    assert not spec.notes


def test_a_family_that_cannot_be_untied_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    rewrite(tmp_path, lambda t: t.update({"cls.predictions.decoder.bias": torch.ones(64)}))
    error = refused(tmp_path, "bert")
    assert "different values for cls.predictions.bias and cls.predictions.decoder.bias" in str(error)


# --------------------------------------------------------------------------- quantized weights


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4", ""])
def test_a_quantized_configuration_is_refused_by_name(tmp_path: Path, method: str) -> None:
    saved(tmp_path)
    settle(tmp_path, quantization_config={"quant_method": method} if method else {"bits": 4})
    assert f"quantized ({method or 'by a method without a name'})" in str(refused(tmp_path))


PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        *[
            (lambda t, dtype=dtype: t.update({PROJ: t[PROJ].to(dtype)}), rf"{PROJ} is of dtype {name}")
            for dtype, name in [
                (torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8"), (torch.uint8, "U8"),
                (torch.int32, "I32"), (torch.int64, "I64"), (torch.bool, "BOOL"), (torch.complex64, "C64"),
            ]
        ],
        *[
            (lambda t, name=name: t.update({name: torch.ones(2)}), f"{name} .* belongs to quantized weights")
            for name in [
                f"{PROJ}_scale_inv", f"{PROJ}_scale", f"{PROJ}.absmax", f"{PROJ}.quant_state.bitsandbytes__nf4",
                PROJ.replace("weight", "qweight"), PROJ.replace("weight", "scales"), PROJ.replace("weight", "input_scale"),
                f"{PROJ}:qdata", PROJ.replace("weight", "SCB"), "model.layers.0.mlp.down_proj_blocks",
            ]
        ],
        (lambda t: t.update({"x": torch.ones(2, dtype=torch.int8)}), r"x \(I8\) belongs to quantized weights"),
    ],
)  # fmt: skip
def test_quantized_tensors_are_refused_by_name(tmp_path: Path, change: Change, problem: str) -> None:
    saved(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=problem):
        spec_of(tmp_path)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("bert", {"is_decoder": True}),
        ("bert", {"chunk_size_feed_forward": 4}),
        ("gpt2", {"add_cross_attention": True}),
        ("opt", {"layerdrop": 0.1}),
    ],
)
def test_a_configuration_that_computes_something_else_is_refused(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    saved(tmp_path, family)
    settle(tmp_path, **fields)
    assert f"has {next(iter(fields))} = " in str(refused(tmp_path, family))


# --------------------------------------------------------------------------- what is said


def test_what_nothing_uses_is_told(tmp_path: Path) -> None:
    saved(tmp_path, attention_bias=True)
    settle(tmp_path, attention_bias=False)
    (note,) = spec_of(tmp_path).notes
    assert (note.kind, note.count, note.names[0]) == ("unread", 8, "model.layers.0.self_attn.k_proj.bias")
    assert words(note) == (
        "8 tensors of the folder are used by nothing: " + ", ".join(note.names) + " and 4 more"
    )


def test_what_transformers_does_not_mention_is_not_told(tmp_path: Path) -> None:
    saved(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert not spec_of(tmp_path).notes


def test_what_is_missing_begins_fresh_and_is_told(tmp_path: Path) -> None:
    model = saved(tmp_path)
    rewrite(tmp_path, lambda t: t.pop("lm_head.weight"))
    spec, without = spec_of(tmp_path), load_spec(small_job("llama"))
    assert spec.notes == (FolderNote("fresh", 1, ("lm_head.weight",)),)
    assert words(spec.notes[0]) == "1 tensor is not in the folder and begins fresh: lm_head.weight"
    params = all_params(spec)
    assert torch.equal(params["lm_head.weight"], all_params(without)["lm_head.weight"])
    assert torch.equal(params["model.norm.weight"], model.get_parameter("model.norm.weight"))


def test_a_deeper_model_has_fresh_blocks(tmp_path: Path) -> None:
    saved(tmp_path)
    (note,) = spec_of(tmp_path, num_hidden_layers=3).notes
    assert (note.kind, note.count) == ("fresh", 9)


def test_a_look_at_a_folder_prints_its_notes(tmp_path: Path) -> None:
    saved(tmp_path / "m")
    rewrite(tmp_path / "m", lambda t: t.pop("lm_head.weight"))
    job = small_job("llama", {}, model={"checkpoint": str(tmp_path / "m")})
    (tmp_path / "job.toml").write_text(to_toml(table_of(job)))
    done = CliRunner().invoke(look.main, ["--job", str(tmp_path / "job.toml"), "--no-data"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["notes"] == [{"kind": "fresh", "count": 1, "names": ["lm_head.weight"]}]
    shutil.rmtree(tmp_path / "m")
    done = CliRunner().invoke(look.main, ["--job", str(tmp_path / "job.toml")])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: model.checkpoint: ")
    assert "\nhint: " in done.stderr

"""Every family goes through checkpoint, export and from_pretrained with its bits; nothing half-written is
left.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from oobleckd.host.checkpoint import complete
from oobleckd.host.export import MARK, Exported, mark_of
from oobleckd.protocol.checkpoint import manifest_of
from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Counters
from oobleckd.worker.models import FAMILIES, MASKED, ModelSpec, load_spec
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.state.bucket_files import step_name, write_bucket
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.tools import export
from tests.helpers.models import all_params, small_job, some_batch, undivided
from tests.helpers.optimizers import shape_of

GPT2 = small_job("gpt2")
LARGE = 10**9


def checkpoint_of(job: Job, root: Path, step: int = 3) -> tuple[Path, ModelSpec, dict[str, Tensor]]:
    """A checkpoint as devices and daemon leave it, the model, and its weights."""
    spec = load_spec(job)
    params = all_params(spec)
    return written(job, spec, params, root, Counters(step, step, step)), spec, params


def written(job: Job, spec: ModelSpec, params: dict[str, Tensor], root: Path, counters: Counters) -> Path:
    partial = root / f"{step_name(counters.step)}.partial"
    parts = []
    for bucket in spec.buckets:
        values = [params[key] for key in bucket.keys]
        file = write_bucket(partial, bucket, BucketState.fresh(shape_of(bucket.shapes), values))
        assert file is not None
        where = ("n0/0", "job-1", counters, str(partial), bucket.index, len(spec.buckets))
        parts.append(CheckpointPart(*where, *file))
    return complete(partial, manifest_of(job, parts), keep=1)


def write(checkpoint: Path, folder: Path, **how: Any) -> Exported:
    return export.export(checkpoint, folder, **{"shard_bytes": LARGE, "dtype": torch.float32, **how})


def loaded(folder: Path, family: str) -> PreTrainedModel:
    auto = AutoModelForMaskedLM if family in MASKED else AutoModelForCausalLM
    model: PreTrainedModel
    model, said = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    return model.eval()


def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        # A cache hands on keys in another layout, for which a CPU may sum in another order.
        found: Tensor = model(input_ids=tokens, use_cache=False).logits
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_loads_has_the_logits_of_the_job(family: str, tmp_path: Path) -> None:
    checkpoint, spec, params = checkpoint_of(small_job(family), tmp_path)
    write(checkpoint, tmp_path / "out")
    model = loaded(tmp_path / "out", family)
    tokens = some_batch(spec).inputs
    assert torch.equal(logits(model, tokens), logits(undivided(spec, params).eval(), tokens))
    again = load_spec(small_job(family, {}, model={"checkpoint": str(tmp_path / "out")}))
    for key, value in all_params(again).items():
        assert torch.equal(value, params[key]), key


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    checkpoint, spec, _ = checkpoint_of(GPT2, tmp_path, step=7)
    done = write(checkpoint, tmp_path / "out")
    assert names(tmp_path / "out") == ["config.json", "model.safetensors", MARK]
    assert (done.step, done.architecture, done.dtype) == (7, "GPT2LMHeadModel", "float32")
    assert done.files == ("model.safetensors",)
    assert done.num_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert (config["dtype"], config["use_cache"]) == ("float32", True)
    assert not spec.config.use_cache


def test_a_large_model_has_shards_and_an_index(tmp_path: Path) -> None:
    checkpoint, spec, params = checkpoint_of(GPT2, tmp_path)
    done = write(checkpoint, tmp_path / "out", shard_bytes=20_000)
    count = len(done.files)
    assert count > 2
    assert done.files == tuple(f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == params.keys()
    assert index["metadata"]["total_size"] == sum(param.nbytes for param in params.values())
    for name in done.files:
        with safe_open(str(tmp_path / "out" / name), framework="pt") as file:
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118 - no dict
            assert sum(sizes) <= 20_000 or len(sizes) == 1
            assert {key for key, place in index["weight_map"].items() if place == name} == set(file.keys())
    tokens = some_batch(spec).inputs
    same = undivided(spec, params).eval()
    assert torch.equal(logits(loaded(tmp_path / "out", "gpt2"), tokens), logits(same, tokens))


def test_bfloat16_rounds_the_weights(tmp_path: Path) -> None:
    checkpoint, _, params = checkpoint_of(GPT2, tmp_path)
    assert write(checkpoint, tmp_path / "out", dtype=torch.bfloat16).dtype == "bfloat16"
    model = loaded(tmp_path / "out", "gpt2")
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(model.get_parameter(k), v.detach().to(torch.bfloat16)) for k, v in params.items())


def test_a_tokenizer_comes_along_from_where_the_job_started(tmp_path: Path) -> None:
    checkpoint, _, params = checkpoint_of(GPT2, tmp_path)
    start = tmp_path / "start"
    write(checkpoint, start)
    (start / "tokenizer.json").write_text("{}")
    (start / "notes.txt").write_text("not for others")
    job = small_job("gpt2", {}, model={"checkpoint": str(start)})
    tuned, _, _ = checkpoint_of(job, tmp_path / "tuned")
    for shard in start.glob("*.safetensors"):
        shard.unlink()  # weights are the checkpoint's
    write(tuned, tmp_path / "out")
    assert names(tmp_path / "out") == ["config.json", "model.safetensors", MARK, "tokenizer.json"]
    assert all(torch.equal(loaded(tmp_path / "out", "gpt2").get_parameter(k), v) for k, v in params.items())


def test_what_was_tied_by_its_configuration_alone_is_exported_as_two(tmp_path: Path) -> None:
    start = tmp_path / "start"
    checkpoint, _, _ = checkpoint_of(GPT2, tmp_path)
    write(checkpoint, start)
    tensors = load_file(start / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    save_file(tensors, start / "model.safetensors", {"format": "pt"})
    tuned, _, params = checkpoint_of(
        small_job("gpt2", {}, model={"checkpoint": str(start)}), tmp_path / "tuned"
    )
    assert "lm_head.weight" in params
    write(tuned, tmp_path / "out")
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    model = loaded(tmp_path / "out", "gpt2")
    assert all(torch.equal(model.get_parameter(key), value) for key, value in params.items())


# --------------------------------------------------------------------------- the folder


def test_weights_that_are_not_finite_and_steps_without_an_update_are_told(tmp_path: Path) -> None:
    spec = load_spec(GPT2)
    params = all_params(spec)
    name = next(iter(params))
    params[name].data.view(-1)[0] = float("inf")
    checkpoint = written(GPT2, spec, params, tmp_path, Counters(5, 5, 2, 3))
    done = write(checkpoint, tmp_path / "out")
    assert (done.skipped, done.not_finite) == (3, (name,))


def test_an_export_is_replaced_as_a_whole(tmp_path: Path) -> None:
    checkpoint, _, _ = checkpoint_of(GPT2, tmp_path)
    out = tmp_path / "place" / "out"
    write(checkpoint, out, shard_bytes=20_000)
    with pytest.raises(UserError, match="is not empty") as raised:
        write(checkpoint, out)
    assert "--overwrite" in raised.value.hint
    write(checkpoint, out, overwrite=True)
    assert names(out) == ["config.json", "model.safetensors", MARK]
    assert names(out.parent) == ["out"]


def test_what_is_no_export_is_never_replaced(tmp_path: Path) -> None:
    checkpoint, _, _ = checkpoint_of(GPT2, tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"holds thesis\.tex"):
        write(checkpoint, tmp_path / "home", overwrite=True)
    with pytest.raises(UserError, match="is not a folder"):
        write(checkpoint, tmp_path / "file", overwrite=True)
    assert names(tmp_path / "home") == ["thesis.tex"]


def test_a_model_that_somebody_else_saved_is_never_replaced(tmp_path: Path) -> None:
    """It has the very files that an export has, and more."""
    checkpoint, spec, params = checkpoint_of(GPT2, tmp_path)
    theirs = tmp_path / "theirs"
    undivided(spec, params).save_pretrained(theirs)
    (theirs / "tokenizer.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    for how in ({"overwrite": True}, {}):
        with pytest.raises(UserError, match=r"not empty|not written by export"):
            write(checkpoint, theirs, **how)
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before
    assert names(tmp_path) == [checkpoint.name, "theirs"]


@pytest.mark.parametrize("change", ["added", "saved over", "touched", "link", "mark", "mark is a link"])
def test_an_export_that_was_changed_is_never_replaced(tmp_path: Path, change: str) -> None:
    checkpoint, _, _ = checkpoint_of(GPT2, tmp_path)
    out = tmp_path / "out"
    write(checkpoint, out, job="small-1")
    mark = mark_of(out)
    assert mark is not None
    assert (mark.job, mark.step, sorted(mark.files)) == ("small-1", 3, ["config.json", "model.safetensors"])
    match change:
        case "added":
            (out / "tokenizer.json").write_text("{}")
        case "saved over":  # as by save_pretrained after tuning
            data = bytearray((out / "model.safetensors").read_bytes())
            data[-1] ^= 1
            (out / "model.safetensors").write_bytes(data)
        case "touched":
            (out / "config.json").touch()
        case "link":
            (out / "model.safetensors").rename(tmp_path / "weights")
            (out / "model.safetensors").symlink_to(tmp_path / "weights")
        case "mark":
            (out / MARK).write_text("{}")
        case _:
            (out / MARK).rename(tmp_path / "mark")
            (out / MARK).symlink_to(tmp_path / "mark")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UserError, match="export") as raised:
        write(checkpoint, out, overwrite=True)
    assert "another folder" in raised.value.hint
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    checkpoint, _, _ = checkpoint_of(GPT2, tmp_path)
    write(checkpoint, tmp_path / "out")
    (tmp_path / "latest").symlink_to(tmp_path / "out")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("latest", "dangling"):
        with pytest.raises(UserError, match="is a symbolic link"):
            write(checkpoint, tmp_path / name, overwrite=True)
    assert not (tmp_path / "nowhere").exists()


def test_what_came_while_it_was_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _, _ = checkpoint_of(GPT2, tmp_path)
    out = tmp_path / "place" / "out"
    write(checkpoint, out)
    before = export._mark

    def meanwhile(*args: Any) -> None:
        before(*args)
        (out / "thesis.tex").write_text("years of work")

    with monkeypatch.context() as patched:
        patched.setattr(export, "_mark", meanwhile)
        with pytest.raises(UserError, match=r"holds thesis\.tex"):
            write(checkpoint, out, overwrite=True)
    assert names(out) == ["config.json", "model.safetensors", MARK, "thesis.tex"]
    assert names(out.parent) == ["out"]
    (out / "thesis.tex").unlink()
    rename = Path.rename

    def later(path: Path, target: Path) -> Path:
        if path == out:
            (out / "thesis.tex").write_text("years of work")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", later)
    done = write(checkpoint, out, overwrite=True)
    assert names(out) == ["config.json", "model.safetensors", MARK]
    assert names(Path(done.left)) == ["thesis.tex"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    checkpoint, _, _ = checkpoint_of(GPT2, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"export: .*out cannot be written"):
        write(checkpoint, tmp_path / "file" / "out")


# --------------------------------------------------------------------------- the checkpoint


def test_a_damaged_checkpoint_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    checkpoint, spec, _ = checkpoint_of(GPT2, tmp_path)
    out = tmp_path / "place" / "out"
    write(checkpoint, out)
    before = (out / "model.safetensors").read_bytes()
    torn = checkpoint / f"bucket-{len(spec.buckets) - 1:05d}.safetensors"
    data = bytearray(torn.read_bytes())
    data[-1] ^= 1
    torn.write_bytes(data)
    with pytest.raises(UserError, match="SHA-256 is not the manifest's") as raised:
        write(checkpoint, out, overwrite=True)
    assert "export again" in raised.value.hint
    torn.write_bytes(data[:-1])
    with pytest.raises(UserError, match="is torn"):
        write(checkpoint, out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert names(out.parent) == ["out"]


def test_a_checkpoint_that_is_gone_or_partial_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest\.json: No such file"):
        write(tmp_path / "step-00000009", tmp_path / "out")
    with pytest.raises(UserError, match="never completed"):
        write(tmp_path / "step-00000009.partial", tmp_path / "out")
    assert names(tmp_path) == []


def test_the_program_prints_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, _, _ = checkpoint_of(GPT2, tmp_path)
    words = ["--out", str(tmp_path / "out"), "--shard-bytes", "1000000", "--dtype", "float32"]
    with pytest.raises(SystemExit) as ended:
        export.main(["--checkpoint", str(checkpoint), *words])
    assert ended.value.code == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Exported).path == str(tmp_path / "out")
    with pytest.raises(SystemExit) as ended:
        export.main(["--checkpoint", str(checkpoint), *words])
    assert ended.value.code == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: name another folder")

"""What no node would take is refused by a look at a job, in words of its job.toml: models and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from oobleckd.ctl.reference import to_toml
from oobleckd.protocol.job import parse_job, table_of
from oobleckd.protocol.modelnotes import DataNote, Looked, data_words
from oobleckd.worker.models import FAMILIES, load_spec
from oobleckd.worker.tools import look
from tests.helpers.models import small_config, small_job

TRAIN = {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 16}
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


def looked_at(tmp_path: Path, **tables: Any) -> Result:
    file = tmp_path / "job.toml"
    raw = {"name": "j", "train": TRAIN, "model": {"family": "gpt2", "config": SMALL}, **tables}
    file.write_text(to_toml(table_of(parse_job(raw))), encoding="utf-8")
    return CliRunner().invoke(look.main, ["--job", str(file)])


def refused(tmp_path: Path, **tables: Any) -> tuple[str, str]:
    done = looked_at(tmp_path, **tables)
    assert (done.exit_code, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    return error.removeprefix("error: "), hint.removeprefix("hint: ")


def model(family: str = "gpt2", **config: Any) -> dict[str, Any]:
    return {"model": {"family": family, "config": config}}


# --------------------------------------------------------------------------- families


@pytest.mark.parametrize(
    ("family", "said", "hint"),
    [
        ("gtp2", "", "'gpt2'"),
        ("GPT-2", "", "'gpt2'"),
        ("lama", "", "'llama'"),
        ("gemma3", "more than a language model", "gemma3_text"),
        ("llama4", "mixture of experts", "docs/models.md"),
        ("dbrx", "mixture of experts", "docs/models.md"),
        ("mixtrall", "", "'mixtral'"),
        ("Qwen3-MoE", "", "'qwen3_moe'"),
        ("ernie4_5_moe", "e_score_correction_bias", "docs/models.md"),
        ("t5", "no causal or masked", "docs/models.md"),
        ("mamba", "transformers has it", "docs/models.md"),
        ("meta-llama/Llama-3.1-8B", "", "model.checkpoint"),
        ("zzz", "", "supported families: arcee"),
    ],
)
def test_families(tmp_path: Path, family: str, said: str, hint: str) -> None:
    found = refused(tmp_path, **model(family))
    assert found[0].startswith(f"model.family: {family!r} is not supported")
    assert said in found[0]
    assert hint in found[1]


# --------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("family", "config", "key"),
    [
        ("gpt2", {"hidden": 64}, "model.config.hidden: "),
        ("gpt2", {"n_embd": 128, "n_head": 3}, "model.config.n_head: 3 does not divide n_embd = 128"),
        ("bert", {"hidden_size": 128, "num_attention_heads": 3}, "model.config.num_attention_heads: 3"),
        ("mpt", {"d_model": 128, "n_heads": 3}, "model.config.n_heads: 3 does not divide d_model"),
        (
            "qwen2",
            {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 3, "num_hidden_layers": 2},
            "model.config.num_key_value_heads: 3 does not divide num_attention_heads = 4",
        ),
        ("gpt2", {"n_head": 0}, "model.config.n_head: 0"),
        ("gpt2", {"n_embd": -8}, "model.config.n_embd: -8"),
        ("gpt2", {"n_embd": "64"}, "model.config: Field 'n_embd' expected int"),
        ("gpt2", {"activation_function": "gellu"}, "model.config.activation_function: "),
        ("gpt2", {"n_positions": 8}, "train.sequence = 16"),
        ("mpt", {"max_seq_len": 8}, "train.sequence = 16"),
    ],
)
def test_sizes(tmp_path: Path, family: str, config: dict[str, Any], key: str) -> None:
    assert refused(tmp_path, **model(family, **config))[0].startswith(key)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_is_not_refused(family: str) -> None:
    load_spec(small_job(family, small_config(family))).try_blocks()


# --------------------------------------------------------------------------- texts


def test_a_vocabulary_without_all_bytes(tmp_path: Path) -> None:
    small = {"model": {"config": {**SMALL, "vocab_size": 100}}}
    assert "the model's vocabulary ends at 99" in refused(tmp_path, **small)[0]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text("z" * 100)
    data = {"source": "text", "path": str(tmp_path / "text")}
    found = refused(tmp_path, **small, data=data)
    assert "has token 122" in found[0]
    assert "123" in found[1]
    (tmp_path / "text" / "a").write_text("A" * 100)
    assert looked_at(tmp_path, **small, data=data).exit_code == 0


@pytest.mark.parametrize("source", ["tokens", "text"])
def test_too_short(tmp_path: Path, source: str) -> None:
    (tmp_path / "data").write_bytes(b"\x01\x00" * 4)
    data = {"source": source, "path": str(tmp_path / "data")}
    assert "fewer than train.sequence = 16" in refused(tmp_path, data=data)[0]


def test_data_of_the_wrong_kind(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "hello there"}\n' * 40)
    assert "is JSON" in refused(tmp_path, data={"source": "tokens", "path": str(file)})[0]
    assert "is a folder" in refused(tmp_path, data={"source": "tokens", "path": str(tmp_path)})[0]


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    (folder / ".git").mkdir(parents=True)
    (folder / "a.txt").write_text("some text, " * 40)
    (folder / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    (folder / "c.jsonl").write_text('{"text": "hello there"}\n' * 40)
    done = looked_at(tmp_path, data={"source": "text", "path": str(folder)})
    notes = msgspec.json.decode(done.stdout, type=Looked).data
    assert notes == (DataNote(2, 3, "b.png", "a PNG picture"),)
    assert "2 of 3 files" in data_words(notes[0])


def test_a_look_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert looked_at(tmp_path).exit_code == 0
    assert not (tmp_path / "cache").exists()

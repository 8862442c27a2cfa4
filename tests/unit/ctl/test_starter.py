"""``init`` writes jobs that a node would take, and nothing over what is there."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from oobleckd.ctl import jobschema
from oobleckd.ctl.main import main
from oobleckd.protocol.job import parse_job


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text", encoding="utf-8")
    (tmp_path / "chats.jsonl").write_text('{"text": "hello"}\n', encoding="utf-8")
    vocabulary = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 41, "content": "<end>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["init", *words], catch_exceptions=False)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("nodes", ["1", "5"])
def test_every_page_is_a_job(family: str, nodes: str) -> None:
    text = run("--family", family, "--nodes", nodes, "--steps", "7", "--to", "-").stdout
    raw = tomllib.loads(text)
    job = parse_job(raw)
    assert (job.name, job.train.steps, job.resources.max_nodes) == (
        f"{family}-stdlib", 7, int(nodes),
    )  # fmt: skip
    assert job.fault_tolerance.f == (1 if nodes == "5" else 0)
    assert job.model.family == family
    assert text.startswith("#:schema ./job.schema.json\n")
    jsonschema.validate(raw, jobschema.schema())


@pytest.mark.parametrize(
    ("words", "source", "vocabulary"),
    [
        (("--data", "text"), "text", 256),
        (("--data", "text", "--tokenizer", "tokenizer.json"), "text", 42),
        (("--data", "text/*.txt", "--tokenizer", "."), "text", 42),
        (("--data", "chats.jsonl", "--tokenizer", "."), "jsonl", 42),
        (("--data", "s3://bucket/rows.parquet", "--tokenizer", "."), "parquet", 42),
    ],
)
def test_data_is_what_its_name_says(words: tuple[str, ...], source: str, vocabulary: int) -> None:
    assert run(*words, "--to", "new.toml").stdout == "new.toml\n"
    job = parse_job(tomllib.loads(Path("new.toml").read_text(encoding="utf-8")))
    assert (job.data.source, job.data.path) == (source, words[1])
    assert job.model.config["vocab_size"] == vocabulary


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data", "nowhere"), "--data: nowhere does not exist"),
        (("--data", "chats.jsonl"), "--data: jsonl is tokenized first, and no --tokenizer is named"),
        (("--data", "text", "--tokenizer", "text"), "--tokenizer: text/tokenizer.json: No such file"),
        (("--data", "text", "--tokenizer", "chats.jsonl"), "chats.jsonl: is no tokenizer.json"),
        (("--tokenizer", "."), "stdlib is trained on as bytes"),
        (("--name", "a b"), "--name: "),
        (("--nodes", "0"), "--nodes is 0"),
    ],
)
def test_what_cannot_be_writes_nothing(words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert not Path("job.toml").exists()


def test_nothing_is_overwritten_unless_asked() -> None:
    Path("job.toml").write_text("mine", encoding="utf-8")
    result = run()
    assert result.exit_code == 2
    assert "job.toml is there already" in result.stderr
    assert Path("job.toml").read_text(encoding="utf-8") == "mine"
    assert run("--force", "-o", "json").stdout.endswith('"kind":"Init","file":"job.toml"}\n')
    assert parse_job(tomllib.loads(Path("job.toml").read_text(encoding="utf-8")))


def test_a_file_may_be_named_as_other_tools_name_it() -> None:
    assert run("-o", "other.toml").stdout == "other.toml\n"
    assert run("--to", "/nowhere/x").exit_code == 1

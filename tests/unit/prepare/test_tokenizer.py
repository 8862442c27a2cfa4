"""Which tokenizer a job has, and which of its tokens end and begin a document."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from oobleckd.prepare.tokenizer import tokenizer_of
from oobleckd.protocol.job import Job
from oobleckd.tokens.errors import DataError
from tests.helpers.corpora import job_of, make_tokenizer

SIZE = 300


def at(tokenizer: Path, **more: object) -> Job:
    return job_of("jsonl", "t.jsonl", tokenizer, **more)


def of_model(folder: Path, **config: object) -> Job:
    job = at(folder)
    data = msgspec.structs.replace(job.data, tokenizer="model.checkpoint" if config else "")
    model = msgspec.structs.replace(job.model, checkpoint=str(folder), config=config)
    return msgspec.structs.replace(job, data=data, model=model)


def test_it_is_a_folder_a_file_or_that_of_the_model(tokenizer: Path) -> None:
    by_folder = tokenizer_of(at(tokenizer))
    assert by_folder.size == SIZE
    assert tokenizer_of(at(tokenizer / "tokenizer.json")) == by_folder
    assert tokenizer_of(of_model(tokenizer)) == by_folder


@pytest.mark.parametrize(
    ("name", "config", "eos"),
    [
        ("tokenizer_config.json", {"eos_token": "a"}, None),
        ("tokenizer_config.json", {"eos_token": {"content": "b"}}, None),
        ("special_tokens_map.json", {"eos_token": "c"}, None),
        ("generation_config.json", {"eos_token_id": [9, 8]}, 9),
        ("config.json", {"eos_token_id": 17}, 17),
        ("config.json", {"eos_token": None, "eos_token_id": True}, 0),
        ("config.json", {"eos_token_id": 5000}, 0),
        ("config.json", [], 0),
    ],
    ids=range(8),
)
def test_the_end_of_a_document_is_what_the_files_beside_it_say(
    tmp_path: Path, name: str, config: object, eos: int | None
) -> None:
    tokenizer = make_tokenizer(tmp_path)
    (tmp_path / name).write_text(json.dumps(config))
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    said = config.get("eos_token") if isinstance(config, dict) else None
    text = said["content"] if isinstance(said, dict) else said
    assert tokenizer_of(at(tokenizer)).eos == (vocabulary[text] if eos is None else eos)


def test_nothing_is_guessed_where_nothing_is_said(tmp_path: Path, tokenizer: Path) -> None:
    bare = make_tokenizer(tmp_path / "bare", eos="")
    with pytest.raises(DataError, match=r"data\.eos: .* does not say which token is the end"):
        tokenizer_of(at(bare))
    assert tokenizer_of(at(bare, eos=False)).eos == -1
    with pytest.raises(DataError, match=r"data\.bos: .* the beginning of a document"):
        tokenizer_of(at(tokenizer, bos=True))
    two = make_tokenizer(tmp_path / "two", ("</s></s></s>",), eos="<|endoftext|>")
    file = two / "tokenizer.json"
    told = json.loads(file.read_text())
    told["added_tokens"].append(
        {**told["added_tokens"][0], "id": len(told["model"]["vocab"]), "content": "</s>"}
    )
    file.write_text(json.dumps(told))
    with pytest.raises(DataError, match=r"<\|endoftext\|> and </s>"):
        tokenizer_of(at(two))


def test_a_vocabulary_beyond_the_model_s_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    with pytest.raises(DataError, match="has 300 tokens, and the model's vocabulary ends at 298"):
        tokenizer_of(of_model(tokenizer, vocab_size=299))
    (tmp_path / "config.json").write_text('{"vocab_size": 299}')
    with pytest.raises(DataError, match="vocabulary ends at 298"):
        tokenizer_of(of_model(tokenizer))
    assert tokenizer_of(of_model(tokenizer, vocab_size=300)).size == SIZE


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        tokenizer_of(at(tmp_path / "none"))
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        tokenizer_of(at(tmp_path))
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"has no tokenizer\.json") as caught:
        tokenizer_of(at(tmp_path))
    assert "vocab.json" in caught.value.hint
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        tokenizer_of(at(tmp_path))

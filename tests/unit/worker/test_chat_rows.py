"""Rows of chats: what a device asks the model for, and what it refuses of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from oobleckd.prepare import build
from oobleckd.prepare.build import prepare
from oobleckd.protocol.job import Job, parse_job
from oobleckd.tokens.manifest import LOSS, read_manifest
from oobleckd.worker.data import inputs
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.data.masking import NOT_ASKED
from oobleckd.worker.data.rows import Misread
from oobleckd.worker.runtime.errors import UserError
from tests.helpers import chat_templates
from tests.helpers.chats import CHATS, chat_tokenizer, write_lines
from tests.helpers.one_process import OneProcess

MakeJob = Callable[..., Job]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("chatml") / "tokenizer", chat_templates.CHATML)


@pytest.fixture
def job(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeJob:
    """Makes a job whose chats are prepared; fields of its ``[data]``."""
    monkeypatch.setattr(build, "Pool", OneProcess)
    lines = write_lines(tmp_path / "t.jsonl", *({"messages": each, "text": "x" * 40} for each in CHATS))

    def made(family: str = "gpt2", **data: Any) -> Job:
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1} if family == "gpt2" else {}
        job = parse_job({
            "name": "chats",
            "model": {"family": family, "config": {"vocab_size": 512, **sizes}},
            "data": {
                "source": "jsonl", "path": str(lines), "tokenizer": str(tokenizer), "format": "chat", **data,
            },
            "train": {"steps": 4, "global_batch": 4, "micro_batch": 2, "sequence": 256},
        })  # fmt: skip
        folder = prepare(job, 1, lambda _progress: None).folder
        return msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, prepared=str(folder)))

    return made


@pytest.mark.parametrize("sequences", ["packed", "padded"])
def test_labels_are_the_answers_of_all_chats(job: MakeJob, tokenizer: Path, sequences: str) -> None:
    made = job(sequences=sequences)
    corpus, loaded = open_corpus(made), Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    said = []
    for row in range(corpus.sources[0].count):
        found = corpus.sources[0].row(row)
        assert int(found.asked.sum()) == corpus.sources[0].num_targets(row)
        text = loaded.decode(found.tokens[found.asked].tolist(), skip_special_tokens=False)
        said += text.split("<|im_end|>")[:-1]
    wanted = [each["content"] for chat in CHATS for each in chat if each["role"] == "assistant"]
    assert sorted(said) == sorted(wanted)
    for step in range(2):
        for micro_batch in range(2):
            batch = corpus.batch(step, micro_batch)
            assert int((batch.labels != NOT_ASKED).sum()) == corpus.targets_of(step)[micro_batch]
    corpus.inputs.close()


def test_what_is_asked_for_is_part_of_what_is_read(job: MakeJob) -> None:
    """Two devices whose folders have the same tokens, and other bits, do not train the same."""
    digests = set()
    for roles in (["assistant"], ["user"]):
        corpus = open_corpus(job(chat={"roles": roles}))
        digests.add(corpus.digest)
        assert corpus.inputs.digest() == corpus.digest
        corpus.inputs.close()
    assert len(digests) == 2


@pytest.mark.parametrize("small", [True, False])
def test_bits_that_were_changed_are_refused(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, *, small: bool
) -> None:
    made = job()
    loss = Path(made.data.prepared) / LOSS
    bits = loss.read_bytes()
    loss.write_bytes(bytes(len(bits)))
    if not small:
        monkeypatch.setattr(inputs, "SMALL_BYTES", 0)
        with pytest.raises(Misread, match=r"loss\.bin is not what its manifest says"):
            open_corpus(made).batch(0, 0)
    for _ in range(2):  # it is remembered that they were wrong
        with pytest.raises(UserError, match=r"loss\.bin is not what its manifest says"):
            open_corpus(made)
    loss.write_bytes(bits)
    open_corpus(made).batch(0, 0)


def test_a_folder_of_chats_is_not_trained_on_as_text(job: MakeJob) -> None:
    made = job()
    assert read_manifest(Path(made.data.prepared)).has_loss
    data = msgspec.structs.replace(made.data, format="text")
    with pytest.raises(UserError, match=r"has chats, and data\.format is 'text'"):
        open_corpus(msgspec.structs.replace(made, data=data))


def test_a_masked_model_takes_no_chats(job: MakeJob) -> None:
    with pytest.raises(UserError, match=r"data\.format: .* bert"):
        open_corpus(job("bert"))

"""What the program says that prepares data for an agent."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from oobleckd.prepare import build, program
from oobleckd.prepare.build import PrepareProgress, prepare
from oobleckd.protocol.datamessages import PrepareData, PrepareDone, PrepareFailed, Preparing
from oobleckd.protocol.job import Job, parse_job
from oobleckd.tokens.manifest import read_manifest
from tests.helpers.corpora import DOCUMENTS
from tests.helpers.one_process import OneProcess

TRAIN = {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 8}
Word = Preparing | PrepareDone | PrepareFailed


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "Pool", OneProcess)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return file


def job_of(data: dict[str, object]) -> Job:
    return parse_job({"name": "a", "train": TRAIN, "data": data})


def rows_of(text: Path, tokenizer: Path, **more: object) -> Job:
    return job_of({"source": "jsonl", "path": str(text), "tokenizer": str(tokenizer)} | more)


def said_of(job: Job) -> list[Word]:
    said: list[Word] = []
    program._answer(PrepareData("job-1", job, "a"), said.append)
    return said


def test_it_says_how_far_it_is_and_then_the_folder(text: Path, tokenizer: Path) -> None:
    job = rows_of(text, tokenizer)
    *far, done = said_of(job)
    assert [each.phase for each in far if isinstance(each, Preparing)] == ["read", "tokenize", "join"]
    assert isinstance(done, PrepareDone)
    assert read_manifest(Path(*done.folders)).documents == len(DOCUMENTS)
    assert said_of(job) == [done]  # what is there already


def test_of_several_sources_who_lacks_a_folder_gets_one(text: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text(text.read_text() * 2)
    (tmp_path / "c.bin").write_bytes(bytes(800))
    named = prepare(rows_of(text, tokenizer), 1, lambda _far: None).folder
    sources = [
        {"name": "a", "weight": 1, "kind": "jsonl", "path": str(text), "prepared": str(named)},
        {"name": "b", "weight": 1, "kind": "jsonl", "path": str(tmp_path / "more.jsonl")},
        {"name": "c", "weight": 1, "kind": "bin", "path": str(tmp_path / "c.bin")},
    ]
    *far, done = said_of(job_of({"source": sources, "tokenizer": str(tokenizer)}))
    assert {each.source for each in far if isinstance(each, Preparing)} == {"b"}
    assert isinstance(done, PrepareDone)
    assert (done.folders[0], done.folders[2]) == (str(named), "")
    assert read_manifest(Path(done.folders[1])).documents == 2 * len(DOCUMENTS)


def test_a_plan_of_rows_is_made_where_the_folder_is_there(text: Path, tokenizer: Path) -> None:
    folder = prepare(rows_of(text, tokenizer), 1, lambda _far: None).folder
    *_, done = said_of(rows_of(text, tokenizer, sequences="packed"))
    assert done == PrepareDone("job-1", (str(folder),))
    assert list(folder.glob("plan-*"))


@pytest.mark.parametrize(
    ("more", "begun"), [({"path": "/none.jsonl"}, False), ({"column": "txt"}, False), ({}, True)]
)
def test_a_look_is_told_apart_from_what_is_found_later(
    text: Path, tokenizer: Path, more: dict[str, object], begun: bool
) -> None:
    with text.open("a") as file:
        file.write("no JSON\n")
    *_, failed = said_of(rows_of(text, tokenizer, **more))
    assert isinstance(failed, PrepareFailed)
    assert (failed.begun, failed.died) == (begun, False)
    assert str(more.get("path", text)) in failed.error


def test_all_sources_are_looked_at_before_work_begins(text: Path, tokenizer: Path) -> None:
    sources = [
        {"name": "a", "weight": 1, "kind": "jsonl", "path": str(text)},
        {"name": "b", "weight": 1, "kind": "jsonl", "path": "/none.jsonl"},
    ]
    (failed,) = said_of(job_of({"source": sources, "tokenizer": str(tokenizer)}))
    assert isinstance(failed, PrepareFailed)
    assert not failed.begun
    assert "'b'" in failed.error


def test_a_cache_that_cannot_be_written_is_found_before_all_is_read(text: Path, tokenizer: Path) -> None:
    (text.parent / "file").touch()
    (failed,) = said_of(rows_of(text, tokenizer, cache=str(text.parent / "file" / "cache")))
    assert isinstance(failed, PrepareFailed)
    assert not failed.begun


def test_it_speaks_once_a_second_and_of_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = 0.0, list[Word]()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    teller = program._Teller("job-1", "web", said.append)
    for number in range(101):
        now = number / 40
        teller(PrepareProgress("read" if number < 20 else "tokenize", number << 20, 100 << 20))
    assert [(each.phase, each.done_bytes >> 20) for each in said if isinstance(each, Preparing)] == [
        ("read", 0), ("tokenize", 20), ("tokenize", 60), ("tokenize", 100)
    ]  # fmt: skip
    last = said[-1]
    assert isinstance(last, Preparing)
    assert (last.source, last.bytes_per_s) == ("web", pytest.approx(40 << 20))
    assert msgspec.json.decode(msgspec.json.encode(last), type=Word) == last

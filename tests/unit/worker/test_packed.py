"""Micro-batches of packed and padded rows, and of windows whose documents are separate: what a model is shown
and asked for follows from the documents alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oobleckd.protocol.inputs import Input
from oobleckd.protocol.job import Job, jobs_of_sources
from oobleckd.worker.data import inputs as inputs_module
from oobleckd.worker.data.corpus import Corpus, open_corpus
from oobleckd.worker.data.input_watch import Eyes
from oobleckd.worker.data.masking import NOT_ASKED, num_chosen
from oobleckd.worker.data.rows import Misread
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import GPT2, small_config, small_job
from tests.helpers.prepared import planned, prepared

LENGTHS = (5, 1, 30, 8, 20, 3, 2, 16, 0, 11)
SEQUENCE = 16
STEPS = range(6)
VOCAB = 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Token n of all is n + 1, so that nothing is what fills a row up."""
    ends = np.cumsum(LENGTHS)
    documents = [np.arange(end - size, end) + 1 for end, size in zip(ends, LENGTHS, strict=True)]
    return prepared(tmp_path / ("0" * 32), documents, "uint16")


def job_of(folder: Path, family: str = "gpt2", **data: Any) -> Job:
    model = {**GPT2, "vocab_size": VOCAB} if family == "gpt2" else small_config(family, vocab_size=VOCAB)
    table = {"source": "jsonl", "path": "/nowhere.jsonl", "prepared": str(folder), **data}
    return small_job(family, model, data=table, train={"sequence": SEQUENCE})


def corpus_of(folder: Path, family: str = "gpt2", **data: Any) -> Corpus:
    job = job_of(folder, family, **data)
    if job.data.row_kind != "windows":
        planned(job)
    return open_corpus(job)


def document_of(token: int) -> int:
    return int(np.searchsorted(np.cumsum(LENGTHS), token - 1, side="right"))


WAYS = {
    "packed": {"sequences": "packed"},
    "padded": {"sequences": "padded"},
    "windows": {"documents": "separate"},
    "megatron": {"source": "megatron", "documents": "separate"},
    "packed, joined": {"sequences": "packed", "documents": "joined"},
    "padded, joined": {"sequences": "padded", "documents": "joined"},
}


def opened(folder: Path, way: str, family: str = "gpt2") -> Corpus:
    data: dict[str, Any] = dict(WAYS[way])
    if way == "megatron":
        return corpus_of(folder, family, **data, path=f"{folder}/tokens", prepared="")
    return corpus_of(folder, family, **data)


def wanted(tokens: list[int], *, separate: bool) -> tuple[list[int], list[int], list[int]]:
    """Labels, positions and documents of a row, by its tokens alone."""
    labels, positions, documents = [], [], []
    for at, token in enumerate(tokens):
        begins = at == 0 or (token == 0) != (tokens[at - 1] == 0)
        begins |= bool(token) and at > 0 and tokens[at - 1] != token - 1
        begins |= bool(token) and at > 0 and document_of(token) != document_of(tokens[at - 1])
        documents.append((documents[-1] if documents else -1) + begins)
        positions.append(0 if begins else positions[-1] + 1)
        labels.append(NOT_ASKED if not token or at == 0 or (separate and begins) else token)
    return labels, positions, documents


@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_is_asked_for_follows_from_the_documents(folder: Path, way: str) -> None:
    corpus = opened(folder, way)
    separate = "joined" not in way
    for step in STEPS:
        for micro_batch in range(2):
            batch = corpus.batch(step, micro_batch)
            assert torch.equal(batch.inputs, corpus.tokens(step, micro_batch))
            rows = [wanted(row, separate=separate) for row in batch.inputs.tolist()]
            assert batch.labels.tolist() == [labels for labels, _, _ in rows]
            if separate:
                assert batch.positions is not None
                assert batch.documents is not None
                assert batch.positions.tolist() == [positions for _, positions, _ in rows]
                assert batch.documents.tolist() == [documents for _, _, documents in rows]
            else:
                assert batch.positions is batch.documents is None
            assert batch.num_targets == int((batch.labels != NOT_ASKED).sum()) > 0
            assert corpus.targets_of(step)[micro_batch] == batch.num_targets
            bare = corpus.batch(step, micro_batch, tokens=False)
            assert (bare.inputs.numel(), bare.labels.numel()) == (0, 0)
            assert same(bare.positions, batch.positions)
            assert same(bare.documents, batch.documents)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


def test_a_pass_over_packed_rows_has_every_token_of_a_row_with_targets(folder: Path) -> None:
    corpus = opened(folder, "packed")
    rows = [corpus.sources[0].row(number) for number in range(corpus.sources[0].count)]
    seen = [int(token) for row in rows for token in row.tokens if token]
    assert sorted(seen) == sorted(set(seen))
    assert set(range(1, sum(LENGTHS) + 1)) - set(seen) <= {6}  # the document of one token, alone in a row
    assert len(rows) <= -(-sum(LENGTHS) // SEQUENCE) + 2


def test_joined_windows_stay_as_they_are(folder: Path) -> None:
    corpus = corpus_of(folder)
    batch = corpus.batch(0, 0)
    assert batch.inputs is batch.labels
    assert (batch.positions, batch.documents, batch.num_targets) == (None, None, 0)
    assert corpus.targets_of(0) == (0, 0)


@pytest.mark.parametrize("way", ["packed", "padded", "windows"])
def test_a_masked_model_has_a_share_of_the_real_tokens_hidden(folder: Path, way: str) -> None:
    corpus = opened(folder, way, "bert")
    for step in STEPS:
        batch, tokens = corpus.batch(step, 0), corpus.tokens(step, 0)
        asked = batch.labels != NOT_ASKED
        real = (tokens != 0).sum(dim=1).tolist()
        assert asked.sum(dim=1).tolist() == [num_chosen(size) for size in real]
        assert torch.equal(batch.labels[asked], tokens[asked])
        assert torch.equal(batch.inputs[~asked], tokens[~asked])
        assert not asked[tokens == 0].any()
        assert batch.num_targets == corpus.targets_of(step)[0] == int(asked.sum())
        assert batch.documents is not None


def test_a_masked_model_must_not_see_what_fills_a_row_up(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.documents: is 'joined'"):
        opened(folder, "packed, joined", "bert")


# --------------------------------------------------------------------------- what is on disk


def parts_of(folder: Path, way: str) -> list[Input]:
    """The identity of what is read, before and after it was looked at once more."""
    corpus = opened(folder, way)
    found = [corpus.inputs.part]
    eyes = Eyes(corpus.inputs)
    assert eyes.verify() is None
    corpus.inputs.close()
    return [*found, corpus.inputs.part]


@pytest.mark.parametrize("way", WAYS)
def test_what_rows_follow_from_is_part_of_what_is_read(folder: Path, way: str, tmp_path: Path) -> None:
    """Two nodes with other borders would train on other samples."""
    first, again = parts_of(folder, way)
    assert first == again
    assert first.whole
    assert first.files == {"windows": 2, "megatron": 2}.get(way, 5)
    documents = np.split(np.arange(sum(LENGTHS)) + 1, [50])
    other = prepared(tmp_path / "other" / folder.name, documents, "uint16")
    assert (other / "tokens.bin").read_bytes() == (folder / "tokens.bin").read_bytes()
    assert parts_of(other, way)[0].whole != first.whole


def test_a_folder_without_the_plan_says_what_to_run(folder: Path) -> None:
    """As one that was prepared before there were plans, or for another sequence."""
    planned(job_of(folder, sequences="padded"))
    with pytest.raises(UserError, match=r"^data\.prepared: .* is not packed into rows of 16") as raised:
        open_corpus(job_of(folder, sequences="packed"))
    assert "oobleckctl data prepare" in raised.value.hint


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is small enough to be read when it is opened."""
    monkeypatch.setattr(inputs_module, "SMALL_BYTES", 0)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


FILES = ("row_starts.bin", "tokens.bin", "lengths.bin", "targets.bin")


@pytest.mark.parametrize("name", FILES)
def test_a_small_plan_that_was_changed_is_refused_at_once(folder: Path, name: str) -> None:
    job = job_of(folder, sequences="packed")
    place = planned(job)
    flip(place / name, 1)
    with pytest.raises(UserError, match=f"{name} is not what its manifest says") as raised:
        open_corpus(job)
    assert f"delete {place}, and run `oobleckctl data prepare` again" in raised.value.hint


@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("large")
def test_a_large_one_is_refused_before_it_is_trained_on(folder: Path, name: str) -> None:
    job = job_of(folder, sequences="packed")
    place = planned(job)
    flip(place / name, 1)
    corpus = open_corpus(job)
    with pytest.raises(Misread):
        corpus.batch(0, 0)
    with pytest.raises(UserError, match=name):  # who knows looks there first
        open_corpus(job)
    flip(place / name, 1)
    assert open_corpus(job).batch(0, 0).num_targets


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("lengths.bin", _cut, "lengths.bin has 1 byte less than its manifest says"),
        ("plan.json", _cut, "plan.json cannot be read"),
        ("plan.json", Path.unlink, "plan.json: No such file"),
        ("plan.json", lambda path: path.write_text('{"format": 2}'), "is of format 2, and 1 is known"),
        ("tokens.bin", Path.unlink, "tokens.bin: No such file"),
    ],
)
def test_a_torn_plan_is_refused_and_made_again(
    folder: Path, name: str, damage: Callable[[Path], object], says: str
) -> None:
    job = job_of(folder, sequences="packed")
    place = planned(job)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    damage(place / name)
    with pytest.raises(UserError, match=says) as raised:
        open_corpus(job)
    assert "data prepare" in raised.value.hint
    assert planned(job) == place
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_plan_of_another_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    other = prepared(tmp_path / "x", [np.arange(40)], "uint16")
    job = job_of(folder, sequences="packed")
    place = planned(job)
    shutil.rmtree(place)
    planned(job_of(other, sequences="packed")).rename(place)
    with pytest.raises(UserError, match="is of other data, or of other rows"):
        open_corpus(job)


def test_a_folder_without_borders_cannot_keep_documents_apart(folder: Path) -> None:
    (folder / "tokens.idx").unlink()
    data = {"source": "tokens", "path": f"{folder}/tokens.bin", "prepared": "", "documents": "separate"}
    with pytest.raises(UserError, match=r"^data\.documents: "):
        corpus_of(folder, **data)


def test_a_pass_is_drawn_ahead(folder: Path) -> None:
    corpus = opened(folder, "packed")
    for step in range(20):
        corpus.draw_ahead(step)
        corpus.batch(step, 0)
        corpus.targets_of(step)
    assert corpus.num_waits == 0
    corpus.of_step(40)
    assert corpus.num_waits == 1


def test_rows_are_of_any_kind_of_numbers(tmp_path: Path) -> None:
    wide = np.arange(100_000, 100_040)
    folder = prepared(tmp_path / "x", [wide[:7], wide[7:]], "int32")
    model = {**GPT2, "vocab_size": 100_040}
    data = {"source": "jsonl", "path": "t", "prepared": str(folder), "sequences": "padded"}
    job = small_job("gpt2", model, data=data, train={"sequence": SEQUENCE})
    planned(job)
    assert open_corpus(job).tokens(0, 0).max() >= 100_000


def test_an_index_that_was_changed_is_refused(folder: Path) -> None:
    job = job_of(folder, documents="separate")
    flip(folder / "tokens.idx", -8)
    with pytest.raises(UserError, match=r"tokens\.idx (is not what|has documents that do not)"):
        open_corpus(job)
    flip(folder / "tokens.idx", -8)
    flip(folder / "tokens.idx", -24)  # one border moved, which may as well be right
    with pytest.raises(UserError, match=r"tokens\.idx is not what its manifest says") as raised:
        open_corpus(job)
    assert f"delete {folder}" in raised.value.hint


# --------------------------------------------------------------------------- several sources


def mixed_job(places: dict[str, Path], **data: Any) -> Job:
    sources = [
        {"name": name, "kind": "jsonl", "path": "/t", "weight": 1, "prepared": str(place)}
        for name, place in places.items()
    ]
    table = {"source": sources, "tokenizer": "/t", **data}
    return small_job("gpt2", {**GPT2, "vocab_size": VOCAB}, data=table, train={"sequence": SEQUENCE})


@pytest.mark.parametrize("way", ["packed", "padded", "windows"])
def test_each_source_of_a_mixture_has_rows_of_its_own(folder: Path, tmp_path: Path, way: str) -> None:
    other = prepared(tmp_path / "x", [np.arange(120, 124), np.arange(130, 145)] * 3, "uint16")
    job = mixed_job({"one": folder, "two": other}, **WAYS[way])
    if way != "windows":
        with pytest.raises(UserError, match=r"^data\.source 'one': .* is not") as raised:
            open_corpus(job)
        assert "data prepare" in raised.value.hint
        for _, part in jobs_of_sources(job):
            planned(part)
    corpus = open_corpus(job)
    seen = set()
    for step in STEPS:
        for micro_batch in range(2):
            batch = corpus.batch(step, micro_batch)
            assert batch.num_targets == corpus.targets_of(step)[micro_batch] > 0
            assert batch.documents is not None
            seen |= {corpus.place(sample).source for sample in corpus.sample_ids(step, micro_batch)}
    assert seen == {0, 1}
    assert Eyes(corpus.inputs).verify() is None
    part = corpus.inputs.part
    assert part.files == len(part.listing) == (4 if way == "windows" else 10)
    assert part.whole == corpus.inputs.digest()

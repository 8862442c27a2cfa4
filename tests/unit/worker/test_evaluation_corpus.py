"""What a job is evaluated on: never what it trains on, and the same in every evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from oobleckd.protocol.inputs import difference, same
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobparts import parts_of
from oobleckd.tokens.heldout import DocumentSide
from oobleckd.worker.data.corpus import Corpus, open_corpus
from oobleckd.worker.data.evaluation import EvalCorpus
from oobleckd.worker.data.look import look_at
from oobleckd.worker.data.masking import NOT_ASKED
from oobleckd.worker.data.rows import DataRow, Rows
from oobleckd.worker.models import Batch
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import GPT2, small_config, small_job
from tests.helpers.prepared import planned, prepared

SEQUENCE, VOCAB = 16, 4000
LENGTHS = np.random.default_rng(11).integers(0, 40, 150)
BORDERS = np.cumsum([0, *LENGTHS])
NUMBER = int(BORDERS[-1])
SHARE = 0.2
HELD_OUT: dict[str, Any] = {"held_out": SHARE, "sequences": 4}
Made = Callable[..., Job]


def tokens_of() -> npt.NDArray[np.int64]:
    """Token n of all is n + 1, so that each says where it is from, and none is what fills a row up."""
    return np.arange(NUMBER) + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    documents = np.split(tokens_of(), BORDERS[1:-1])
    return prepared(tmp_path / ("0" * 32), documents, "uint16")


def job_of(data: dict[str, Any], evaluated: dict[str, Any], family: str = "gpt2", seed: int = 0) -> Job:
    model = {**GPT2, "vocab_size": VOCAB} if family == "gpt2" else small_config(family, vocab_size=VOCAB)
    return small_job(family, model, data=data, train={"sequence": SEQUENCE, "seed": seed}, eval=evaluated)


def opened(job: Job) -> Corpus:
    for _, _, part in parts_of(job):
        if part.data.row_kind != "windows":
            planned(part)
    return open_corpus(job)


WAYS: dict[str, dict[str, Any]] = {
    "packed": {"sequences": "packed"},
    "padded": {"sequences": "padded"},
    "packed, joined": {"sequences": "packed", "documents": "joined"},
    "windows": {},
    "windows, separate": {"documents": "separate"},
    "megatron": {"source": "megatron"},
    "megatron, separate": {"source": "megatron", "documents": "separate"},
    "tokens with an index": {"source": "tokens"},
}


def on(folder: Path, way: str) -> dict[str, Any]:
    if "source" in WAYS[way]:
        return {**WAYS[way], "path": f"{folder}/tokens.bin"}
    return {"source": "jsonl", "path": "/nowhere.jsonl", "prepared": str(folder), **WAYS[way]}


def read(rows: Rows) -> Counter[int]:
    """How often each place of the data is in them."""
    found = Counter(token for number in range(rows.count) for token in rows.row(number).tokens.tolist())
    del found[0]
    return Counter({token - 1: times for token, times in found.items()})


def values(rows: Rows) -> set[int]:
    return {token for number in range(rows.count) for token in rows.row(number).tokens.tolist()}


def documents_of(places: Iterable[int]) -> set[int]:
    return {int(np.searchsorted(BORDERS, place, side="right")) - 1 for place in places}


def both(job: Job) -> tuple[Rows, Rows]:
    corpus = opened(job)
    assert corpus.evaluation is not None
    return corpus.sources[0], corpus.evaluation.sources[0].rows


@pytest.mark.parametrize("way", WAYS)
def test_no_document_is_trained_on_and_evaluated_on(folder: Path, way: str) -> None:
    trained, held = map(read, both(job_of(on(folder, way), HELD_OUT)))
    wanted = DocumentSide(0, round(SHARE * 1e6), held=True).keeps(np.arange(len(LENGTHS)))
    assert documents_of(held) <= {int(number) for number in np.flatnonzero(wanted)}
    assert documents_of(trained).isdisjoint(documents_of(held))
    assert set((trained + held).values()) == {1}  # and nothing twice
    left = set(range(NUMBER)) - set(trained) - set(held)
    if "packed" in way or way == "padded":  # a row of one token asks for nothing
        assert all(LENGTHS[document] % SEQUENCE == 1 for document in documents_of(left))
    else:  # the ends, which make no window
        assert len(left) == NUMBER - (len(trained) + len(held)) < 2 * SEQUENCE


@pytest.mark.parametrize("way", ["packed", "windows", "megatron"])
def test_the_seed_draws_which(folder: Path, way: str) -> None:
    jobs = [job_of(on(folder, way), HELD_OUT, seed=seed) for seed in (0, 1, 2, 0)]
    found = [frozenset(read(both(job)[1])) for job in jobs]
    assert len(set(found)) == 3
    assert found[0] == found[3]


def test_windows_that_hold_out_have_borders_where_documents_begin(folder: Path) -> None:
    for rows in both(job_of(on(folder, "windows, separate"), HELD_OUT)):
        for number in range(rows.count):
            row = rows.row(number)
            places = [token - 1 for token in row.tokens.tolist()]
            begins = [
                at
                for at, place in enumerate(places)
                if at == 0 or place in BORDERS or places[at - 1] != place - 1
            ]
            assert row.starts.tolist() == begins
            assert rows.num_targets(number) == SEQUENCE - len(begins)
            stretches = rows.stretches(number)
            assert [one for token, length in stretches for one in range(token, token + length)] == places


def plain_files(folder: Path) -> dict[str, dict[str, Any]]:
    numbers = tokens_of().astype("<u2")
    numbers.tofile(folder / "a.bin")
    np.save(folder / "a.npy", numbers)
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, NUMBER
    (folder / "llmc.bin").write_bytes(head.tobytes() + numbers.tobytes())
    return {
        "bin": {"source": "bin", "path": str(folder / "a.bin")},
        "tokens": {"source": "tokens", "path": str(folder / "a.npy")},
        "npy": {"source": "npy", "path": str(folder / "a.npy")},
        "llmc": {"source": "llmc", "path": str(folder / "llmc.bin")},
    }


@pytest.mark.parametrize("kind", ["bin", "tokens", "npy", "llmc"])
def test_of_files_without_documents_the_end_is_held_out(tmp_path: Path, kind: str) -> None:
    trained, held = map(read, both(job_of(plain_files(tmp_path)[kind], HELD_OUT)))
    at = NUMBER - NUMBER * 2 // 10
    assert sorted(trained) == list(range(at // SEQUENCE * SEQUENCE))
    assert sorted(held) == list(range(at, at + (NUMBER - at) // SEQUENCE * SEQUENCE))


def test_of_a_folder_of_text_files_are_held_out(tmp_path: Path) -> None:
    """From a cache, too; and of one file of text its end."""
    place = tmp_path / "text"
    place.mkdir()
    for number in range(30):
        (place / f"{number:02}.txt").write_bytes(bytes([number]) * (number + 20))
    wanted = set(np.flatnonzero(DocumentSide(0, 300_000, held=True).keeps(np.arange(30))).tolist())
    job = job_of({"source": "text", "path": str(place)}, {"held_out": 0.3, "sequences": 2})
    for _ in range(2):
        trained, held = both(job)
        seen = [values(rows) for rows in (trained, held)]
        assert seen[0].isdisjoint(wanted)
        assert seen[1] <= wanted
        assert len(seen[0]) > 15
        assert len(wanted) - len(seen[1]) <= 1  # but for what makes no window
    one = tmp_path / "one.txt"
    one.write_bytes(bytes(range(200)))
    trained, held = both(job_of({"source": "text", "path": str(one)}, {"held_out": 0.25, "sequences": 2}))
    assert (trained.count, held.count) == (150 // SEQUENCE, 50 // SEQUENCE)
    assert held.row(0).tokens.tolist() == list(range(150, 150 + SEQUENCE))


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_holds_nothing_out_reads_what_it_always_did(folder: Path, way: str) -> None:
    """Also beside text of its own to evaluate on."""
    text = {"name": "own", "kind": "jsonl", "path": "/nowhere.jsonl", "prepared": str(folder)}
    if "source" in WAYS[way]:
        text = {"name": "own", "kind": WAYS[way]["source"], "path": f"{folder}/tokens.bin"}
    plain = opened(job_of(on(folder, way), {}))
    beside = opened(job_of(on(folder, way), {"source": [text], "sequences": 4}))
    assert plain.evaluation is None
    for step in range(3):
        assert plain.sample_ids(step, 1) == beside.sample_ids(step, 1)
        assert torch.equal(plain.tokens(step, 1), beside.tokens(step, 1))


def sources(folder: Path) -> list[dict[str, Any]]:
    where = {"kind": "jsonl", "path": "/nowhere.jsonl", "prepared": str(folder)}
    return [{"name": "a", **where}, {"name": "b", **where}]


def drawn(evaluation: EvalCorpus, number: int) -> list[DataRow]:
    rows = evaluation.sources[number // (len(evaluation.targets) // len(evaluation.sources))].rows
    return [rows.row(row) for row in evaluation.rows_of(number)]


def parts(batch: Batch) -> list[Any]:
    return [batch.inputs, batch.labels, batch.positions, batch.documents]


@pytest.mark.parametrize("family", ["gpt2", "bert"])
@pytest.mark.parametrize("way", ["packed", "windows", "windows, separate"])
def test_an_evaluation_is_a_function_of_job_and_files(folder: Path, way: str, family: str) -> None:
    """No step shows in it, nor what was asked before, nor a source beside; and it asks for what it says."""
    evaluated = {"sequences": 9, "source": sources(folder)}  # four micro-batches of two, and one left over
    corpus, other = (opened(job_of(on(folder, way), evaluated, family)) for _ in range(2))
    one, two = corpus.evaluation, other.evaluation
    assert one is not None
    assert two is not None
    assert len(one.targets) == 8
    assert [one.source_of(number) for number in range(8)] == ["a"] * 4 + ["b"] * 4
    other.draw_ahead(2)
    ahead = {number: two.batch(number) for number in reversed(range(8))}
    for number in range(8):
        batch = one.batch(number)
        asked = batch.labels != NOT_ASKED
        if way == "windows" and family == "gpt2":  # the head asks for no first token
            asked[:, 0] = False
        assert int(asked.sum()) == one.targets[number] == two.targets[number]
        for mine, theirs in zip(parts(batch), parts(ahead[number]), strict=True):
            assert mine is theirs or torch.equal(mine, theirs)
        bare = one.batch(number, tokens=False)
        for mine, theirs in zip(parts(bare)[2:], parts(batch)[2:], strict=True):
            assert mine is theirs or torch.equal(mine, theirs)
    rows = [tuple(row.tokens.tolist()) for number in range(4) for row in drawn(one, number)]
    assert len(set(rows)) == 8  # none twice
    alone = opened(job_of(on(folder, way), {**evaluated, "source": sources(folder)[1:]}, family)).evaluation
    assert alone is not None
    assert [row.tokens.tolist() for row in drawn(alone, 1)] == [row.tokens.tolist() for row in drawn(one, 5)]


def test_what_is_held_out_comes_before_text_of_its_own(folder: Path) -> None:
    job = job_of(on(folder, "packed"), {**HELD_OUT, "source": sources(folder)})
    corpus = opened(job)
    assert corpus.evaluation is not None
    assert job.eval_sources == ("held-out", "a", "b")
    names = [corpus.evaluation.source_of(number) for number in range(6)]
    assert names == ["held-out", "held-out", "a", "a", "b", "b"]


def chats(tmp_path: Path) -> Path:
    documents = [np.arange(1, length + 1) for length in (5, 9, 16, 3, 7, 12)]
    asked = [np.arange(len(each)) >= 2 for each in documents]
    return prepared(tmp_path / ("3" * 32), documents, "uint16", asked=asked)


@pytest.mark.parametrize("way", ["windows", "packed", "windows, separate"])
def test_chats_are_evaluated_on_where_text_is_trained_on(folder: Path, tmp_path: Path, way: str) -> None:
    """Of windows each has a row of its own; and its answers alone are asked for."""
    source = {**sources(chats(tmp_path))[0], "format": "chat"}
    corpus = opened(job_of({**on(folder, way), "tokenizer": "/none"}, {"sequences": 4, "source": [source]}))
    one = corpus.evaluation
    assert one is not None
    for number in range(2):
        batch, rows = one.batch(number), drawn(one, number)
        asked = [at for row in rows if row.asked is not None for at in np.flatnonzero(row.asked)]
        assert one.targets[number] == len(asked) == batch.num_targets
        if way != "packed":
            assert {int((row.tokens > 0).sum()) for row in rows} <= {5, 9, 16, 3, 7, 12}


def test_other_bytes_to_evaluate_on_are_told_by_name(folder: Path, tmp_path: Path) -> None:
    def corpus(value: int) -> Corpus:
        (tmp_path / "own.txt").write_bytes(bytes([value]) * 100)
        (tmp_path / "text.txt").write_bytes(b"text" * 100)
        source = {"name": "own", "kind": "text", "path": str(tmp_path / "own.txt")}
        data = {"source": "text", "path": str(tmp_path / "text.txt")}
        return open_corpus(job_of(data, {"sequences": 2, "source": [source]}))

    one, other, again = corpus(1), corpus(2), corpus(1)
    assert same(one.inputs.part, again.inputs.part)
    assert not same(one.inputs.part, other.inputs.part)
    assert "eval.source 'own'/own.txt changed" in difference((one.inputs.part,), (other.inputs.part,))


def test_another_plan_of_what_is_held_out_is_another_input(folder: Path) -> None:
    packed = on(folder, "packed")
    tables = ({}, HELD_OUT, {**HELD_OUT, "held_out": 0.4})
    corpora = [opened(job_of(packed, table)) for table in tables]
    assert len({corpus.digest for corpus in corpora}) == 3
    assert opened(job_of(packed, HELD_OUT)).digest == corpora[1].digest


OWN: dict[str, Any] = {"name": "own", "kind": "npy"}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "too few": (
        "windows",
        {**HELD_OUT, "sequences": 400},
        "eval.sequences: 400 are asked for, and 'held-out' has ",
    ),
    "nothing": (
        "windows",
        {**HELD_OUT, "held_out": 0.000_001},
        "eval.held_out: nothing of the 150 documents of ",
    ),
    "no tokens": ("bin", {**HELD_OUT, "held_out": 0.000_1}, "eval.held_out: nothing of the tokens of "),
    "a missing file": (
        "windows",
        {"source": [{**OWN, "path": "/gone.npy"}]},
        "eval.source 'own': /gone.npy",
    ),
    "a short one": ("windows", {"sequences": 2, "source": [{**OWN, "path": "short"}]}, "eval.source 'own': "),
    "a vocabulary": (
        "windows",
        {"sequences": 2, "source": [{**OWN, "path": "large"}]},
        "eval.source 'own': ",
    ),
    "few of its own": (
        "windows",
        {"sequences": 64, "source": [{**OWN, "path": "few"}]},
        "eval.sequences: 64 are asked for, and 'own' has 3 sequences",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_device_would_take_is_found_by_a_look(
    folder: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, evaluated, wanted = REFUSED[case]
    files = {"short": np.arange(5), "large": np.arange(4000, 4100), "few": np.arange(3 * SEQUENCE + 2)}
    for name, numbers in files.items():
        with (tmp_path / name).open("wb") as file:
            np.save(file, numbers.astype("<u2"))
    data = on(folder, way) if way in WAYS else plain_files(tmp_path)[way]
    monkeypatch.chdir(tmp_path)
    job = job_of(data, evaluated)
    for ask in (open_corpus, lambda job: look_at(job, VOCAB)):
        with pytest.raises(UserError) as refused:
            ask(job)
        assert refused.value.problem.startswith(wanted), refused.value.problem
        assert refused.value.hint


def test_a_look_counts_files_as_a_device_does(tmp_path: Path) -> None:
    place = tmp_path / "text"
    place.mkdir()
    for number in range(30):
        (place / f"{number:02}.txt").write_bytes(b"x" * 20)
    data = {"source": "text", "path": str(place)}
    there = opened(job_of(data, {"held_out": 0.3, "sequences": 2})).evaluation
    assert there is not None
    enough = there.sources[0].rows.count // 2 * 2
    look_at(job_of(data, {"held_out": 0.3, "sequences": enough}), VOCAB)
    with pytest.raises(UserError, match="'held-out' has"):
        look_at(job_of(data, {"held_out": 0.3, "sequences": enough + 2}), VOCAB)


def test_masked_models_have_no_chats_to_evaluate_on(folder: Path, tmp_path: Path) -> None:
    source = {**sources(chats(tmp_path))[0], "format": "chat"}
    data = {**on(folder, "windows"), "tokenizer": "/none"}
    job = job_of(data, {"sequences": 2, "source": [source]}, "bert")
    with pytest.raises(UserError, match=r"eval\.source 'a': format: a chat asks for answers"):
        look_at(job, VOCAB)

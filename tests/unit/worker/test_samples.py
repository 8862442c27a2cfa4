"""The samples that ``oobleckctl data show`` prints are those that are trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oobleckd.protocol.job import parse_job
from oobleckd.protocol.samplerows import Border, SampleRows
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.tools.samples import samples
from tests.helpers.prepared import planned, prepared

LENGTHS = (5, 1, 30, 8, 20)
BERT = {"family": "bert", "config": {"vocab_size": 70}}


def shown(folder: Path, model: dict[str, object], data: dict[str, object]) -> SampleRows:
    train = {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 16}
    job = parse_job({"name": "a", "train": train, "model": model, "data": data})
    if job.data.row_kind != "windows":
        planned(job)
    told = samples(job, 2, 1)
    corpus = open_corpus(job)
    assert [row.sample for row in told.rows] == list(corpus.sample_ids(1, 1))
    assert [list(row.tokens) for row in told.rows] == corpus.tokens(1, 1).tolist()
    assert [list(row.inputs) for row in told.rows] == corpus.batch(1, 1).inputs.tolist()
    corpus.inputs.close()
    return told


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ends = np.cumsum(LENGTHS)
    documents = [np.arange(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]
    return prepared(tmp_path / ("0" * 32), documents, "uint16")


def test_rows_have_the_borders_of_their_documents(folder: Path) -> None:
    data = {"source": "jsonl", "path": "t", "prepared": str(folder)}
    told = shown(folder, {}, data)
    borders = {
        0: (Border(0, 0), Border(5, 1), Border(6, 2)),
        16: (Border(0, 2, 10),),
        32: (Border(0, 2, 26), Border(4, 3), Border(12, 4)),
        48: (Border(0, 4, 4),),
    }
    for row in told.rows:
        assert row.tokens == tuple(range(row.start, row.start + 16))  # a token is its place here
        assert row.borders == borders[row.start]
        assert row.asked == tuple(range(1, 16))


def test_a_megatron_data_set_has_borders_and_a_plain_file_none(folder: Path) -> None:
    told = shown(folder, {}, {"source": "megatron", "path": f"{folder}/tokens"})
    assert all(row.borders for row in told.rows)
    (folder / "tokens.idx").unlink()
    told = shown(folder, {}, {"source": "bin", "path": f"{folder}/tokens.bin"})
    assert not any(row.borders for row in told.rows)


def test_packed_rows_have_the_borders_of_their_pieces_and_of_the_fill(folder: Path) -> None:
    table = {"source": "jsonl", "path": "t", "prepared": str(folder), "sequences": "packed"}
    told = shown(folder, {}, table)
    ends = np.cumsum(LENGTHS)
    for row in told.rows:
        fill = next((border.at for border in row.borders if border.is_fill), 16)
        assert row.borders[0].at == 0
        assert row.start == row.tokens[0]
        edges = [*(border.at for border in row.borders if not border.is_fill), fill]
        for border, end in zip(row.borders, edges[1:], strict=False):
            first = int(ends[border.document] - LENGTHS[border.document]) + border.into
            assert row.tokens[border.at : end] == tuple(range(first, first + end - border.at))
        assert row.tokens[fill:] == (0,) * (16 - fill)
        assert row.asked == tuple(sorted(set(range(fill)) - set(edges)))


def test_windows_of_separate_documents_ask_for_no_first_token(folder: Path) -> None:
    table = {"source": "megatron", "path": f"{folder}/tokens", "documents": "separate"}
    for row in shown(folder, {}, table).rows:
        assert row.asked == tuple(sorted(set(range(16)) - {border.at for border in row.borders}))


def test_a_masked_model_is_asked_for_what_is_hidden(folder: Path) -> None:
    told = shown(folder, BERT, {"source": "jsonl", "path": "t", "prepared": str(folder)})
    for row in told.rows:
        assert len(row.asked) == 2
        assert {at for at in range(16) if row.inputs[at] != row.tokens[at]} <= set(row.asked)

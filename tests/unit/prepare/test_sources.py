"""Which files and rows a source has, and what is said of those that cannot be used."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.prepare import arrows, rows, sources
from oobleckd.prepare.columns import RowColumns
from oobleckd.prepare.rows import lines_before, place_of, rows_of
from oobleckd.prepare.sources import Kind, Part, files_of, pieces_of
from oobleckd.prepare.wanted import look_at, wanted_of
from oobleckd.protocol.job import Job
from oobleckd.tokens.errors import DataError
from tests.helpers.corpora import job_of, save_to_disk

TEXT = RowColumns(text=("text",))
LINES = st.lists(
    st.sampled_from(["", "  ", '{"text": "a"}', '{"text": "%s"}' % ("b" * 50), "{}"]), max_size=12
)


@given(lines=LINES, ends=st.booleans(), size=st.integers(1, 90))
@settings(max_examples=60, deadline=None)
def test_a_line_belongs_to_one_piece_and_keeps_its_number(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], ends: bool, size: int
) -> None:
    file = tmp_path_factory.mktemp("cut") / "t.jsonl"
    file.write_text("\n".join(lines) + "\n" * ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", size)
        pieces = pieces_of("jsonl", [file])
    found = [
        (
            place_of("jsonl", part, row.number, lines_before(part))[1],
            row.values.get("text", ""),
            bool(row.problem),
        )
        for piece in pieces
        for part in piece.parts
        for row in rows_of("jsonl", part, TEXT)
    ]
    wanted = [
        (number, json.loads(line).get("text", ""), "text" not in line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    assert found == wanted


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "a"', "not JSON: it ends in the middle"),
        (b'{"text": "a"} b', "not JSON, from byte 15 on"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
        (b'["a"]', "no object, but a list of 1"),
        (b"7", "no object, but 7"),
        (b'{"text": 7}', "its 'text' is no text, but 7"),
        (b'{"text": null}', "its 'text' is no text, but nothing"),
        (b'{"other": "a"}', "has no column 'text'"),
        (b'{"text": "\\ud800"}', "not JSON: it ends in the middle"),
        (b"[" * 5000, "not JSON: too deep"),
        (b'{"text": "' + b"a" * 200 + b'"}', "is longer than 100 B"),
    ],
    ids=range(11),
)
def test_a_row_that_is_none_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, problem: str
) -> None:
    if b"aaa" in line:
        monkeypatch.setattr(rows, "MAX_DOCUMENT", 100)
    file = tmp_path / "t.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    part = Part(str(file), 0, file.stat().st_size, file.stat().st_size)
    found = [(row.number, row.values.get("text", ""), row.problem) for row in rows_of("jsonl", part, TEXT)]
    assert found == [(0, "good", ""), (1, "", problem), (2, "good", "")]


def rows_in(kind: Kind, file: Path) -> list[rows.SourceRow]:
    return [
        row for piece in pieces_of(kind, [file]) for part in piece.parts for row in rows_of(kind, part, TEXT)
    ]


def test_texts_and_nulls_have_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"good \xfe")
    assert rows_in("text", text)[0].problem == "not UTF-8 at byte 5"
    table = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": ["a", None, "c" * 9]}), table)
    monkeypatch.setattr(rows, "MAX_DOCUMENT", 8)
    assert [row.problem for row in rows_in("parquet", table)] == [
        "",
        "has nothing there (null)",
        "is longer than 8 B",
    ]
    text.write_bytes(b"123456789")
    assert rows_in("text", text)[0].problem == "is longer than 8 B"


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_text_of_every_type_is_read(tmp_path: Path, kind: str) -> None:
    texts = pa.array(["a", "b", "a"])
    texts = texts.dictionary_encode() if kind == "dictionary" else texts.cast(getattr(pa, kind)())
    file = tmp_path / "t.arrow"
    table = pa.table({"text": texts})
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    arrows.check_columns(file, TEXT, parquet=False)
    assert [row.values["text"] for row in rows_in("arrow", file)] == ["a", "b", "a"]


# --------------------------------------------------------------------------- refusals

Make = Callable[[Path], object]


def _cut_gz(folder: Path) -> None:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(os.urandom(4000).hex().encode())[:3000])


def _cut_parquet(folder: Path) -> None:
    pq.write_table(pa.table({"text": ["a" * 500]}), folder / "a.parquet")
    (folder / "a.parquet").write_bytes((folder / "a.parquet").read_bytes()[:200])


def _cut_arrow(folder: Path) -> None:
    save_to_disk(folder / "d", pa.table({"text": ["a" * 500]}), 1)
    file = next((folder / "d").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:400])


def _splits(folder: Path) -> None:
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def _indices(folder: Path) -> None:
    (folder / "state.json").write_text('{"_data_files": [], "_indices_files": [{"filename": "i"}]}')


def _lacking(folder: Path) -> None:
    (folder / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')


def _hidden(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_text("x")
    (folder / "a.txt").write_text("x")


def _columns(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"id": 1, "messages": [], "source": "x"}\n')


def _second(folder: Path) -> None:
    for name, column in (("a", "text"), ("b", "other")):
        pq.write_table(pa.table({column: ["x"]}), folder / f"{name}.parquet")


def _numbers(folder: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), folder / "a.parquet")


@pytest.mark.parametrize(
    ("source", "path", "make", "said"),
    [
        ("jsonl", "none/*.jsonl", None, "matches no file"),
        ("jsonl", "none", None, "does not exist"),
        ("jsonl", "", None, "has no .jsonl or .ndjson file"),
        ("text", "", None, "has no file"),
        ("text", "", _hidden, r"\.git/index is hidden"),
        ("text", "", lambda folder: (folder / "x.png").write_bytes(b"\x89PNG\0"), "x.png is no text"),
        ("arrow", "", None, "has no .arrow file"),
        ("arrow", "", _splits, "several splits: train, test"),
        ("arrow", "", _indices, "in another file"),
        ("arrow", "", _lacking, "lacks gone.arrow"),
        ("jsonl", "", _columns, "has no column 'text'; it has id, messages, source"),
        ("parquet", "", _second, "b.parquet has no column 'text'; it has other"),
        ("parquet", "", _numbers, "is of int64, and no text"),
        ("jsonl", "a.json", lambda folder: (folder / "a.json").write_text("[\n{}]"), "is one JSON array"),
        ("jsonl", "", _cut_gz, "a.jsonl.gz cannot be read"),
        ("parquet", "", _cut_parquet, "a.parquet cannot be read"),
        ("arrow", "d", _cut_arrow, "cannot be read"),
        ("jsonl", "", lambda folder: (folder / "a.jsonl.zst").write_bytes(b"no zstd"), "cannot be read"),
        ("parquet", "", lambda folder: (folder / "a.parquet").write_bytes(b"PK"), "cannot be read"),
    ],
    ids=range(19),
)  # fmt: skip
def test_what_cannot_be_a_source_is_named(
    tokenizer: Path, tmp_path: Path, source: Kind, path: str, make: Make | None, said: str
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    if make is not None:
        make(folder)
    with pytest.raises(DataError, match=said) as caught:
        read(job_of(source, folder / path, tokenizer))
    assert str(folder) in caught.value.problem
    assert caught.value.hint


def read(job: Job) -> None:
    wanted = wanted_of(job)
    look_at(wanted)
    for piece in wanted.pieces():
        for part in piece.parts:
            list(rows_of(wanted.kind, part, TEXT))


def test_a_pattern_takes_neither_hidden_files_nor_prepared_ones(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.txt", ".d.txt", "prepared/e/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = files_of("text", f"{tmp_path}/**/*.txt", tmp_path / "prepared")
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["a.txt", "b/c.txt"]


def test_without_pyarrow_a_sentence_says_what_to_install(
    tokenizer: Path, corpora: dict[str, tuple[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(arrows, "import_module", absent)
    for name in ("zst", "parquet", "saved"):
        with pytest.raises(DataError, match="pyarrow, which is not installed") as caught:
            look_at(wanted_of(job_of(*corpora[name], tokenizer)))
        assert "oobleckd[data]" in caught.value.hint

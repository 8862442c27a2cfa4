"""Text becomes the same folder, whatever its format, whoever is killed, and however many are at it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from oobleckd.prepare import build, sources, wanted
from oobleckd.prepare.build import MadeFolder, prepare
from oobleckd.protocol.job import Job
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.index import read_index
from oobleckd.tokens.manifest import INDEX, LOSS, MANIFEST, TOKENS, checksums, read_manifest
from tests.helpers import chat_templates
from tests.helpers.chats import CHATS, asked_of, chat_tokenizer, chatml_text, write_lines
from tests.helpers.corpora import DOCUMENTS, EOS, expected, job_of, make_tokenizer
from tests.helpers.one_process import OneProcess
from tests.helpers.smalldisk import SmallDisk

Corpora = dict[str, tuple[str, Path]]
FORMATS = ("jsonl", "gz", "zst", "folder", "pattern", "parquet", "saved", "arrow", "text", "texts")
ROOT = Path(__file__).resolve().parents[3]
SMALL = 1000
"""Bytes of a piece: of few documents."""


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", SMALL)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "Pool", OneProcess)


def made(job: Job, processes: int = 1) -> MadeFolder:
    return prepare(job, processes, lambda _progress: None)


def documents_of(folder: Path) -> list[list[int]]:
    index = read_index(folder / INDEX)
    tokens = np.fromfile(folder / TOKENS, index.dtype)
    starts = index.document_starts()
    return [tokens[start:stop].tolist() for start, stop in pairwise(starts)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("small_pieces")
def test_every_format_gives_the_same_tokens(
    corpora: Corpora, tokenizer: Path, tmp_path: Path, name: str
) -> None:
    source, path = corpora[name]
    done = made(job_of(source, path, tokenizer, cache=str(tmp_path)), 1 + (name == "folder"))
    assert documents_of(done.folder) == list(expected(tokenizer))
    told = read_manifest(done.folder)
    assert (told, done.new, done.folder) == (done.manifest, True, tmp_path / told.digest)
    assert (told.bin_sha256, told.crcs) == checksums(done.folder / TOKENS)
    assert told.idx_sha256 == checksums(done.folder / INDEX)[0]
    tokens = [token for document in expected(tokenizer) for token in document]
    assert (told.tokens, told.documents, told.largest) == (len(tokens), len(DOCUMENTS), max(tokens))
    assert (told.dtype, told.vocabulary, told.eos, told.bos) == ("uint16", 300, 0, -1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [told.digest]
    assert sorted(path.name for path in done.folder.iterdir()) == sorted([TOKENS, INDEX, MANIFEST])


def test_pieces_do_not_show_and_what_is_there_is_not_made_again(
    corpora: Corpora, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path = corpora["jsonl"]
    jobs = [job_of(source, path, tokenizer, cache=str(tmp_path / name)) for name in ("a", "b")]
    whole = made(jobs[0])
    monkeypatch.setattr(sources, "PIECE_BYTES", 77)
    assert made(jobs[1], 3).manifest == whole.manifest
    assert read_bytes(tmp_path / "a") == read_bytes(tmp_path / "b")
    monkeypatch.setattr(build, "_hashed", None)  # found by names, sizes and times alone
    assert made(jobs[0]) == whole._replace(new=False)


def read_bytes(cache: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(cache.rglob("*.*"))]


@pytest.mark.usefixtures("one_process")
def test_settings_and_bytes_name_the_folder_and_places_do_not(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    other = make_tokenizer(tmp_path / "other", size=290)
    (other / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": EOS}}))
    text = tmp_path / "t.jsonl"
    text.write_text('{"text": "one", "b": "three"}\n{"text": "two"}\n')

    def folder(path: Path = text, by: Path = tokenizer, **more: object) -> str:
        return made(job_of("jsonl", path, by, cache=str(tmp_path / "cache"), **more)).folder.name

    names = {
        folder(),
        folder(by=other),
        folder(by=other, bos=True),
        folder(eos=False),
        folder(dtype="int32"),
        folder(on_bad_row="skip"),
        folder(column="b", on_bad_row="skip"),
    }
    assert len(names) == 7
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(text.read_bytes())
    assert folder(moved) == folder()
    with monkeypatch.context() as patch:
        patch.setattr(build, "_hashed", None)
        assert folder() in names  # where it lay last is known without reading it
    text.write_text('{"text": "other"}\n')
    assert folder() not in names


@pytest.mark.usefixtures("one_process")
def test_ends_and_beginnings_stand_where_they_are_asked_for(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "bos_token_id": 7}))
    text = tmp_path / "t.jsonl"
    text.write_text('{"text": "one"}\n{"text": ""}\n\n{"text": "two"}\n')
    bare = [document[:-1] for document in expected(tokenizer, ("one", "two"))]

    def documents(**more: object) -> list[list[int]]:
        return documents_of(made(job_of("jsonl", text, tokenizer, **more)).folder)

    assert documents(eos=False) == bare
    assert documents() == [[*each, 0] for each in bare]
    assert documents(bos=True) == [[7, *each, 0] for each in bare]
    assert (tmp_path / "prepared").is_dir()


@pytest.mark.usefixtures("one_process")
def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    size = 128_256
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 128001}')
    (tmp_path / "t.jsonl").write_text('{"text": "w1 w65535 w65536 w128255"}\n')
    done = made(job_of("jsonl", tmp_path / "t.jsonl", tmp_path))
    assert documents_of(done.folder) == [[1, 65535, 65536, 128255, 128001]]
    assert (done.manifest.dtype, done.manifest.vocabulary, done.manifest.largest) == ("int32", size, size - 1)


def test_rows_without_text_are_left_out_and_named(tokenizer: Path, tmp_path: Path) -> None:
    for number in range(3):
        lines = ['{"text": "good"}', '{"text": null}', "", '{"other": 1}', "not JSON", '{"text": "good"}']
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    done = made(job_of("jsonl", tmp_path / "?.jsonl", tokenizer, on_bad_row="skip"))
    assert [(Path(row.file).name, row.line) for row in done.manifest.bad_rows] == [
        (f"{number}.jsonl", line) for number in range(3) for line in (2, 4, 5)
    ]
    assert (done.manifest.num_bad_rows, done.manifest.documents) == (9, 6)


@pytest.mark.usefixtures("small_pieces")
def test_a_bad_row_has_a_line_wherever_its_piece_begins(tokenizer: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.jsonl"
    text.write_text('{"text": "good enough"}\n' * 200 + "{}\n" + '{"text": "good"}\n' * 100)
    job = job_of("jsonl", text, tokenizer)
    with pytest.raises(DataError, match=r"t\.jsonl:201: has no column 'text'"):
        made(job)
    skipped = made(job_of("jsonl", text, tokenizer, on_bad_row="skip"), 2)
    assert [row.line for row in skipped.manifest.bad_rows] == [201]


def test_a_source_that_is_written_meanwhile_is_found(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "t.jsonl"
    text.write_text('{"text": "good"}\n' * 100)
    job = job_of("jsonl", text, tokenizer)

    def told(now: build.PrepareProgress) -> None:
        if now.phase == "tokenize" and not now.done:
            text.write_text('{"text": "other"}\n' * 100)

    with pytest.raises(DataError, match="was changed while it was prepared"):
        prepare(job, 1, told)
    assert not list(tmp_path.rglob(MANIFEST))
    assert made(job).manifest.documents == 100


def test_no_room_is_said_before_the_disk_is_full(
    corpora: Corpora, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024
    monkeypatch.setattr(build.shutil, "disk_usage", lambda _path: usage(100, 90, 10))
    with pytest.raises(DataError, match="are needed, 10 B are free"):
        made(job_of(*corpora["jsonl"], tokenizer, cache=str(tmp_path)))


def test_a_cache_that_cannot_be_written_is_one_sentence(
    corpora: Corpora, tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Not a directory"):
        made(job_of(*corpora["jsonl"], tokenizer, cache=str(tmp_path / "file" / "cache")))


def test_a_torn_folder_is_named(corpora: Corpora, tokenizer: Path, tmp_path: Path) -> None:
    job = job_of(*corpora["jsonl"], tokenizer, cache=str(tmp_path))
    folder = made(job).folder
    with (folder / TOKENS).open("r+b") as file:
        file.truncate(10)
    assert wanted.find(wanted.wanted_of(job)) is None
    with pytest.raises(DataError, match="less than its manifest says") as caught:
        made(job)
    assert str(folder) in caught.value.hint


# --------------------------------------------------------------------------- kills

KILLED = """
import os, signal, sys
from pathlib import Path
from oobleckd.host.jobfile import load_job
from oobleckd.prepare import build, sources
sys.path.insert(0, sys.argv[3])
from tests.helpers.one_process import OneProcess
from tests.helpers.smalldisk import SmallDisk
sources.PIECE_BYTES = 1000
left = int(sys.argv[2])

def counted(act):
    def acting(*args, **more):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return act(*args, **more)
    return acting

Path.replace, Path.rename = counted(Path.replace), counted(Path.rename)
build.Pool = OneProcess  # one kill ends all of it
build.shutil.rmtree = counted(build.shutil.rmtree)
done = build.prepare(load_job(Path(sys.argv[1])), 1, lambda _: None)
print(done.folder)
"""


@pytest.mark.thin(12)
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("rows", ["text", "chats"])
def test_killed_before_any_rename_it_is_finished_by_the_next(
    corpora: Corpora, tokenizer: Path, tmp_path: Path, seed: int, rows: str
) -> None:
    source, path = corpora["jsonl"]
    file, more = tmp_path / "job.toml", ""
    if rows == "chats":
        tokenizer = chat_tokenizer(tmp_path / "tokenizer", chat_templates.CHATML)
        path = write_lines(tmp_path / "t.jsonl", *({"messages": each} for each in CHATS))
        more = 'format = "chat"\non_long_document = "cut"\n'
    file.write_text(
        f'name = "a"\n[train]\nsteps = 1\nglobal_batch = 1\nmicro_batch = 1\nsequence = 8\n'
        f'[data]\nsource = "{source}"\npath = "{path}"\ntokenizer = "{tokenizer}"\n'
        f'cache = "{tmp_path}/cache"\n{more}'
    )
    killed = run(KILLED, file, seed)
    assert killed.returncode in {-signal.SIGKILL, 0}
    finished = run(KILLED, file, 1000)
    folder = Path(finished.stdout.strip())
    told = read_manifest(folder)
    if rows == "chats":
        assert [text for text, _ in asked_of(folder, tokenizer)] == list(map(chatml_text, CHATS))
        assert told.loss_sha256 == checksums(folder / LOSS)[0]
    else:
        assert documents_of(folder) == list(expected(tokenizer))
    assert told.bin_sha256 == checksums(folder / TOKENS)[0]
    left = {path.name for path in folder.parent.iterdir()} - {folder.name}
    assert not left


def run(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", code, *map(str, words), str(ROOT)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("small_pieces", "one_process")
def test_what_was_done_before_a_kill_is_not_done_again(
    corpora: Corpora, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a piece that is torn is."""
    job = job_of(*corpora["jsonl"], tokenizer, cache=str(tmp_path))

    class Killed(BaseException):
        pass

    def until(share: float) -> list[int]:
        seen: list[int] = []

        def told(now: build.PrepareProgress) -> None:
            if now.phase == "tokenize":
                seen.append(now.done)
                if now.done >= share * now.total:
                    raise Killed

        with pytest.raises(Killed):
            prepare(job, 1, told)
        return seen

    until(0.7)
    (building,) = tmp_path.glob(".*.building")
    whole = sorted(building.glob("*.done"))
    assert len(whole) >= 2
    assert until(0.8)[0] == SMALL * len(whole)
    whole = sorted(building.glob("*.done"))
    whole[0].with_suffix(".bin").write_bytes(b"")
    whole[1].write_bytes(b"half")
    assert until(0.0)[0] == SMALL * (len(whole) - 2)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", SMALL + 1)  # as another version may
        assert until(0.0)[0] == 0
    assert documents_of(made(job).folder) == list(expected(tokenizer))


@pytest.mark.usefixtures("one_process")
def test_two_at_once_make_one_folder(corpora: Corpora, tokenizer: Path, tmp_path: Path) -> None:
    """Each joins at the moment when the other one is done."""
    job = job_of(*corpora["jsonl"], tokenizer, cache=str(tmp_path))
    others: list[MadeFolder] = []

    def told(phase: str) -> object:
        def telling(now: build.PrepareProgress) -> None:
            if now.phase == phase and not others:
                others.append(MadeFolder(tmp_path, read_manifest_of(job), new=True))

        return telling

    def read_manifest_of(job: Job) -> object:
        return made(job).manifest

    for phase in ("tokenize", "join"):
        others.clear()
        mine = prepare(job, 1, told(phase))
        assert (mine.new, mine.manifest) == (False, others[0].manifest)
        assert [path.name for path in tmp_path.iterdir()] == [mine.folder.name]
        assert documents_of(mine.folder) == list(expected(tokenizer))
        build.shutil.rmtree(mine.folder)


def test_a_process_that_is_killed_ends_it_with_a_sentence(
    corpora: Corpora, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(*corpora["jsonl"], tokenizer, cache=str(tmp_path))
    monkeypatch.setattr(build, "Pool", Doomed)
    with pytest.raises(DataError, match="by signal 9 while it read"):
        made(job)
    monkeypatch.undo()
    assert made(job).new


class Doomed(build.Pool):
    def _next(self, each, left) -> None:
        os.kill(each.process.pid, signal.SIGKILL)
        each.process.wait()
        super()._next(each, left)


def test_a_disk_that_is_full_ends_it_and_room_lets_it_go_on(
    corpora: Corpora, tokenizer: Path, tmp_path: Path
) -> None:
    job = job_of(*corpora["jsonl"], tokenizer, cache=str(tmp_path / "disk" / "cache"))
    with SmallDisk(tmp_path / "disk", 1 << 20) as disk:
        (disk.path / "cache").mkdir()
        disk.fill()
        with pytest.raises(DataError, match=r"disk|cache") as caught:
            made(job)
        assert "data.cache" in caught.value.hint
        disk.free()
        assert documents_of(made(job).folder) == list(expected(tokenizer))

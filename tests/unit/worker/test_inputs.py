"""The identity of what a job reads: quick whatever the size, and another one for other bytes."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from oobleckd.protocol.inputs import Input, agree, completed, difference, of_corpus, same
from oobleckd.protocol.parts import Counters
from oobleckd.worker.data import inputs as inputs_module
from oobleckd.worker.data import sources as data_module
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.data.input_watch import Changed, Checked, Eyes, InputWatch, Moved
from oobleckd.worker.data.inputs import Opened, opened
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import GPT2, small_job

HUGE = 100 * 10**9


def sparse(path: Path, size: int = HUGE) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def write_at(path: Path, at: int, what: bytes) -> None:
    """In place."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(what)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"abcdefgh" * 1000)
    return path


def held(*paths: Path) -> Opened:
    return opened(paths, str(paths[0]))


# ---------------------------------------------------------------------- identity


def test_a_hundred_gigabytes_take_no_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, count = sparse(tmp_path / "huge"), 0
    plain = os.pread

    def counted(handle: int, size: int, start: int) -> bytes:
        nonlocal count
        count += size
        return plain(handle, size, start)

    monkeypatch.setattr(inputs_module.os, "pread", counted)
    began = time.process_time()
    job = small_job(
        "gpt2", {**GPT2, "vocab_size": 300}, data={"source": "text", "path": str(path)},
        train={"sequence": 8},
    )  # fmt: skip
    corpus = open_corpus(job)
    assert time.process_time() - began < 2
    assert count <= 5 << 20
    part = corpus.inputs.part
    assert (part.num_bytes, part.files, part.whole, corpus.digest) == (HUGE, 1, "", "")
    assert corpus.tokens(0, 0).shape == (2, 8)
    write_at(path, 0, b"x")
    assert not same(part, held(path).part), "the first bytes are always looked at"
    write_at(path, 0, b"\0")
    assert same(part, held(path).part)
    write_at(path, HUGE - 1, b"x")
    assert not same(part, held(path).part)


def test_tokens_beyond_the_vocabulary_of_a_text_too_large_to_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs_module, "SMALL_BYTES", 100)
    path = tmp_path / "tokens"
    np.full(1000, 400, "<u2").tofile(path)
    job = small_job(
        "gpt2", {**GPT2, "vocab_size": 300}, data={"source": "tokens", "path": str(path)},
        train={"sequence": 8},
    )  # fmt: skip
    with pytest.raises(UserError, match="has token 400, but the model's vocabulary ends at 299"):
        open_corpus(job).tokens(0, 0)


def test_what_tells_two_texts_apart(tmp_path: Path, text: Path) -> None:
    first = held(text).part
    copy = tmp_path / "copy"
    copy.write_bytes(text.read_bytes())
    assert same(first, held(copy).part), "names and places of a single file do not count"
    write_at(copy, 4001, b"X")
    assert "has as many bytes as the job's, and others" in difference((first,), (held(copy).part,))
    copy.write_bytes(text.read_bytes() + b"x")
    assert f"{copy} has 8,001 bytes, and the job's has 8,000" in difference((first,), (held(copy).part,))


def folder_job(folder: Path):
    return small_job(
        "gpt2", {**GPT2, "vocab_size": 256}, data={"source": "text", "path": str(folder)},
        train={"sequence": 8},
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    made = tmp_path / "folder"
    made.mkdir()
    for name in "abc":
        (made / name).write_bytes(name.encode() * 100)
    return made


def test_the_files_of_a_folder_are_named(folder: Path) -> None:
    first = open_corpus(folder_job(folder)).inputs.part
    (folder / "b").write_bytes(b"B" * 100)
    (folder / "c").rename(folder / "d")
    now = open_corpus(folder_job(folder)).inputs.part
    assert difference((first,), (now,)) == f"{folder}: b changed, c missing, d new"


def test_files_in_another_order_are_another_text(folder: Path) -> None:
    first = open_corpus(folder_job(folder)).inputs.part
    (folder / "a").rename(folder / "z")
    assert not same(first, open_corpus(folder_job(folder)).inputs.part)
    (folder / "z").rename(folder / "a")
    assert same(first, open_corpus(folder_job(folder)).inputs.part)


def test_a_folder_whose_file_changes_leaves_those_who_read_alone(folder: Path) -> None:
    corpus = open_corpus(folder_job(folder))
    eyes = Eyes(corpus.inputs)
    assert corpus.inputs.fresh()
    (folder / "b").write_bytes(b"B" * 100)
    assert not corpus.inputs.fresh()
    assert eyes.look() is None
    assert not eyes.suspect
    assert eyes.verify() is None


def test_the_copy_of_a_folder_is_looked_at(folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(folder_job(folder))
    eyes = Eyes(corpus.inputs)
    (copy,) = (tmp_path / "cache").rglob("*.bytes")
    write_at(copy, 5, b"X")
    eyes.look()
    assert eyes.suspect
    assert eyes.verify() is not None


def test_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="has 0 tokens"):
        open_corpus(folder_job(tmp_path / "pipe"))


def test_a_file_that_is_replaced_while_it_is_opened(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mapped is what the identity is of."""
    plain, times = data_module._text, []

    def replaced(path: Path) -> object:
        if not times:
            times.append(1)
            new = path.with_name("new")
            new.write_bytes(b"X" * 8000)
            new.replace(path)
        return plain(path)

    monkeypatch.setattr(data_module, "_text", replaced)
    corpus = open_corpus(folder_job(text))
    assert corpus.digest == corpus.inputs.digest()
    assert bytes(corpus.tokens(0, 0).flatten().tolist()) == b"X" * 16


# ---------------------------------------------------------------------- what is known of two


def test_what_is_not_known_does_not_differ() -> None:
    quick = Input("data", "t", 1, 8, "b")
    whole = Input("data", "t", 1, 8, "b", "8-aa")
    assert same(quick, whole)
    assert same(of_corpus("8-aa")[0], quick), "format 1 has the corpus alone"
    assert not same(of_corpus("9-aa")[0], quick)
    assert not same(of_corpus("8-bb")[0], whole)
    assert same(Input("data", "x", 3, 8, "c", "8-aa"), whole), "all bytes count, where they are known"
    assert agree((quick,), ()), "of another kind nothing is known"
    assert completed((quick,), (whole,)) == (whole,)
    assert completed(of_corpus("8-aa"), (quick,))[0] == whole
    assert of_corpus("") == ()


# ---------------------------------------------------------------------- looks


def test_a_touch_is_nothing(text: Path) -> None:
    eyes = Eyes(held(text))
    assert eyes.look() is None
    os.utime(text)
    eyes.look()
    assert eyes.suspect
    assert eyes.verify() is None
    assert not eyes.suspect


def test_written_in_place_with_its_times_put_back(text: Path) -> None:
    eyes = Eyes(held(text))
    was = text.stat()
    write_at(text, 4000, b"X")
    os.utime(text, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert text.stat().st_mtime_ns == was.st_mtime_ns
    found = eyes.verify()
    assert isinstance(found, Changed)
    assert str(text) in found.what


def test_written_through_a_map(text: Path) -> None:
    eyes = Eyes(held(text))
    with text.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[7:8] = b"X"
    assert isinstance(eyes.verify(), Changed)


def test_cut_short_and_grown(text: Path) -> None:
    eyes = Eyes(held(text))
    with text.open("ab") as file:
        file.write(b"more")
    eyes.look()
    assert eyes.verify() is None, "what was there is as it was"
    assert eyes.look() == Moved(str(text), "other"), "who opens it reads something else"
    os.truncate(text, 100)
    eyes.look()
    assert eyes.verify() == Changed(f"{text} was written to in place: 100 bytes, and it had 8,000")


def test_replaced_gone_and_back(text: Path, tmp_path: Path) -> None:
    eyes = Eyes(held(text))
    kept = tmp_path / "kept"
    os.link(text, kept)
    eyes.look()
    assert eyes.verify() is None, "a link more is no change"
    text.unlink()
    assert _seen(eyes) == Moved(str(text), "gone")
    text.write_bytes(b"other")
    assert _seen(eyes) == Moved(str(text), "other")
    text.write_bytes(kept.read_bytes())
    assert _seen(eyes) == Moved(str(text), "back"), "the same bytes in another file"
    write_at(kept, 1, b"X")
    eyes.look()
    assert isinstance(eyes.verify(), Changed), "what is mapped is the file behind the other link"


def _seen(eyes: Eyes) -> Moved | None:
    found = eyes.look()
    if eyes.suspect:
        assert eyes.verify() is None
        found = eyes.look()
    return found


def test_a_link_that_leads_elsewhere(text: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(text)
    eyes = Eyes(held(link))
    other = tmp_path / "other"
    other.write_bytes(b"other")
    link.unlink()
    link.symlink_to(other)
    assert _seen(eyes) == Moved(str(link), "other")
    assert eyes.verify() is None


def test_what_nobody_has_read_as_a_whole_yet(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_module, "SMALL_BYTES", 100)
    found = held(text)
    assert found.part.whole == ""
    eyes = Eyes(found)
    assert eyes.verify() is None
    assert found.part.whole.startswith("8000-")
    write_at(text, 4001, b"X")
    assert isinstance(eyes.verify(), Changed)


def test_a_watch_says_up_to_where_it_was_right_and_then_no_more(text: Path) -> None:
    heard = threading.Event()
    watch = InputWatch(held(text), heard.set)
    at = Counters(4, 4, 4)
    watch.check(at)
    assert heard.wait(60)
    assert watch.hear() == [Checked(at, watch.inputs.part)]
    heard.clear()
    write_at(text, 0, b"X")
    assert heard.wait(60), "its times have changed"
    (found,) = watch.hear()
    assert isinstance(found, Changed)
    watch.stop()

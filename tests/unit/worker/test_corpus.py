"""Every sample once per pass, the same for everybody, and files that do not fit are named."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.protocol.job import Job
from oobleckd.tokens.permutation import Permutation
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import GPT2, small_job


def text_job(path: Path, *, vocab_size: int = 256, seed: int = 0, sequence: int = 8) -> Job:
    return small_job(
        "gpt2",
        {**GPT2, "vocab_size": vocab_size},
        data={"source": "text", "path": str(path)},
        train={"seed": seed, "sequence": sequence},
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(8 * 10 + 3)))  # ten windows of eight, and a rest
    return path


@given(st.integers(1, 5000), st.integers(0, 1000))
def test_a_permutation_is_one(size: int, seed: int) -> None:
    order = Permutation(size, str(seed))
    assert sorted(order(position) for position in range(size)) == list(range(size))


def test_a_permutation_mixes() -> None:
    order = [Permutation(1000, "0:0")(position) for position in range(1000)]
    assert order != sorted(order)
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
    assert order != [Permutation(1000, "0:1")(position) for position in range(1000)]


def test_a_micro_batch_is_a_function_of_seed_and_step(text: Path) -> None:
    corpus, again = open_corpus(text_job(text)), open_corpus(text_job(text))
    tokens = corpus.tokens(1, 1)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (2, 8)
    again.tokens(5, 0)
    assert torch.equal(again.tokens(1, 1), tokens)
    other = open_corpus(text_job(text, seed=1))
    assert [other.sample_ids(step, 0) for step in range(3)] != [
        corpus.sample_ids(step, 0) for step in range(3)
    ]


def test_no_sample_twice_within_a_pass_and_windows_do_not_overlap(text: Path) -> None:
    corpus = open_corpus(text_job(text))
    places = [(step, micro_batch) for step in range(5) for micro_batch in range(2)]
    samples = [sample for place in places for sample in corpus.sample_ids(*place)]
    assert corpus.sources[0].count == 10
    assert corpus.num_tokens == 80
    assert sorted(samples) == list(range(20))  # 20 samples are two passes of ten
    assert sorted(samples[:10]) == list(range(10))
    assert [sample - 10 for sample in samples[10:]] != samples[:10]
    first = torch.cat([corpus.tokens(*place) for place in places])[:10]
    assert sorted(first.flatten().tolist()) == list(range(80))


def test_samples_of_a_step_are_drawn_once(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while two steps take turns, as where one is begun before the votes for the other are in."""
    drawn: list[int] = []
    plain = Permutation.__call__
    monkeypatch.setattr(
        Permutation, "__call__", lambda order, position: drawn.append(position) or plain(order, position)
    )
    corpus = open_corpus(text_job(text))
    both = corpus.of_step(0), corpus.of_step(1)
    assert len(drawn) == sum(len(samples) for step in both for samples in step) == 8
    for _ in range(3):
        assert corpus.of_step(0) == both[0]
        assert corpus.sample_ids(1, 1) == both[1][1]
        corpus.tokens(0, 1)
    assert len(drawn) == 8
    corpus.of_step(2)
    assert corpus.of_step(0) == both[0]  # of longer ago: drawn anew, and the same


def test_tokens_are_those_of_the_samples(text: Path) -> None:
    corpus = open_corpus(text_job(text))
    for row, sample in zip(corpus.tokens(0, 1), corpus.sample_ids(0, 1), strict=True):
        assert row.tolist() == list(range(8 * sample, 8 * sample + 8))


def test_digest_tells_contents_apart(text: Path, tmp_path: Path) -> None:
    copy, changed = tmp_path / "copy", tmp_path / "changed"
    copy.write_bytes(text.read_bytes())
    changed.write_bytes(b"x" + text.read_bytes()[1:])
    digest = open_corpus(text_job(text)).digest
    assert digest == f"83-{hashlib.sha256(text.read_bytes()).hexdigest()}"
    assert open_corpus(text_job(copy)).digest == digest
    assert open_corpus(text_job(changed)).digest != digest


def test_a_folder_is_its_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "2").write_bytes(b"B" * 9)
    (folder / "a").write_bytes(b"A" * 9)
    corpus = open_corpus(text_job(folder))
    assert corpus.digest == f"18-{hashlib.sha256(b'A' * 9 + b'B' * 9).hexdigest()}"
    cached = list((tmp_path / "cache").rglob("*.bytes"))
    assert [path.read_bytes() for path in cached] == [b"A" * 9 + b"B" * 9]
    cached[0].write_bytes(b"C" * 18)
    assert open_corpus(text_job(folder)).digest == corpus.digest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of a folder that were written some time ago, and the cache for them."""
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    monkeypatch.setattr("oobleckd.worker.data.textfiles.time.time_ns", lambda: 2**62)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(b"A" * 9)
    (folder / "b").write_bytes(b"B" * 9)
    return folder


def reads_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """Which files of the folder are read to open it, and the digest of what was opened."""
    read, real = [], Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.parent == folder:
            read.append(path.name)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_bytes)
        return read, open_corpus(text_job(folder)).digest


def digest_of(data: bytes) -> str:
    return f"{len(data)}-{hashlib.sha256(data).hexdigest()}"


def test_a_folder_is_read_once_and_then_known_by_its_stats(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, digest = reads_of(folder, monkeypatch)
    again, same = reads_of(folder, monkeypatch)
    assert (first, again) == (["a", "b"], [])
    assert digest == same == digest_of(b"A" * 9 + b"B" * 9)


@pytest.mark.parametrize(
    "change", ["in place, with its time put back", "another file", "one more", "one less"]
)
def test_a_folder_that_changed_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    reads_of(folder, monkeypatch)
    file, data = folder / "b", b"A" * 9 + b"C" * 9
    match change:
        case "another file":
            (folder.parent / "new").write_bytes(b"C" * 9)
            (folder.parent / "new").replace(file)
        case "one more":
            (folder / "c").write_bytes(b"C" * 9)
            data = b"A" * 9 + b"B" * 9 + b"C" * 9
        case "one less":
            file.unlink()
            data = b"A" * 9
        case _:
            before = file.stat()
            with file.open("r+b") as there:
                there.write(b"C" * 9)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    read, digest = reads_of(folder, monkeypatch)
    assert read
    assert digest == digest_of(data)


@pytest.mark.parametrize("damage", ["*.bytes", "*.known"])
def test_a_damaged_cache_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    _, digest = reads_of(folder, monkeypatch)
    (file,) = (folder.parent / "cache").glob(damage)
    with file.open("r+b") as there:
        there.write(b"#")
    assert reads_of(folder, monkeypatch) == (["a", "b"], digest)
    assert reads_of(folder, monkeypatch) == ([], digest)


def test_a_folder_that_has_just_been_written_is_not_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change again within one tick of the file system's clock."""
    monkeypatch.setattr(
        "oobleckd.worker.data.textfiles.time.time_ns", lambda: (folder / "b").stat().st_ctime_ns + 10**9
    )
    first, _ = reads_of(folder, monkeypatch)
    again, _ = reads_of(folder, monkeypatch)
    assert first == again == ["a", "b"]


def test_no_writable_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "file" / "below"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(b"A" * 20)
    assert open_corpus(text_job(folder)).tokens(0, 0).unique().tolist() == [65]


def test_the_standard_library_is_always_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    corpus = open_corpus(small_job("gpt2", {**GPT2, "vocab_size": 256}))
    root = Path(sysconfig.get_path("stdlib"))
    (cached,) = tmp_path.glob("*.bytes")
    data = cached.read_bytes()
    assert data.startswith((root / "__future__.py").read_bytes())
    assert (root / "json" / "decoder.py").read_bytes() in data
    assert corpus.sources[0].count == len(data) // 8


def test_token_files_are_little_endian_uint16(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.arange(1000, 1016, dtype="<u2").tobytes())
    job = small_job("gpt2", {**GPT2, "vocab_size": 1016}, data={"source": "tokens", "path": str(path)})
    assert sorted(open_corpus(job).tokens(0, 0).flatten().tolist()) == list(range(1000, 1016))


# --------------------------------------------------------------------------- what a user can get wrong


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone: No such file") as raised:
        open_corpus(text_job(tmp_path / "gone"))
    assert "every node" in raised.value.hint


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no files"):
        open_corpus(text_job(tmp_path))


@pytest.mark.parametrize("size", [0, 7])
def test_a_text_shorter_than_a_sequence_is_named(tmp_path: Path, size: int) -> None:
    (tmp_path / "short").write_bytes(b"x" * size)
    with pytest.raises(UserError, match=rf"has {size} tokens, fewer than train\.sequence = 8"):
        open_corpus(text_job(tmp_path / "short"))


def test_a_token_beyond_the_vocabulary_is_named(text: Path) -> None:
    with pytest.raises(UserError, match="has token 82, but the model's vocabulary ends at 63") as raised:
        open_corpus(text_job(text, vocab_size=64))
    assert "83 or more" in raised.value.hint


def test_an_odd_sized_token_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"\x01" * 33)
    with pytest.raises(UserError, match="33 bytes, an odd number"):
        open_corpus(small_job(data={"source": "tokens", "path": str(path)}))


def test_a_folder_of_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        open_corpus(small_job(data={"source": "tokens", "path": str(tmp_path)}))

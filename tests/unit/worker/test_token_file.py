"""Files of token numbers are recognised by what is in them, and what is none is refused by its name."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import read_tokens
from oobleckd.worker.data.corpus import Corpus, open_corpus
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import GPT2, small_job

TOKENS = np.random.default_rng(0).integers(0, 300, 1280)
WIDE = np.random.default_rng(1).integers(0, 128_000, 1280)


def opened(path: Path, vocab_size: int = 320, **data: str) -> Corpus:
    table = {"source": "tokens", "path": str(path), **data}
    return open_corpus(small_job("gpt2", {**GPT2, "vocab_size": vocab_size}, data=table))


def refused(path: Path, vocab_size: int = 70_000, **data: str) -> UserError:
    with pytest.raises(UserError) as raised:
        opened(path, vocab_size, **data)
    return raised.value


def all_of(corpus: Corpus) -> list[int]:
    return np.asarray(corpus.sources[0]._tokens).tolist()


def plain(path: Path, numbers: npt.NDArray[np.int64], kind: str = "<u2") -> Path:
    numbers.astype(kind).tofile(path)
    return path


def llmc(
    path: Path, kind: str = "<u2", magic: int = 20240520, version: int = 1, count: int = TOKENS.size
) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, count
    path.write_bytes(header.tobytes() + TOKENS.astype(kind).tobytes())
    return path


def megatron(path: Path, code: int, kind: str, *, lengths: tuple[int, ...] = (1000, 280)) -> Path:
    TOKENS.astype(kind).tofile(path)
    size = np.dtype(kind).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    index += np.array(lengths, "<i4").tobytes() + np.array([0, lengths[0] * size], "<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index + np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return path


# --------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("kind", ["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8", "<u8"])
def test_an_array_of_numpy_is_read(tmp_path: Path, kind: str) -> None:
    tokens = TOKENS % 100
    np.save(tmp_path / "t.npy", tokens.astype(kind))
    corpus = opened(tmp_path / "t.npy")
    assert all_of(corpus) == tokens.tolist()
    assert corpus.tokens(0, 0).dtype == torch.int64


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_it_and_rows_of_tokens(tmp_path: Path, version: tuple[int, int]) -> None:
    with (tmp_path / "t.bin").open("wb") as file:  # the name says nothing
        np.lib.format.write_array(file, TOKENS.astype("<u2").reshape(20, 64), version)
    assert all_of(opened(tmp_path / "t.bin")) == TOKENS.tolist()


@pytest.mark.parametrize(("kind", "magic", "version"), [("<u2", 20240520, 1), ("<u4", 20240801, 7)])
def test_llmc_is_read_behind_its_header(tmp_path: Path, kind: str, magic: int, version: int) -> None:
    assert all_of(opened(llmc(tmp_path / "t.bin", kind, magic, version))) == TOKENS.tolist()


@pytest.mark.parametrize(("code", "kind"), [(8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_megatron_is_read_by_its_index(tmp_path: Path, code: int, kind: str) -> None:
    assert all_of(opened(megatron(tmp_path / "t.bin", code, kind))) == TOKENS.tolist()


def test_numbers_of_32_bits_are_read_where_that_is_said(tmp_path: Path) -> None:
    path = plain(tmp_path / "t.bin", WIDE, "<u4")
    assert all_of(opened(path, 128_000, dtype="uint32")) == WIDE.tolist()


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    """So that of a plain one is that of its tokens, as ever."""
    path = plain(tmp_path / "plain.bin", TOKENS)
    data = TOKENS.astype("<u2").tobytes()
    assert path.read_bytes() == data
    assert opened(path).digest == f"{len(data)}-{hashlib.sha256(data).hexdigest()}"
    np.save(tmp_path / "t.npy", TOKENS.astype("<u2"))
    data = (tmp_path / "t.npy").read_bytes()
    assert opened(tmp_path / "t.npy").digest == f"{len(data)}-{hashlib.sha256(data).hexdigest()}"


@pytest.mark.parametrize(
    "tokens", [np.zeros(15), np.arange(40) % 3, TOKENS % 16, TOKENS % 2 * 256 + TOKENS % 3]
)
def test_odd_looking_numbers_that_may_be_right_are_read(
    tmp_path: Path, tokens: npt.NDArray[np.int64]
) -> None:
    assert all_of(opened(plain(tmp_path / "t.bin", tokens))) == tokens.tolist()


# --------------------------------------------------------------------------- widths


@pytest.mark.parametrize(
    ("tokens", "kind", "data", "says"),
    [
        (TOKENS, "<u4", {}, "every second place: it looks like numbers of 32 bits"),
        (TOKENS, "<u4", {"dtype": "uint16"}, "every second place: it looks like numbers of 32 bits"),
        (TOKENS, "<i8", {}, "every second place: it looks like numbers of 32 bits"),
        (TOKENS, "<i8", {"dtype": "uint32"}, "every second place: it looks like numbers of 64 bits"),
        (WIDE, "<u4", {}, "below 16 in every second place"),
        (TOKENS, ">u4", {}, "big-endian"),
        (TOKENS % 256, ">u2", {}, "big-endian"),
        (TOKENS * 0, "<u2", {}, "every second place"),
    ],
)
def test_numbers_of_another_width_are_not_trained_on(
    tmp_path: Path, tokens: npt.NDArray[np.int64], kind: str, data: dict[str, str], says: str
) -> None:
    error = refused(plain(tmp_path / "t.bin", tokens, kind), **data)
    assert says in str(error)
    assert "vocab" not in error.hint


def test_who_says_that_a_file_is_right_as_it_is_is_believed(tmp_path: Path) -> None:
    path = plain(tmp_path / "t.bin", WIDE, "<u4")
    assert opened(path, 70_000, dtype="uint16").sources[0].count == 2 * 1280 // 8


def test_a_width_that_the_file_denies_is_refused(tmp_path: Path) -> None:
    error = refused(llmc(tmp_path / "t.bin"), dtype="uint32")
    assert "has llm.c's header of uint16, and data.dtype = uint32" in str(error)
    assert "no multiple of 4" in str(refused(plain(tmp_path / "u.bin", TOKENS[:33]), dtype="uint32"))


# --------------------------------------------------------------------------- what is refused by name


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("0.txt"), io.BytesIO())


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("0.npy", b"")


def _records(path: Path) -> None:
    path.write_bytes(b"".join(struct.pack("<Q", 100) + bytes(4) + b"\x0a" * 104 for _ in range(5)))


def _chunk(path: Path) -> None:
    offsets = [20 + 100 * number for number in range(4)]
    path.write_bytes(struct.pack("<5I", 3, *offsets) + b"\x01" * 300)


FOREIGN = {
    "gzip": lambda path: path.write_bytes(gzip.compress(TOKENS.tobytes())),
    "zip archive": _zip,
    "zip": lambda path: torch.save({"tokens": torch.tensor([1])}, path),
    "tar archive": _tar,
    "zstd": lambda path: path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100)),
    "Parquet": lambda path: path.write_bytes(b"PAR1" + bytes(100) + b"PAR1"),
    "Arrow file": lambda path: path.write_bytes(b"ARROW1\x00\x00" + bytes(100)),
    "stream of Arrow": lambda path: path.write_bytes(b"\xff\xff\xff\xff\x40\x00\x00\x00" + bytes(200)),
    "HDF5": lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100)),
    "safetensors": lambda path: save_file({"tokens": torch.tensor([1])}, path),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"tokens": [1, 2]})),
    "torch.save": lambda path: torch.save([1], path, _use_new_zipfile_serialization=False),
    "SQLite": lambda path: path.write_bytes(b"SQLite format 3\x00" + bytes(100)),
    "GGUF": lambda path: path.write_bytes(b"GGUF" + bytes(100)),
    "is text": lambda path: path.write_text("Once upon a time, über alle Berge, there was a file.\n"),
    "JSON": lambda path: path.write_text("\n".join([json.dumps({"text": "once upon a time"})] * 9)),
    "TFRecord": _records,
    "LitData": _chunk,
    "model of llm.c": lambda path: llmc(path, magic=20240326, version=3),
    "version 9": lambda path: llmc(path, version=9),
    "header for 1,281 tokens": lambda path: llmc(path, count=1281),
    "index of a Megatron": lambda path: path.write_bytes(b"MMIDIDX\x00\x00" + bytes(100)),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_file_of_tokens_is_named(tmp_path: Path, name: str) -> None:
    FOREIGN[name](tmp_path / "t.bin")
    error = refused(tmp_path / "t.bin")
    assert name in str(error)
    assert error.hint
    assert "vocab" not in error.hint


LOOK_ALIKES = {  # as others write them; each gets a byte more as well
    "d.jsonl": (b'{"text": "once upon a time"}\n' * 9, b"\n", "is JSON"),
    "short.json": (b"[1, 2, 3]\n" + b"\n" * 30, b"\n", "is JSON"),
    "d.txt": (b"once upon a time there was " * 4, b"!", "is text"),
    "d.csv": (b"a,b\n1,2\n" * 20, b"\n", "is text"),
    "d.bin.gz": (gzip.compress(TOKENS.astype("<u2").tobytes()), b"\0", "is a gzip archive"),
    "d.parquet": (b"PAR1" + bytes(100) + b"PAR1", b"\0", "is a Parquet file"),
}


@pytest.mark.parametrize("dtype", ["auto", "uint16", "uint32"])
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_a_file_is_comes_before_its_size(tmp_path: Path, name: str, dtype: str) -> None:
    """Whatever the size and the width that is asked for: an odd one is what is wrong with numbers alone."""
    data, more, says = LOOK_ALIKES[name]
    for times in range(4):
        (tmp_path / name).write_bytes(data + times * more)
        with pytest.raises(DataError) as raised:
            read_tokens(tmp_path / name, dtype)
        assert says in raised.value.problem
        assert "bytes" not in raised.value.problem


def test_a_short_text_of_odd_size_is_one(tmp_path: Path) -> None:
    """Of an even size it may be tokens by chance."""
    (tmp_path / "t").write_bytes(b"{}\n")
    assert "is JSON" in refused(tmp_path / "t").problem
    (tmp_path / "t").write_bytes(b"{}\n\n")
    assert len(read_tokens(tmp_path / "t", "auto")) == 2


def test_an_array_of_odd_size_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", TOKENS.astype("<u2"))
    (tmp_path / "t.npy").write_bytes((tmp_path / "t.npy").read_bytes() + b"\0")
    assert "is a .npy file" in refused(tmp_path / "t.npy").problem


ARRAYS = {
    "of float64": lambda: TOKENS.astype("<f8"),
    "of bool": lambda: TOKENS > 3,
    "big-endian": lambda: TOKENS.astype(">u2"),
    "in Fortran's order": lambda: np.asfortranarray(TOKENS.astype("<u2").reshape(20, 64)),
    "of 3 dimensions": lambda: TOKENS.astype("<u2").reshape(2, 10, 64),
    "of 0 dimensions": lambda: np.array(3, "<u2"),
    "cannot be read": lambda: np.array([{}], object),
}


@pytest.mark.parametrize("says", ARRAYS)
def test_an_array_without_a_row_of_tokens_is_named(tmp_path: Path, says: str) -> None:
    np.save(tmp_path / "t.npy", ARRAYS[says](), allow_pickle=True)
    error = refused(tmp_path / "t.npy")
    assert "is a .npy file" in str(error)
    assert says in str(error)


@pytest.mark.parametrize("change", [slice(0, 700), slice(0, 9), None])
def test_a_damaged_array_is_named(tmp_path: Path, change: slice | None) -> None:
    np.save(tmp_path / "t.npy", TOKENS.astype("<u2"))
    data = (tmp_path / "t.npy").read_bytes()
    (tmp_path / "t.npy").write_bytes(data[change] if change else data + b"\x00\x00")
    assert "is a .npy file" in str(refused(tmp_path / "t.npy"))


@pytest.mark.parametrize(
    "header", [b"{'descr': (", b"{b'descr': 1, 'shape': 2, 'fortran_order': 3}", b"(" * 100, b'"""']
)
def test_a_header_that_makes_no_sense_is_named(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "t.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
    )
    assert "is a .npy file that cannot be read" in str(refused(tmp_path / "t.npy"))


def test_an_empty_array_is_too_short(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.zeros(0, "<u2"))
    assert "has 0 tokens" in str(refused(tmp_path / "t.npy"))


def test_an_index_that_does_not_agree_is_named(tmp_path: Path) -> None:
    assert "does not belong to" in str(refused(megatron(tmp_path / "a.bin", 8, "<u2", lengths=(1000, 281))))
    assert "of float32, not of token numbers" in str(refused(megatron(tmp_path / "b.bin", 7, "<f4")))
    path = megatron(tmp_path / "c.bin", 8, "<u2")
    path.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes()[:50])
    assert "c.idx has 50 bytes" in str(refused(path))


def test_a_folder_is_named_by_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "index.json").touch()
    assert "LitData" in str(refused(tmp_path))


# --------------------------------------------------------------------------- the vocabulary


def test_a_header_that_nobody_knows_is_no_reason_for_a_larger_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(b"\xf0\xf1\xf2\xf3" * 16 + np.tile(TOKENS, 8).astype("<u2").tobytes())
    error = refused(path, 320)
    assert "has token 62450, but the model's vocabulary ends at 319" in str(error)
    assert "only its first 4,096 bytes have such numbers: they look like the header" in error.hint
    assert "vocab" not in error.hint


def test_before_the_vocabulary_is_made_larger_the_file_is_to_be_looked_at(tmp_path: Path) -> None:
    error = refused(plain(tmp_path / "t.bin", TOKENS), 100)
    assert "has token 299, but the model's vocabulary ends at 99" in str(error)
    assert error.hint.startswith(
        "look first whether it has plain little-endian uint16 of this model's tokenizer"
    )


def test_marks_below_zero_are_no_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.where(TOKENS == 7, -100, TOKENS).astype("<i4"))
    assert "has token -100, below 0" in str(refused(tmp_path / "t.npy"))


# --------------------------------------------------------------------------- one kind alone


def npy(path: Path) -> Path:
    np.save(path, TOKENS.astype("<u2"))
    return path


KINDS = {
    "npy": lambda folder: npy(folder / "t.npy"),
    "llmc": lambda folder: llmc(folder / "t.bin"),
    "megatron": lambda folder: megatron(folder / "t.bin", 8, "<u2"),
    "bin": lambda folder: plain(folder / "t.bin", TOKENS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_who_names_a_kind_gets_no_other(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path)
    for source in KINDS:
        if source == kind or (source, kind) == ("bin", "megatron"):
            assert all_of(opened(path, source=source)) == TOKENS.tolist()
        else:
            error = refused(path, source=source)
            assert f"and data.source is '{source}'" in str(error)
            assert f'set data.source = "{kind}"' in error.hint


@pytest.mark.parametrize("name", ["t", "t.bin", "t.idx"])
def test_a_megatron_set_by_any_of_its_names(tmp_path: Path, name: str) -> None:
    megatron(tmp_path / "t.bin", 4, "<i4")
    assert all_of(opened(tmp_path / name, source="megatron")) == TOKENS.tolist()


@pytest.mark.parametrize(
    ("kind", "dtype", "tokens"),
    [("u1", "uint8", TOKENS % 256), ("<i4", "int32", WIDE), ("<u4", "uint32", WIDE), ("<i8", "int64", WIDE)],
)
def test_plain_numbers_of_every_width(
    tmp_path: Path, kind: str, dtype: str, tokens: npt.NDArray[np.int64]
) -> None:
    assert all_of(opened(plain(tmp_path / "t.bin", tokens, kind), 128_000, dtype=dtype)) == tokens.tolist()

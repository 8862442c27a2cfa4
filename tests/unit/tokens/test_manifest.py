"""A manifest says what its folder has; what is torn is refused in a sentence."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from oobleckd.tokens.dtypes import NAMED
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.manifest import MANIFEST, PIECE, Manifest, SourceFile, checksums, read_manifest
from tests.helpers.prepared import prepared

TOKENS = np.arange(700_000) % 60_000


def test_it_says_what_the_folder_has(tmp_path: Path) -> None:
    folder = prepared(tmp_path / ("a" * 32), [TOKENS[:5], TOKENS[5:]], "uint16")
    found = read_manifest(folder)
    data = (folder / "tokens.bin").read_bytes()
    assert data == TOKENS.astype("<u2").tobytes()
    assert (found.tokens, found.documents, found.largest, found.bin_bytes) == (700_000, 2, 59_999, len(data))
    assert found.kind == NAMED["uint16"]
    assert found.bin_sha256 == hashlib.sha256(data).hexdigest()
    assert np.frombuffer(found.crcs, "<u4").tolist() == [zlib.crc32(data[:PIECE]), zlib.crc32(data[PIECE:])]
    assert found.sources == (SourceFile("a.jsonl", 3, 5, "00"),)
    assert checksums(folder / "tokens.idx")[0] == found.idx_sha256


def test_nothing_of_a_manifest_is_lost_on_disk(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "x", [TOKENS], "int32", bad_rows=(("a", 3, "no JSON"),), eos=7)
    found = read_manifest(folder)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Manifest) == found
    assert (found.bad_rows[0].line, found.num_bad_rows, found.eos, found.bos) == (3, 1, 7, -1)


def _cut(folder: Path) -> None:
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(2 * len(TOKENS) - 41)


def _longer(folder: Path) -> None:
    with (folder / "tokens.idx").open("ab") as file:
        file.write(b"1")


def _manifest(folder: Path, old: bytes, new: bytes) -> None:
    path = folder / MANIFEST
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_cut, "tokens.bin has 41 bytes less than its manifest says"),
        (_longer, "tokens.idx has 1 byte more than its manifest says"),
        (lambda folder: (folder / "tokens.bin").unlink(), "tokens.bin: No such file or directory"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json: No such file or directory"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"{"), "manifest.json cannot be read"),
        (
            lambda folder: _manifest(folder, b'"format": 1', b'"format": 3'),
            "is of format 3, and 1 and 2 are known",
        ),
        (lambda folder: _manifest(folder, b'"tokens": 700', b'"tokens": "'), "manifest.json cannot be read"),
        (lambda folder: _manifest(folder, b'"tokens": 700000', b'"tokens": -7'), "cannot be read: tokens"),
        (lambda folder: _manifest(folder, b'"tokens": 700000', b'"tokens": 7'), "contradicts itself"),
        (lambda folder: _manifest(folder, b'"uint16"', b'"float8"'), "contradicts itself"),
    ],
)
def test_a_folder_that_is_torn_is_refused(tmp_path: Path, damage: object, says: str) -> None:
    folder = prepared(tmp_path / "x", [TOKENS], "uint16")
    damage(folder)  # type: ignore[operator]
    with pytest.raises(DataError) as raised:
        read_manifest(folder)
    assert says in raised.value.problem
    assert "data prepare" in raised.value.hint

"""Indexes are read and written in Megatron's layout, byte for byte, and what is torn is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from oobleckd.tokens import index as index_module
from oobleckd.tokens.dtypes import NAMED, smallest
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.index import check_size, read_index, write_index

# Written out by hand from the layout: three sequences of 3, 1 and 2 tokens of uint16, the first two of them
# one document.
BY_HAND = bytes.fromhex(
    "4d4d494449445800 00"  # MMIDIDX, two zeros
    "0100000000000000"  # version
    "08"  # uint16
    "0300000000000000"  # sequences
    "0300000000000000"  # borders of documents
    "03000000 01000000 02000000"  # tokens of each
    "0000000000000000 0600000000000000 0800000000000000"  # where each begins, in bytes
    "0000000000000000 0200000000000000 0300000000000000"  # its first sequence of each document, and the end
)
WIDE = bytes.fromhex(
    "4d4d494449445800 00 0100000000000000 04 0100000000000000 0200000000000000"
    "05000000 0000000000000000 0000000000000000 0100000000000000"
)


def of(*numbers: int) -> npt.NDArray[np.int32]:
    return np.array(numbers, np.int32)


def changed(at: int, value: int, data: bytes = BY_HAND) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


def test_what_was_written_by_hand_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.idx"
    path.write_bytes(BY_HAND)
    found = read_index(path)
    assert (found.dtype, found.lengths.tolist(), found.documents.tolist()) == ("<u2", [3, 1, 2], [0, 2, 3])
    assert (found.num_tokens, found.num_documents, found.num_bytes) == (6, 2, 12)
    assert found.document_starts().tolist() == [0, 4, 6]


@pytest.mark.parametrize("at_once", [1, 2, 1 << 20])
def test_what_is_written_is_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(index_module, "_AT_ONCE", at_once)
    path = tmp_path / "t.idx"
    write_index(path, NAMED["uint16"], of(3, 1, 2), np.array([0, 2, 3]))
    assert path.read_bytes() == BY_HAND
    assert read_index(path).lengths.tolist() == [3, 1, 2]
    write_index(path, NAMED["int32"], of(5))
    assert path.read_bytes() == WIDE
    assert [each.name for each in tmp_path.iterdir()] == ["t.idx"]


@pytest.mark.parametrize("kind", ["uint16", "int32"])
def test_starts_within_are_those_of_documents_that_have_tokens(tmp_path: Path, kind: str) -> None:
    """Of several sequences each; some of them, and some documents, are empty."""
    path, lengths, documents = tmp_path / "t.idx", of(0, 3, 1, 0, 2, 0, 4, 0), [0, 0, 3, 4, 4, 6, 7, 8]
    write_index(path, NAMED[kind], lengths, np.array(documents))
    found = read_index(path)
    starts = found.document_starts()
    assert found.num_tokens == int(starts[-1]) == 10
    for first, stop in itertools.combinations(range(11), 2):
        inside = starts[:-1][(starts[:-1] >= first) & (starts[:-1] < stop)]
        assert found.starts_within(first, stop).tolist() == sorted(set(inside.tolist()))


def test_no_document_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.idx"
    write_index(path, NAMED["uint16"], of())
    found = read_index(path)
    assert (len(path.read_bytes()), found.num_tokens, found.num_documents) == (42, 0, 0)


def test_modes_of_multimodal_sets_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.idx"
    path.write_bytes(BY_HAND + bytes(3))
    assert read_index(path).lengths.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "its first nine bytes are others"),
        (changed(0, 0x4E), "its first nine bytes are others"),
        (BY_HAND[:20], "is cut: 20 bytes"),
        (changed(9, 2), "is of version 2, and 1 is known"),
        (changed(17, 6), "is of float64, not of token numbers"),
        (changed(17, 9), "is of kind 9"),
        (BY_HAND[:-1], "has 93 bytes, and 3 sequences in 2 documents need 94"),
        (BY_HAND + b"1", "has 95 bytes, and 3 sequences in 2 documents need 94"),
        (changed(25, 255), "need 220,496,"),
        (changed(34 + 12 + 24 + 16, 2), "has documents that do not cover its sequences"),
        (changed(34 + 12 + 24, 1), "has documents that do not cover its sequences"),
        (changed(34 + 12 + 24 + 8, 4), "has documents that go back"),
        (changed(34 + 3, 0x80), "has a sequence of less than no tokens"),
        (changed(34, 4), "do not lie one behind the other"),
        (changed(34 + 12 + 8, 7), "do not lie one behind the other"),
    ],
    ids=map(str, itertools.count()),
)
def test_what_is_torn_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "t.idx"
    path.write_bytes(data)
    with pytest.raises(DataError) as raised:
        read_index(path)
    assert says in raised.value.problem
    assert raised.value.problem.startswith(str(path))
    assert raised.value.hint


def test_an_index_of_other_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.idx"
    path.write_bytes(BY_HAND)
    check_size(path, read_index(path), tmp_path / "t.bin", 12)
    with pytest.raises(DataError, match="tells of 12 bytes of uint16, and there are 10"):
        check_size(path, read_index(path), tmp_path / "t.bin", 10)


def test_uint32_has_no_index(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no code for uint32"):
        write_index(tmp_path / "t.idx", NAMED["uint32"], of(1))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("vocabulary", "kind"), [(65_499, "uint16"), (65_500, "int32"), (128_256, "int32")])
def test_the_smallest_is_megatron_s(vocabulary: int, kind: str) -> None:
    assert smallest(vocabulary) == NAMED[kind]

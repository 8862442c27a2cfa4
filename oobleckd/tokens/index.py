"""The index of a file of tokens (``.idx`` beside ``.bin``), in the layout of Megatron-LM's indexed data sets:
where each document begins.

Owns the layout: reading it by a map, all its checks, and writing it so that it is whole or not there.
Little-endian and packed: 9 bytes of mark, version (8), code of the dtype (1), S sequences (8), D borders of
documents (8); then S lengths (int32), S offsets in bytes (int64), D borders (int64: of each document its
first sequence, and S at the end), and with some S modes (int8).
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oobleckd.host.durable import sync_directory
from oobleckd.tokens.dtypes import CODES, DType, code_of
from oobleckd.tokens.errors import DataError
from oobleckd.words import count

MARK = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_AT_ONCE = 1 << 20
"""Sequences that are looked at, or written, at a time: there may be a billion."""
_AGAIN = "make both anew with Megatron's preprocess_data, or rename the .bin if it is a plain file of numbers"


@dataclass(frozen=True, slots=True)
class Index:
    """Of a file of ``dtype``. ``lengths``: tokens of each sequence; ``offsets``: its first byte;
    ``documents``: the first sequence of each document, and the number of sequences at the end. All may be
    maps of the file.
    """

    dtype: DType
    lengths: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return self._first_of(len(self.lengths))

    @property
    def num_documents(self) -> int:
        """Borders have one more."""
        return len(self.documents) - 1

    @property
    def num_bytes(self) -> int:
        """What the file of tokens has."""
        return self.num_tokens * self.dtype.itemsize

    def document_starts(self) -> npt.NDArray[np.int64]:
        """The first token of each document, and the number of tokens at the end."""
        ends = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, dtype=np.int64, out=ends[1:])
        return ends[self.documents]

    def borders(self) -> Iterator[npt.NDArray[np.int64]]:
        """The first token of each document, and the number of tokens at the end, in blocks, each of which
        begins with what the one before ended with: nobody has all of a billion in memory.
        """
        for first in range(0, self.num_documents, _AT_ONCE):
            sequences = self.documents[first : first + _AT_ONCE + 1]
            inner = sequences < len(self.lengths)
            starts = np.full(len(sequences), self.num_tokens)
            starts[inner] = self.offsets[sequences[inner]] // self.dtype.itemsize
            yield starts

    def starts_within(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """The tokens from ``first`` to before ``stop`` with which a document begins, each once: reads a few
        places of the file.
        """
        # Bisected where they lie: a device that kept them all would need 8 GB for a billion documents.
        documents = range(self.num_documents)
        begin = bisect_left(documents, first, key=self._start_of)
        end = bisect_left(documents, stop, lo=begin, key=self._start_of)
        return np.unique(self.offsets[self.documents[begin:end]] // self.dtype.itemsize)

    def _start_of(self, document: int) -> int:
        return self._first_of(int(self.documents[document]))

    def _first_of(self, sequence: int) -> int:
        """The first token of a sequence; behind the last one, how many there are."""
        if sequence < len(self.lengths):
            return int(self.offsets[sequence]) // self.dtype.itemsize
        return self._first_of(sequence - 1) + int(self.lengths[-1]) if sequence else 0


def read_index(path: Path) -> Index:
    """What ``path`` has, checked. Raises DataError, OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    if not head.startswith(MARK):
        raise DataError(f"{path} is no index of tokens: its first nine bytes are others", _AGAIN)
    if len(head) < _HEAD.size:
        raise DataError(f"{path} is cut: {count(size, 'byte')}", _AGAIN)
    _, version, code, num_sequences, num_borders = _HEAD.unpack(head)
    if version != 1:
        raise DataError(f"{path} is of version {version}, and 1 is known", _AGAIN)
    kind = CODES.get(code)
    if kind is None or kind.kind == "f":
        what = kind.name if kind is not None else f"kind {code}"
        raise DataError(f"{path} is of {what}, not of token numbers", _AGAIN)
    least = _HEAD.size + 12 * num_sequences + 8 * num_borders
    if size not in {least, least + num_sequences}:
        needed = f"{count(num_sequences, 'sequence')} in {count(max(0, num_borders - 1), 'document')}"
        raise DataError(f"{path} has {count(size, 'byte')}, and {needed} need {least:,}", _AGAIN)
    raw = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    at = _HEAD.size
    lengths = np.frombuffer(raw, "<i4", num_sequences, at)
    offsets = np.frombuffer(raw, "<i8", num_sequences, at + 4 * num_sequences)
    documents = np.frombuffer(raw, "<i8", num_borders, at + 12 * num_sequences)
    if problem := _problem_of(lengths, offsets, documents, kind):
        raise DataError(f"{path} {problem}", _AGAIN)
    return Index(kind, lengths, offsets, documents)


def check_size(path: Path, index: Index, tokens: Path, size: int) -> None:
    """Whether ``tokens`` of ``size`` bytes is what the index at ``path`` tells of. Raises DataError."""
    if index.num_bytes != size:
        raise DataError(
            f"{path} does not belong to {tokens}: it tells of {count(index.num_bytes, 'byte')} of "
            f"{index.dtype.name}, and there are {size:,}",
            _AGAIN,
        )


def write_index(
    path: Path, dtype: DType, lengths: npt.NDArray[np.int32], documents: npt.NDArray[np.int64] | None = None
) -> None:
    """Write the index of a file of ``dtype`` whose sequences have ``lengths``; ``documents`` as ``Index`` has
    them (None: each sequence is one). Whole and durable when it returns. Raises OSError.
    """
    borders = np.arange(len(lengths) + 1, dtype="<i8") if documents is None else documents.astype("<i8")
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("wb") as file:
            file.write(_HEAD.pack(MARK, 1, code_of(dtype), len(lengths), len(borders)))
            for some in _parts(len(lengths)):
                file.write(lengths[some].astype("<i4").tobytes())
            at = 0
            for some in _parts(len(lengths)):
                ends = at + np.cumsum(lengths[some], dtype=np.int64) * dtype.itemsize
                file.write(np.concatenate([[at], ends[:-1]]).astype("<i8").tobytes())
                at = int(ends[-1])
            file.write(borders.tobytes())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _problem_of(
    lengths: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int64],
    kind: DType,
) -> str:
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths):
        return "has documents that do not cover its sequences"
    for some in _parts(len(documents)):
        if (np.diff(documents[some.start : some.stop + 1]) < 0).any():
            return "has documents that go back"
    at = 0
    for some in _parts(len(lengths)):
        if (lengths[some] < 0).any():
            return "has a sequence of less than no tokens"
        ends = at + np.cumsum(lengths[some], dtype=np.int64) * kind.itemsize
        if offsets[some.start] != at or (offsets[some][1:] != ends[:-1]).any():
            return "has sequences that do not lie one behind the other"
        at = int(ends[-1])
    return ""


def _parts(length: int) -> Iterator[slice]:
    for start, stop in pairwise([*range(0, length, _AT_ONCE), length]):
        yield slice(start, stop)

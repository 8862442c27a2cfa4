"""Which documents of a source are held out of training, to evaluate on: a function of a seed and a document's
number.

Owns the draw, and where the tokens of either side lie. A source whose documents nobody knows is cut in two:
its end is held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from oobleckd.protocol.job import Job
from oobleckd.protocol.mixtures import millionths
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.permutation import mix
from oobleckd.words import count

Numbers = npt.NDArray[np.int64]
_MILLION = 1_000_000
_STRIDE = 0x9E3779B97F4A7C15
"""Between two numbers before they are mixed (splitmix64, Steele et al. 2014)."""


class DocumentSide(msgspec.Struct, frozen=True):
    """The documents that are ``held`` out of training, or the others: of all, so many ``millionths`` are held
    out, drawn by ``seed``.
    """

    seed: int
    millionths: int
    held: bool

    def keeps(self, documents: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Of each document, by its number, whether it is of this side."""
        # Integers alone, and no number of documents: who has an index of a billion draws as who has a part of
        # it, on any machine. A larger share holds out what a smaller one does, and more. (D-data-026)
        key = hashlib.blake2b(f"held out:{self.seed}".encode(), digest_size=8).digest()
        drawn = mix(documents.astype(np.uint64) * np.uint64(_STRIDE) + np.uint64(int.from_bytes(key, "big")))
        held: npt.NDArray[np.bool_] = drawn < np.uint64((self.millionths << 64) // _MILLION)
        return held if self.held else ~held

    def cut(self, num_tokens: int) -> KeptTokens:
        """Of tokens without documents: those at the end are held out."""
        at = num_tokens - num_tokens * self.millionths // _MILLION
        first, stop = (at, num_tokens) if self.held else (0, at)
        return KeptTokens(np.array([first]), np.array([0, stop - first]))

    def of_documents(self, borders: Iterable[Numbers]) -> KeptTokens:
        """``borders``: the first token of each document and the end of the last, in blocks, each of which
        begins with what the one before ended with.
        """
        firsts, lengths, number = [], [], 0
        for block in borders:
            kept = self.keeps(np.arange(number, number + len(block) - 1))
            number += len(kept)
            turns = np.flatnonzero(np.diff(kept, prepend=False, append=False))
            firsts.append(block[turns[::2]])
            lengths.append(block[turns[1::2]] - firsts[-1])
        sizes = np.concatenate([np.zeros(1, np.int64), *lengths])
        return KeptTokens(np.concatenate([np.zeros(0, np.int64), *firsts]), np.cumsum(sizes))


class KeptStretch(NamedTuple):
    """``length`` tokens that lie one behind the other, from ``token`` of all on."""

    token: int
    length: int


class KeptTokens:
    """Tokens of one side, one behind the other: those of runs of documents that lie beside each other.
    ``firsts``: of each run its first token in all; ``upto``: how many tokens are before it, and in all.
    """

    def __init__(self, firsts: Numbers, upto: Numbers) -> None:
        some = np.diff(upto) > 0
        self._firsts, self._upto = firsts[some], np.append(upto[:-1][some], upto[-1:])

    def __len__(self) -> int:
        return int(self._upto[-1])

    def stretches(self, start: int, stop: int) -> Iterator[KeptStretch]:
        """Where the tokens from ``start`` to before ``stop`` of this side lie."""
        run = int(np.searchsorted(self._upto, start, side="right")) - 1
        while start < stop:
            length = min(stop, int(self._upto[run + 1])) - start
            yield KeptStretch(int(self._firsts[run]) + start - int(self._upto[run]), length)
            start, run = start + length, run + 1


def side_of(job: Job, *, held: bool = False) -> DocumentSide | None:
    """What is ``held`` out of each source of ``job``, or else what is left; None where all is trained on."""
    share = millionths(job.eval.held_out)
    return DocumentSide(job.train.seed, share, held) if share else None


def nothing_held_out(where: str, documents: int) -> DataError:
    """Of ``where``, which has so many ``documents`` (0: nobody knows)."""
    of = f"{count(documents, 'document')} of {where}" if documents else f"tokens of {where}"
    return DataError(
        f"eval.held_out: nothing of the {of} is held out",
        "make it larger, or write an [[eval.source]] table",
    )

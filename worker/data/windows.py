"""The rows of one source as windows of one sequence over its tokens, which do not overlap.

Owns what is looked at before a row is trained on: its bytes, where the folder has checksums, and its tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from oobleckd.tokens.files import Tokens
from oobleckd.tokens.heldout import KeptTokens
from oobleckd.tokens.index import Index
from oobleckd.worker.data.rows import NO_STARTS, DataRow, Misread, TokenStretch, of_job


class Windows:
    """``check``: looks at the tokens of each row (None: all were looked at); ``first``: looks at the bytes of
    tokens before they are read. ``index``: where documents begin, if they are kept apart; what a window has
    of one that began before is a document, too. ``kept``: the tokens that windows are cut out of; None:
    all.
    """

    def __init__(
        self,
        tokens: Tokens,
        sequence: int,
        check: Callable[[Tokens], None] | None = None,
        first: Callable[[int, int], None] | None = None,
        index: Index | None = None,
        kept: KeptTokens | None = None,
    ) -> None:
        # Of the plain kind: to cut a window out of numpy's mapped one takes ten times as long.
        self._tokens, self._sequence = tokens.view(np.ndarray), sequence
        self._check, self._first, self._index, self._kept = check, first, index, kept
        self.count = len(tokens if kept is None else kept) // sequence

    def row(self, number: int) -> DataRow:
        """Its tokens, and where documents begin. Raises Misread, UserError."""
        stretches = self.stretches(number)
        if self._first is not None:
            with of_job("data", Misread):
                for start, length in stretches:
                    self._first(start, start + length)
        parts = [self._tokens[start : start + length] for start, length in stretches]
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self._check is not None:
            with of_job("data"):
                self._check(tokens)
        return DataRow(tokens, self.starts(number))

    def starts(self, number: int) -> npt.NDArray[np.int32]:
        """Where documents begin."""
        if self._index is None:
            return NO_STARTS
        found, at = [np.zeros(1, np.int64)], 0
        for start, length in self.stretches(number):
            inner = self._index.starts_within(start if at else start + 1, start + length)
            found.append(inner - start + at)
            at += length
        return np.concatenate(found).astype(np.int32)

    def stretches(self, number: int) -> tuple[TokenStretch, ...]:
        """The one that it is; where documents are held out, those between them."""
        start = number * self._sequence
        if self._kept is None:
            return (TokenStretch(start, self._sequence),)
        return tuple(TokenStretch(*each) for each in self._kept.stretches(start, start + self._sequence))

    def num_tokens(self, _number: int) -> int:
        """Of any window."""
        return self._sequence

    def num_targets(self, number: int) -> int:
        """All tokens but the first of each document, or of the row."""
        return self._sequence - max(1, len(self.starts(number)))

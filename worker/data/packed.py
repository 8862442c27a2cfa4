"""The rows of one source as a plan has them: several documents beside each other, or one, and what fills the
row up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from oobleckd.tokens.asked import AskedTokens
from oobleckd.tokens.files import Tokens
from oobleckd.tokens.plan import Pieced, RowPlan
from oobleckd.worker.data.rows import NO_STARTS, DataRow, Misread, TokenStretch, of_job

# Every vocabulary has it, and few tokenizers have a token for padding. (D-data-021)
_FILL = 0


class Packed:
    """``first``: looks at the bytes of tokens before they are read. ``asked``: which of them the loss asks
    for; None: all.
    """

    def __init__(
        self,
        tokens: Tokens,
        plan: RowPlan,
        first: Callable[[int, int], None],
        asked: AskedTokens | None = None,
    ) -> None:
        self._tokens, self._plan, self._first, self._asked = tokens.view(np.ndarray), plan, first, asked
        rule = plan.manifest.rule
        self._sequence, self._separate = rule.sequence, rule.separate
        self.count = plan.manifest.rows

    def row(self, number: int) -> DataRow:
        """Its tokens, where documents begin, and what is fill. Raises Misread."""
        pieces = self._pieces(number)
        tokens, at = np.full(self._sequence, _FILL, self._tokens.dtype), 0
        asked = np.zeros(self._sequence, np.bool_)
        for start, length in _stretches(pieces):
            with of_job("data", Misread):
                self._first(start, start + length)
                asked[at : at + length] = (
                    True if self._asked is None else self._asked.mask(start, start + length)
                )
            tokens[at : at + length] = self._tokens[start : start + length]
            at += length
        return DataRow(tokens, self._starts(pieces), asked)

    def starts(self, number: int) -> npt.NDArray[np.int32]:
        """Where documents begin, and the fill. Raises Misread."""
        return self._starts(self._pieces(number)) if self._separate else NO_STARTS

    def stretches(self, number: int) -> tuple[TokenStretch, ...]:
        """Its pieces. Raises Misread."""
        return _stretches(self._pieces(number))

    def num_tokens(self, number: int) -> int:
        """Of all pieces. Raises Misread."""
        return int(self._pieces(number).lengths.sum())

    def num_targets(self, number: int) -> int:
        """As the plan counted them. Raises Misread."""
        with of_job("data", Misread):
            return self._plan.targets(number)

    def _pieces(self, number: int) -> Pieced:
        with of_job("data", Misread):
            return self._plan.row(number)

    def _starts(self, pieces: Pieced) -> npt.NDArray[np.int32]:
        if not self._separate:
            return NO_STARTS
        ends = np.cumsum(pieces.lengths)
        starts = np.append(0, ends) if ends[-1] < self._sequence else np.append(0, ends[:-1])
        return starts.astype(np.int32)


def _stretches(pieces: Pieced) -> tuple[TokenStretch, ...]:
    return tuple(map(TokenStretch, pieces.tokens.tolist(), pieces.lengths.tolist()))

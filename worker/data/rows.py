"""What the rows of a source are to those who train on them, however they are made."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from oobleckd.tokens.files import Tokens


class Row(NamedTuple):
    """``tokens``: of one sequence. ``starts``: positions at which documents begin, ascending, the first 0;
    what fills the row up counts as one. Empty where documents are joined. ``asked``: bool, of each token
    whether the loss asks for it; None: of all.
    """

    tokens: Tokens
    starts: npt.NDArray[np.int32]
    asked: npt.NDArray[np.bool_] | None = None


class Rows(Protocol):
    """``count`` rows, by their numbers."""

    count: int

    def row(self, number: int) -> Row:
        """Raises Misread, UserError."""
        ...

    def num_targets(self, number: int) -> int:
        """How many of its tokens a causal model is asked for: all that are asked, but for the first of each
        document, which has none before it. Reads no tokens.
        """
        ...

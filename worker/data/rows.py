"""What the rows of a source are to those who train on them, however they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import Tokens
from oobleckd.worker.runtime.errors import UserError


class Misread(UserError):
    """What a device is about to train on is not what it was when it was prepared."""


class DataRow(NamedTuple):
    """``tokens``: of one sequence. ``starts``: positions at which documents begin, ascending, the first 0;
    what fills the row up counts as one. Empty where documents are joined. ``asked``: bool, of each token
    whether the loss asks for it; None: of all.
    """

    tokens: Tokens
    starts: npt.NDArray[np.int32]
    asked: npt.NDArray[np.bool_] | None = None


class TokenStretch(NamedTuple):
    """``length`` tokens of a row, which lie one behind the other in the data, from its ``token`` on."""

    token: int
    length: int


class Rows(Protocol):
    """``count`` rows, by their numbers."""

    count: int

    def row(self, number: int) -> DataRow:
        """Raises Misread, UserError."""
        ...

    def starts(self, number: int) -> npt.NDArray[np.int32]:
        """``DataRow.starts``, without a look at its tokens. Raises Misread."""
        ...

    def stretches(self, number: int) -> Sequence[TokenStretch]:
        """Where its tokens lie, in order; what fills it up lies nowhere. Raises Misread."""
        ...

    def num_tokens(self, number: int) -> int:
        """How many it has, without what fills it up. Raises Misread."""
        ...

    def num_targets(self, number: int) -> int:
        """How many of its tokens a causal model is asked for: all that are asked, but for the first of each
        document, which has none before it. Reads no tokens. Raises Misread.
        """
        ...


NO_STARTS = np.zeros(0, np.int32)
"""Of a row whose documents are joined."""


@contextmanager
def of_job(key: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """What is wrong with a file is wrong with ``key`` of the job."""
    try:
        yield
    except DataError as error:
        raise kind(f"{key}: {error.problem}", error.hint) from error

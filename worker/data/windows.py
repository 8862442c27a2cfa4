"""The rows of one source: windows of one sequence over its tokens, which do not overlap.

Owns what is looked at before a row is trained on: its bytes, where the folder has checksums, and its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import Tokens
from oobleckd.worker.runtime.errors import UserError


class Misread(UserError):
    """What a device is about to train on is not what it was when it was prepared."""


class Windows:
    """``check``: looks at the tokens of each row (None: all were looked at); ``first``: looks at the bytes of
    tokens before they are read.
    """

    def __init__(
        self,
        tokens: Tokens,
        sequence: int,
        check: Callable[[Tokens], None] | None = None,
        first: Callable[[int, int], None] | None = None,
    ) -> None:
        # Of the plain kind: to cut a window out of numpy's mapped one takes ten times as long.
        self._tokens, self._sequence = tokens.view(np.ndarray), sequence
        self._check, self._first = check, first
        self.count = len(tokens) // sequence

    def row(self, number: int) -> Tokens:
        """Its tokens. Raises Misread, UserError."""
        start = number * self._sequence
        if self._first is not None:
            with of_job("data", Misread):
                self._first(start, start + self._sequence)
        tokens = self._tokens[start : start + self._sequence]
        if self._check is not None:
            with of_job("data"):
                self._check(tokens)
        return tokens


@contextmanager
def of_job(key: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """What is wrong with a file is wrong with ``key`` of the job."""
    try:
        yield
    except DataError as error:
        raise kind(f"{key}: {error.problem}", error.hint) from error

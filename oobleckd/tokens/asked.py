"""Which tokens of prepared chats the loss asks for: `loss.bin` beside `tokens.bin`, a bit for each token.

Owns the layout: token n is bit n % 8 of byte n // 8, the least significant first, and what fills the last
byte up is 0. Where there is no such file, as of prepared text, all tokens are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

import numpy as np
import numpy.typing as npt

_Bits = npt.NDArray[np.bool_]


class AskedTokens:
    """``data``: the bytes of a loss.bin; ``check``: looks at a stretch of them before it is read."""

    def __init__(
        self, data: npt.NDArray[np.uint8], check: Callable[[int, int], None] = lambda _start, _stop: None
    ) -> None:
        self._data, self._check = data, check

    def mask(self, first: int, stop: int) -> _Bits:
        """Of each token from ``first`` to before ``stop``, whether it is asked for. Raises what ``check``
        does.
        """
        begin, end = first // 8, -(-stop // 8)
        self._check(begin, end)
        bits = np.unpackbits(self._data[begin:end], bitorder="little")
        return bits[first - 8 * begin : stop - 8 * begin].view(np.bool_)

    def counts(self, tokens: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many are asked for of each stretch: of so many tokens from a token on. Raises the same."""
        stretches = zip(tokens.tolist(), lengths.tolist(), strict=True)
        found = (np.count_nonzero(self.mask(first, first + length)) for first, length in stretches)
        return np.fromiter(found, np.int64, len(tokens))


class AskedWriter:
    """Writes a loss.bin into ``file``, however many tokens it is given at a time."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._left = file, np.zeros(0, np.bool_)

    def add(self, asked: _Bits) -> None:
        """Of the tokens that follow. Raises OSError."""
        bits = np.concatenate([self._left, asked])
        whole = len(bits) // 8 * 8
        self._file.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._left = bits[whole:]

    def end(self) -> None:
        """Write what is left of the last byte. Raises OSError."""
        self._file.write(np.packbits(self._left, bitorder="little").tobytes())
        self._left = self._left[:0]

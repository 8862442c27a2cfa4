"""Checks the bytes of prepared tokens against their manifest, a MiB at a time, when each is first read.

Owns which were checked. A device so finds a torn or changed folder before it trains on it, without a pass
over all of it at its start.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oobleckd.tokens.errors import DataError
from oobleckd.tokens.manifest import PIECE, TOKENS, Manifest


class Pieces:
    """Of ``data``, all bytes of `tokens.bin` in ``folder``."""

    def __init__(self, data: npt.NDArray[np.uint8], manifest: Manifest, folder: Path) -> None:
        self._data, self._manifest, self._folder = data, manifest, folder
        self._checked = np.zeros(-(-len(data) // PIECE), np.bool_)

    def check(self, start: int, stop: int) -> None:
        """Bytes from ``start`` to before ``stop`` are about to be read. Raises DataError where one of their
        pieces is not what it was when it was prepared.
        """
        # A checksum of 1 GB/s at the first read costs a thousandth of what training on a MiB does, and the
        # digest of all would be minutes at every start of every device. (D-data-011)
        for piece in range(start // PIECE, -(-stop // PIECE)):
            if self._checked[piece]:
                continue
            if zlib.crc32(self._data[piece * PIECE : (piece + 1) * PIECE].data) != self._manifest.crc_of(
                piece
            ):
                raise DataError(
                    f"{self._folder / TOKENS} is not what its manifest says: from byte {piece * PIECE:,} on "
                    "others are there",
                    f"delete {self._folder}, and run `oobleckctl data prepare` again",
                )
            self._checked[piece] = True

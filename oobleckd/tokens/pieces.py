"""Checks the bytes of prepared data against their manifest, a MiB at a time, when each is first read.

Owns which were checked. A device so finds a torn or changed folder before it trains on it, without a pass
over all of it at its start.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oobleckd.tokens.errors import DataError
from oobleckd.tokens.manifest import PIECE, crc_of


class Pieces:
    """Of ``data``, all bytes of the file at ``path``, whose MiBs have the checksums ``crcs``; ``again``: how
    to come by another one.
    """

    def __init__(self, data: npt.NDArray[np.uint8], crcs: bytes, path: Path, again: str) -> None:
        self._data, self._crcs, self._path, self._again = data, crcs, path, again
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
            found = zlib.crc32(self._data[piece * PIECE : (piece + 1) * PIECE].data)
            if found != crc_of(self._crcs, piece):
                raise DataError(
                    f"{self._path} is not what its manifest says: from byte {piece * PIECE:,} on others are "
                    "there",
                    self._again,
                )
            self._checked[piece] = True

"""Memory that was used for a moment goes back to the system.

Owns when: after many bytes, and not often. The C library keeps what was freed, as it may be wanted again, and
a flood of questions would leave its size behind for ever.
"""

from __future__ import annotations

import ctypes
import time

TRIM_BYTES = 16 * 2**20
TRIM_EVERY_S = 5.0


class _Used:
    """Since the last time."""

    num_bytes = 0
    at = 0.0


def used(num_bytes: int) -> None:
    """So many bytes were needed for a moment."""
    _Used.num_bytes += num_bytes


def give_back() -> bool:
    """Give back what is free, if enough was used since the last time; whether it did."""
    now = time.monotonic()
    if _Used.num_bytes < TRIM_BYTES or now - _Used.at < TRIM_EVERY_S:
        return False
    _Used.num_bytes, _Used.at = 0, now
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # another C library may have none
    if trim is not None:
        trim(0)
    return True

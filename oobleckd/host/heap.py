"""Memory that was used for a moment goes back to the system, and what stays is not looked at for garbage.

Owns when memory is given back: after many bytes, and not often. The C library keeps what was freed, as it may
be wanted again, and a flood of questions would leave its size behind for ever. And owns how long a look for
garbage may take: everything stands still meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import time
from typing import Any

TRIM_BYTES = 16 * 2**20
TRIM_EVERY_S = 5.0
LOOK_S = 0.005
"""Of one look at all that lives for garbage, or what has survived it is not looked at again."""
_OF_ALL = 2  # as Python numbers it


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


def keep_looks_short() -> None:
    """What there is now stays, and so does from time to time what has gathered."""
    gc.collect()
    gc.freeze()
    gc.callbacks.append(_Look())


class _Look:
    """How long the one at all that lives takes, of the processor."""

    began_s = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        # Python looks at all that lives whenever a quarter as much is new: 0.15 s of a daemon that has read
        # 150,000 steps. What is in no ring goes when nobody has it any more, looked at or not.
        # (D-service-023)
        if info["generation"] != _OF_ALL:  # others leave garbage behind, which must be found yet
            return
        if phase == "start":
            self.began_s = time.thread_time()
        elif time.thread_time() - self.began_s > LOOK_S:
            gc.freeze()

"""Fault points: places in a device process where a test or drill can make it die or hang; and how slow it is
made to be.

Their names are ``oobleckd.protocol.parts``'. Each firing is written to ``<run dir>/faults.jsonl`` and synced
before it happens, so that a test can tell that it happened where it was meant to.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from oobleckd.protocol.parts import Point

POINTS = get_args(Point)
IN_STEP = POINTS[: POINTS.index("frozen")]
ANYWHERE = ""  # whichever of ``IN_STEP`` comes first


@dataclass(slots=True)
class Faults:
    """Armed fault points of one device process: point -> (round or -1 for the next time, whether to hang)."""

    device: str
    run_dir: Path
    armed: dict[str, tuple[int, bool]] = field(default_factory=dict)
    _times: float = 1.0
    _slow_until: float = math.inf  # of the monotonic clock

    def arm(self, point: str, round_: int, *, hang: bool = False) -> None:
        """Die (or hang) at ``point`` in round ``round_`` or, if that is over, at the next chance."""
        self.armed[point] = (round_, hang)

    def reach(self, point: str, round_: int) -> None:
        """The device is at ``point``: die or hang if that was asked for."""
        anywhere = self.armed.get(ANYWHERE) if point in IN_STEP else None
        wanted, hang = self.armed.get(point) or anywhere or (sys.maxsize, False)
        if round_ >= wanted:
            self.strike(point, round_, hang=hang)

    def slow_down(self, times: float, seconds: float) -> None:
        """Take ``times`` as long for every layer from now on, or for ``seconds``."""
        self._times, self._slow_until = times, time.monotonic() + (seconds or math.inf)

    @property
    def drags(self) -> bool:
        """Whether layers are to take longer now."""
        return self._times > 1 and time.monotonic() < self._slow_until

    def drag(self, took_s: float) -> None:
        """A layer took so long: take as much longer as was asked for."""
        if self.drags:
            time.sleep((self._times - 1) * took_s)

    def strike(self, point: str, round_: int, *, hang: bool) -> None:
        """Write it down, then die or hang: now."""
        record = {
            "device": self.device,
            "point": point,
            "round": round_,
            "at": time.time(),
            "pid": os.getpid(),
        }
        fd = os.open(self.run_dir / "faults.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_SYNC, 0o600)
        os.write(fd, json.dumps(record).encode() + b"\n")
        if hang:
            hang_for_ever()
        os.kill(os.getpid(), signal.SIGKILL)


def hang_for_ever() -> None:
    """Hang as a driver call does that never returns: no thread of this process gets the
    interpreter any more.
    """
    ctypes.PyDLL(None).pause()

"""Fault points: places in a device process where a test or drill can make it die by SIGKILL.

Owns the names of the places. Each firing is written to ``<run dir>/faults.jsonl`` and synced before the
process dies, so that a test can tell that its kill happened where it meant it to.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

POINTS = (
    "forward", "backward", "reduce", "reduced", "commit", "update", "updated", "frozen", "deploy", "copy",
    "ready", "checkpoint",
)  # fmt: skip


@dataclass(slots=True)
class Faults:
    """Armed fault points of one device process: point -> round (-1: the next time)."""

    device: str
    run_dir: Path
    armed: dict[str, int] = field(default_factory=dict)

    def arm(self, point: str, round_: int) -> None:
        """Die at ``point`` in round ``round_`` or, if that is over, at the next chance."""
        self.armed[point] = round_

    def reach(self, point: str, round_: int) -> None:
        """The device is at ``point``: die if that was asked for."""
        wanted = self.armed.get(point)
        if wanted is None or round_ < wanted:
            return
        record = {
            "device": self.device,
            "point": point,
            "round": round_,
            "at": time.time(),
            "pid": os.getpid(),
        }
        fd = os.open(self.run_dir / "faults.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_SYNC, 0o600)
        os.write(fd, json.dumps(record).encode() + b"\n")
        os.kill(os.getpid(), signal.SIGKILL)

"""A sink of "another package", which hangs when it is told to: for tests of what then happens to all others.

It writes JSON lines, and while the FIFO ``hang`` lies in the folder named by OOBLECK_TEST_STUCK each write
waits until somebody opens that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from oobleckd.sinks.base import Record
from oobleckd.sinks.jsonlines import JsonLinesSink

FOLDER = "OOBLECK_TEST_STUCK"


class StuckSink(JsonLinesSink):
    def write(self, records: Sequence[Record]) -> None:
        fifo = Path(os.environ[FOLDER]) / "hang"
        if fifo.exists():
            (fifo.parent / "hangs").touch()
            fifo.read_bytes()
        super().write(records)


def install(folder: Path) -> dict[str, str]:
    """What pip writes of such a package, in ``folder``; the environment in which it is found there."""
    info = folder / "stuck-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck\nVersion: 1.0\n", encoding="utf-8")
    entry = "[oobleckd.sinks]\nstuck = tests.helpers.stuck_sink:StuckSink\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")
    os.mkfifo(folder / "hang")
    checkout = Path(__file__).parents[2]
    return {FOLDER: str(folder), "PYTHONPATH": f"{folder}{os.pathsep}{checkout}"}


def free(folder: Path) -> None:
    """It hangs no more: who waits goes on, and nobody waits from now on."""
    fifo = folder / "hang"
    with fifo.open("wb"):
        fifo.unlink()

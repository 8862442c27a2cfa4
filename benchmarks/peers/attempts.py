"""What the peers' programs write down about every step they try, and how the benchmark reads it.

One JSON line per attempt in a file per process, flushed at once, so that a kill -9 loses only the attempt it
hit. Needs nothing but the standard library: the peers run it in environments of their own.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "OOBLECK_BENCH_DIR"
"""Environment variable with the folder of the files."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a step by one process. ``groups`` took part in it; times are POSIX seconds."""

    who: str
    pid: int
    step: int
    began_at: float
    ended_at: float
    committed: bool
    groups: int


class AttemptLog:
    """The file of this process; ``who`` is its place in the job, the same in every life."""

    def __init__(self, who: str) -> None:
        folder = Path(os.environ[FOLDER])
        self._who = who
        self._file = (folder / f"{who}.{os.getpid()}.jsonl").open("a", buffering=1)

    def add(self, step: int, began_at: float, groups: int, *, committed: bool = True) -> None:
        """Write down an attempt that ends now."""
        attempt = Attempt(self._who, os.getpid(), step, began_at, time.time(), committed, groups)
        self._file.write(json.dumps(asdict(attempt)) + "\n")


class AttemptReader:
    """All attempts in a folder, oldest first; each call reads only what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}
        self._attempts: list[Attempt] = []

    def attempts(self) -> list[Attempt]:
        """Everything so far, by the time the attempts ended."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + len(newline)
            self._attempts += [Attempt(**json.loads(line)) for line in whole.splitlines()]
        self._attempts.sort(key=lambda attempt: attempt.ended_at)
        return self._attempts

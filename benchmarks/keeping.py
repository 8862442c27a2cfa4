"""Results of long simulations, kept in a file, so that a run that was ended goes on where it was.

Owns the file: result by the digest of what was asked and of the code that answers. What other code answered,
or what was asked otherwise, is not found. Does not know what is asked (``goodput``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

ROOT = Path(__file__).resolve().parents[1]
ANSWERING = (
    "planner",
    "oobleckd/core",
    "oobleckd/host",
    "oobleckd/protocol",
    "oobleckd/simulator",
    "oobleckd/ctl",
)
Result = TypeVar("Result")


def code_digest(folders: Iterable[str] = ANSWERING) -> bytes:
    """Of all code that can have a part in an answer."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.digest()


class Kept(Generic[Result]):
    """What ``path`` has, all of one ``kind``; nowhere where there is no path."""

    def __init__(self, path: Path | None, kind: type[Result]) -> None:
        """Raises msgspec.DecodeError for a file that is none of ours."""
        self.path = path
        self._code = code_digest() if path is not None else b""
        self._found: dict[str, Result] = {}
        if path is not None and path.exists():
            self._found = msgspec.json.decode(path.read_bytes(), type=dict[str, kind])

    def key(self, asked: object) -> str:
        """Of a question, for this code."""
        return hashlib.sha256(self._code + msgspec.json.encode(asked)).hexdigest()

    def get(self, key: str) -> Result | None:
        """The result of what has that key."""
        return self._found.get(key)

    def put(self, results: dict[str, Result]) -> None:
        """Keep them: the file has all of them, or is what it was."""
        self._found |= results
        if self.path is not None:
            part = self.path.with_name(f"{self.path.name}.part")
            part.write_bytes(msgspec.json.encode(self._found))
            part.replace(self.path)

"""What a device asks its agent about artifacts, and waits for.

Owns the question that is open: one at a time, as a device compiles one kind of layer after the other.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

from oobleckd.protocol.artifactmessages import ArtifactHere, ArtifactMade, NoArtifact, WantArtifact
from oobleckd.protocol.message import Message


class Asking:
    """``say`` sends to the agent. An answer is ``heard`` in another thread than that which asks."""

    def __init__(self, say: Callable[[Message], None]) -> None:
        self._say = say
        self._answers: queue.SimpleQueue[ArtifactHere] = queue.SimpleQueue()

    def want(self, key: str) -> Path | None:
        """The archive of ``key``, which is the caller's from now on; None: compile it, and say ``made`` or
        ``not_made``. Takes as long as another node compiles.
        """
        self._say(WantArtifact(key))
        while True:
            answer = self._answers.get()
            if answer.key == key:
                return Path(answer.path) if answer.path else None

    def heard(self, answer: ArtifactHere) -> None:
        """The agent answers."""
        self._answers.put(answer)

    def made(self, key: str, archive: Path) -> None:
        """It is in ``archive``, which is the agent's from now on."""
        self._say(ArtifactMade(key, str(archive)))

    def not_made(self, key: str) -> None:
        """There will be none."""
        self._say(NoArtifact(key))

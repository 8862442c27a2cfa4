"""Decides which connection of a node counts, and what becomes of the others.

Owns the rule, for the hub and for simulated worlds. A connection introduces itself by ``Hello``; what came
before it waits for it. The newest connection of a node takes the place of the one before, and that is a lost
link even if nobody has seen it close yet: what was on its way there is gone, and has to be asked for again.
What still comes from the older one was said before the newer Hello; what matters of it is said again.

Pure: no socket, and no word about who may call itself what (``hub``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from oobleckd.protocol.agentmessages import Hello
from oobleckd.protocol.messages import FromWorker

MAX_EARLY = 256


@dataclass(slots=True, eq=False, kw_only=True)
class Connection:
    """``node`` is empty until its Hello was accepted, which what is in ``early`` waits for. ``replaced``: by
    a newer one.
    """

    node: str = ""
    replaced: bool = False
    early: list[FromWorker] = field(default_factory=list)


Peer = TypeVar("Peer", bound=Connection)


class Connections(Generic[Peer]):
    """All nodes' connections."""

    def __init__(self) -> None:
        self._on_heard: Callable[[str, FromWorker], None] = lambda _node, _message: None
        self._on_lost: Callable[[str], None] = lambda _node: None
        self._of: dict[str, Peer] = {}

    def listen(self, on_heard: Callable[[str, FromWorker], None], on_lost: Callable[[str], None]) -> None:
        """From now on ``on_heard(node, message)`` and ``on_lost(node)`` are told what counts."""
        self._on_heard, self._on_lost = on_heard, on_lost

    def of(self, node: str) -> Peer | None:
        """The one on which to talk to ``node``."""
        return self._of.get(node)

    def introduced(self, connection: Peer, node: str, hello: Hello) -> None:
        """Take in an accepted ``hello``: ``connection`` is that of ``node`` from now on."""
        before = self._of.get(node)
        if before is not None and before is not connection:
            # Half-open connections are seen by one end first. Without a lost link the core took the new
            # Hello for news on the old one, and never said again what that had taken along. (D-daemon-006)
            before.replaced = True
            self._on_lost(node)
        connection.node, self._of[node] = node, connection
        self._on_heard(node, hello)
        early, connection.early = connection.early, []
        for message in early:
            self._on_heard(node, message)

    def heard(self, connection: Peer, message: FromWorker) -> None:
        """Take in anything but a Hello."""
        if not connection.node:
            del connection.early[: max(0, len(connection.early) + 1 - MAX_EARLY)]
            connection.early.append(message)
        elif not connection.replaced:
            self._on_heard(connection.node, message)

    def closed(self, connection: Peer) -> None:
        """Take in that ``connection`` closed, after all that it had said was passed on."""
        if connection.node and self._of.get(connection.node) is connection:
            del self._of[connection.node]
            self._on_lost(connection.node)

"""The event stream's memory: the newest changes, and who waits for the next one.

Owns a bounded ring that all streams read at their own pace; a slow reader misses changes (and is told so),
it never slows anybody down. Owns no transport. Changes of the core have numbers that grow by one; *notices*
of the shell itself (its disk, its files) have none of their own and bear that of the change before them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

from oobleckd.protocol.changes import Change, DaemonTrouble
from oobleckd.protocol.text import visible

Listener = Callable[[Change], None]


class History:
    """The newest ``size`` changes, for the event loop alone. ``last``: the newest number; ``closed``: no
    more.

    ``ring`` holds (position, change); ``position`` is that of the next one, which sets ``news``.
    ``listeners`` hear each that is new.
    """

    def __init__(self, size: int) -> None:
        self.last = 0
        self.closed = False
        self.ring: deque[tuple[int, Change]] = deque(maxlen=size)
        self.position = 0
        self.news = asyncio.Event()
        self.listeners: list[Listener] = []

    def restore(self, changes: Iterable[Change], last: int) -> None:
        """Begin with changes of an earlier incarnation, whose newest number was ``last``."""
        for change in changes:
            self._push(change)
        self.last = max(self.last, last)

    def publish(self, change: Change) -> None:
        """Add a numbered change."""
        self._push(change)
        self.last = change.seq
        self._tell(change)

    def notice(self, text: str, data: DaemonTrouble, level: Literal["info", "warn", "error"]) -> Change:
        """Add a notice of the shell; it is not durable and cannot be asked for by number."""
        change = Change(self.last, time.time(), data.kind, level, visible(text), (), data)
        self._push(change)
        self._tell(change)
        return change

    def cursor(self, since: int | None) -> Cursor:
        """A reader that begins after number ``since``; None: with the next change."""
        if since is None:
            return Cursor(self, self.position)
        position = self.position
        for index, change in reversed(self.ring):
            if change.seq <= since:
                break
            position = index
        return Cursor(self, position, since)

    def story(self, key: str) -> tuple[Change, ...]:
        """The kept changes that bear ``key``."""
        return tuple(change for _, change in self.ring if key in change.story)

    def close(self) -> None:
        """Wake every reader: nothing comes any more."""
        self.closed = True
        self.news.set()

    def _tell(self, change: Change) -> None:
        for listener in self.listeners:
            listener(change)

    def _push(self, change: Change) -> None:
        self.ring.append((self.position, change))
        self.position += 1
        self.news.set()
        self.news = asyncio.Event()


class Cursor:
    """One reader's place in a history."""

    def __init__(self, history: History, position: int, since: int | None = None) -> None:
        self._history = history
        self._position = position
        self._seen = history.last if since is None else since

    async def wait(self, timeout_s: float) -> bool:
        """Whether there is something to take within ``timeout_s``."""
        if self._position < self._history.position:
            return True
        if self._history.closed:
            return False
        try:
            await asyncio.wait_for(self._history.news.wait(), timeout_s)
        except TimeoutError:
            return False
        return not self._history.closed

    @property
    def behind(self) -> bool:
        """Whether something is there to take."""
        return self._position < self._history.position

    def take(self, most: int | None = None) -> Iterator[Change]:
        """What is new, in order and ``most`` at once, with a change of kind "gap" wherever numbers are
        missing.
        """
        ring, oldest = self._history.ring, self._history.position - len(self._history.ring)
        begin = max(0, self._position - oldest)
        end = len(ring) if most is None else min(len(ring), begin + most)
        new = [change for _, change in islice(ring, begin, end)]
        self._position = oldest + end
        for change in new:
            if change.seq > self._seen + 1 or change.seq < self._seen:
                yield _gap(change.seq - 1)
            self._seen = change.seq
            yield change
        if not self.behind and self._seen != self._history.last:
            # Numbers beyond the newest change kept, or a reader that comes from another state folder.
            self._seen = self._history.last
            yield _gap(self._seen)


def _gap(last_missing: int) -> Change:
    return Change(last_missing, time.time(), "gap", "warn", "changes were missed: fetch a snapshot", ())

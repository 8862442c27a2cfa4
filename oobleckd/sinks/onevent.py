"""What follows when something happens: a command, or a POST, as rules of the daemon's configuration say.

Owns one rule's way through the event stream, and the number of the last event that it has followed, which is
kept on disk: after a restart it goes on behind it, so what was under way is done once more and nothing is
left out. How a command is run and a URL called is ``delivery``'s.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from pathlib import Path

import msgspec

from oobleckd.client import Client
from oobleckd.host.durable import write_whole
from oobleckd.protocol.changes import Change
from oobleckd.protocol.sinks import EventRule, event_of
from oobleckd.sinks.delivery import deliver

_SEEN_EVERY = 1000  # events of no interest between two notes of where we are
_AGAIN_S = 10.0
_log = logging.getLogger(__name__)


class RuleFollower(threading.Thread):
    """Follows ``rule``, with its position in ``folder``."""

    def __init__(self, client: Client, rule: EventRule, folder: Path) -> None:
        super().__init__(name=f"on_event {', '.join(rule.events)}", daemon=True)
        self._client, self._rule = client, rule
        self._file = folder / f"{_name(rule)}.seq"
        self._stopping = threading.Event()
        self._noted = -1

    def stop(self) -> None:
        """Have it end after the try under way, from any thread."""
        self._stopping.set()

    def run(self) -> None:
        """Follow the stream, until ``stop``."""
        while not self._stopping.is_set():
            try:
                self._follow()
            except Exception:  # noqa: BLE001 - a thread's boundary: other rules, and this one later, go on
                _log.exception("on_event %s: again in %.0f s", ", ".join(self._rule.events), _AGAIN_S)
                self._stopping.wait(_AGAIN_S)

    def _follow(self) -> None:
        """A rule that is new begins with what happens from now on."""
        # Read and delivered by one thread: while a receiver is away the daemon's own memory of changes, which
        # is bounded, is the queue. (D-sinks-005)
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        with self._client.events(self._position()) as events:
            if events.last is not None:
                self._keep(events.last)
            for change in events:
                if self._stopping.is_set():
                    return
                self._take(change)

    def _take(self, change: Change) -> None:
        if change.kind == "gap":
            _log.warning("on_event: events up to number %d were missed", change.seq)
        event = event_of(change)
        if event in self._rule.events:
            if not deliver(self._rule, event, change, self._stopping) and self._stopping.is_set():
                return  # it is done in the next life
            self._keep(change.seq)
        elif change.seq >= self._noted + _SEEN_EVERY:
            self._keep(change.seq)

    def _position(self) -> int | None:
        try:
            return int(self._file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def _keep(self, seq: int) -> None:
        write_whole(self._file, b"%d\n" % seq)
        self._noted = seq


def _name(rule: EventRule) -> str:
    """A rule that is changed in what it does is another one."""
    what = msgspec.json.encode([rule.events, rule.command, rule.url])
    return hashlib.sha256(what).hexdigest()[:16]

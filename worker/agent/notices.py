"""Notices of clouds: who is asked whether this machine is about to be taken away, and how often.

Owns the poller, a thread of its own in which blocking questions may take their time, and the registry of
sources. A source is anything with ``poll_s`` and ``poll``; ``clouds`` has those of AWS, Google Cloud and
Azure, and packages can bring their own as an entry point of the group ``oobleckd.notices``: a callable
without arguments that makes one.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Protocol

from oobleckd.worker.agent import clouds

NONE = "none"
GROUP = "oobleckd.notices"
_log = logging.getLogger(__name__)


class NoticeSource(Protocol):
    """Where notices come from. ``poll_s``: seconds between two questions."""

    poll_s: float

    def poll(self) -> clouds.End | None:
        """Ask once; None while nothing is planned. Raises OSError, ValueError or HTTPException where there is
        no answer, or none that can be read.
        """


class UnknownSource(ValueError):
    """No source of that name; ``known`` are there."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"no source of notices is called {name!r}")
        self.known = known


def find_source(name: str) -> NoticeSource | None:
    """The source ``name``; None for "none". Raises UnknownSource."""
    if name == NONE:
        return None
    if name in clouds.SOURCES:
        return clouds.SOURCES[name]()
    brought = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in brought:
        raise UnknownSource(name, sorted({NONE, *clouds.SOURCES, *brought}))
    make: Callable[[], NoticeSource] = brought[name].load()
    return make()


class Poller:
    """Asks ``source`` until it has given one notice, in a thread; ``on_notice(reason, left_s)`` is called
    there.
    """

    def __init__(self, source: NoticeSource, on_notice: Callable[[str, float], None]) -> None:
        self._source, self._on_notice = source, on_notice
        self._closed, self._failing = threading.Event(), False
        threading.Thread(target=self._run, name="notices", daemon=True).start()

    def close(self) -> None:
        """Ask no more. A question under way is not waited for."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            end = self._ask()
            if end is not None:
                self._on_notice(end.reason, max(0.0, end.at - time.time()))
                return
            self._closed.wait(self._source.poll_s)

    def _ask(self) -> clouds.End | None:
        """Silent about an outage but for its beginning: it may be the service, and it may be the
        wrong cloud.
        """
        try:
            end = self._source.poll()
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._failing:
                _log.warning("notices cannot be asked for: %s; trying again", error)
            self._failing = True
            return None
        self._failing = False
        return end

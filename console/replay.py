"""A source of facts that are past: at a time of day from the daemon's history, or from a file.

Owns the place on the tape and the clock that moves it. What a moment is made of is ``past``'s; nothing here
knows whether somebody looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from oobleckd.client import Client
from oobleckd.console.bundle import read
from oobleckd.console.facts import AnyFact, Away, Unshown, Wants
from oobleckd.console.past import Walk
from oobleckd.protocol.watch import Past
from oobleckd.unixhttp import ClientError, Unreachable

# So much is fetched at once: little enough to be there at a keystroke, enough to play for a while.
SPAN_S = 60.0
TICK_S = 0.25
RETRY_S = 0.5  # for a daemon that is to come
Load = Callable[[float], Past]


class Replay:
    """The past from ``at`` on, as ``load`` has it, until ``close``. Every second of it can be sought."""

    def __init__(
        self,
        load: Load,
        deliver: Callable[[AnyFact], None],
        at: float,
        *,
        playing: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._deliver = deliver
        self._clock = clock
        self._lock = threading.Lock()
        self._kick = threading.Event()
        self._closed = False
        self._sought: float | None = at
        self._playing = playing
        self._walk: Walk | None = None

    @property
    def threads(self) -> tuple[Callable[[], None], ...]:
        """Playing."""
        return (self.run,)

    def want(self, wants: Wants) -> None:
        """What is not on the tape cannot be asked for."""

    def close(self) -> None:
        """The thread ends soon."""
        self._closed = True
        self._kick.set()

    def seek(self, at: float) -> None:
        """Show ``at``."""
        with self._lock:
            self._sought = at
        self._kick.set()

    def move(self, by_s: float) -> None:
        """Show so many seconds later, or earlier."""
        with self._lock:
            here = self._sought if self._sought is not None else self._walk.at if self._walk else None
        if here is not None:
            self.seek(here + by_s)

    def play(self) -> None:
        """Let time go on, or stand still."""
        self._playing = not self._playing
        with self._lock:
            if self._sought is None and self._walk is not None:
                self._sought = self._walk.at
        self._kick.set()

    def run(self) -> None:
        """Tell the moment that is sought, then what follows, until ``close``."""
        last = self._clock()
        while not self._closed:
            now = self._clock()
            self.tick(now - last)
            last = now
            self._kick.wait(self._rest_s())
            self._kick.clear()

    def _rest_s(self) -> float | None:
        with self._lock:
            waits = self._sought is not None
        return RETRY_S if waits else TICK_S if self._playing else None

    def tick(self, passed_s: float) -> None:
        """``passed_s`` seconds later: tell what is new, if anything."""
        with self._lock:
            sought, self._sought = self._sought, None
        if sought is not None:
            self._show(sought)
        elif self._playing and self._walk is not None:
            self._play(self._walk, passed_s)

    def _show(self, at: float) -> None:
        walk = self._walk
        if walk is None or not walk.holds(at):
            try:
                past = self._load(at)
            except ClientError as error:
                self._refuse(at, error)
                return
            walk = self._walk = Walk(past, past.snapshot.at)
        at = min(max(at, walk.past.snapshot.at), walk.past.until)
        self._deliver(walk.begin(at, self._playing))

    def _refuse(self, at: float, error: ClientError) -> None:
        """Say why ``at`` is not shown; where nobody is there to ask it is sought again, unless something else
        is by now.
        """
        said = f"the past cannot be shown: {error.problem}"
        if not isinstance(error, Unreachable):
            self._deliver(Unshown(at, said, error.hint))
            return
        self._deliver(Away(at, said, error.hint))
        with self._lock:
            if self._sought is None:
                self._sought = at

    def _play(self, walk: Walk, passed_s: float) -> None:
        at = walk.at + passed_s
        if at <= walk.past.until:
            if walk.seen(at) is None:
                self._deliver(walk.onward(at, self._playing))
            else:
                self._deliver(walk.begin(at, self._playing))
        elif walk.at < walk.past.until:
            self._deliver(walk.onward(walk.past.until, self._playing))
        else:
            self._follow(walk, at)

    def _follow(self, walk: Walk, at: float) -> None:
        """The end of what was loaded: there may be more by now."""
        end = walk.past.until
        try:
            past = self._load(at)
        except ClientError:
            past = walk.past
        if past.until > end:
            self._walk = Walk(past, past.snapshot.at)
            self._deliver(self._walk.begin(min(at, past.until), self._playing))
        else:
            self._playing = False
            self._deliver(walk.onward(end, self._playing))


def of_daemon(client: Client) -> Load:
    """The daemon's own history."""
    return lambda at: client.past(at, SPAN_S)


def of_file(path: Path) -> tuple[Load, float]:
    """A bundle, and the moment at which its incident began. Raises BundleError."""
    bundle = read(path)
    return (lambda _at: bundle.past), bundle.incident.at

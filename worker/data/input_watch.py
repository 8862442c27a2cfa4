"""Watches what a device reads: looks once a second whether it changed, and reads all of it once for every
checkpoint.

Owns when one looks, the thread of lower priority that does it, and what it has found. The files are
``inputs``'; what follows is ``reading``'s. A file that is written to by the ordinary ways shows by its times
and size at the next look. Who writes through a map of it may show late or not at all, and times can be put
back: so all bytes are read again after every checkpoint, in pieces with pauses, so that training goes first.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from oobleckd.protocol.inputs import Input, same
from oobleckd.protocol.parts import Counters
from oobleckd.worker.data.inputs import Opened, Signature, signature_at
from oobleckd.worker.runtime.errors import ends_the_process

LOOK_S = 1.0
_PAUSE = 3.0
"""Times what reading a piece took: a quarter of a core, at most, and that only where nobody else wants it."""
_NICER_BY = 15


@dataclass(frozen=True, slots=True)
class Checked:
    """All bytes were read, from after what led to ``counters``: they are what they were. ``part``: the
    identity, with the digest of all.
    """

    counters: Counters
    part: Input


@dataclass(frozen=True, slots=True)
class Changed:
    """The bytes are others than when it was opened."""

    what: str


@dataclass(frozen=True, slots=True)
class Moved:
    """Another file lies at ``path``, or none; "back": the same bytes lie there again."""

    path: str
    now: Literal["other", "gone", "back"]


Finding = Checked | Changed | Moved


class Eyes:
    """What one look sees, and what all bytes say. No thread and no clock. ``suspect``: something has changed
    since all was read.
    """

    def __init__(self, inputs: Opened) -> None:
        self.inputs, self.suspect = inputs, False
        self._there: tuple[Signature | None, ...] = ()
        self._said: Literal["other", "gone", "back"] = "back"

    def look(self) -> Moved | None:
        """A stat of each file and of its path."""
        inputs = self.inputs
        seen = inputs.stat()
        if seen != inputs.seen:
            inputs.seen, self.suspect = seen, True
        return self._look_at_paths(seen) if inputs.watched else None

    def verify(self, between: Callable[[], object] = lambda: None) -> Changed | None:
        """Read all bytes. ``between``: called after each piece; may raise."""
        self.suspect = False
        inputs = self.inputs
        if not inputs.handles:
            return None
        # Times can be put back, and who writes through a map shows late, so a look at them proves nothing:
        # a checkpoint is good for going back to once all bytes were read again after it. (D-data-005)
        whole = inputs.digest(between)
        if inputs.part.whole:
            wrong = whole != inputs.part.whole
        else:  # the first time: since it was opened, nothing may have happened that its blocks show
            wrong = inputs.quick().blocks != inputs.part.blocks
        if wrong:
            return Changed(self._words())
        inputs.part = msgspec.structs.replace(inputs.part, whole=whole)
        return None

    def _words(self) -> str:
        inputs = self.inputs
        where = ", ".join(map(str, inputs.paths[:3]))
        sizes = sum(each.size for each in inputs.stat()), sum(inputs.sizes)
        how = f"{sizes[0]:,} bytes, and it had {sizes[1]:,}" if sizes[0] != sizes[1] else "its bytes differ"
        return f"{where} was written to in place: {how}"

    def _look_at_paths(self, seen: tuple[Signature, ...]) -> Moved | None:
        there = tuple(signature_at(path) for path in self.inputs.paths)
        if there == self._there or self.suspect:
            return None  # nothing new, or first what is open is to be read
        self._there = there
        now, path = self._now(there, seen)
        if now == self._said:
            return None
        self._said = now
        return Moved(str(path), now)

    def _now(
        self, there: tuple[Signature | None, ...], seen: tuple[Signature, ...]
    ) -> tuple[Literal["other", "gone", "back"], Path]:
        inputs = self.inputs
        for path, found in zip(inputs.paths, there, strict=True):
            if found is None:
                return "gone", path
        ours = [(each.device, each.inode, size) for each, size in zip(seen, inputs.sizes, strict=True)]
        if ours == [each[:3] for each in there if each is not None]:
            return "back", inputs.paths[0]
        try:
            with_other = inputs.again()
        except OSError:
            return "gone", inputs.paths[0]
        return ("back" if same(with_other.part, inputs.part) else "other"), inputs.paths[0]


class InputWatch:
    """Looks at ``inputs`` in a thread of its own; calls ``wake`` when there is something to ``hear``."""

    def __init__(self, inputs: Opened, wake: Callable[[], None]) -> None:
        self._eyes, self._wake = Eyes(inputs), wake
        self._lock, self._ask = threading.Lock(), threading.Event()
        self._found: list[Finding] = []
        self._wanted: Counters | None = None
        self._hurry = self._resting = self._stopped = False
        self._looked = time.monotonic()
        threading.Thread(target=self._run, name="input-watch", daemon=True).start()

    @property
    def inputs(self) -> Opened:
        """What is looked at."""
        return self._eyes.inputs

    def check(self, counters: Counters, *, hurry: bool = False) -> None:
        """Have all bytes read once, from now on: what led to ``counters`` has been read by now. ``hurry``:
        nobody trains meanwhile.
        """
        with self._lock:
            self._wanted, self._hurry, self._resting = counters, hurry, False
        self._ask.set()

    def go_on(self) -> None:
        """Look again once a second."""
        self._resting = self._hurry = False
        self._ask.set()

    def rest(self) -> None:
        """Nobody reads from it for now: what was asked for is still done, and nothing is looked at after
        that.
        """
        self._hurry = self._resting = True

    def stop(self) -> None:
        """End the thread: nobody reads from it any more."""
        self._stopped = True
        self._ask.set()

    def hear(self) -> list[Finding]:
        """Take what was found since it was last asked."""
        if not self._found:
            return []
        with self._lock:
            found, self._found = self._found, []
        return found

    def _run(self) -> None:
        with ends_the_process(), suppress(_Stopped):
            _be_nice()
            while not self._stopped:
                self._ask.wait(None if self._resting and self._wanted is None else LOOK_S)
                self._ask.clear()
                self._turn()

    def _turn(self) -> None:
        self._look()
        with self._lock:
            wanted, self._wanted = self._wanted, None
        if wanted is None and not self._eyes.suspect:
            return
        changed = self._eyes.verify(self._pauses())
        if changed is not None:
            self._say(changed)
            raise _Stopped
        if wanted is not None:
            self._say(Checked(wanted, self.inputs.part))
        self._look()

    def _look(self) -> None:
        self._looked = time.monotonic()
        try:
            moved = self._eyes.look()
        except OSError:  # a file system that is away: the pages that are mapped tell by themselves
            return
        if moved is not None:
            self._say(moved)

    def _pauses(self) -> Callable[[], None]:
        """Between two pieces: let others have the processor, and look."""
        began = time.monotonic()

        def between() -> None:
            nonlocal began
            if self._stopped:
                raise _Stopped
            now = time.monotonic()
            if not self._hurry:
                time.sleep(_PAUSE * (now - began))
            if now - self._looked >= LOOK_S:
                self._look()
            began = time.monotonic()

        return between

    def _say(self, finding: Finding) -> None:
        with self._lock:
            self._found.append(finding)
        self._wake()


class _Stopped(Exception):
    """Raised in the thread: nobody wants to know any more."""


def _be_nice() -> None:
    thread = threading.get_native_id()
    with suppress(OSError):  # a sandbox may forbid it
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER_BY))

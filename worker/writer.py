"""Who writes a device's share of a checkpoint: a thread beside training, or the caller itself.

Owns the order of shares, and that a part is told when it is durable and not before. A share that is given up leaves nothing, and
nobody hears of it. What is written is ``snapshot``'s, the files are ``checkpoint``'s.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from oobleckd.protocol.messages import FromWorker
from worker.errors import UserError, ends_the_process
from worker.faults import Faults
from worker.snapshot import Share, write_share

_NICER_BY = 10
Tell = Callable[[FromWorker], None]


class Writer(Protocol):
    """Writes shares, one after the other."""

    @property
    def busy(self) -> bool:
        """Whether one is being written."""

    @property
    def blocks(self) -> bool:
        """Whether one is that is no copy: the device must not go on."""

    def begin(self, share: Share) -> None:
        """Write ``share``, after those before it. May raise UserError when the disk refuses."""

    def check(self) -> None:
        """Raise the UserError that writing has met meanwhile, if any."""

    def abandon(self) -> None:
        """Nobody wants what is not written yet."""


class Inline:
    """Writes at once, in the caller's thread."""

    busy = blocks = False

    def __init__(self, tell: Tell, faults: Faults) -> None:
        self._tell, self._faults = tell, faults

    def begin(self, share: Share) -> None:
        """Write ``share``. Raises UserError when the disk refuses."""
        _write(share, self._tell, self._faults)

    def check(self) -> None:
        """Nothing is met meanwhile."""

    def abandon(self) -> None:
        """Nothing is left to be written."""


class Abandoned(Exception):
    """Raised in the thread that writes: nobody wants it any more."""


class Beside:
    """Writes in a thread of lower priority, and calls ``wake`` when a share is done."""

    def __init__(self, tell: Tell, faults: Faults, wake: Callable[[], None]) -> None:
        self._tell, self._faults, self._wake = tell, faults, wake
        self._lock = threading.Lock()
        self._shares: deque[Share] = deque()  # the first is being written
        self._running = self._abandoned = False
        self._error: UserError | None = None

    @property
    def busy(self) -> bool:
        """Whether a share is being written."""
        return bool(self._shares)

    @property
    def blocks(self) -> bool:
        """Whether one of them is no copy."""
        if not self._shares:
            return False
        with self._lock:
            return not all(share.copied for share in self._shares)

    def begin(self, share: Share) -> None:
        """Write ``share`` after those that were begun before."""
        with self._lock:
            self._shares.append(share)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="checkpoint-writer", daemon=True).start()

    def check(self) -> None:
        """Raise what the thread has met."""
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Stop in the middle of the file that is being written, at the latest."""
        self._abandoned = True

    def _run(self) -> None:
        with ends_the_process("checkpoint"):
            _be_nice()
            while (share := self._next()) is not None:
                try:
                    _write(share, self._say, self._faults, self._go_on)
                except Abandoned:
                    return
                except UserError as error:
                    if self._abandoned:
                        return
                    self._error = error
                with self._lock:
                    self._shares.popleft()
                self._wake()

    def _next(self) -> Share | None:
        with self._lock:
            self._running = bool(self._shares)
            return self._shares[0] if self._shares else None

    def _go_on(self) -> None:
        if self._abandoned:
            raise Abandoned

    def _say(self, message: FromWorker) -> None:
        self._go_on()
        self._tell(message)


def _write(share: Share, tell: Tell, faults: Faults, go_on: Callable[[], None] = lambda: None) -> None:
    def halfway() -> None:
        go_on()
        faults.reach("checkpoint-write", share.counters.round)

    for part in write_share(share, halfway):
        faults.reach("checkpoint", share.counters.round)
        tell(part)


def _be_nice() -> None:
    """Those that train go first."""
    thread = threading.get_native_id()
    with suppress(OSError):  # a sandbox may forbid it
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER_BY))

"""Writes a device's share of a checkpoint: in a thread beside training, or in the caller's.

Owns the order of shares, that a part is told when it is durable and not before, and what follows where the
disk does not take one: training goes on, and the last one of a job, which is its result, is tried again until
it does. A share that is given up leaves nothing, and nobody hears of it. What is written is ``snapshot``'s,
the files are ``bucket_files``'.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from oobleckd.host.checkpoint import room
from oobleckd.protocol.checkpointmessages import CheckpointFailed
from oobleckd.protocol.messages import FromWorker
from oobleckd.worker.checkpointing.snapshot import Share, write_share
from oobleckd.worker.runtime.errors import ends_the_process
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.state.bucket_files import CannotWrite

_NICER_BY = 10
_AGAIN_S = (0.5, 1.0, 2.0, 5.0)  # between tries of the last one
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
        """Write ``share``, after those before it. May raise CannotWrite when the disk refuses."""

    def abandon(self) -> None:
        """Give up what is not written yet: nobody wants it."""


class InlineWriter:
    """Writes at once, in the caller's thread."""

    busy = blocks = False

    def __init__(self, tell: Tell, faults: Faults) -> None:
        self._tell, self._faults = tell, faults

    def begin(self, share: Share) -> None:
        """Write ``share``. Raises CannotWrite when the disk refuses."""
        _write(share, self._tell, self._faults)

    def abandon(self) -> None:
        """Nothing is left to be written."""


class Abandoned(Exception):
    """Raised in the thread that writes: nobody wants it any more."""


class BackgroundWriter:
    """Writes in a thread of lower priority, and calls ``wake`` when a share is done."""

    def __init__(self, tell: Tell, faults: Faults, wake: Callable[[], None]) -> None:
        self._tell, self._faults, self._wake = tell, faults, wake
        self._lock = threading.Lock()
        self._shares: deque[Share] = deque()  # the first is being written
        self._running = False
        self._abandoned = threading.Event()

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

    def abandon(self) -> None:
        """Stop in the middle of the file that is being written, at the latest."""
        self._abandoned.set()

    def _run(self) -> None:
        with ends_the_process("checkpoint"):
            _be_nice()
            while (share := self._next()) is not None:
                try:
                    self._write(share)
                except Abandoned:
                    return
                with self._lock:
                    self._shares.popleft()
                self._wake()

    def _write(self, share: Share) -> None:
        """Once; the last one until the disk takes it, going on from the files that are there. Whoever makes
        room need not know of us.
        """
        said, done = "", set[int]()
        # At the end all hold and the state does not change, so nobody need agree on anything and the device
        # tries again by itself. Elsewhere a try is a boundary, which all must begin alike.
        # (D-checkpoints-018)
        for again_s in itertools.chain(_AGAIN_S, itertools.repeat(_AGAIN_S[-1])):
            self._go_on()
            if done and not share.directory.exists():
                done.clear()
            try:
                _write(share, self._say, self._faults, self._go_on, done)
            except CannotWrite as error:
                if error.problem != said:
                    self._say(_failed(share, error))
                    said = error.problem
                if not share.last:
                    return
            else:
                return
            self._abandoned.wait(again_s)

    def _next(self) -> Share | None:
        with self._lock:
            self._running = bool(self._shares)
            return self._shares[0] if self._shares else None

    def _go_on(self) -> None:
        if self._abandoned.is_set():
            raise Abandoned

    def _say(self, message: FromWorker) -> None:
        self._go_on()
        self._tell(message)


def _write(
    share: Share,
    tell: Tell,
    faults: Faults,
    go_on: Callable[[], None] = lambda: None,
    done: set[int] | None = None,
) -> None:
    """``done``: buckets that need not be written, and those that have been."""
    done = set() if done is None else done

    def halfway() -> None:
        go_on()
        faults.reach("checkpoint-write", share.counters.round)

    for part in write_share(share, halfway, frozenset(done)):
        faults.reach("checkpoint", share.counters.round)
        # A part is told when it is durable and not before: the manifest is made of what was told.
        done.add(part.bucket)
        tell(part)


def _failed(share: Share, error: CannotWrite) -> CheckpointFailed:
    free_bytes = -1
    with suppress(OSError):
        free_bytes, _ = room(share.directory)
    return CheckpointFailed(
        share.device, share.job_id, share.counters, str(share.directory), error.problem, share.num_bytes,
        free_bytes, share.last, error.errno,
    )  # fmt: skip


def _be_nice() -> None:
    """Those that train go first."""
    thread = threading.get_native_id()
    with suppress(OSError):  # a sandbox may forbid it
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER_BY))

"""Has the data of a job prepared, as the daemon tells, and passes on what is said of that.

Owns what is begun and ended, and the last word, which is said again to a daemon that may not have heard it.
Pure: the process that does it is ``preparer``'s, what follows of its end the daemon's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from oobleckd.protocol.datamessages import PrepareData, PrepareDone, PrepareFailed, Preparing

Word = Preparing | PrepareDone | PrepareFailed


class Begin(Protocol):
    """Begins to prepare, and returns what ends that. ``heard`` is called with each word of it, ``ended`` with
    how it ended by itself, for people. Raises OSError.
    """

    def __call__(
        self, order: PrepareData, heard: Callable[[Word], None], ended: Callable[[str], None]
    ) -> Callable[[], None]:
        """Begin."""


@dataclass(slots=True, eq=False)
class _Work:
    """``order``, the last word of it, and what ends it (None: it has ended)."""

    order: PrepareData
    last: Word
    end: Callable[[], None] | None = None


class Preparations:
    """Of one agent: one at a time. ``say`` tells the daemon."""

    def __init__(self, begin: Begin, say: Callable[[Word], None]) -> None:
        self._begin, self._say = begin, say
        self._work: _Work | None = None

    @property
    def job(self) -> str:
        """Whose data is being prepared; "" where none is."""
        return self._work.order.job if self._work is not None and self._work.end is not None else ""

    def prepare(self, order: PrepareData) -> None:
        """Begin, or say again how far that is; anew where it had failed under another order."""
        work = self._work
        if (
            work is None
            or work.order.job != order.job
            or (isinstance(work.last, PrepareFailed) and work.order.order != order.order)
        ):
            self._end()
            self._start(order)
        else:
            work.order = order
        self.say_again()

    def stop(self, job: str) -> None:
        """The data of ``job`` need not be prepared, or all is known that came of it."""
        if self._work is not None and self._work.order.job == job:
            self._end()

    def say_again(self) -> None:
        """The last word, if there is one."""
        if (work := self._work) is not None:
            self._say(msgspec.structs.replace(work.last, order=work.order.order))

    def close(self) -> None:
        """No more."""
        self._end()

    def _start(self, order: PrepareData) -> None:
        work = self._work = _Work(order, Preparing(order.job))
        try:
            work.end = self._begin(order, partial(self._heard, work), partial(self._ended, work))
        except OSError as error:
            work.last = _died(order, f"cannot be started: {error.strerror}")

    def _end(self) -> None:
        work, self._work = self._work, None
        if work is not None and work.end is not None:
            work.end()

    def _heard(self, work: _Work, word: Word) -> None:
        if work is self._work:
            work.last = word
            self.say_again()

    def _ended(self, work: _Work, how: str) -> None:
        work.end = None
        if work is self._work and isinstance(work.last, Preparing):
            work.last = _died(work.order, f"ended {how}")
            self.say_again()


def _died(order: PrepareData, what: str) -> PrepareFailed:
    error, hint = f"the process that prepares data {what}", "the log of that worker has more"
    return PrepareFailed(order.job, error, hint, died=True)

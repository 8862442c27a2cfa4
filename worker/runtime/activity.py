"""What a device process is doing right now, in a page of memory that it shares with its agent.

Owns the page. The device writes a few words at the start and the end of each piece of work (a microsecond, no
system call); the agent reads them even when the device can do nothing any more: its interpreter locked, its
process stopped. What a reading means is ``watchdog``'s. Never imports torch: the agent reads here.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import time
from dataclasses import dataclass
from types import TracebackType

LOOK_UP_S = 0.25
"""How often a device that waits shows that it still could work."""

_FACTOR = 10  # times the longest of its kind: far outside of what load and clocks do
_MIN_S = 2.0  # shorter work is not judged: a page fault on a busy disk takes as long
_LOOSE_S = 60.0  # the same for work whose size differs from one time to the next
_UNKNOWN_S = 600.0  # for the first of its kind
# Minutes where nothing of it is kept yet, and a second where all is, in the same process: no time of one says
# anything of the next. (D-compile-006)
_ANY_LENGTH = {"compile": 3600.0}
_PAGE = struct.Struct("<Qqqq48s")  # sequence (odd: being written), since, longest, limit (ns), what
_NAME_BYTES = 48
_TRIES = 8
_PHASES = {
    "F": "forward", "S": "forward", "E": "forward", "B": "backward", "I": "backward", "W": "backward",
    "U": "update", "R": "reduce", "check": "reduce",
    "Measure": "measure", "Deploy": "deploy", "PreCopy": "copy", "stage": "copy",
    "compile": "compile",
}  # fmt: skip
_TASK = re.compile(r"\d+([A-Z])\d+")  # as ``passes`` names its work


@dataclass(frozen=True, slots=True)
class ActivityReading:
    """``what`` has been under way since ``since_s`` (monotonic clock of this host; "" for waiting).

    ``longest_s``: the longest such work took so far in this process, 0 if there was none. ``limit_s``: what
    takes longer than this is no work any more.
    """

    what: str
    since_s: float
    longest_s: float
    limit_s: float


def phase_of(work: str) -> str:
    """What a device was at, in one word, from the kind of its work, or its name, in the ``activity``."""
    task = _TASK.fullmatch(work)
    kind = task[1] if task else work
    return _PHASES.get(kind, kind.lower() or "waiting")


class ActivityPage:
    """The device's side. ``fd``: the page, from the agent; -1 for a page of one's own that nobody reads."""

    def __init__(self, fd: int = -1) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE)
        self._sequence = 0
        # Kind -> seconds of one unit. The first one prepares much besides, up to a hundred times the rest.
        self._first_s: dict[str, float] = {}
        self._longest_s: dict[str, float] = {}
        self._under_way: list[tuple[int, float, float, bytes]] = []
        self._failed: tuple[int, str] = (0, "")  # id of an error, and the innermost work that it ended

    def wait(self) -> None:
        """The device waits for others, and could work if there were something to do."""
        self._write(time.monotonic_ns(), LOOK_UP_S, max(_MIN_S, _FACTOR * LOOK_UP_S), b"")

    def doing(self, kind: str, what: str = "", units: int = 1) -> _Doing:
        """Work of ``kind``, named ``what`` for people. Its time grows with ``units``; 0: with nothing known
        here.

        Work inside of work counts for itself: the outer one begins anew when the inner one ends.
        """
        return _Doing(self, kind, what or kind, units)

    def begin(self, kind: str, what: str, units: int) -> None:
        """Such work begins."""
        longest_s, limit_s = self._known(kind, units)
        now = (time.monotonic_ns(), longest_s, limit_s, what.encode()[:_NAME_BYTES])
        self._under_way.append(now)
        self._write(*now)

    def _known(self, kind: str, units: int) -> tuple[float, float]:
        """The longest of its kind after the first one, and the limit that follows (s)."""
        if kind in _ANY_LENGTH:
            return 0.0, _ANY_LENGTH[kind]
        longest_s = (self._longest_s.get(kind) or self._first_s.get(kind, 0.0)) * (units or 1)
        min_s = (_MIN_S if units else _LOOSE_S) if longest_s else _UNKNOWN_S
        return longest_s, max(min_s, _FACTOR * longest_s)

    def end(self, kind: str, units: int) -> None:
        """The work that began last is over."""
        now_ns = time.monotonic_ns()
        began_ns = self._under_way.pop()[0]
        took_s = (now_ns - began_ns) / 1e9 / (units or 1)
        # The first of its kind loads kernels and imports, 0.8 s for a backward of 15 ms, and a hang waited
        # for ten times that. So it counts only until there is a second. (D-detection-002)
        if kind in self._first_s:
            self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), took_s)
        else:
            self._first_s[kind] = took_s
        if self._under_way:
            self._under_way[-1] = (now_ns, *self._under_way[-1][1:])
            self._write(*self._under_way[-1])
        else:
            self.wait()

    def fails(self, kind: str, error: BaseException) -> None:
        """The work that began last ends with ``error``."""
        if self._failed[0] != id(error):
            self._failed = (id(error), kind)

    def failed_in(self, error: BaseException) -> str:
        """The kind of the innermost work that ``error`` ended, which was the last to; "" where it
        ended none.
        """
        return self._failed[1] if self._failed[0] == id(error) else ""

    def _write(self, since_ns: int, longest_s: float, limit_s: float, what: bytes) -> None:
        times = (since_ns, int(longest_s * 1e9), int(limit_s * 1e9))
        _PAGE.pack_into(self._page, 0, self._sequence + 1, *times, what)
        self._sequence += 2
        struct.pack_into("<Q", self._page, 0, self._sequence)


class _Doing:
    """``ActivityPage.doing``. A class: a generator's machinery takes longer than the rest, twice in every
    task.
    """

    __slots__ = ("_activity", "_kind", "_units", "_what")

    def __init__(self, activity: ActivityPage, kind: str, what: str, units: int) -> None:
        self._activity, self._kind, self._what, self._units = activity, kind, what, units

    def __enter__(self) -> None:
        self._activity.begin(self._kind, self._what, self._units)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._activity.fails(self._kind, error)
        self._activity.end(self._kind, self._units)


class ActivityReader:
    """The agent's side: makes the page (``fd`` goes to the device) and reads it. Raises OSError."""

    __slots__ = ("_page", "fd")

    def __init__(self) -> None:
        self.fd = os.memfd_create("activity page")
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._page = mmap.mmap(self.fd, mmap.PAGESIZE)

    def read(self) -> ActivityReading | None:
        """What the device does now; None before its first word, or when it was caught writing."""
        for _ in range(_TRIES):
            sequence, since_ns, longest_ns, limit_ns, what = _PAGE.unpack_from(self._page)
            if not sequence:
                return None
            if sequence % 2 == 0 and sequence == struct.unpack_from("<Q", self._page)[0]:
                name = what.rstrip(b"\0").decode(errors="replace")
                return ActivityReading(name, since_ns / 1e9, longest_ns / 1e9, limit_ns / 1e9)
        return None

    def close(self) -> None:
        """Unmap and close."""
        self._page.close()
        os.close(self.fd)

"""Tells a device process that hangs from one that works long, waits for others, or gets no processor time.

Owns the judgement over one process, from its activity page, the kernel's account of it, and the time. Nobody
sets a time-out: a piece of work is compared with the longest of its kind in this very process (``activity``).
Ends nothing: that is the agent's. Four things are left out of the count: time in which the agent itself did
not look, time in which the process was ready to run and got no processor, time in which it was stopped, and a
debugger that holds the process. Who is stopped, by a signal or with its cgroup, is told from who hangs: it
can go on as if nothing had been.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from oobleckd.words import seconds
from oobleckd.worker.runtime.activity import LOOK_UP_S, ActivityReader, ActivityReading

LOOK_EVERY_S = 0.1
_MAX_CREDIT_S = 2 * LOOK_EVERY_S  # what one look may add: more means that we did not look
_STOPPED_S = 1.0  # a stopped process does not go on by itself; long enough for a shell's fg


class ProcessAccount:
    """What the kernel says of a process' main thread. Raises OSError when there is no such process."""

    __slots__ = ("_delay_fd", "_stat_fd")

    def __init__(self, pid: int) -> None:
        thread = Path(f"/proc/{pid}/task/{pid}")
        self._stat_fd = os.open(thread / "stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._delay_fd = os.open(thread / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._delay_fd = -1  # a kernel without that account: load then counts against the device

    def state(self) -> str:
        """One letter: R running, S sleeping, T stopped by a signal, t held by a debugger; "" when
        it is gone.
        """
        try:
            stat = os.pread(self._stat_fd, 1024, 0)
        except ProcessLookupError:
            return ""
        return stat[stat.rindex(b")") + 2 :][:1].decode()

    def delay_s(self) -> float:
        """For how long in all it was ready to run and got no processor."""
        if self._delay_fd < 0:
            return 0.0
        try:
            return int(os.pread(self._delay_fd, 128, 0).split()[1]) / 1e9
        except (ProcessLookupError, IndexError):
            return 0.0

    def close(self) -> None:
        """Close the files."""
        os.close(self._stat_fd)
        if self._delay_fd >= 0:
            os.close(self._delay_fd)


@dataclass(slots=True)
class Suspicion:
    """How long the present piece of work took as far as it counts, and how long the process was stopped.

    ``stopped``: the last verdict was that it is, rather than that it hangs. ``frozen``: with its cgroup, as
    somebody else has seen.
    """

    since_s: float = -1.0
    counted_s: float = 0.0
    delay_s: float = 0.0
    stopped_s: float = 0.0
    looked_s: float = -1.0
    stopped: bool = False
    frozen: bool = False

    def look(self, now_s: float, reading: ActivityReading | None, state: str, delay_s: float) -> str:
        """Why the process hangs, for people; "" if nothing says that it does.

        Without a reading (before the first word, or stopped in the middle of one) the kernel's account is
        all.
        """
        credit_s = min(now_s - self.looked_s, _MAX_CREDIT_S) if self.looked_s >= 0 else 0.0
        self.looked_s = now_s
        self.stopped_s = self.stopped_s + credit_s if state == "T" or self.frozen else 0.0
        self.stopped = self.stopped_s >= _STOPPED_S
        if self.stopped:
            how = "stopped with its cgroup, which is frozen," if self.frozen else "stopped by a signal"
            return f"hung{_where(reading)}: {how} for {seconds(self.stopped_s)}"
        if reading is None:
            return ""
        if reading.since_s != self.since_s:
            self.since_s, self.delay_s = reading.since_s, delay_s
            self.counted_s = min(max(0.0, now_s - reading.since_s), credit_s)
        elif state not in {"t", "T"}:
            self.counted_s += credit_s
        return self._too_long(reading, self.counted_s - (delay_s - self.delay_s))

    def freezes(self) -> None:
        """What looked like a hang is a frozen cgroup: the time that counted was that of a stop."""
        self.frozen, self.stopped_s, self.counted_s = True, max(self.counted_s, _STOPPED_S), 0.0

    def thaws(self) -> None:
        """The cgroup goes on."""
        self.frozen, self.stopped_s = False, 0.0

    @staticmethod
    def _too_long(reading: ActivityReading, took_s: float) -> str:
        if took_s < reading.limit_s:
            return ""
        if reading.what:
            known = (
                f"measured: {seconds(reading.longest_s)} at most"
                if reading.longest_s
                else "the first of its kind"
            )
            return f"hung{_where(reading)} for {seconds(took_s)} ({known})"
        return (
            f"hung: gave no sign for {seconds(took_s)} while waiting (it does so every {seconds(LOOK_UP_S)})"
        )


def _where(reading: ActivityReading | None) -> str:
    return f" in {reading.what}" if reading is not None and reading.what else ""


class Watchdog:
    """The watchdog of one device process."""

    __slots__ = ("_account", "_activity", "_pid", "_suspicion")

    def __init__(self, pid: int, activity: ActivityReader) -> None:
        self._pid = pid
        self._account = ProcessAccount(pid)
        self._activity = activity
        self._suspicion = Suspicion()

    def reading(self) -> ActivityReading | None:
        """What the process does, or did last."""
        return self._activity.read()

    def look(self, now_s: float) -> str:
        """Why the process hangs or is stopped; "" if nothing says that it does. Call it every
        ``LOOK_EVERY_S``.
        """
        suspicion = self._suspicion
        if suspicion.frozen and not is_frozen(self._pid):
            suspicion.thaws()
        seen = self._activity.read(), self._account.state(), self._account.delay_s()
        verdict = suspicion.look(now_s, *seen)
        if verdict and not suspicion.stopped and is_frozen(self._pid):
            suspicion.freezes()
            verdict = suspicion.look(now_s, *seen)
        return verdict

    @property
    def stopped_s(self) -> float:
        """For how long it has been stopped, at the last look; 0 where it runs, or hangs."""
        return self._suspicion.stopped_s if self._suspicion.stopped else 0.0

    def close(self) -> None:
        """Close what belongs to it, the page too."""
        self._account.close()
        self._activity.close()


def is_frozen(pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether a cgroup of the process is frozen (of either version; its state does not tell). False where the
    kernel does not say.
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers in {"", "freezer"}:
            folder = cgroups / controllers / place.lstrip("/")
            with suppress(OSError):
                if controllers:
                    return (folder / "freezer.state").read_text(encoding="ascii").startswith("FR")
                return "frozen 1" in (folder / "cgroup.events").read_text(encoding="ascii").splitlines()
    return False

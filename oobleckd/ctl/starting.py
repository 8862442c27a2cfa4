"""Waits for programs of a local cluster that were just started, and says why where that is no use.

Owns when waiting ends: a program ends, devices die alike, or the time is over; and what is said then: the
last words of who it was. Who starts what is ``cluster``'s.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from oobleckd.ctl import processes
from oobleckd.ctl.local import DAEMON, Home
from oobleckd.ctl.output import fail
from oobleckd.ctl.processes import ClusterProcess
from oobleckd.host.starts import FailedStart, failed_starts, forget_failed, repeated
from oobleckd.words import seconds

_LOOK_EVERY_S = 0.05
_MOST_BYTES = 64 * 1024  # of the end of a log
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d[ T]")  # how an entry begins; what a device prints itself does not


@dataclass(slots=True)
class Starting:
    """What was started in ``home``, and is waited for."""

    home: Home
    programs: dict[str, ClusterProcess] = field(default_factory=dict)
    _logged: dict[str, int] = field(default_factory=dict)  # bytes in its log before

    def begin(self, name: str, start: Callable[[], ClusterProcess]) -> ClusterProcess:
        """Start the program ``name``."""
        log = self.home.log(name)
        self._logged[name] = log.stat().st_size if log.exists() else 0
        forget_failed(self.home.run / name)  # of a life before this one
        self.programs[name] = start()
        return self.programs[name]

    def wait(self, missing: Callable[[], Collection[str]], timeout_s: float, problem: str) -> None:
        """Wait until nobody is ``missing``. A program that ends meanwhile, devices that die alike, or the
        deadline, end the command.
        """
        deadline = time.monotonic() + timeout_s
        while late := missing():
            self._check_programs()
            # One death may be chance, and an agent tries again for ever. (D-devices-021)
            failed = {name: failed_starts(self.home.run / name) for name in self.programs if name != DAEMON}
            if (again := repeated(start for starts in failed.values() for start in starts)) is not None:
                self._give_up(next(name for name, starts in failed.items() if again in starts), again)
            if time.monotonic() >= deadline:
                last, hint = last_words(self.home.log(name := min(late)), self._logged[name])
                fail(f"{problem} within {seconds(timeout_s)} ({name}: {last})", self._hint(name, hint))
            time.sleep(_LOOK_EVERY_S)

    def _check_programs(self) -> None:
        for name, process in self.programs.items():
            if not processes.is_alive(process):
                problem, hint = last_words(self.home.log(name), self._logged[name])
                fail(f"{name} ended at its start: {problem}", self._hint(name, hint))

    def _give_up(self, name: str, again: FailedStart) -> None:
        words = again.words
        if not again.said and (printed := _printed(self.home.log(name), self._logged[name])):
            words = f"{words}, after it had printed: {printed}"
        fail(f"{again.device} cannot start, it died alike before: {words}", self._hint(name, again.hint))

    def _hint(self, name: str, hint: str) -> str:
        return f"{hint and f'{hint}; '}its log: {self.home.log(name)}"


def last_words(log: Path, since: int = 0) -> tuple[str, str]:
    """The last error in a log behind its first ``since`` bytes, or else its last line, and the hint with the
    error.
    """
    said = _lines(log, since)
    errors = [index for index, line in enumerate(said) if line.lower().startswith("error: ")]
    if not errors:
        return (said or ["it said nothing"])[-1], ""
    after = said[errors[-1] + 1 : errors[-1] + 2]
    hint = next((line.removeprefix("hint: ") for line in after if line.startswith("hint: ")), "")
    return said[errors[-1]].removeprefix("error: "), hint


def _printed(log: Path, since: int) -> str:
    """The last line that no program of ours has logged."""
    return next((line for line in reversed(_lines(log, since)) if not _LOGGED.match(line)), "")


def _lines(log: Path, since: int) -> list[str]:
    """The last lines of a log that are not empty."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(since, log.stat().st_size - _MOST_BYTES))
        text = file.read().decode(errors="replace")
    return [line for line in text.split("\n") if line.strip()]

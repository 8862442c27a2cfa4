"""Programs that outlive the command that starts them, known by pid file, and ended one by one.

A pid alone is no name: the kernel gives it to somebody else later. So a pid file also holds the start time of
the process and the boot it belongs to, and a signal goes through a pidfd that was checked against both.
Nothing else is ever signalled. Linux only.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _START_TICKS = 0, 19  # fields of /proc/PID/stat, counted from the one behind the name


# A pid is given to somebody else later, and down must never end a stranger. (D-service-001)
class ClusterProcess(msgspec.Struct, frozen=True):
    """One process for all time: its pid, its start in clock ticks since boot, and the boot."""

    pid: int
    start_ticks: int
    boot: str


class _Noted(msgspec.Struct, frozen=True):
    """What a pid file holds: the process, and the number of the folder that it was written in (0: by an older
    version, which did not say).

    In a copy of the folder it names nobody: what runs there was started from where it was copied from.
    """

    pid: int
    start_ticks: int
    boot: str
    folder: int = 0


def identify(pid: int) -> ClusterProcess | None:
    """The process that has ``pid`` now; None when there is none, or only its remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[_STATE] in "ZX":
        return None
    return ClusterProcess(pid, int(fields[_START_TICKS]), _BOOT_ID.read_text(encoding="ascii").strip())


def is_alive(process: ClusterProcess) -> bool:
    """Whether this very process still runs."""
    return identify(process.pid) == process


def start(
    name: str, command: Sequence[str], run: Path, logs: Path, environ: Mapping[str, str]
) -> ClusterProcess:
    """Start ``command`` in a session of its own, its output in ``logs/name.log``, and write its pid file.

    Raises OSError when it cannot be started.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with undisturbed(), (logs / f"{name}.log").open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
            env={**os.environ, **environ},
        )
        # It is our child and not yet waited for, so its entry in /proc is there even if it has ended.
        process = identify(child.pid) or ClusterProcess(child.pid, -1, "")
        child.returncode = 0  # It outlives this command: Popen must neither wait for it nor warn.
        remember(name, process, run)
    return process


@contextmanager
def undisturbed() -> Iterator[None]:
    """Between the start of a process and its pid file no Ctrl-C: nobody would know the process. It comes
    after.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, _frame: caught.append(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for got in caught:
        signal.raise_signal(got)


def remember(name: str, process: ClusterProcess, run: Path) -> None:
    """Write the pid file of ``name``, whole or not at all."""
    run.mkdir(parents=True, exist_ok=True)
    part = run / f".{name}.pid.part"
    noted = _Noted(process.pid, process.start_ticks, process.boot, run.stat().st_ino)
    part.write_bytes(msgspec.json.encode(noted))
    part.replace(run / f"{name}.pid")


def recall(run: Path) -> dict[str, ClusterProcess]:
    """Every pid file of ``run``, by name. A file that cannot be read, or was written elsewhere,
    names nobody.
    """
    known = {}
    for path in sorted(run.glob("*.pid")):
        with suppress(msgspec.DecodeError, OSError):
            noted = msgspec.json.decode(path.read_bytes(), type=_Noted)
            if noted.folder in {0, run.stat().st_ino}:
                known[path.stem] = ClusterProcess(noted.pid, noted.start_ticks, noted.boot)
    return known


def forget(name: str, run: Path) -> None:
    """Remove the pid file of ``name``."""
    (run / f"{name}.pid").unlink(missing_ok=True)


def end(processes: Iterable[ClusterProcess], grace_s: float) -> int:
    """End exactly these processes: SIGTERM to all, SIGKILL to those that are left after ``grace_s``.

    Returns how many had to be killed. Those that have ended before are no error.
    """
    with _opened(processes) as handles:
        _signal(handles, signal.SIGTERM)
        _signal(handles, signal.SIGCONT)  # a stopped process hears nothing else but SIGKILL
        left = _still_there(handles, grace_s)
        _signal(left, signal.SIGKILL)
        _still_there(left, grace_s)
        return len(left)


def outlive(processes: Iterable[ClusterProcess], wait_s: float) -> int:
    """How many of these have not ended after ``wait_s`` at most. Nobody is signalled."""
    with _opened(processes) as handles:
        return len(_still_there(handles, wait_s))


@contextmanager
def _opened(processes: Iterable[ClusterProcess]) -> Iterator[list[int]]:
    handles = [handle for process in processes if (handle := _open(process)) is not None]
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


def _open(process: ClusterProcess) -> int | None:
    """A handle on this very process: opened first, identified then, so that no pid can change
    hands between.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if is_alive(process):
        return handle
    os.close(handle)
    return None


def _signal(handles: Iterable[int], number: signal.Signals) -> None:
    for handle in handles:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)


def _still_there(handles: Sequence[int], wait_s: float) -> list[int]:
    """Wait until all have ended, ``wait_s`` at most; those that have not."""
    deadline = time.monotonic() + wait_s
    left = list(handles)
    while left and (remaining := deadline - time.monotonic()) > 0:
        ended, _, _ = select.select(left, [], [], remaining)
        left = [handle for handle in left if handle not in ended]
    return left

"""Device processes as children of the agent: start, watch, end.

Owns how a device process is started and how its end is seen. ``PF_EXITING`` in /proc shows a dying
process within milliseconds, long before its memory is freed and its sockets close; a pidfd is the
second evidence. The other half runs in the device process: it ends with its agent (``die_with_parent``).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PF_EXITING = 0x4
POLL_S = 0.003
_PR_SET_PDEATHSIG = 1
_STAT_BYTES = 1024


def die_with_parent(expected_ppid: int) -> None:
    """Have the kernel end this process when the thread that started it ends. Call it first of all.

    ``expected_ppid`` closes the gap: a parent that died before this call is seen by its absence. (Not in
    a preexec function: those are unsafe in a parent with threads.) Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected_ppid:
        os.kill(os.getpid(), signal.SIGKILL)


def task_flags(stat: bytes) -> int:
    """Field 9 of a /proc stat line. The name in field 2 may hold spaces and parentheses, even ") R 1 (".

    Raises ValueError when this is no stat line.
    """
    return int(stat[stat.rindex(b")") + 1 :].split()[6])


@dataclass(frozen=True, slots=True)
class Setting:
    """What all device processes of an agent have in common."""

    kind: str
    run_dir: Path
    bind: str
    host: str
    program: tuple[str, ...] = (sys.executable, "-m", "worker.device")


class Child:
    """A running device process and the agent's end of its socket."""

    __slots__ = ("_stat_fd", "device", "link", "pidfd", "process")

    def __init__(self, device: str, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.device = device
        self.process = process
        self.link = link
        self.pidfd = os.pidfd_open(process.pid)
        # The main thread's own file: unlike the process' it does not add up the times of all threads.
        self._stat_fd = os.open(f"/proc/{process.pid}/task/{process.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def is_exiting(self) -> bool:
        """Whether the kernel is taking the process down, or has."""
        try:
            return bool(task_flags(os.pread(self._stat_fd, _STAT_BYTES, 0)) & PF_EXITING)
        except (ProcessLookupError, ValueError):
            return True

    def ending(self) -> str:
        """How the process ended, such as "signal 9" or "exit code 1"; "running" while it has not."""
        code = self.process.poll()
        if code is None:
            return "running"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def signal(self, number: int) -> None:
        """Send a signal, unless the process is gone."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, unless the process is gone."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Reap the process (it must have ended or been killed) and close what belongs to it."""
        self.process.wait()
        self.link.close()
        os.close(self.pidfd)
        os.close(self._stat_fd)


def start(device: str, setting: Setting) -> Child:
    """Start the process of ``device``. Call it from the main thread: the child dies with the calling one.

    It gets a session of its own, so that a Ctrl-C meant for the agent does not reach it. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [
                *setting.program,
                f"--device={device}",
                f"--kind={setting.kind}",
                f"--fd={theirs.fileno()}",
                f"--run-dir={setting.run_dir}",
                f"--bind={setting.bind}",
                f"--host={setting.host}",
                f"--parent={os.getpid()}",
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
    return Child(device, process, ours)


class Watch:
    """One thread that sees children end: ``on_exit(child, evidence)`` is called in it, once per child."""

    def __init__(self, on_exit: Callable[[Child, str], None], poll_s: float = POLL_S) -> None:
        self._on_exit = on_exit
        self._poll_s = poll_s
        self._changed = threading.Condition()
        self._children: list[Child] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="children-watch", daemon=True)
        self._thread.start()

    def add(self, child: Child) -> None:
        """Begin to watch ``child``."""
        with self._changed:
            self._children.append(child)
            self._changed.notify()

    def discard(self, children: Sequence[Child]) -> None:
        """Watch ``children`` no more; afterwards they may be closed."""
        with self._changed:
            self._children = [child for child in self._children if child not in children]

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._children or self._closed)
                if self._closed:
                    return
                ended = self._look()
                self._children = [child for child in self._children if child not in ended]
                pidfds = [child.pidfd for child in self._children]
            for child, evidence in ended.items():
                self._on_exit(child, evidence)
            poller = select.poll()
            for pidfd in pidfds:
                poller.register(pidfd, select.POLLIN)
            poller.poll(self._poll_s * 1000)

    def _look(self) -> dict[Child, str]:
        # Under the lock, so that no child is closed while it is looked at.
        return {
            child: ending if (ending := child.ending()) != "running" else "PF_EXITING"
            for child in self._children
            if child.is_exiting()
        }

"""Device processes, and their spare, as children of the agent: start, watch, end.

Owns how a device process is started and how its end is seen; whether it hangs is ``watchdog``'s. Its life
line (``lifeline``) tells within milliseconds, long before its memory is freed and its sockets close; a pidfd
is the second evidence, and the only one before the process holds its line. The other half runs in the device
process: it ends with its agent (``oobleckd.host.orphans``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from oobleckd.host.interpreter import command
from oobleckd.host.standing import ENVIRONMENT
from oobleckd.host.urgency import as_urgent, hurries
from oobleckd.worker.processes.orphans import Orphans
from oobleckd.worker.processes.watchdog import Watchdog
from oobleckd.worker.runtime.activity import ActivityReader
from oobleckd.worker.runtime.lifeline import Lifeline

EXITING = "the process is exiting"
"""Evidence of an end whose cause the kernel does not tell yet."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChildSetting:
    """What all device processes of an agent have in common. ``compiled_dir``: where they keep what they
    compile; None: in ``run_dir``.
    """

    kind: str
    run_dir: Path
    bind: str
    host: str
    program: tuple[str, ...] = command("oobleckd.worker.device.process")
    compiled_dir: Path | None = None

    @property
    def compiled_path(self) -> Path:
        """Where they keep what they compile."""
        return self.compiled_dir or self.run_dir / "compiled"


class Process(Protocol):
    """What was started, by exec (``subprocess.Popen``) or by a fork."""

    @property
    def pid(self) -> int:
        """Its number, which is its own until it is reaped."""

    def poll(self) -> int | None:
        """None while it runs; then its exit code, or the negative number of the signal that ended it."""

    def wait(self) -> int:
        """Wait for that."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""


class Child:
    """A running device process and the agent's end of its socket. ``device`` is "" for a spare;
    ``is_loading``: a spare was taken while it loaded compiled layers.
    """

    __slots__ = ("_orphans", "device", "is_loading", "lifeline", "link", "pidfd", "process", "watchdog")

    def __init__(
        self,
        device: str,
        process: Process,
        link: socket.socket,
        lifeline: Lifeline,
        activity: ActivityReader,
        orphans: Orphans | None = None,
    ) -> None:
        self.device, self.is_loading = device, False
        self.process = process
        self.link = link
        self.lifeline = lifeline
        self.pidfd = os.pidfd_open(process.pid)
        self.watchdog = Watchdog(process.pid, activity)
        self._orphans = orphans
        if orphans is not None:
            orphans.own.add(process.pid)

    @property
    def is_fork(self) -> bool:
        """Whether it had torch loaded when it was born."""
        return not isinstance(self.process, subprocess.Popen)

    def ending(self) -> str:
        """How the process ended, such as "signal 9" or "exit code 1"; "running" while it has not."""
        code = self.process.poll()
        if code is None:
            return "running"
        why = (
            " (SIGBUS: a file that it reads was cut short, or its disk fails)"
            if code == -signal.SIGBUS
            else ""
        )
        return f"signal {-code}{why}" if code < 0 else f"exit code {code}"

    def own_bytes(self) -> int:
        """Memory that the process wrote to and shares with no other; 0 where the kernel does not tell. What
        it alone has read of files is the kernel's to drop.
        """
        try:
            rollup = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            return 0
        written = re.findall(r"^Private_(?:Dirty|Hugetlb): +(\d+) kB$", rollup, re.MULTILINE)
        return 1024 * sum(int(kib) for kib in written)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process is gone."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, unless the process is gone."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Reap the process (it must have ended or been killed) and close what belongs to it."""
        self.process.wait()
        if self._orphans is not None:
            self._orphans.own.discard(self.process.pid)
        self.link.close()
        self.lifeline.close()
        self.watchdog.close()
        os.close(self.pidfd)


NUM_TIES = 4


class Ties:
    """What holds a device process and its agent together: a socket, a life line and an activity page.
    ``theirs`` are the descriptors for the process.
    """

    def __init__(self) -> None:
        self._lifeline, self._activity = Lifeline(), ActivityReader()
        self._ours, self._theirs = socket.socketpair()
        self.theirs = (
            self._theirs.fileno(),
            self._lifeline.fd,
            self._lifeline.held_fd,
            self._activity.fd,
        )

    def child(self, device: str, process: Process, orphans: Orphans | None) -> Child:
        """The process has been started with them. It is none of ``orphans``."""
        self._theirs.close()
        return Child(device, process, self._ours, self._lifeline, self._activity, orphans)

    def cut(self) -> None:
        """There is no such process, or it is to end."""
        self._theirs.close()
        self._ours.close()
        self._lifeline.close()
        self._activity.close()


def words_of(device: str, setting: ChildSetting) -> tuple[str, ...]:
    """The command line of the process of ``device``, or of a spare (""), but for the program and the ties."""
    return (
        f"--device={device}",
        f"--kind={setting.kind}",
        f"--run-dir={setting.run_dir}",
        *([f"--compiled-dir={setting.compiled_dir}"] if setting.compiled_dir else []),
        f"--bind={setting.bind}",
        f"--host={setting.host}",
        f"--parent={os.getpid()}",
        *(["--urgent"] if hurries() else []),
    )


def words_of_ties(theirs: Sequence[int]) -> tuple[str, ...]:
    """The rest of it: where the process finds its ties."""
    link, lifeline, held, activity = theirs
    return (f"--fd={link}", "--lifeline", str(lifeline), str(held), f"--activity={activity}")


def start(device: str, setting: ChildSetting, orphans: Orphans | None = None) -> Child:
    """Start the process of ``device``, or a spare (""), by exec; ``forking`` knows a faster way.

    Call it from the main thread: the child dies with the calling one.

    It gets a session of its own, so that a Ctrl-C meant for the agent does not reach it. Raises OSError.
    """
    ties = Ties()
    try:
        process = subprocess.Popen(
            [*setting.program, *words_of(device, setting), *words_of_ties(ties.theirs)],
            stdin=subprocess.DEVNULL,
            pass_fds=ties.theirs,
            start_new_session=True,
            env={**ENVIRONMENT, **os.environ},
        )
    except OSError:
        ties.cut()
        raise
    return ties.child(device, process, orphans)


async def ended(child: Child, timeout_s: float | None) -> None:
    """Wait until the process of ``child`` has ended, or ``timeout_s`` seconds."""
    loop = asyncio.get_running_loop()
    seen = asyncio.Event()
    loop.add_reader(child.pidfd, seen.set)
    try:
        async with asyncio.timeout(timeout_s):
            await seen.wait()
    except TimeoutError:
        _log.warning("%s (pid %d) does not end", child.device, child.process.pid)
    finally:
        loop.remove_reader(child.pidfd)


async def bury(child: Child) -> None:
    """Reap ``child``, which is ending, once its memory is freed, which takes a while."""
    await ended(child, None)
    _log.info("%s (pid %d): %s", child.device or "the spare", child.process.pid, child.ending())
    child.close()


class Burials:
    """Children that are ending and that nobody waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, child: Child) -> None:
        """Reap ``child`` when it has ended. Call it in a running loop."""
        task = asyncio.get_running_loop().create_task(bury(child))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def done(self) -> None:
        """Wait until all of them have been reaped."""
        await asyncio.gather(*self._tasks)


class Watch:
    """One thread that sees children end: ``on_exit(child, evidence)`` is called in it, once per child.

    It sleeps until something happens. A thread more for each child waits at its life line.
    """

    def __init__(self, on_exit: Callable[[Child, str], None]) -> None:
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._children: list[Child] = []
        self._held: set[Child] = set()
        self._exiting: set[Child] = set()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        # On cores that compute each hop from a loss to the decision could wait for the kernel's tick, 4 ms
        # at 250 Hz; nice values and short slices did not help. (D-recovery-016, D-recovery-017)
        self._thread = threading.Thread(target=as_urgent(self._run), name="children-watch", daemon=True)
        self._thread.start()

    def add(self, child: Child) -> None:
        """Begin to watch ``child``."""
        with self._lock:
            self._children.append(child)
            os.eventfd_write(self._wake, 1)

    def discard(self, children: Sequence[Child]) -> None:
        """Watch ``children`` no more; afterwards they may be closed."""
        with self._lock:
            for child in children:
                self._forget(child)

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._lock:
            os.close(self._wake)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                poller = self._poller()
            ready = {fd for fd, _ in poller.poll()}
            with self._lock:
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._grip(ready)
                ended = self._look()
                for child in ended:
                    self._forget(child)
            for child, evidence in ended.items():
                self._on_exit(child, evidence)

    def _poller(self) -> select.poll:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for child in self._children:
            poller.register(child.pidfd, select.POLLIN)
            if child not in self._held:
                poller.register(child.lifeline.held_fd, select.POLLIN)
        return poller

    def _grip(self, ready: set[int]) -> None:
        """Wait at the life lines that have just been taken up. Under the lock."""
        for child in self._children:
            if child not in self._held and child.lifeline.held_fd in ready and child.lifeline.is_held():
                self._held.add(child)
                threading.Thread(
                    target=as_urgent(partial(self._wait_at, child)),
                    name=f"lifeline-{child.device}",
                    daemon=True,
                ).start()

    def _wait_at(self, child: Child) -> None:
        child.lifeline.wait()
        with self._lock:
            if child in self._children and not self._closed:
                self._exiting.add(child)
                os.eventfd_write(self._wake, 1)

    def _look(self) -> dict[Child, str]:
        # Under the lock, so that no child is closed while it is looked at.
        endings = {child: child.ending() for child in self._children}
        return {
            child: EXITING if ending == "running" else ending
            for child, ending in endings.items()
            if ending != "running" or child in self._exiting
        }

    def _forget(self, child: Child) -> None:
        if child in self._children:
            self._children.remove(child)
        self._held.discard(child)
        self._exiting.discard(child)

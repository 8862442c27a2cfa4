"""The agent's side of the forker (``forker``): devices and spares as forks of a process that has torch
loaded.

Owns the forker's life: it is the first that an agent starts, by a fork where the agent itself comes from a
process with torch loaded (``base``), else by exec; one that dies is made anew and costs no device. Where
there is none (``--no-fork``, or it cannot be had), processes are started by exec, which takes a second and a
half of a core more and 180 MB.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from oobleckd.host.interpreter import command
from oobleckd.host.orphans import die_with_parent
from oobleckd.host.standing import ENVIRONMENT
from oobleckd.worker.fork.orders import ORDER_BYTES, READY, Answer, Order, limits, num_threads
from oobleckd.worker.processes.children import (
    Child,
    ChildSetting,
    Process,
    Ties,
    start,
    words_of,
)
from oobleckd.worker.processes.orphans import Orphans
from oobleckd.worker.processes.title import ROOM

_LOAD_S, _FORK_S = 120.0, 10.0  # what it gets for it at most
_MAX_AGAIN_S = 60.0  # between starts of forkers that end before they are ready
_PROGRAM = command("oobleckd.worker.fork.forker")
Live = Callable[[socket.socket, str], NoReturn]
_log = logging.getLogger(__name__)


_lives: list[Live] = []


def has_all(live: Live) -> None:
    """Say that this process has loaded what a forker needs: a fork of it, or of a fork of it, that calls
    ``live`` is one.
    """
    _lives.append(live)


def _is_loaded() -> bool:
    return bool(_lives) and num_threads() == 1


class Forked:
    """A process that a forker has forked for this one, its parent: as ``subprocess.Popen`` for those that
    were started by exec.

    Another thread may ask, too. Raises OSError if there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """None while it runs; then its exit code, or the negative number of the signal that ended it."""
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        """Wait for that."""
        while (code := self._look(0)) is None:
            pass
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        with self._lock:
            if self.returncode is None:
                try:
                    signal.pidfd_send_signal(self._pidfd, sig)
                except ProcessLookupError:
                    _log.debug("process %d has ended already", self.pid)

    def _look(self, how: int) -> int | None:
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            try:
                found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | how)
            except ChildProcessError:
                code = 0  # somebody else reaped it: nobody knows any more
            else:
                if found is None:
                    return None
                code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            os.close(self._pidfd)
            self.returncode = code
            return code


class Forker:
    """The forker of an agent. Make it first of all, before there are threads; ``attach`` it to the loop."""

    def __init__(self, node: str, orphans: Orphans, program: Sequence[str] = _PROGRAM) -> None:
        self._node, self._orphans, self._program = node, orphans, program
        self._process: Process | None = None
        self._link: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pidfd = -1
        self._turn = asyncio.Lock()
        self._failed = 0
        self._again: asyncio.TimerHandle | None = None
        self.ready = False
        self._begin()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the forker made anew whenever it ends, from now on, in ``loop``."""
        self._loop = loop
        self._watch()

    @property
    def pid(self) -> int:
        """The process number of the present forker; 0 where there is none."""
        return self._process.pid if self._process is not None else 0

    async def fork(self, words: Sequence[str], theirs: Sequence[int]) -> Forked | None:
        """A process with these words and ties, once the forker is ready; None where it cannot be had so."""
        async with self._turn:
            link, born, usable = self._link, None, False
            if link is None or self._loop is None:
                return None
            self._orphans.busy = True
            try:
                answer = await self._ask(link, Order(tuple(words), os.getpid(), limits()), theirs)
                usable = answer is not None and self._process is not None and self._process.poll() is None
                if answer is not None and answer.pid:
                    born = Forked(answer.pid)
                    self._orphans.own.add(born.pid)
                elif answer is not None:
                    _log.error("the forker (pid %d) forks nothing: %s", self.pid, answer.problem)
            except asyncio.CancelledError:
                self._drop()  # nobody starts anything any more
                usable = True
                raise
            except (OSError, TimeoutError, msgspec.MsgspecError) as error:
                _log.error("the forker (pid %d) does not answer: %s", self.pid, error)
            finally:
                self._orphans.busy = False
                self._orphans.reap()
                if not usable:
                    self._renew()
            return born

    async def _ask(self, link: socket.socket, order: Order, theirs: Sequence[int]) -> Answer | None:
        """None: it has ended. Raises TimeoutError, OSError, MsgspecError."""
        assert self._loop is not None
        if not self.ready:
            async with asyncio.timeout(_LOAD_S):
                if await self._loop.sock_recv(link, ORDER_BYTES) != READY:
                    return None
            self.ready, self._failed = True, 0
        async with asyncio.timeout(_FORK_S):
            socket.send_fds(link, [msgspec.msgpack.encode(order)], theirs)
            data = await self._loop.sock_recv(link, ORDER_BYTES)
        return msgspec.msgpack.decode(data, type=Answer) if data else None

    def close(self) -> None:
        """End it. Within the loop that it was attached to, or without one."""
        if self._again is not None:
            self._again.cancel()
        self._drop()
        self._loop = None

    def _begin(self) -> None:
        """Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Once and before the agent has threads: with more than one a fork may find locks held for ever.
            # (D-devices-016)
            self._process = self._by_fork(ours, theirs) if _is_loaded() else self._by_exec(theirs)
        self._orphans.own.add(self._process.pid)
        ours.setblocking(False)
        self._link, self.ready = ours, False
        self._watch()

    def _by_fork(self, ours: socket.socket, theirs: socket.socket) -> Process:
        agent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            die_with_parent(agent)
            os.setsid()
            _lives[-1](theirs, self._node)
        return Forked(pid)

    def _by_exec(self, theirs: socket.socket) -> Process:
        return subprocess.Popen(
            [*self._program, str(theirs.fileno()), str(os.getpid()), self._node, ROOM],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**ENVIRONMENT, **os.environ},
        )

    def _watch(self) -> None:
        if self._loop is not None and self._process is not None and self._pidfd < 0:
            self._pidfd = os.pidfd_open(self._process.pid)
            self._loop.add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        if self._turn.locked() and self._loop is not None:
            self._loop.remove_reader(self._pidfd)  # who waits for its answer finds out
        else:
            self._renew()

    def _renew(self) -> None:
        """It has ended, or is of no more use: another one, now or in a while. Only what is yet to start
        notices.
        """
        if self._loop is None:
            return
        _log.warning("the forker (pid %d) has ended; another one is started", self.pid)
        self._failed = 0 if self.ready else self._failed + 1
        self._drop()
        if self._failed:
            self._again = self._loop.call_later(min(2.0**self._failed, _MAX_AGAIN_S), self._begin_again)
        else:
            self._begin_again()

    def _begin_again(self) -> None:
        self._again = None
        try:
            self._begin()
        except OSError as error:
            _log.error("there is no forker: %s; what is to start is started by exec", error)

    def _drop(self) -> None:
        process, self._process = self._process, None
        link, self._link = self._link, None
        self.ready = False
        if self._pidfd >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if link is not None and self._loop is not None:
            self._loop.call_soon(link.close)  # after whoever waits at it has gone
        elif link is not None:
            link.close()
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            self._orphans.own.discard(process.pid)


async def begin(device: str, setting: ChildSetting, forker: Forker | None, orphans: Orphans) -> Child:
    """Start the process of ``device``, or a spare (""), the fastest way there is. From the main thread.
    Raises OSError.
    """
    if forker is None:
        return start(device, setting, orphans)
    ties = Ties()
    process = None
    try:
        process = await forker.fork(words_of(device, setting), ties.theirs)
    finally:
        if process is None:
            ties.cut()
    if process is None:
        return start(device, setting, orphans)
    return ties.child(device, process, orphans)

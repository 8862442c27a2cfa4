"""The base of the agents of one machine: a process with torch loaded that forks them, so that all of them
share its memory.

Owns its loading, who may ask it, and what a fork takes on to be the program that was asked for. Each agent
then forks its forker at once (``forking``). ``oobleckctl up`` has one for its cluster and no agent needs it
after its start: when it ends they live on, and the next one is started by exec or by another base. Programs
of the worker that a verb runs are forks of it, too. Without an agent of its own for a while it ends by
itself. Like a forker it has one thread and computes nothing.

    python -P -m oobleckd.worker.fork.base SOCKET ROOM
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

import msgspec

from oobleckd.host.interpreter import MODULE, command
from oobleckd.host.orphans import die_with_parent
from oobleckd.host.standing import PROGRAMS, Birth, Born, Ended, difference, standing
from oobleckd.worker.fork import forker, forking
from oobleckd.worker.fork.orders import num_threads
from oobleckd.worker.processes.title import set_title
from oobleckd.worker.runtime.framing import FrameError, frame, read_exactly

IDLE_S = 600.0
_REQUEST_S = 10.0
_LENGTH = struct.Struct("<I")
_MAX_BYTES = 16 * 2**20
_BACKLOG = 64
_PEER = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid


class ForkBase:
    """Forks programs for those who ask at ``listener``, and reaps them."""

    def __init__(self, listener: socket.socket, idle_s: float = IDLE_S) -> None:
        self._listener, self._idle_s = listener, idle_s
        self._forks: dict[int, int] = {}  # pid by pidfd
        self._attended: dict[int, socket.socket] = {}  # who asked for it, by pidfd
        self._standing = standing(os.environ)

    def serve(self) -> Birth | None:
        """In a fork what it is to be; in the base None, when it has been idle."""
        while True:
            poller = select.poll()
            asking = {link.fileno(): pidfd for pidfd, link in self._attended.items()}
            for fd in (self._listener.fileno(), *self._forks, *asking):
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(1000 * self._idle_s)}
            if not ready and not self._forks:
                return None
            for fd in ready & asking.keys():
                self._left(asking[fd])
            for pidfd in ready & self._forks.keys():
                self._ended(pidfd)
            if self._listener.fileno() in ready and (birth := self._answer()) is not None:
                return birth

    def _left(self, pidfd: int) -> None:
        """Who attended the program is gone, or has said what nobody asked for."""
        self._attended.pop(pidfd).close()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # not reaped yet, so it is this one

    def _ended(self, pidfd: int) -> None:
        _, status = os.waitpid(self._forks.pop(pidfd), 0)
        os.close(pidfd)
        if (asking := self._attended.pop(pidfd, None)) is not None:
            with asking:
                _tell(asking, Ended(os.waitstatus_to_exitcode(status)))

    def _answer(self) -> Birth | None:
        """Answer one who asks. In a fork what it is to be."""
        asking, _ = self._listener.accept()
        asking.settimeout(_REQUEST_S)
        try:
            birth, outputs = _request(asking)
        except (OSError, EOFError, FrameError, msgspec.MsgspecError) as error:
            print(f"warning: the base did not understand a request: {error}", file=sys.stderr, flush=True)
            asking.close()
            return None
        born, pidfd = self._fork(birth)
        if born is None:
            asking.close()
            _take_on(birth, outputs)
            return birth
        for output in outputs:
            os.close(output)
        _tell(asking, born)
        if birth.attended and born.pid:
            self._attended[pidfd] = asking
            return None
        with asking, contextlib.suppress(OSError):
            asking.recv(1)  # its remains stay until who asked has seen it
        return None

    def _fork(self, birth: Birth) -> tuple[Born | None, int]:
        """Who was born, and its pidfd; None in the fork."""
        if birth.module not in PROGRAMS:
            return Born(problem=f"the base has no program {birth.module!r}"), -1
        # A fork could take on some of a standing (limits, environment, control group), but not what was
        # read at the import: half a likeness is found out later than none. (D-devices-018)
        if differs := difference(self._standing, birth.standing):
            return Born(problem=f"the base was started with another standing: {differs}"), -1
        if (threads := num_threads()) != 1:
            return Born(problem=f"the base has {threads} threads"), -1
        base = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            return Born(problem=str(error)), -1
        if pid:
            pidfd = os.pidfd_open(pid)
            self._forks[pidfd] = pid
            return Born(pid), pidfd
        if birth.attended:
            die_with_parent(base)
        self._listener.close()
        for link in self._attended.values():
            link.close()
        for pidfd in self._forks:
            os.close(pidfd)
        return None, -1


def _tell(asking: socket.socket, what: msgspec.Struct) -> None:
    try:
        asking.sendall(frame(msgspec.json.encode(what)))
    except OSError:
        print("warning: who asked the base for a program is gone", file=sys.stderr, flush=True)


def _request(asking: socket.socket) -> tuple[Birth, list[int]]:
    """What is wanted, and the descriptors for its output. Raises OSError, EOFError, FrameError,
    MsgspecError.
    """
    head, outputs, _, _ = socket.recv_fds(asking, _LENGTH.size, 2)
    peer = _PEER.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if peer[1] != os.geteuid() or len(head) != _LENGTH.size or not outputs:
        raise FrameError("it is not of this user, or has nowhere to write to")
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_BYTES:
        raise FrameError(f"{length} bytes are too many")
    data = read_exactly(asking, length)
    if data is None:
        raise EOFError("it ended within a request")
    return msgspec.json.decode(data, type=Birth), outputs


def _take_on(birth: Birth, outputs: list[int]) -> None:
    """Be what exec would have made of it."""
    os.setsid()
    os.dup2(outputs[0], 1)
    os.dup2(outputs[-1], 2)
    for output in outputs:
        os.close(output)
    os.environ.clear()
    os.environ.update(birth.environ)
    os.chdir(birth.folder)
    forker.sow()
    sys.argv = list(birth.words[len(MODULE) :] if birth.words[: len(MODULE)] == MODULE else birth.words)
    set_title([sys.executable, *birth.words], Path(birth.words[0]).name)


def listen(path: Path) -> socket.socket:
    """A listener at ``path`` for this user alone. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    return listener


def main() -> None:
    """The program."""
    path = Path(sys.argv[1])
    set_title(command("oobleckd.worker.fork.base", str(path)), "oobleck-base")
    forker.load()
    forking.has_all(forker.live)
    importlib.import_module("oobleckd.worker.agent.main")  # with ZeroMQ, of which no context is made here
    birth = ForkBase(listen(path)).serve()
    if birth is None:
        path.unlink(missing_ok=True)
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = importlib.import_module(birth.module).main

    def run() -> None:
        try:
            program()
        finally:
            threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - as multiprocessing ends its forks
            atexit._run_exitfuncs()  # noqa: SLF001 - which _exit leaves out

    # To take apart all that torch is made of copies each of its pages: 0.1 s and more. (D-devices-024)
    forker.end_after(run)


if __name__ == "__main__":
    main()

"""The base of the agents of one machine: a process with torch loaded that forks them, so that all of them share its memory.

Owns its loading, who may ask it, and what a fork takes on to be the agent that was asked for. Each agent then forks its forker at once
(``forking``). ``oobleckctl up`` has one for its cluster and no agent needs it after its start: when it ends they live on, and the next one is
started by exec or by another base. Without an agent of its own for a while it ends by itself. Like a forker it has one thread and computes nothing.

    python -m worker.base SOCKET ROOM
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import sys
from pathlib import Path

import msgspec

from oobleckd.standing import Birth, Born, difference, standing
from worker import forker, forking
from worker.framing import FrameError, frame, read_exactly
from worker.orders import num_threads
from worker.title import set_title

IDLE_S = 600.0
_REQUEST_S = 10.0
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 16 * 2**20
_BACKLOG = 64
_PEER = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid


class Base:
    """Forks agents for those who ask at ``listener``, and reaps them."""

    def __init__(self, listener: socket.socket, idle_s: float = IDLE_S) -> None:
        self._listener, self._idle_s = listener, idle_s
        self._agents: dict[int, int] = {}  # by pidfd
        self._standing = standing(os.environ)

    def serve(self) -> Birth | None:
        """In an agent what it is to be; in the base None, when it has been idle."""
        while True:
            poller = select.poll()
            for fd in (self._listener.fileno(), *self._agents):
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(1000 * self._idle_s)}
            if not ready and not self._agents:
                return None
            for pidfd in ready & self._agents.keys():
                os.waitpid(self._agents.pop(pidfd), 0)
                os.close(pidfd)
            if self._listener.fileno() in ready and (birth := self._answer()) is not None:
                return birth

    def _answer(self) -> Birth | None:
        """Answer one who asks. In an agent what it is to be."""
        asking, _ = self._listener.accept()
        with asking:
            asking.settimeout(_REQUEST_S)
            try:
                birth, logs = _request(asking)
            except (OSError, EOFError, FrameError, msgspec.MsgspecError) as error:
                print(f"warning: the base did not understand a request: {error}", file=sys.stderr, flush=True)
                return None
            born = self._fork(birth)
            if born is None:
                _take_on(birth, logs)
                return birth
            for log in logs:
                os.close(log)
            try:
                asking.sendall(frame(msgspec.json.encode(born)))
                asking.recv(1)  # its remains stay until who asked has seen it
            except OSError:
                print("warning: who asked the base for an agent is gone", file=sys.stderr, flush=True)
        return None

    def _fork(self, birth: Birth) -> Born | None:
        """None in the fork."""
        if differs := difference(self._standing, birth.standing):
            return Born(problem=f"the base was started with another standing: {differs}")
        if (threads := num_threads()) != 1:
            return Born(problem=f"the base has {threads} threads")
        try:
            pid = os.fork()
        except OSError as error:
            return Born(problem=str(error))
        if pid:
            self._agents[os.pidfd_open(pid)] = pid
            return Born(pid)
        self._listener.close()
        for pidfd in self._agents:
            os.close(pidfd)
        return None


def _request(asking: socket.socket) -> tuple[Birth, list[int]]:
    """What is wanted, and the descriptor of its log. Raises OSError, EOFError, FrameError, MsgspecError."""
    head, logs, _, _ = socket.recv_fds(asking, _LENGTH.size, 1)
    peer = _PEER.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if peer[1] != os.geteuid() or len(head) != _LENGTH.size or len(logs) != 1:
        raise FrameError("it is not of this user, or has no log")
    (length,) = _LENGTH.unpack(head)
    if length > _MOST_BYTES:
        raise FrameError(f"{length} bytes are too many")
    data = read_exactly(asking, length)
    if data is None:
        raise EOFError("it ended within a request")
    return msgspec.json.decode(data, type=Birth), logs


def _take_on(birth: Birth, logs: list[int]) -> None:
    """Be what exec would have made of it."""
    os.setsid()
    for log in logs:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    os.environ.clear()
    os.environ.update(birth.environ)
    os.chdir(birth.folder)
    forker.sow()
    sys.argv = list(birth.words)
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
    set_title([sys.executable, "-m", "worker.base", str(path)], "oobleck-base")
    forker.load()
    forking.has_all(forker.live)
    from worker import agent  # with ZeroMQ, of which no context is made here

    birth = Base(listen(path)).serve()
    if birth is None:
        path.unlink(missing_ok=True)
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    agent.main()


if __name__ == "__main__":
    main()

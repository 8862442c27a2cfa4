"""The planner's forker: a process that has the planner loaded and forks the processes that plan, each within
milliseconds.

Owns its loading, what a fork sets right for itself, and the fork's work: calls in, results out, one after
another. It plans nothing itself, has one thread and no connection but the daemon's, at whose end all of them
end. The daemon's side is in ``lanes``. Not meant to be started by hand.

    python -P -m oobleckd.daemon.planforker FD
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from oobleckd.daemon import poolwork
from oobleckd.host import urgency
from oobleckd.host.orphans import die_with_parent

LENGTH = struct.Struct("<Q")
"""In front of every frame: the bytes that follow."""
ORDER_BYTES = 256
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class LaneOrder(msgspec.Struct, frozen=True):
    """A process that is wanted; the descriptor of its link comes along. ``nicer_by``: how much it leaves to
    others.
    """

    nicer_by: int = 0
    urgent: bool = False


def frame(data: bytes) -> bytes:
    """``data`` with its length in front."""
    return LENGTH.pack(len(data)) + data


def serve(daemon: socket.socket) -> tuple[LaneOrder, socket.socket] | None:
    """Fork what ``daemon`` orders, until it is gone: None then. In a fork: what it is to be, and its link."""
    while True:
        data, fds, _, _ = socket.recv_fds(daemon, ORDER_BYTES, 1)
        if not data:
            return None
        with socket.socket(fileno=fds[0]) as link:
            try:
                pid = os.fork()
            except OSError as error:  # the link ends, and that says it
                print(f"warning: the planner cannot be forked: {error}", file=sys.stderr, flush=True)
                continue
            if pid == 0:
                daemon.close()
                return msgspec.msgpack.decode(data, type=LaneOrder), socket.socket(fileno=link.detach())


def become(order: LaneOrder, forker: int) -> None:
    """Take on what ``order`` says, in a fork of ``forker``."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(forker)
    stand(order)


def stand(order: LaneOrder) -> None:
    """Have the priority that ``order`` says, as far as the system allows it."""
    with suppress(OSError):  # a sandbox may forbid it: then its plans take the processor that they get
        os.nice(order.nicer_by)
    if order.urgent:
        urgency.hurry()


def work(link: socket.socket) -> None:
    """Say who this is, and answer calls until nobody is there to ask."""
    stream = link.makefile("rb")
    link.sendall(frame(str(os.getpid()).encode()))
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        data = stream.read(*LENGTH.unpack(head))
        link.sendall(frame(_answer(data)))


def _answer(data: bytes) -> bytes:
    """Of a pickled function and its arguments: whether it returned, and what; else what it raised."""
    try:
        function, arguments = pickle.loads(data)  # noqa: S301 - the daemon's own
        answer = (True, function(*arguments))
    except Exception as error:  # noqa: BLE001 - a process's boundary: whoever asked has it
        error.add_note(traceback.format_exc())
        answer = (False, error)
    try:
        return pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001 - as above
        return pickle.dumps((False, TypeError(f"an answer that cannot be sent: {error}: {answer[1]!r}")))


def main(load: Callable[[], Any] = poolwork.load) -> NoReturn:
    """The program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon's to hear
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends is not waited for
    # A fork has one thread of those that libraries made, and what the others held is held for ever.
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    forker = os.getpid()
    load()
    gc.collect()
    gc.freeze()
    with suppress(OSError):  # the daemon is gone
        forked = serve(socket.socket(fileno=int(sys.argv[1])))
        if forked is not None:
            order, link = forked
            become(order, forker)
            work(link)
    os._exit(0)  # what was loaded is not taken apart, page by page


if __name__ == "__main__":
    main()

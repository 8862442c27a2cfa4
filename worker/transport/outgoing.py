"""The link on which a device sends to one incarnation of a peer.

Owns the socket, the queues and the writer thread, which dials at the first message and then also watches for
the peer's goodbye or end. What the socket takes at once is written by the sender's own thread: a hand-over to
a thread costs more than a small message. Tensor messages that can wait leave, in their own order, whenever no
other is there, and can be taken back until then; one that has begun to leave is not interrupted.

The last bytes of every message are written under the lock, without waiting: whoever got a whole message hears
a goodbye when the link is stopped, however late its writer thread hears that the message is gone.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from oobleckd.protocol.parts import Peer
from oobleckd.worker.transport import sockets, wire
from oobleckd.worker.transport.handshake import HandshakeError, NotYet
from oobleckd.worker.transport.lending import LENDING
from oobleckd.worker.transport.mailbox import Key
from oobleckd.worker.transport.wire import Frame

_RETRY_S = (0.02, 1.0)
_PATIENCE_S = 600.0  # with a peer that answers: it may be loading a model before it hears of our layout


class Outgoing:
    """One outgoing link. ``spawn`` starts its thread, ``greet`` shakes hands on a connected socket and says
    whether the peer reads what is lent to it.

    While ``unblocked`` is not set nothing goes out and no end is noticed (``Transport.block``).

    ``on_end`` is called once, from the writer thread, when the link ended and not by ``stop``: with the link,
    and None after the peer's goodbye, else the reason.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        unix: bool,
        timeout_s: float,
        spawn: Callable[[Callable[[], None], str], None],
        greet: Callable[[socket.socket], bool],
        unblocked: threading.Event,
        on_end: Callable[[Outgoing, str | None], None],
    ) -> None:
        self._peer = peer
        self._unix = unix
        self._timeout_s = timeout_s
        self._spawn = spawn
        self._greet = greet
        self._unblocked = unblocked
        self._on_end = on_end
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._queue: deque[Frame] = deque()
        self._later: deque[tuple[Key, Frame]] = deque()
        self._socket: socket.socket | None = None
        self._open = False  # the handshake is done
        self._lends = False
        self._lent: set[int] = set()  # pieces that the peer has mapped
        self._writing = False
        self._stopped = threading.Event()
        self._wake = -1

    def frame_of(self, key: Key, tensors: Sequence[Tensor], meta: bytes) -> Frame:
        """The frame of a message that ``send`` is given next. Raises WireError."""
        # Sums of a replica on the same host, 8 bytes a parameter, cost half of what sockets take.
        # (D-transport-011)
        if self._lends and (num_bytes := wire.lent_bytes(tensors)):
            piece = LENDING.lend(num_bytes, self)
            if piece is not None:
                is_new, ended = piece.number not in self._lent, self._lent - LENDING.numbers
                self._lent = self._lent - ended | {piece.number}
                return wire.lent_frame(key, tensors, meta, piece, is_new=is_new, ended=ended)
        return wire.message_frame(key, tensors, meta)

    def send(self, frame: Frame) -> bool:
        """Send or queue ``frame`` without waiting; False when the link has ended."""
        with self._lock:
            if self._stopped.is_set():
                return False
            if self._wake < 0:
                self._start()
            if self._write_inline(frame):
                return True
            self._queue.append(frame)
            os.eventfd_write(self._wake, 1)
            return True

    def send_later(self, key: Key, frame: Frame) -> bool:
        """Queue ``frame`` behind all that ``send`` is given before it leaves; False when the link
        has ended.
        """
        with self._lock:
            if self._stopped.is_set():
                return False
            if self._wake < 0:
                self._start()
            self._later.append((key, frame))
            os.eventfd_write(self._wake, 1)
            return True

    def recall(self, unwanted: Callable[[Key], bool]) -> list[Key]:
        """Take back what ``send_later`` was given and has not begun to leave; the keys of what was."""
        with self._lock:
            taken = [key for key, _ in self._later if unwanted(key)]
            self._later = deque((key, frame) for key, frame in self._later if not unwanted(key))
            if self._is_idle():
                self._written.notify_all()
            return taken

    def flush(self, deadline: float) -> bool:
        """Wait until all is handed to the kernel (or the link has ended); False at ``deadline`` (monotonic
        s).
        """
        with self._lock:
            return self._written.wait_for(self._is_idle, max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Drop what is queued, say goodbye unless a message is half written, close. ``on_end`` is
        not called.
        """
        with self._lock:
            between = not self._writing and not (self._queue and self._queue[0].has_begun)
            self._clear()
            if self._open and between and self._socket is not None and self._unblocked.is_set():
                with suppress(OSError):
                    wire.goodbye_frame().write_now(self._socket)
            self._end()

    def _start(self) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._spawn(self._run, "transport-writer")

    def _write_inline(self, frame: Frame) -> bool:
        if not self._open or self._writing or self._queue or not frame.ready() or self._socket is None:
            return False
        if not self._unblocked.is_set():
            return False
        try:
            return frame.write_now(self._socket)
        except OSError:
            return False  # the writer thread meets the same error and reports it

    def _is_idle(self) -> bool:
        return self._stopped.is_set() or not (self._queue or self._later or self._writing)

    def _clear(self) -> None:
        self._queue.clear()
        self._later.clear()

    def _end(self) -> None:
        # Under the lock. The writer thread, wherever it waits, wakes up and closes what it owns.
        self._stopped.set()
        self._written.notify_all()
        LENDING.over(self)
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        why = None
        try:
            self._dial()
            self._pump()
        except (OSError, EOFError, wire.WireError) as error:
            why = None if self._said_goodbye() else (str(error) or type(error).__name__)
        with self._lock:
            told = self._stopped.is_set()
            self._end()
            self._clear()
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            os.close(self._wake)
            self._wake = -1
        if not told:
            self._on_end(self, why)

    def _dial(self) -> None:
        """Connect and shake hands; repeats while the peer is there but not ready. Raises OSError."""
        now = time.monotonic()
        deadline, last_deadline = now + self._timeout_s, now + _PATIENCE_S
        delay_s, max_delay_s = _RETRY_S
        while (why := self._try_once()) is not None:
            now = time.monotonic()
            if isinstance(why, NotYet):
                deadline = min(now + self._timeout_s, last_deadline)
            if now > deadline:
                raise HandshakeError(f"the peer is there but no handshake succeeded: {why}")
            if self._stopped.wait(delay_s):
                raise HandshakeError("stopped")
            delay_s = min(2 * delay_s, max_delay_s)

    def _try_once(self) -> OSError | None:
        """None: open. Else why it may work later. Raises OSError when nobody is there."""
        self._unblocked.wait()
        try:
            sock = self._connect()
        except BlockingIOError as error:
            return error
        try:
            lends = self._greet(sock)
        except OSError as error:
            if self._stopped.is_set():
                raise
            return error
        sock.settimeout(None)
        with self._lock:
            self._open, self._lends = True, lends
        return None

    def _connect(self) -> socket.socket:
        try:
            sock = self._replace_socket(unix=self._unix)
            sockets.connect(sock, self._peer, unix=self._unix)
        except FileNotFoundError:
            # The same host, but its file system is not seen from here (a container).
            self._unix = False
            sock = self._replace_socket(unix=False)
            sockets.connect(sock, self._peer, unix=False)
        return sock

    def _replace_socket(self, *, unix: bool) -> socket.socket:
        with self._lock:
            if self._stopped.is_set():
                raise HandshakeError("stopped")
            if self._socket is not None:
                self._socket.close()
            self._socket = sock = sockets.open_socket(self._peer, unix=unix)
        sock.settimeout(self._timeout_s)
        return sock

    def _pump(self) -> None:
        """Write frames as they come, until the peer's goodbye. Raises OSError, EOFError, WireError."""
        sock = self._socket
        assert sock is not None
        room, poller = select.poll(), select.poll()
        room.register(sock, select.POLLOUT)
        poller.register(sock, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while not self._stopped.is_set():
            self._unblocked.wait()
            frame = self._begin()
            if frame is not None:
                frame.write_all_but_the_tail(sock)
                while not self._finish(frame, sock):
                    room.poll()
                continue
            ready = {fd for fd, _ in poller.poll()}
            self._unblocked.wait()
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if sock.fileno() in ready and wire.MessageReader(sock, "").read() is None:
                return

    def _begin(self) -> Frame | None:
        with self._lock:
            if not (self._queue or self._later):
                return None
            self._writing = True
            # What is pre-copied leaves when nothing else does: gigabytes of state went in front of
            # activations where source and target are neighbours. (D-precopy-014)
            return self._queue.popleft() if self._queue else self._later.popleft()[1]

    def _finish(self, frame: Frame, sock: socket.socket) -> bool:
        """Write what the socket takes of the rest of ``frame``; whether that was all. Raises OSError."""
        with self._lock:
            if not frame.write_now(sock):
                return False
            self._writing = False
            if self._is_idle():
                self._written.notify_all()
            return True

    def _said_goodbye(self) -> bool:
        """Whether a goodbye lies unread on a link that failed in writing."""
        sock = self._socket
        if sock is None or not self._open:
            return False
        poller = select.poll()  # not select: descriptors of a large job are above 1024
        poller.register(sock, select.POLLIN)
        if not poller.poll(0):
            return False
        try:
            return wire.MessageReader(sock, "").read() is None
        except (OSError, EOFError, wire.WireError):
            return False

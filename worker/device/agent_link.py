"""The device process's end of the socket to its agent.

Owns the socket and one reader thread. Control messages of the daemon, passed on by the agent, land in
the mailbox; what the device says goes out in order. When the agent is gone the process ends at once:
a node fails as one.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable

from oobleckd.host.urgency import hurry
from oobleckd.protocol import codec
from oobleckd.protocol.artifactmessages import ArtifactHere
from oobleckd.protocol.message import Message
from oobleckd.worker.runtime.framing import FrameError, read_frame, write_frame
from oobleckd.worker.transport.mailbox import Mailbox

AGENT_GONE = 3
_LAST_S = 1.0
_log = logging.getLogger(__name__)


def _end_process() -> None:
    # No clean-up: threads may hang in a collective or a driver call, and nothing here outlives the agent.
    os._exit(AGENT_GONE)


class DeviceLink:
    """Decodes ``ToWorker`` messages into ``mailbox`` (as controls) and sends ``FromWorker`` messages.

    ``fd`` is a stream socket inherited from the agent. ``on_closed`` runs when the agent is gone, in
    whichever thread noticed; ``on_control`` after a message was put into the mailbox, in the reader thread;
    ``on_artifact`` for what a device that compiles waits for, there, too; ``urgent``: how that thread is to
    be scheduled.
    """

    def __init__(
        self,
        fd: int,
        mailbox: Mailbox,
        *,
        on_closed: Callable[[], None] = _end_process,
        on_control: Callable[[], None] = lambda: None,
        on_artifact: Callable[[ArtifactHere], None] = lambda _: None,
        urgent: bool = False,
    ) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._mailbox = mailbox
        self._on_closed = on_closed
        self._on_control, self._on_artifact = on_control, on_artifact
        self._urgent = urgent
        self._sending = threading.Lock()
        self.num_unknown = 0
        self._reader = threading.Thread(target=self._read, name="link-reader", daemon=True)
        self._reader.start()

    def send(self, message: Message) -> None:
        """Send to the agent, from any thread; whole messages, in order."""
        data = codec.encode(message)
        try:
            with self._sending:
                write_frame(self._socket, data)
        except OSError:
            self._on_closed()

    def send_last(self, message: Message) -> None:
        """Send it if that can be done soon: this process is about to end, and another thread may be in the
        middle of a message.
        """
        if self._sending.acquire(timeout=_LAST_S):
            try:
                write_frame(self._socket, codec.encode(message))
            finally:
                self._sending.release()

    def close(self) -> None:
        """Close the socket and end the reader; ``on_closed`` runs (orderly ends use a callback of
        their own).
        """
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            _log.debug("the link to the agent was closed already")
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        if self._urgent:
            hurry()
        try:
            while (data := read_frame(self._socket)) is not None:
                self._receive(data)
        except (OSError, EOFError, FrameError) as error:
            _log.warning("link to the agent: %s", error)
        self._on_closed()

    def _receive(self, data: bytes) -> None:
        try:
            control = codec.decode_to_worker(data)
        except codec.CodecError as error:
            self.num_unknown += 1
            _log.warning("ignored a message of the agent: %s", error)
            return
        if isinstance(control, ArtifactHere):
            self._on_artifact(control)
            return
        self._mailbox.put_control(control)
        self._on_control()

"""The agent's end of the socket to a device process (``agent_link`` is the other one).

Owns the buffering of frames in an event loop; what they mean is the agent's business.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from oobleckd.worker.runtime.framing import FrameBuffer, FrameError, frame

_CHUNK_BYTES = 256 * 1024
_log = logging.getLogger(__name__)


class AgentSide:
    """Frames to and from one device process. ``on_end`` is called once, when the device closed its end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        *,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._incoming = FrameBuffer()
        self._outgoing = bytearray()
        self._open = True
        sock.setblocking(False)
        loop.add_reader(sock, self._receive)

    def send(self, data: bytes) -> None:
        """Queue one frame; never waits for the device."""
        if self._open:
            self._outgoing += frame(data)
            self._flush()

    def drain(self) -> None:
        """Handle all that has arrived: a dead device's last words."""
        while self._receive():
            pass

    def close(self) -> None:
        """Stop reading and writing; the socket is its owner's to close."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)

    def _receive(self) -> bool:
        """Read once; whether there was something."""
        if not self._open:
            return False
        try:
            data = self._socket.recv(_CHUNK_BYTES)
            frames = self._incoming.feed(data)
        except BlockingIOError:
            return False
        except (OSError, FrameError) as error:
            _log.error("link to a device: %s", error)
            data, frames = b"", []
        for each in frames:
            self._on_frame(each)
        if not data:
            self.close()
            self._on_end()
        return bool(data)

    def _flush(self) -> None:
        try:
            sent = self._socket.send(self._outgoing)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the reader sees the end, and says so
        del self._outgoing[:sent]
        if self._outgoing:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)

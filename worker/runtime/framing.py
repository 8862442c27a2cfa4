"""Length-prefixed frames on a stream socket: four bytes, little-endian, then that many bytes.

Owns the cut only; what a frame means is its reader's business. Blocking functions for threads, and
``FrameBuffer`` without any input or output for an event loop.
"""

from __future__ import annotations

import socket
import struct

MAX_FRAME_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<I")


class FrameError(ValueError):
    """The stream is no sequence of frames (or one longer than allowed)."""


def frame(data: bytes) -> bytes:
    """``data`` with its length in front. Raises FrameError when it is too long for any reader."""
    _check(len(data), MAX_FRAME_BYTES)
    return _LENGTH.pack(len(data)) + data


def write_frame(sock: socket.socket, data: bytes) -> None:
    """Send one frame on a blocking socket. Raises OSError."""
    sock.sendall(frame(data))


def read_frame(sock: socket.socket, limit: int = MAX_FRAME_BYTES) -> bytes | None:
    """The next frame, or None at the end of the stream. Raises OSError, EOFError (cut short), FrameError."""
    head = read_exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    _check(length, limit)
    body = read_exactly(sock, length)
    if body is None:
        raise EOFError("the stream ended within a frame")
    return bytes(body)


def read_exactly(sock: socket.socket, num_bytes: int) -> bytearray | None:
    """``num_bytes`` bytes; None when the stream ended before the first. Raises OSError, EOFError."""
    data = bytearray(num_bytes)
    view, got = memoryview(data), 0
    while got < num_bytes:
        count = sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
        if count == 0:
            if got == 0:
                return None
            raise EOFError("the stream ended within a frame")
        got += count
    return data


class FrameBuffer:
    """Cuts what an event loop received into frames."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that ``data`` completes, in order. Raises FrameError."""
        self._data += data
        frames, start = [], 0
        while len(self._data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, start)
            _check(length, MAX_FRAME_BYTES)
            stop = start + _LENGTH.size + length
            if len(self._data) < stop:
                break
            frames.append(bytes(self._data[start + _LENGTH.size : stop]))
            start = stop
        del self._data[:start]
        return frames


def _check(length: int, limit: int) -> None:
    if length > limit:
        raise FrameError(f"a frame of {length} bytes is longer than the {limit} allowed")

"""Frames, as they are cut out of a stream."""

from __future__ import annotations

import socket

import pytest

from oobleckd.worker.runtime.framing import FrameBuffer, FrameError, frame, read_frame, write_frame


def test_frame_buffer_cuts_at_any_place() -> None:
    frames = [b"", b"one", bytes(5000), b"last"]
    stream = b"".join(map(frame, frames))
    for step in (1, 3, 4, 1000, len(stream)):
        buffer = FrameBuffer()
        got = [f for i in range(0, len(stream), step) for f in buffer.feed(stream[i : i + step])]
        assert got == frames


def test_frames_have_a_limit() -> None:
    with pytest.raises(FrameError, match="longer than"):
        FrameBuffer().feed(b"\xff\xff\xff\xff")


def test_frames_on_a_socket() -> None:
    one, other = socket.socketpair()
    with one, other:
        write_frame(one, b"hello")
        one.sendall(frame(b"cut short")[:6])
        one.shutdown(socket.SHUT_WR)
        assert read_frame(other) == b"hello"
        with pytest.raises(EOFError):
            read_frame(other)
        assert read_frame(other) is None

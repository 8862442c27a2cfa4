"""Tensor messages as bytes on a transport link.

Owns the frame: a fixed header, a msgpack body (key, meta, dtypes, shapes), the tensors' bytes. Nothing is
copied on the way that need not be: a frame refers to the memory of contiguous CPU tensors, and a receiver
reads straight into its own: fresh ones, 64-byte aligned by torch's CPU allocator, or ones in ``pages``.
"""

from __future__ import annotations

import ctypes
import math
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.worker.runtime.deaths import is_out_of_memory
from oobleckd.worker.transport.mailbox import Key, TensorMessage
from oobleckd.worker.transport.pages import MESSAGE_PAGES

_MAGIC = b"OBLK"
_HEADER = struct.Struct("<4sBxxxIQ")  # magic, kind, body bytes, payload bytes
_MESSAGE, _GOODBYE = 1, 2
_MAX_BODY_BYTES = 64 * 2**20
_IOV_MAX = 1024
_BUFFER_BYTES = 4096
_TAIL_BYTES = 4096
_OWN_PAGES_BYTES = 1 << 20  # of a message for which they are worth while
_ALIGNED_BYTES = 64
_HOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}


_PYBUF_WRITE = 0x200
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_memory.restype = ctypes.py_object


class WireError(ValueError):
    """Bytes that are no frame, or a tensor that has no form on the wire."""


class _Body(msgspec.Struct, frozen=True, array_like=True):
    key: tuple[str | int, ...]
    meta: bytes
    dtypes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


class Head(NamedTuple):
    """What comes before a message's tensors: of ``num_bytes``."""

    body: _Body
    num_bytes: int


_encoder = msgspec.msgpack.Encoder()
_body_decoder = msgspec.msgpack.Decoder(_Body)


class Frame:
    """One frame on its way out; remembers how much of it has gone.

    Holds references to the tensors' memory: who sends must not change them until the frame is written.
    """

    __slots__ = ("_buffers", "_copied", "_left", "_tensors", "num_bytes")

    def __init__(
        self, head: bytes, tensors: Sequence[Tensor] = (), copied: torch.cuda.Event | None = None
    ) -> None:
        self._buffers = deque((memoryview(head), *map(_bytes_of, tensors)))
        self._tensors = tensors
        self._copied = copied
        self.num_bytes = self._left = sum(buffer.nbytes for buffer in self._buffers)

    def ready(self) -> bool:
        """Whether the bytes are in host memory already (copies from an accelerator are under way
        until then).
        """
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    @property
    def has_begun(self) -> bool:
        """Whether some of it has gone."""
        return self._left < self.num_bytes

    def write_all_but_the_tail(self, sock: socket.socket) -> None:
        """Write the rest, however long it takes, but its last bytes, which ``write_now`` is for. Raises
        OSError.
        """
        if self._copied is not None:
            self._copied.synchronize()
        while self._left > _TAIL_BYTES:
            self._advance(sock.sendmsg(_first(self._next_buffers(), self._left - _TAIL_BYTES)))

    def write_now(self, sock: socket.socket) -> bool:
        """Write what the socket takes without waiting; whether that was all. Raises OSError."""
        try:
            while self._left:
                self._advance(sock.sendmsg(self._next_buffers(), [], socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
        return True

    def _next_buffers(self) -> list[memoryview]:
        return list(islice(self._buffers, _IOV_MAX))

    def _advance(self, num_bytes: int) -> None:
        self._left -= num_bytes
        _advance(self._buffers, num_bytes)


def message_frame(key: Key, tensors: Sequence[Tensor], meta: bytes) -> Frame:
    """The frame of a message. Accelerator tensors are copied to pinned host memory on their current stream.

    Raises WireError for a dtype without a number on the wire.
    """
    hosted, copied = _to_host(tensors)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    body = _encoder.encode(_Body(key, meta, numbers_of(tensors), shapes))
    payload = [tensor.contiguous() for tensor in hosted if tensor.numel()]
    header = _HEADER.pack(_MAGIC, _MESSAGE, len(body), sum(tensor.nbytes for tensor in payload))
    return Frame(header + body, payload, copied)


def numbers_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The dtypes of ``tensors`` as they are written on the wire. Raises WireError."""
    try:
        return tuple(_NUMBER_OF[tensor.dtype] for tensor in tensors)
    except KeyError as error:
        raise WireError(f"tensors of {error.args[0]} cannot be sent") from error


def dtype_of(number: int) -> torch.dtype:
    """The dtype that is written as ``number``. Raises WireError."""
    if not 0 <= number < len(_DTYPES):
        raise WireError(f"there is no dtype {number}")
    return _DTYPES[number]


def goodbye_frame() -> Frame:
    """The last frame of a link that is closed in order."""
    return Frame(_HEADER.pack(_MAGIC, _GOODBYE, 0, 0))


class MessageReader:
    """Reads the messages of ``source`` from a blocking socket.

    A small message takes one system call: what comes first goes through a small buffer, and only what
    does not fit there is read straight into the tensors.
    """

    __slots__ = ("_buffer", "_socket", "_source", "_start", "_stop")

    def __init__(self, sock: socket.socket, source: str) -> None:
        self._socket = sock
        self._source = source
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._stop = 0

    def read(self) -> TensorMessage | None:
        """The next message, or None after the peer's goodbye.

        Raises EOFError when the stream ends without one, WireError for bytes that are no frame, OSError.
        """
        head = self.head()
        return None if head is None else self.message(head)

    def head(self) -> Head | None:
        """The first part of the next message, or None after the peer's goodbye. ``message`` is to be called
        with it. Raises as ``read``.
        """
        if not self._more():
            raise EOFError("closed without a goodbye")
        magic, kind, body_bytes, payload_bytes = _HEADER.unpack(self._take(_HEADER.size))
        if magic != _MAGIC or kind not in {_MESSAGE, _GOODBYE} or body_bytes > _MAX_BODY_BYTES:
            raise WireError("damaged frame header")
        if kind == _GOODBYE:
            return None
        return Head(_decode(self._take(body_bytes)), payload_bytes)

    def message(self, head: Head) -> TensorMessage:
        """The tensor message that ``head`` begins. Raises as ``read``."""
        body = head.body
        tensors = _empty_tensors(body)
        views = [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
        if sum(map(len, views)) != head.num_bytes:
            raise WireError("a frame's payload does not have the size of its tensors")
        self._fill(views)
        return TensorMessage(body.key, self._source, body.meta, tensors)

    def _more(self) -> bool:
        """Get something into an empty buffer; False at the end of the stream."""
        if self._start == self._stop:
            self._start, self._stop = 0, self._socket.recv_into(self._buffer)
        return self._start < self._stop

    def _take(self, num_bytes: int) -> memoryview:
        have = self._stop - self._start
        if num_bytes <= have:
            self._start += num_bytes
            return self._buffer[self._start - num_bytes : self._start]
        data = memoryview(bytearray(num_bytes))
        self._fill([data])
        return data

    def _fill(self, views: Sequence[memoryview]) -> None:
        rest = deque(views)
        while rest and self._start < self._stop:
            count = min(rest[0].nbytes, self._stop - self._start)
            rest[0][:count] = self._buffer[self._start : self._start + count]
            self._start += count
            _advance(rest, count)
        while rest:
            count = self._socket.recvmsg_into(list(islice(rest, _IOV_MAX)), 0, socket.MSG_WAITALL)[0]
            if count == 0:
                raise EOFError("closed within a frame")
            _advance(rest, count)


def _decode(data: memoryview) -> _Body:
    try:
        return _body_decoder.decode(data)
    except UNREADABLE as error:
        raise WireError(f"damaged frame: {problem_of(error)}") from error


def _empty_tensors(body: _Body) -> list[Tensor]:
    num_bytes = 0
    try:
        made_of = [(shape, dtype_of(number)) for number, shape in zip(body.dtypes, body.shapes, strict=True)]
        if any(size < 0 for shape, _ in made_of for size in shape):
            raise WireError("a size below 0")
        num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in made_of)
        if num_bytes < _OWN_PAGES_BYTES:
            return [torch.empty(shape, dtype=dtype) for shape, dtype in made_of]
        return _in_own_pages(made_of)
    except (ValueError, RuntimeError, OverflowError, OSError) as error:
        if is_out_of_memory(error) and num_bytes < _HOST_BYTES:
            raise  # ours to die of: the sender has done nothing wrong
        raise WireError(f"a frame's tensors cannot be made: {error}") from error


def _in_own_pages(made_of: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Tensors of these shapes and dtypes, one behind the other and aligned as torch's allocator
    aligns them.
    """
    lengths = [math.prod(shape) for shape, _ in made_of]
    sizes = [
        -(-length * dtype.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES
        for length, (_, dtype) in zip(lengths, made_of, strict=True)
    ]
    pages = MESSAGE_PAGES.take(sum(sizes))
    return [
        torch.frombuffer(pages, dtype=dtype, count=length, offset=start).view(shape)
        if length
        else torch.empty(shape, dtype=dtype)
        for length, (shape, dtype), start in zip(lengths, made_of, accumulate(sizes, initial=0), strict=False)
    ]


def _advance(views: deque[memoryview], num_bytes: int) -> None:
    while num_bytes:
        first = views[0]
        if num_bytes < first.nbytes:
            views[0] = first[num_bytes:]
            return
        num_bytes -= first.nbytes
        views.popleft()


def _first(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    first = []
    for view in views:
        if num_bytes <= 0:
            break
        first.append(view[:num_bytes])
        num_bytes -= view.nbytes
    return first


def _bytes_of(tensor: Tensor) -> memoryview:
    # Not numpy(): it knows no bfloat16, and the views on the way to it are the dearest part of a small
    # message. Whoever uses the memory keeps the tensor.
    # ctypes' view takes 13 us where numpy's takes 21; what is left of a small message is mostly the system
    # call. (D-devices-008)
    view: memoryview = _view_memory(tensor.data_ptr(), tensor.nbytes, _PYBUF_WRITE)
    return view


def _to_host(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], torch.cuda.Event | None]:
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    if not devices:
        return tensors, None
    if len(devices) > 1:
        raise WireError("the tensors of one message lie on several accelerators")
    hosted = []
    with torch.cuda.device(devices.pop()):
        for tensor in tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            hosted.append(host.copy_(tensor, non_blocking=True))
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
    return hosted, copied

"""Tensor messages as bytes on a transport link.

Owns the frame: a fixed header, a msgpack body (key, meta, dtypes, shapes), the tensors' bytes. Nothing is
copied on the way that need not be: a frame refers to the memory of contiguous CPU tensors, and a receiver
reads straight into its own: fresh ones, 64-byte aligned by torch's CPU allocator, or ones in ``pages``. Of a
large message to a peer on the same host the frame says only where its tensors lie (``lending``).
"""

from __future__ import annotations

import array
import ctypes
import math
import os
import socket
import struct
from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.worker.runtime.deaths import is_out_of_memory
from oobleckd.worker.transport.lending import Borrowed, LendError, LentPiece
from oobleckd.worker.transport.mailbox import Key, TensorMessage
from oobleckd.worker.transport.pages import MESSAGE_PAGES

_MAGIC = b"OBLK"
_HEADER = struct.Struct("<4sBxxxIQ")  # magic, kind, body bytes, payload bytes
_MESSAGE, _GOODBYE, _LENT = 1, 2, 3
_MAX_BODY_BYTES = 64 * 2**20
_IOV_MAX = 1024
_BUFFER_BYTES = 4096
_TAIL_BYTES = 4096
_OWN_PAGES_BYTES = 1 << 20  # of a message for which they are worth while, lent or not
_MOST_FDS = 8  # that came and that no frame has spoken of
_ALIGNED_BYTES = 64
_FD_BYTES = array.array("i").itemsize
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


class _LentBody(_Body, frozen=True, array_like=True):
    """Its tensors lie in the piece of this number, whose descriptor comes with it where it ``is_new``;
    ``ended`` are those that will not come again.
    """

    piece: int
    is_new: bool
    ended: tuple[int, ...]


class Head(NamedTuple):
    """What comes before a message's tensors, or says where they lie: of ``num_bytes``."""

    body: _Body
    num_bytes: int


_encoder = msgspec.msgpack.Encoder()
_BODIES: dict[int, msgspec.msgpack.Decoder[Any]] = {
    _MESSAGE: msgspec.msgpack.Decoder(_Body),
    _LENT: msgspec.msgpack.Decoder(_LentBody),
}
MadeOf = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes."""


class Frame:
    """One frame on its way out; remembers how much of it has gone.

    Holds references to the tensors' memory: who sends must not change them until the frame is written.
    ``num_bytes``: of the message, with ``num_lent`` that lie in ``piece``, whose descriptor goes with its
    first byte where it ``is_new``.
    """

    __slots__ = ("_buffers", "_copied", "_is_new", "_left", "_piece", "_size", "_tensors", "num_bytes")

    def __init__(
        self,
        head: bytes,
        tensors: Sequence[Tensor] = (),
        copied: torch.cuda.Event | None = None,
        *,
        piece: LentPiece | None = None,
        is_new: bool = False,
        num_lent: int = 0,
    ) -> None:
        self._buffers = deque((memoryview(head), *map(_bytes_of, tensors)))
        self._tensors = tensors
        self._copied = copied
        self._piece, self._is_new = piece, is_new
        self._size = self._left = sum(buffer.nbytes for buffer in self._buffers)
        self.num_bytes = self._size + num_lent

    def ready(self) -> bool:
        """Whether the bytes are in host memory already (copies from an accelerator are under way
        until then).
        """
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def drop(self) -> None:
        """It was not sent, and will not be."""
        if self._piece is not None:
            self._piece.give_back()

    @property
    def has_begun(self) -> bool:
        """Whether some of it has gone."""
        return self._left < self._size

    def write_all_but_the_tail(self, sock: socket.socket) -> None:
        """Write the rest, however long it takes, but its last bytes, which ``write_now`` is for. Raises
        OSError.
        """
        if self._copied is not None:
            self._copied.synchronize()
        while self._left > _TAIL_BYTES:
            buffers = _first(self._next_buffers(), self._left - _TAIL_BYTES)
            self._advance(sock.sendmsg(buffers, self._beside()))

    def write_now(self, sock: socket.socket) -> bool:
        """Write what the socket takes without waiting; whether that was all. Raises OSError."""
        try:
            while self._left:
                self._advance(sock.sendmsg(self._next_buffers(), self._beside(), socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
        return True

    def _next_buffers(self) -> list[memoryview]:
        return list(islice(self._buffers, _IOV_MAX))

    def _beside(self) -> list[tuple[int, int, array.array[int]]]:
        if self._piece is None or not self._is_new or self.has_begun:
            return []
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._piece.fd]))]

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


def lent_bytes(tensors: Sequence[Tensor]) -> int:
    """How large a piece has to be for a message of ``tensors``; 0 where it is not worth while, or they are
    not in the host's memory. Raises WireError.
    """
    if sum(tensor.nbytes for tensor in tensors) < _OWN_PAGES_BYTES or any(t.is_cuda for t in tensors):
        return 0
    numbers_of(tensors)
    return sum(_places([(tuple(tensor.shape), tensor.dtype) for tensor in tensors]))


def lent_frame(
    key: Key,
    tensors: Sequence[Tensor],
    meta: bytes,
    piece: LentPiece,
    *,
    is_new: bool,
    ended: Collection[int] = (),
) -> Frame:
    """The frame of a message whose ``tensors`` are copied into ``piece`` (of ``lent_bytes``), which is the
    receiver's then: they may change at once. ``is_new``: on this link; ``ended``: pieces that had been on it
    and are no more. Raises WireError.
    """
    numbers, shapes = numbers_of(tensors), tuple(tuple(tensor.shape) for tensor in tensors)
    made_of = list(zip(shapes, (tensor.dtype for tensor in tensors), strict=True))
    for into, tensor in zip(_tensors_in(piece.data, made_of), tensors, strict=True):
        into.copy_(tensor)
    body = _encoder.encode(_LentBody(key, meta, numbers, shapes, piece.number, is_new, tuple(ended)))
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    header = _HEADER.pack(_MAGIC, _LENT, len(body), num_bytes)
    return Frame(header + body, piece=piece, is_new=is_new, num_lent=num_bytes)


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
    does not fit there is read straight into the tensors. ``close`` it when there is nothing more to be read.
    """

    __slots__ = ("_borrowed", "_buffer", "_fds", "_is_local", "_socket", "_source", "_start", "_stop")

    def __init__(self, sock: socket.socket, source: str) -> None:
        self._socket = sock
        self._is_local = sock.family == socket.AF_UNIX
        self._fds: deque[int] = deque()
        self._borrowed = Borrowed()
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
        if magic != _MAGIC or kind not in {_MESSAGE, _GOODBYE, _LENT} or body_bytes > _MAX_BODY_BYTES:
            raise WireError("damaged frame header")
        if kind == _GOODBYE:
            return None
        body = _decode(self._take(body_bytes), _BODIES[kind])
        if isinstance(body, _LentBody):
            self._borrowed.forget(body.ended)
            if body.is_new:
                self._learn(body.piece)
        return Head(body, payload_bytes)

    def message(self, head: Head) -> TensorMessage:
        """The tensor message that ``head`` begins. Raises as ``read``."""
        body = head.body
        if isinstance(body, _LentBody):
            return TensorMessage(body.key, self._source, body.meta, self._lent(body))
        tensors = _empty_tensors(body)
        views = [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
        if sum(map(len, views)) != head.num_bytes:
            raise WireError("a frame's payload does not have the size of its tensors")
        self._fill(views)
        return TensorMessage(body.key, self._source, body.meta, tensors)

    def close(self) -> None:
        """Close what came and was not spoken of."""
        while self._fds:
            os.close(self._fds.popleft())

    def _learn(self, piece: int) -> None:
        if not self._fds:
            raise WireError("memory was lent, and it did not come")
        try:
            self._borrowed.learn(piece, self._fds.popleft())
        except (LendError, OSError, ValueError) as error:
            raise WireError(f"memory was lent that is of no use: {error}") from error

    def _lent(self, body: _LentBody) -> list[Tensor]:
        made_of = _made_of(body)
        try:
            return _tensors_in(self._borrowed.take(body.piece, sum(_places(made_of))), made_of)
        except (LendError, ValueError, RuntimeError) as error:
            raise WireError(f"memory was lent that is of no use: {error}") from error

    def _more(self) -> bool:
        """Get something into an empty buffer; False at the end of the stream."""
        if self._start == self._stop:
            self._start, self._stop = 0, self._receive()
        return self._start < self._stop

    def _receive(self) -> int:
        if not self._is_local:
            return self._socket.recv_into(self._buffer)
        num_bytes, beside, flags, _ = self._socket.recvmsg_into(
            [self._buffer], socket.CMSG_SPACE(_MOST_FDS * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(array.array("i", data[: len(data) - len(data) % _FD_BYTES]))
        if len(self._fds) > _MOST_FDS or flags & socket.MSG_CTRUNC:
            raise WireError("descriptors that nobody speaks of")
        return num_bytes

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


def _decode(data: memoryview, decoder: msgspec.msgpack.Decoder[Any]) -> _Body:
    try:
        body: _Body = decoder.decode(data)
    except UNREADABLE as error:
        raise WireError(f"damaged frame: {problem_of(error)}") from error
    return body


def _made_of(body: _Body) -> MadeOf:
    try:
        made_of = [(shape, dtype_of(number)) for number, shape in zip(body.dtypes, body.shapes, strict=True)]
    except ValueError as error:
        raise WireError(f"a frame's tensors cannot be made: {error}") from error
    if any(size < 0 for shape, _ in made_of for size in shape):
        raise WireError("a frame's tensors cannot be made: a size below 0")
    return made_of


def _empty_tensors(body: _Body) -> list[Tensor]:
    made_of = _made_of(body)
    num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in made_of)
    try:
        if num_bytes < _OWN_PAGES_BYTES:
            return [torch.empty(shape, dtype=dtype) for shape, dtype in made_of]
        return _tensors_in(MESSAGE_PAGES.take(sum(_places(made_of))), made_of)
    except (ValueError, RuntimeError, OverflowError, OSError) as error:
        if is_out_of_memory(error) and num_bytes < _HOST_BYTES:
            raise  # ours to die of: the sender has done nothing wrong
        raise WireError(f"a frame's tensors cannot be made: {error}") from error


def _places(made_of: MadeOf) -> list[int]:
    """Bytes that each takes where they lie one behind the other, aligned as torch's allocator aligns them."""
    return [
        -(-math.prod(shape) * dtype.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES for shape, dtype in made_of
    ]


def _tensors_in(memory: memoryview, made_of: MadeOf) -> list[Tensor]:
    """Tensors in ``memory``, of the sum of ``_places``."""
    starts = accumulate(_places(made_of), initial=0)
    lengths = [math.prod(shape) for shape, _ in made_of]
    return [
        torch.frombuffer(memory, dtype=dtype, count=length, offset=start).view(shape)
        if length
        else torch.empty(shape, dtype=dtype)
        for length, (shape, dtype), start in zip(lengths, made_of, starts, strict=False)
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

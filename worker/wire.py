"""Letters as bytes on a transport link.

Owns the frame: a fixed header, a msgpack body (key, meta, dtypes, shapes), the tensors' bytes.
Nothing is copied on the way that need not be: a frame refers to the memory of contiguous CPU tensors,
and a receiver reads straight into fresh ones (64-byte aligned by torch's CPU allocator).
"""

from __future__ import annotations

import math
import socket
import struct
from collections import deque
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from worker.framing import read_exactly
from worker.mailbox import Key, Letter

_MAGIC = b"OBLK"
_HEADER = struct.Struct("<4sBxxxIQ")  # magic, kind, body bytes, payload bytes
_LETTER, _GOODBYE = 1, 2
_MAX_BODY_BYTES = 64 * 2**20
_IOV_MAX = 1024
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}


class WireError(ValueError):
    """Bytes that are no frame, or a tensor that has no form on the wire."""


class _Body(msgspec.Struct, frozen=True, array_like=True):
    key: tuple[str | int, ...]
    meta: bytes
    dtypes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


_encoder = msgspec.msgpack.Encoder()
_body_decoder = msgspec.msgpack.Decoder(_Body)


class Frame:
    """One frame on its way out; remembers how much of it has gone.

    Holds references to the tensors' memory: who sends must not change them until the frame is written.
    """

    __slots__ = ("_buffers", "_copied", "num_bytes")

    def __init__(self, buffers: Sequence[bytes | memoryview], copied: torch.cuda.Event | None = None) -> None:
        self._buffers = deque(memoryview(buffer) for buffer in buffers)
        self._copied = copied
        self.num_bytes = sum(buffer.nbytes for buffer in self._buffers)

    def ready(self) -> bool:
        """Whether the bytes are in host memory already (copies from an accelerator are under way until then)."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def write(self, sock: socket.socket) -> None:
        """Write the rest, however long it takes. Raises OSError."""
        if self._copied is not None:
            self._copied.synchronize()
        while self._buffers:
            self._advance(sock.sendmsg(self._next_buffers()))

    def write_now(self, sock: socket.socket) -> bool:
        """Write what the socket takes without waiting; whether that was all. Raises OSError."""
        try:
            while self._buffers:
                self._advance(sock.sendmsg(self._next_buffers(), [], socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
        return True

    def _next_buffers(self) -> list[memoryview]:
        return [buffer for buffer, _ in zip(self._buffers, range(_IOV_MAX), strict=False)]

    def _advance(self, num_bytes: int) -> None:
        _advance(self._buffers, num_bytes)


def letter_frame(key: Key, tensors: Sequence[Tensor], meta: bytes) -> Frame:
    """The frame of a letter. Accelerator tensors are copied to pinned host memory on their current stream.

    Raises WireError for a dtype without a number on the wire.
    """
    hosted, copied = _to_host(tensors)
    try:
        dtypes = tuple(_NUMBER_OF[tensor.dtype] for tensor in tensors)
    except KeyError as error:
        raise WireError(f"{error.args[0]} tensors cannot be sent") from error
    body = _encoder.encode(_Body(key, meta, dtypes, tuple(tuple(tensor.shape) for tensor in tensors)))
    payload = [_bytes_of(tensor) for tensor in hosted if tensor.numel()]
    header = _HEADER.pack(_MAGIC, _LETTER, len(body), sum(view.nbytes for view in payload))
    return Frame([header + body, *payload], copied)


def goodbye_frame() -> Frame:
    """The last frame of a link that is closed in order."""
    return Frame([_HEADER.pack(_MAGIC, _GOODBYE, 0, 0)])


def read_letter(sock: socket.socket, source: str) -> Letter | None:
    """The next letter of ``source``, or None after its goodbye.

    Raises EOFError when the stream ends without one, WireError for bytes that are no frame, OSError.
    """
    header = read_exactly(sock, _HEADER.size)
    if header is None:
        raise EOFError("closed without a goodbye")
    magic, kind, body_bytes, payload_bytes = _HEADER.unpack(header)
    if magic != _MAGIC or kind not in {_LETTER, _GOODBYE} or body_bytes > _MAX_BODY_BYTES:
        raise WireError("damaged frame header")
    if kind == _GOODBYE:
        return None
    body = _decode(read_exactly(sock, body_bytes))
    if _payload_bytes(body) != payload_bytes:
        raise WireError("a frame's payload does not have the size of its tensors")
    tensors = [
        torch.empty(shape, dtype=_DTYPES[number])
        for number, shape in zip(body.dtypes, body.shapes, strict=True)
    ]
    _fill(sock, deque(_bytes_of(tensor) for tensor in tensors if tensor.numel()))
    return Letter(body.key, source, body.meta, tensors)


def _decode(data: bytearray | None) -> _Body:
    if data is None:
        raise EOFError("closed within a frame")
    try:
        return _body_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise WireError(f"damaged frame: {error}") from error


def _payload_bytes(body: _Body) -> int:
    if len(body.dtypes) != len(body.shapes) or any(not 0 <= n < len(_DTYPES) for n in body.dtypes):
        raise WireError("damaged frame: dtypes and shapes do not fit")
    return sum(
        _DTYPES[number].itemsize * math.prod(shape)
        for number, shape in zip(body.dtypes, body.shapes, strict=True)
    )


def _fill(sock: socket.socket, views: deque[memoryview]) -> None:
    while views:
        batch = [view for view, _ in zip(views, range(_IOV_MAX), strict=False)]
        count = sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
        if count == 0:
            raise EOFError("closed within a frame")
        _advance(views, count)


def _advance(views: deque[memoryview], num_bytes: int) -> None:
    while num_bytes:
        first = views[0]
        if num_bytes < first.nbytes:
            views[0] = first[num_bytes:]
            return
        num_bytes -= first.nbytes
        views.popleft()


def _bytes_of(tensor: Tensor) -> memoryview:
    # numpy knows no bfloat16, so everything is seen as bytes; the array keeps the tensor's memory alive.
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _to_host(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], torch.cuda.Event | None]:
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    if not devices:
        return tensors, None
    if len(devices) > 1:
        raise WireError("the tensors of one letter lie on several accelerators")
    hosted = []
    with torch.cuda.device(devices.pop()):
        for tensor in tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            hosted.append(host.copy_(tensor, non_blocking=True))
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
    return hosted, copied

"""A tensor message's tensors as one run of bytes, so that a message is one operation of its channel."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from oobleckd.worker.transport import wire


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of ``tensors`` (uint8, one dimension) on their device; a single contiguous tensor is not
    copied.
    """
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def num_bytes(dtypes: Sequence[int], shapes: Sequence[Sequence[int]]) -> int:
    """The length of the payload of a header. Raises WireError for an unknown dtype."""
    return sum(_size(number, shape) for number, shape in zip(dtypes, shapes, strict=True))


def unpack(payload: Tensor, dtypes: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The inverse of ``pack``: tensors with memory of their own, aligned as the allocator aligns."""
    sizes = [_size(number, shape) for number, shape in zip(dtypes, shapes, strict=True)]
    parts = [payload] if len(sizes) == 1 else [part.clone() for part in torch.split(payload, sizes)]
    return [
        part.view(wire.dtype_of(number)).view(tuple(shape))
        for part, number, shape in zip(parts, dtypes, shapes, strict=True)
    ]


def _size(number: int, shape: Sequence[int]) -> int:
    return wire.dtype_of(number).itemsize * prod(shape)

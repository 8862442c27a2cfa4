"""A digest of a bucket's training state: 64 bits that are equal where the state is, on devices of one kind.

Replicas of a bucket compare them (docs/corruption.md). Owns the arithmetic, not when it is done
(``integrity``).

A tensor's bytes are laid out as rows of 64-bit words, and the sums of its rows and of its columns modulo
2**64 are hashed (BLAKE2b): two passes at the speed of the memory or one, on a CPU as on an accelerator, where
the state stays, and an order of additions that does not matter. One flipped bit changes the sum of its row,
whichever it is, and two words that change places those of their rows or of their columns. Small tensors are
laid one behind the other first: a call for each of them would take longer than its numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from oobleckd.worker.sums.choice import kernels_of

_WIDTH = 1024
"""Words of a row."""
_SMALL = 1 << 16
"""Tensors of at most so many numbers are laid one behind the other."""
_HALF_BYTES = 2


def digest(tensors: Sequence[Tensor], exponents: Sequence[int], wrong: Tensor | None = None) -> int:
    """A 64-bit digest of a bucket's ``tensors``, by slot and key and of any shape and dtype, and of its
    ``exponents``. On a GPU it waits once. ``wrong``: how much is wrong beside of them, an int64 scalar on
    their device; the digest is another one unless that is 0.
    """
    (found,) = digests([(tensors, exponents, wrong)])
    return found


def digests(states: Iterable[tuple[Sequence[Tensor], Sequence[int], Tensor | None]]) -> list[int]:
    """The digest of each of ``states``: tensors and exponents of a bucket, and how much is wrong beside of
    them, all on one device. On a GPU it waits once for all of them.
    """
    heads, sums = [], []
    for tensors, exponents, wrong in states:
        heads.append(repr(tuple(exponents)).encode())
        sums.append(_sums_of(tensors, wrong))
    filled = [part for part in sums if part.numel()]
    flat = torch.cat(filled).cpu().numpy() if filled else None
    found, begin = [], 0
    for head, part in zip(heads, sums, strict=True):
        whole, end = hashlib.blake2b(head, digest_size=8), begin + part.numel()
        if flat is not None:
            whole.update(flat[begin:end].tobytes())
        found.append(int.from_bytes(whole.digest(), "little"))
        begin = end
    return found


def _sums_of(tensors: Sequence[Tensor], wrong: Tensor | None) -> Tensor:
    """What is hashed of ``tensors``, 64-bit integers, where they lie."""
    flats = [_words(tensor) for tensor in tensors]
    small = [flat for flat in flats if flat.numel() <= _SMALL]
    large = [flat for flat in flats if flat.numel() > _SMALL]
    sums = [part for flat in ([torch.cat(small), *large] if small else large) for part in _sums(flat)]
    if not sums:
        return torch.empty(0, dtype=torch.int64)
    words = torch.cat(sums)
    # Not a word of its own, and no second look at the device: replicas without copies have the same digest,
    # and who compares and waits for it goes on as ever. (D-corruption-010)
    if wrong is not None:
        words[:1] += wrong
    return words


def _words(tensor: Tensor) -> Tensor:
    """The bits of ``tensor`` as 32-bit integers; of two bytes a number a last odd one has zeros behind it."""
    flat = tensor.detach().reshape(-1)
    if flat.element_size() == _HALF_BYTES:
        flat = torch.nn.functional.pad(flat.view(torch.int16), (0, flat.numel() % 2))
    return flat.view(torch.int32)


def _sums(flat: Tensor) -> list[Tensor]:
    """Sums of the rows and columns of 32-bit integers in pairs, and what is left over as it is, as 64-bit
    integers.
    """
    if flat.storage_offset() % 2:
        flat = flat.clone()  # words begin at even numbers
    paired = flat.numel() // 2 * 2
    words, odd = flat[:paired].view(torch.int64), flat[paired:].to(torch.int64)
    if words.numel() < _WIDTH:
        return [words, odd]
    # Two passes at the speed of the memory, one where there is compiled code: 8.6 ms for 85 MB where BLAKE2b
    # of the bytes took 70, twenty times the update itself. A flipped bit always shows. (D-corruption-004)
    square = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    kernels = kernels_of(flat.device.type)
    rows, columns = (square.sum(1), square.sum(0)) if kernels is None else kernels.square(square)
    return [rows, columns, words[square.numel() :], odd]

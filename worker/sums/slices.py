"""Cuts a bucket's parameters into slices: what of its gradients one holder makes means of for all others.

A *slice* is a part of a bucket, of one key or of several, or of a part of a key. Where slices begin is a
function of the model alone, so that it is the same on every device and whoever holds the bucket: key borders,
and multiples of a power of two of numbers within a key. Sets of slices are bitmaps: bit ``s`` is slice ``s``.

*Chunks* are what squares are added up in (``arithmetic``): of a fixed size within each key, so that a slice
consists of whole ones, and norms do not show how a bucket was cut.

A *shard* is the slices of a bucket that a device holds: all, or where devices hold a stage between them,
those of its rank. Of each of its *parts*, ranges of keys that are as long as can be, the device has one
tensor a slot. Owns no tensor, and not whose a slice is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from oobleckd.worker.sums.arithmetic import square_chunk

MOST_SLICES = 64
"""Of a bucket: as many as there are bits in a number of a message."""
_LEAST_NUMBERS = 1 << 15


class KeyRange(NamedTuple):
    """The numbers from ``begin`` to ``end`` of the flat key at position ``key`` of a bucket."""

    key: int
    begin: int
    end: int


@dataclass(frozen=True)
class Slicing:
    """A bucket with keys of ``sizes`` numbers, cut into ``slices``, each of one or more ranges. ``chunk``:
    numbers whose squares are added up to one.
    """

    sizes: tuple[int, ...]
    slices: tuple[tuple[KeyRange, ...], ...]
    chunk: int
    _ranges: dict[int, tuple[KeyRange, ...]] = field(default_factory=dict, compare=False)
    _chunks: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of each slice how many it has."""
        return tuple(sum(end - begin for _, begin, end in ranges) for ranges in self.slices)

    @property
    def all(self) -> int:
        """The set of all slices."""
        return (1 << len(self.slices)) - 1

    def ranges(self, slices: int) -> tuple[KeyRange, ...]:
        """What a set of ``slices`` consists of, in key order, in as few ranges as there can be."""
        if slices not in self._ranges:
            self._ranges[slices] = tuple(self._joined(slices))
        return self._ranges[slices]

    def _joined(self, slices: int) -> Iterator[KeyRange]:
        last: KeyRange | None = None
        for number in members(slices):
            for each in self.slices[number]:
                if last is not None and (last.key, last.end) == (each.key, each.begin):
                    last = last._replace(end=each.end)
                    continue
                if last is not None:
                    yield last
                last = each
        if last is not None:
            yield last

    def chunks(self, slices: int) -> tuple[int, ...]:
        """The positions of the chunks of ``slices`` among all of the bucket, ascending."""
        if slices not in self._chunks:
            firsts = self._first_chunks()
            self._chunks[slices] = tuple(
                firsts[each.key] + each.begin // self.chunk + number
                for each in self.ranges(slices)
                for number in range(num_chunks(each.end - each.begin, self.chunk))
            )
        return self._chunks[slices]

    def _first_chunks(self) -> list[int]:
        firsts, count = [], 0
        for size in self.sizes:
            firsts.append(count)
            count += num_chunks(size, self.chunk)
        return firsts


@dataclass(frozen=True)
class Shard:
    """The ``slices`` (a bitmap) of a bucket, cut as ``slicing`` says, that a device holds; its keys have
    these ``key_shapes``.
    """

    slicing: Slicing
    slices: int
    key_shapes: tuple[tuple[int, ...], ...]
    _where: dict[int, tuple[KeyRange, ...]] = field(default_factory=dict, compare=False)

    @cached_property
    def parts(self) -> tuple[KeyRange, ...]:
        """What it consists of, in key order."""
        return self.slicing.ranges(self.slices)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of each part: that of the key, where it is all of it, else flat."""
        return tuple(
            self.key_shapes[key] if end - begin == self.slicing.sizes[key] else (end - begin,)
            for key, begin, end in self.parts
        )

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """Of each part the position of its key in the bucket."""
        return tuple(part.key for part in self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether it is the bucket."""
        return self.slices == self.slicing.all

    def cut(self, tensors: Sequence[Tensor], slices: int) -> list[Tensor]:
        """Flat views of the ranges of those of ``slices`` that are here; ``tensors``: contiguous, one for
        each part.
        """
        return [tensors[part].view(-1)[begin:end] for part, begin, end in self._within(slices & self.slices)]

    def _within(self, slices: int) -> tuple[KeyRange, ...]:
        """The ranges of ``slices`` by the part that each lies in, and where in it."""
        if slices not in self._where:
            found, part = [], 0
            for key, begin, end in self.slicing.ranges(slices):
                while self.parts[part].key != key or self.parts[part].end < end:
                    part += 1
                first = self.parts[part].begin
                found.append(KeyRange(part, begin - first, end - first))
            self._where[slices] = tuple(found)
        return self._where[slices]

    def of_parts(self, by_key: Sequence[int]) -> tuple[int, ...]:
        """What is so of each key of the bucket, by part."""
        return tuple(by_key[key] for key in self.keys)

    def of_keys(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parts of ``tensors``, contiguous and one for each key of the bucket, as views in the parts'
        shapes.
        """
        return [
            tensors[key] if end - begin == self.slicing.sizes[key] else tensors[key].reshape(-1)[begin:end]
            for key, begin, end in self.parts
        ]


def slicing(
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    num_shards: int = 1,
    whole: Collection[int] = (),
) -> Slicing:
    """Cut a bucket with keys of these ``shapes`` into at most ``MOST_SLICES``. All but the last have at least
    so many numbers, a power of two from 2**15 on, and less than twice as many.

    With more than one of ``num_shards`` borders are the same, but keys in ``whole``, by position, are not
    cut, and small keys are put together to shorter slices, so that each shard gets some.
    """
    sizes = tuple(map(math.prod, shapes))
    length = _LEAST_NUMBERS
    while sum(sizes) > length * (MOST_SLICES - 1):
        length *= 2
    # Chunks of squares, and the vectors of a processor, must not show where a bucket is cut: what is left
    # over at the end of a tensor torch may round otherwise. (D-exactness-024)
    cut, chunk = length, min(square_chunk(device), length)
    if num_shards > 1:
        length = max(1, -(-sum(sizes) // (MOST_SLICES - 1)))
    slices: list[tuple[KeyRange, ...]] = []
    present: list[KeyRange] = []
    for atom in _atoms(sizes, cut, whole if num_shards > 1 else ()):
        present.append(atom)
        if sum(end - begin for _, begin, end in present) >= length:
            slices.append(tuple(present))
            present = []
    if present or not slices:
        slices.append(tuple(present))
    return Slicing(sizes, tuple(slices), chunk)


def shards(bucket: int, cut: Slicing, num_shards: int) -> tuple[int, ...]:
    """Of each rank the slices of ``bucket`` that it holds, as bitmaps: what lies together, in equal parts as
    far as slices are of equal sizes.
    """
    found, begin, total = [0] * num_shards, 0, sum(cut.numbers)
    for number, size in enumerate(cut.numbers):
        share = (2 * begin + size) * num_shards // (2 * total) if total else 0
        begin += size
        # Buckets begin with another rank each: of small ones the first would have most.
        found[(bucket + share) % num_shards] |= 1 << number
    return tuple(found)


def _atoms(sizes: Sequence[int], length: int, whole: Collection[int]) -> Iterator[KeyRange]:
    """What is not cut any more: ``length`` numbers of a key, or what is left of it."""
    for key, size in enumerate(sizes):
        step = max(1, size) if key in whole else length
        for begin in range(0, max(1, size), step):
            yield KeyRange(key, begin, min(begin + step, size))


def num_chunks(size: int, chunk: int) -> int:
    """How many chunks a range of so many numbers has that begins with one."""
    return max(1, -(-size // chunk))


def members(number: int) -> Iterator[int]:
    """The members of a set that is a bitmap, ascending."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low

"""What runs on an NVIDIA GPU for sums, in Triton's language: a subset of Python without types.

Owns arithmetic alone; ``triton_kernels`` says on what. What the blocks of a sum find, integers, is put
together by atomic operations, whose order leaves no trace. A block that is full has no mask: with one, a GPU
reads number by number and not sixteen bytes at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oobleckd.worker.sums import arithmetic

BASE = tl.constexpr(arithmetic.BASE)
# Single numbers are read from there: it need not be compiled once for each way in which they can lie.
_TOLD = ["factors", "where", "begins", "sizes", "block_keys", "block_begins", "seen", "checksum"]


@triton.jit(do_not_specialize_on_alignment=_TOLD)
def add(
    total, factors, where, begins, sizes, block_keys, block_begins, seen, checksum,
    first: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One block of one key: ``total += grad * factor``, rounded. ``where``: of each key the address of its
    gradient, and whether that is bfloat16.
    """
    number = tl.program_id(0)
    key = tl.load(block_keys + number)
    begin = tl.load(block_begins + number)
    size = tl.load(sizes + key)
    at = begin + tl.arange(0, block)
    into = tl.multiple_of(total + tl.load(begins + key) + at, 16)
    address, narrow = tl.load(where + 2 * key), tl.load(where + 2 * key + 1)
    factor = tl.load(factors + key)
    if begin + block <= size:
        add_block(into, address, narrow, factor, at, size, seen + key, checksum, first, True)
    else:
        add_block(into, address, narrow, factor, at, size, seen + key, checksum, first, False)


@triton.jit
def add_block(
    into, address, narrow, factor, at, size, seen, checksum, first: tl.constexpr, full: tl.constexpr
):
    """Numbers ``at`` of a key of ``size``, all of which are in it where ``full``."""
    if narrow != 0:
        halves = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)) + at, 16)
        grad = load(halves, at, size, full).to(tl.float32)
    else:
        words = tl.multiple_of(address.to(tl.pointer_type(tl.float32)) + at, 16)
        grad = load(words, at, size, full)
    term = (grad.to(tl.float64) * factor + BASE) - BASE
    if first:
        after = term
        change = after.to(tl.int64, bitcast=True)
    else:
        before = load(into, at, size, full)
        after = before + term
        change = after.to(tl.int64, bitcast=True) - before.to(tl.int64, bitcast=True)
    store(into, after, at, size, full)
    tl.atomic_add(checksum, tl.sum(change), sem="relaxed")  # beyond the end it is 0
    magnitude = grad.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(seen, tl.max(magnitude), sem="relaxed")


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["divisor", "largest"])
def finish(total, divisor, grad, squares, largest, size, block: tl.constexpr):
    """One block of one key's end of a step."""
    begin = tl.program_id(0).to(tl.int64) * block
    at = begin + tl.arange(0, block)
    if begin + block <= size:
        finish_block(total + at, tl.load(divisor), grad + at, squares + at, largest, at, size, True)
    else:
        finish_block(total + at, tl.load(divisor), grad + at, squares + at, largest, at, size, False)


@triton.jit
def finish_block(total, divisor, grad, squares, largest, at, size, full: tl.constexpr):
    """Numbers ``at`` of a key of ``size``, all of which are in it where ``full``."""
    value = load(total, at, size, full)
    mean = (value / divisor).to(tl.float32)
    wide = mean.to(tl.float64)
    store(grad, mean, at, size, full)
    store(squares, wide * wide, at, size, full)
    magnitude = value.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    tl.atomic_max(largest, tl.max(magnitude), sem="relaxed")


@triton.jit
def load(pointers, at, size, full: tl.constexpr):
    """What lies there, and 0 beyond the end."""
    if full:
        return tl.load(pointers)
    else:  # noqa: RET505 - Triton's language has returns in both arms, or in none
        return tl.load(pointers, mask=at < size, other=0.0)


@triton.jit
def store(pointers, values, at, size, full: tl.constexpr):
    """Write ``values``, but not beyond the end."""
    if full:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=at < size)

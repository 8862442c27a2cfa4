"""Which pieces of which documents each row of a fixed number of tokens has: packed, or padded.

A function of the documents' lengths and a rule, of nothing else: who has the index makes the same rows
again. Documents are taken in an order that is shuffled once and for all, in blocks that know nothing of each
other, and those of a block go, one after another, into the open row that is left with the least room (best
fit). Owns that; how rows are stored is ``plan``'s. Raises DataError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from oobleckd.protocol.job import Job
from oobleckd.tokens.asked import AskedTokens
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.heldout import DocumentSide, side_of
from oobleckd.tokens.permutation import Permutation
from oobleckd.words import count, noun

_BLOCK = 1 << 16
"""Documents that are packed together."""
_OPEN_ROWS = 256
"""With 16 of them rows are 99.3 % full, with 256 99.6 %, and with thousands no fuller."""
# The order is nobody's seed: one plan serves every seed of a job, so a folder that only its owner may write
# to is prepared once for all. Rows are shuffled by the job's seed in every pass. (D-data-020)
_ORDER = "pack"

Numbers = npt.NDArray[np.int64]


class PackRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """How rows are made. ``separate``: documents of a row do not see each other, so the first token of each
    is nobody's target. ``on_long``: what becomes of documents of more than ``sequence`` tokens. ``side``:
    which documents; None: all of them.
    """

    kind: Literal["packed", "padded"]
    sequence: int
    separate: bool
    on_long: Literal["cut", "skip", "fail"]
    side: DocumentSide | None = None


class RowBlock(NamedTuple):
    """Rows that were packed together. ``row_starts``: the first piece of each, and the number of pieces at
    the end; ``tokens``, ``lengths``: of each piece its first token in all of the data's, and how many;
    ``targets``: of each row. ``long``: documents that are longer than a row; ``idle``: rows that were left
    out, as nothing in them is asked for.
    """

    row_starts: Numbers
    tokens: Numbers
    lengths: Numbers
    targets: Numbers
    long: int
    idle: int


def rules_of(job: Job) -> tuple[PackRule, ...]:
    """Of a job on one source: of what it trains on, and where documents are held out of that, also of those;
    none where its rows are windows, which nobody has to plan.
    """
    sides = (False,) if side_of(job) is None else (False, True)
    return tuple(rule for held in sides if (rule := rule_of(job, held=held)) is not None)


def rule_of(job: Job, *, held: bool = False) -> PackRule | None:
    """Of what a job on one source trains on, or of what is ``held`` out of it; None where its rows are
    windows.
    """
    data = job.data
    if data.row_kind == "windows":
        return None
    usual: Literal["cut", "fail"] = "fail" if data.has_chats else "cut"
    on_long = usual if data.on_long_document == "auto" else data.on_long_document
    return PackRule(data.row_kind, job.train.sequence, data.is_separate, on_long, side_of(job, held=held))


def pack(starts: Numbers, rule: PackRule, asked: AskedTokens | None = None) -> Iterator[RowBlock]:
    """Rows of the documents that begin at ``starts``, tokens of all of the data's, with their number at the
    end. Raises DataError.
    """
    if rule.on_long == "fail":
        _refuse_long(starts, rule.sequence)
    num_documents = len(starts) - 1
    order = Permutation(num_documents, _ORDER)
    for first in range(0, num_documents, _BLOCK):
        positions = np.arange(first, min(first + _BLOCK, num_documents), dtype=np.uint64)
        documents = order.many(positions).astype(np.int64)
        if rule.side is not None:
            documents = documents[rule.side.keeps(documents)]
        yield _pack_block(starts, documents, rule, asked)


def _refuse_long(starts: Numbers, sequence: int) -> None:
    lengths = np.diff(starts)
    long = np.flatnonzero(lengths > sequence)
    if len(long):
        first = int(long[0])
        more = f", as {noun(len(long) - 1, 'is')} {count(len(long) - 1, 'other')}" if len(long) > 1 else ""
        raise DataError(
            f"data: document {first:,} (from 0) has {count(int(lengths[first]), 'token')}, more than "
            f"train.sequence = {sequence:,}{more}",
            'make train.sequence longer, or set data.on_long_document = "skip" or "cut"',
        )


def _pack_block(starts: Numbers, documents: Numbers, rule: PackRule, asked: AskedTokens | None) -> RowBlock:
    sequence = rule.sequence
    firsts, lengths = starts[documents], starts[documents + 1] - starts[documents]
    long = lengths > sequence
    kept = (lengths > 0) & ~long if rule.on_long == "skip" else lengths > 0
    firsts, lengths = firsts[kept], lengths[kept]
    full = (lengths - 1) // sequence
    rests = lengths - full * sequence
    num_full = int(full.sum())
    of_rests = np.arange(len(rests)) if rule.kind == "padded" else best_fit(rests.tolist(), sequence)
    nth = np.arange(num_full) - np.repeat(np.cumsum(full) - full, full)
    tokens = np.concatenate([np.repeat(firsts, full) + nth * sequence, firsts + full * sequence])
    lengths = np.concatenate([np.full(num_full, sequence), rests])
    rows = np.concatenate([np.arange(num_full), num_full + of_rests])
    grouped = np.argsort(rows, kind="stable")
    return _with_targets(rows[grouped], tokens[grouped], lengths[grouped], rule, asked, int(long.sum()))


def _with_targets(
    rows: Numbers, tokens: Numbers, lengths: Numbers, rule: PackRule, asked: AskedTokens | None, long: int
) -> RowBlock:
    """Pieces, ordered by their ``rows``, without the rows that are asked for nothing."""
    is_first = np.diff(rows, prepend=-1) > 0
    unseen = np.ones(len(rows), np.bool_) if rule.separate else is_first
    if asked is None:
        targets = lengths - unseen
    else:
        targets = asked.counts(tokens, lengths) - unseen * asked.counts(tokens, np.ones_like(lengths))
    of_rows = np.bincount(rows, targets).astype(np.int64)  # exact: far below 2**53
    useful = of_rows > 0
    kept = useful[rows]
    row_starts = np.append(np.flatnonzero(is_first[kept]), np.count_nonzero(kept))
    idle = len(useful) - int(useful.sum())
    return RowBlock(row_starts, tokens[kept], lengths[kept], of_rows[useful], long, idle)


def best_fit(lengths: Sequence[int], sequence: int) -> Numbers:
    """The row of each piece of ``lengths``, none of them above ``sequence``; rows are numbered as they are
    opened.

    A piece goes into the open row that is left with the least room. Where it fits into none, a new one is
    opened, and the fullest is closed where too many are open.
    """
    # A bit for each room that an open row has: the least that is large enough is one shift away.
    by_room: dict[int, list[int]] = {}
    rooms = num_open = num_rows = 0
    found = []

    def take(room: int, which: int) -> int:
        nonlocal rooms, num_open
        stack = by_room[room]
        row = stack.pop(which)
        if not stack:
            rooms &= ~(1 << room)
        num_open -= 1
        return row

    for length in lengths:
        if large := rooms >> length:
            room = length + (large & -large).bit_length() - 1
            row = take(room, -1)
        else:
            row, room, num_rows = num_rows, sequence, num_rows + 1
        found.append(row)
        if left := room - length:
            if num_open == _OPEN_ROWS:
                take((rooms & -rooms).bit_length() - 1, 0)
            by_room.setdefault(left, []).append(row)
            rooms |= 1 << left
            num_open += 1
    return np.array(found, np.int64)

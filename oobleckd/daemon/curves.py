"""Curves of whole runs: bins as they are asked for, put together from those that are stored and from rows.

Owns where the bins of a curve begin. What is in one, and the table of them, is ``bins``'; the connection that
all is read over is ``steprows``'.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from oobleckd.daemon import bins
from oobleckd.daemon.bins import BLOCK, Bin
from oobleckd.protocol.jobviews import CurveBin

FEW = 4_000
"""Steps: as many are read one by one, where narrower bins are asked for than are stored."""


@dataclass(frozen=True, slots=True)
class CurveQuestion:
    """Which curve is asked for: of a job's steps from ``first`` to before ``until`` (from 0), in ``num_bins``
    at most, of equal width, or with ``log`` of widths that grow. ``sequence``: tokens of a sample.
    """

    job: str
    first: int
    until: int
    num_bins: int
    log: bool = False
    sequence: int = 0


@dataclass(slots=True)
class FoundCurve:
    """The curve, and whole bins that were not stored, and should be."""

    bins: list[CurveBin]
    renewed: list[Bin] = field(default_factory=list)


# ---------------------------------------------------------------------- where bins begin


def starts(question: CurveQuestion) -> list[int]:
    """Where the bins begin, in order."""
    if question.first >= question.until:
        return []
    return _growing(question) if question.log else _equal(question)


def _equal(question: CurveQuestion) -> list[int]:
    first, until = question.first, question.until
    grain = 1 if until - first <= FEW else bins.width_at(until - 1)
    first -= first % grain
    width = -(-(until - first) // (question.num_bins * grain)) * grain
    return [*range(first, until, width)]


def _growing(question: CurveQuestion) -> list[int]:
    """Each bin is as wide as a share of its distance to the first step: the least share that comes to no more
    bins than are asked for.
    """
    # Up to the next power of two: the bins of a run that goes on stay where they are for long.
    reach = question.first + (1 << (question.until - question.first).bit_length())
    parts = range(1, question.num_bins + 1)
    fit = bisect_left(parts, True, key=lambda part: _too_many(question, part, reach))
    begins = [question.first]
    while (at := _after(begins[-1], question.first, parts[max(0, fit - 1)])) < question.until:
        begins.append(at)
    return begins[: question.num_bins]


def _too_many(question: CurveQuestion, part: int, reach: int) -> bool:
    at, num = question.first, 0
    while at < reach and num <= question.num_bins:
        at, num = _after(at, question.first, part), num + 1
    return num > question.num_bins


def _after(at: int, first: int, part: int) -> int:
    """Where the bin ends that begins at ``at``. As soon as it may be as wide as a stored one, or is far from
    the ``first`` step, it ends where one of these does.
    """
    distance, grain = at - first, bins.width_at(at)
    width = max(1, distance // part)
    if width < grain and distance < FEW:
        return at + width
    return -(-(at + width) // grain) * grain


# ---------------------------------------------------------------------- what is in them


def curve(database: sqlite3.Connection, question: CurveQuestion) -> FoundCurve:
    """What is known of the steps that are asked for; bins of which nothing is known are left out."""
    assert question.num_bins > 0
    begins, found = starts(question), FoundCurve([])
    spans = [range(*pair) for pair in pairwise([*begins, question.until])]
    parts: list[Bin] = []
    for is_stored, group in groupby(spans, lambda span: _is_stored(span, question.until)):
        several = [*group]
        span = range(several[0].start, several[-1].stop)
        if is_stored:
            parts += _of_table(database, question.job, span, found.renewed)
        else:
            parts += _of_rows(database, question, span, begins)
    found.bins = [each.shown(question.sequence) for each in _joined(parts, begins)]
    return found


def _is_stored(span: range, until: int) -> bool:
    """Whether it begins and ends where stored bins do."""
    return bins.start_of(span.start) == span.start and (
        span.stop == until or bins.start_of(span.stop) == span.stop
    )


def _of_rows(
    database: sqlite3.Connection, question: CurveQuestion, span: range, begins: Sequence[int]
) -> list[Bin]:
    """Of steps that no stored bins show closely enough; of these where the rows are gone."""
    made: list[Bin] = []
    for step, outcome, data in bins.latest(database, question.job, span.start, span.stop):
        first = begins[bisect_right(begins, step) - 1]
        if not made or made[-1].first != first:
            made.append(Bin.at(first))
        made[-1].add(step, outcome, data)
    if sum(each.count for each in made) == len(span):
        return made
    known = _known(database, question.job, span)
    return known if _num_steps(known) > _num_steps(made) else made


def _of_table(database: sqlite3.Connection, job: str, span: range, renewed: list[Bin]) -> list[Bin]:
    """Stored bins; those that are missing or old from rows, and the whole ones of them into ``renewed``."""
    known = {each.first: each for each in _known(database, job, span)}
    found: list[Bin] = []
    for block in range(span.start - span.start % BLOCK, span.stop, BLOCK):
        within = range(max(block, span.start), min(block + BLOCK, span.stop))
        found += _of_block(database, job, within, known, renewed)
    return found


def _of_block(
    database: sqlite3.Connection, job: str, span: range, known: dict[int, Bin], renewed: list[Bin]
) -> list[Bin]:
    width = bins.width_at(span.start)
    places = range(span.start, span.stop, width)
    missing = [at for at in places if at not in known or known[at].is_old]
    made: dict[int, Bin] = {}
    if missing:
        until = min(missing[-1] + width, span.stop)
        for step, outcome, data in bins.latest(database, job, missing[0], until):
            at = bins.start_of(step)
            made.setdefault(at, Bin.at(at)).add(step, outcome, data)
    parts = [made[at] if at in missing else known[at] for at in places if at in made or at not in missing]
    block = span.start - span.start % BLOCK
    old = known.get(block)
    # Of a job that has been over for long the rows are gone: what a version before had written is all.
    if old is not None and old.is_old and _num_steps(parts) < old.count - (span.start - block):
        return [old]
    renewed += [made[at] for at in missing if at in made and made[at].count == width]
    return parts


def _known(database: sqlite3.Connection, job: str, span: range) -> list[Bin]:
    """Stored bins with steps of ``span`` alone, but for old ones, which may begin before it."""
    block = span.start - span.start % BLOCK
    found = bins.stored_in(database, job, block, span.stop)
    return [each for each in found if each.last < span.stop and (each.first >= span.start or each.is_old)]


def _num_steps(parts: Iterable[Bin]) -> int:
    return sum(each.count for each in parts)


def _joined(parts: Iterable[Bin], begins: Sequence[int]) -> list[Bin]:
    """``parts`` in the bins that they begin in; what is in two of them counts in the first."""
    made: list[Bin] = []
    places: list[int] = []
    for each in parts:
        place = bisect_right(begins, each.first) - 1
        if made and each.first <= made[-1].last:
            continue
        if places and place == places[-1]:
            made[-1].join(each)
        else:
            made.append(each)
            places.append(place)
    return made

"""Who makes the mean gradients of which slices of a bucket.

Each slice has an *owner* among the live holders of its bucket: it is sent everybody's sums of the slice,
makes the mean, and gives that to the others. Sums are integers, so it does not matter who adds them up. In
steps that are compared a *second* holder makes each mean as well, and is given none: then a wrong one is
found (docs/corruption.md). Pure functions of (bucket, slices, live holders), the same on every device, so
nobody needs to be told, and when a holder dies the others know who owns what now. Sets of slices are bitmaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SPLIT_NUMBERS = 1 << 17
"""Numbers: a bucket with fewer has one owner. Then more messages would cost more than bytes that are sent at
the same time.
"""


class Makes(NamedTuple):
    """Of one holder: the slices that it ``owns``, and all that it makes means of (``slices``)."""

    owns: int = 0
    slices: int = 0


NOTHING = Makes()


def makers(
    bucket: int, numbers: Sequence[int], holders: Sequence[str], *, twice: bool, slices: int = -1
) -> dict[str, Makes]:
    """Of those ``holders``, ascending, who make any, what they make. ``numbers``: of each slice how many it
    has; ``slices``: those that the holders have (-1: all). ``twice``: a second holder makes each mean.

    What an owner has lies together, and owners have equal shares, as far as slices are of equal sizes.
    """
    theirs = [number for number in range(len(numbers)) if slices >> number & 1]
    count, total = len(holders), sum(numbers[number] for number in theirs)
    num_owners = min(count, len(theirs)) if total >= _SPLIT_NUMBERS else 1
    found: dict[str, Makes] = {}
    begin = 0
    for number in theirs:
        size = numbers[number]
        share = (2 * begin + size) * num_owners // (2 * total) if total else 0
        begin += size
        # Buckets begin with another holder each: else the first would own most of the small ones.
        owner, second = (holders[(bucket + share + k) % count] for k in (0, 1))
        owns, makes = found.get(owner, NOTHING)
        found[owner] = Makes(owns | 1 << number, makes | 1 << number)
        if twice:
            owns, makes = found.get(second, NOTHING)
            found[second] = Makes(owns, makes | 1 << number)
    return found

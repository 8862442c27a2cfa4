"""Which numbers of nodes the templates cover, and how: every loss must leave a number that they do. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import nothing, window
from oobleckd.draw.lines import Line, clipped
from oobleckd.words import count

DEPENDS = ("templates", "nodes")
_WITH_HEAD = 6
_TIMES = " \u00d7 "
_AHEAD = 1024  # in steps of so many numbers: a node more or less is no reason to begin anew


class Coverage(msgspec.Struct, frozen=True):
    """Of each number of nodes from 0 on the size of one of the most pipelines that use all of them; 0 where
    no sum of sizes makes it.
    """

    last: tuple[int, ...]

    def way(self, number: int) -> tuple[int, ...]:
        """Sizes of pipelines that use ``number`` nodes, as many pipelines as there can be; none where that
        cannot be.
        """
        found = []
        while size := self.last[number]:
            found.append(size)
            number -= size
        return tuple(reversed(found))

    def gaps(self, min_nodes: int, max_nodes: int) -> list[int]:
        """Numbers that are not covered."""
        return [number for number in range(min_nodes, max_nodes + 1) if not self.last[number]]


def paint(view: View, _now: float, width: int, height: int) -> list[Line]:
    """What is covered in a line, then a line for each number, around the one of now."""
    if not view.templates or height < 1:
        return nothing(
            (("which numbers of nodes can train is known once there are templates", "dim"),), height
        )
    here = _here(view)
    sizes = sorted({template.num_nodes for template in view.templates})
    min_nodes, max_nodes = sizes[0], max(here, sizes[-1])
    found = covers(tuple(sizes), math.ceil((max_nodes + 1) / _AHEAD) * _AHEAD)
    gaps = found.gaps(min_nodes, max_nodes)
    said = (
        f"every number from {min_nodes} to {count(max_nodes, 'node')}"
        if not gaps
        else f"all but {_listed(gaps)} of {min_nodes} to {max_nodes}"
    )
    named = "covered: " if len("covered: ") + len(said) <= width else ""
    lines: list[Line] = [clipped(((named, "dim"), (said, "good" if not gaps else "warn")), width)]
    if height > _WITH_HEAD:
        lines.append(clipped(((f" {'nodes':>5}  pipelines of so many nodes", "dim"),), width))
    seen = window(here - 1, max_nodes, height - len(lines))
    return lines + [_row(index + 1, here, found.way(index + 1), width) for index in seen]


def num_rows(view: View) -> int:
    """What all numbers take, with what is said above them."""
    return 2 + max((_here(view), *(template.num_nodes for template in view.templates)))


def _here(view: View) -> int:
    return sum(node.state in {"active", "standby"} for node in view.nodes)


@lru_cache(maxsize=4)
def covers(sizes: tuple[int, ...], max_nodes: int) -> Coverage:
    """Dynamic programming over numbers up to ``max_nodes``. Kept: sizes are those of a job."""
    count, last = [0], [0]
    for number in range(1, max_nodes + 1):
        before = [
            (count[number - size], -size) for size in sizes if size <= number and count[number - size] >= 0
        ]
        fewer, size = max(before, default=(-2, 0))
        count.append(fewer + 1)
        last.append(-size)
    return Coverage(tuple(last))


def _row(number: int, here: int, way: Sequence[int], width: int) -> Line:
    sign = "▸" if number == here else " "
    if not way:
        return clipped(
            ((f"{sign}{number:>5}  ", "strong" if number == here else ""), ("✗ none", "bad")), width
        )
    counted = {size: way.count(size) for size in sorted(set(way), reverse=True)}
    words = " + ".join(f"{n}{_TIMES}{size}" if n > 1 else str(size) for size, n in counted.items())
    return clipped(((f"{sign}{number:>5}  ", "strong" if number == here else ""), (words, "dim")), width)


def _listed(numbers: Sequence[int]) -> str:
    few = ", ".join(map(str, numbers[:8]))
    return few + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")

"""Which numbers of nodes the templates cover, and how: every loss must leave a number that they do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from console.model import View
from console.widgets.listing import nothing, window
from oobleckd.draw.lines import Line, clipped

DEPENDS = ("templates", "nodes")


def paint(view: View, _now: float, width: int, height: int) -> list[Line]:
    """What is covered in a line, then a line for each number, around the one of now."""
    if not view.templates or height < 1:
        return nothing((("no templates yet", "dim"),), height)
    here = sum(node.state in {"active", "standby"} for node in view.nodes)
    most = max(here, *(template.num_nodes for template in view.templates))
    ways = covers([template.num_nodes for template in view.templates], most)
    least = min(template.num_nodes for template in view.templates)
    gaps = [number for number in range(least, most + 1) if number not in ways]
    said = (
        f"every number from {least} to {most} nodes"
        if not gaps
        else f"all but {_listed(gaps)} of {least} to {most}"
    )
    lines: list[Line] = [clipped((("covered: ", "dim"), (said, "good" if not gaps else "warn")), width)]
    numbers = range(1, most + 1)
    seen = window(here - 1, len(numbers), height - 1)
    return lines + [_row(numbers[index], here, ways.get(numbers[index]), width) for index in seen]


def covers(sizes: Sequence[int], most: int) -> dict[int, tuple[int, ...]]:
    """Number of nodes -> sizes of pipelines that use all of them, as many pipelines as there can be.

    Numbers that no sum of ``sizes`` makes are left out. Dynamic programming over numbers up to ``most``.
    """
    ways: dict[int, tuple[int, ...]] = {0: ()}
    for number in range(1, most + 1):
        before = [(*ways[number - size], size) for size in sorted(set(sizes)) if number - size in ways]
        if before:
            ways[number] = max(before, key=len)
    del ways[0]
    return ways


def _row(number: int, here: int, way: tuple[int, ...] | None, width: int) -> Line:
    sign = "▸" if number == here else " "
    if way is None:
        return clipped(
            ((f"{sign}{number:>5}  ", "strong" if number == here else ""), ("✗ none", "bad")), width
        )
    counted = {size: way.count(size) for size in sorted(set(way), reverse=True)}
    words = " + ".join(f"{times} of {size}" if times > 1 else str(size) for size, times in counted.items())
    return clipped(((f"{sign}{number:>5}  ", "strong" if number == here else ""), (words, "dim")), width)


def _listed(numbers: Sequence[int]) -> str:
    few = ", ".join(map(str, numbers[:8]))
    return few + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")

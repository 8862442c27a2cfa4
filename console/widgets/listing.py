"""Long lists: which rows are in sight, and only those are made. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from oobleckd.console.model import View
from oobleckd.draw.lines import Line, clipped, length

Item = TypeVar("Item")


def clamped(cursor: int, count: int) -> int:
    """A cursor that is in the list; 0 where it is empty."""
    return max(0, min(cursor, count - 1))


def place(names: Sequence[object], name: object, cursor: int) -> int:
    """The cursor of the row called ``name``, wherever it is now; where it is gone, of what has its place."""
    try:
        return names.index(name)
    except ValueError:
        return clamped(cursor, len(names))


def window(cursor: int, count: int, height: int) -> range:
    """The rows in sight: ``height`` of ``count``, the one of the cursor as far in the middle as the ends
    allow.
    """
    height = max(0, min(height, count))
    first = max(0, min(cursor - height // 2, count - height))
    return range(first, first + height)


def rows(
    items: Sequence[Item], cursor: int, width: int, height: int, row: Callable[[Item], Line]
) -> list[Line]:
    """The rows in sight, the one of the cursor marked in its whole width."""
    cursor = clamped(cursor, len(items))
    lines = []
    for index in window(cursor, len(items), height):
        line = clipped(row(items[index]), width)
        lines.append(chosen(line, width) if index == cursor else line)
    return lines


def chosen(line: Line, width: int) -> Line:
    """The row of the cursor: signs stay, so that it still says what it said."""
    text = "".join(text for text, _ in line)
    return ((text + " " * max(0, width - length(line)), "cursor"),)


def matches(text: str, words: str) -> bool:
    """Whether ``text`` has all of ``words``, in any order; upper and lower case are the same."""
    found = text.casefold()
    return all(word in found for word in words.casefold().split())


def counted(shown: int, total: int, what: str, words: str) -> str:
    """``"3 of 40 nodes have “r04”"``, or nothing while there is no filter."""
    return f'{shown:,} of {total:,} {what} have "{words}"' if words else ""


def missing(view: View, what: str, otherwise: str) -> Line:
    """Why there is nothing to show: what the daemon was asked for has no answer, else ``otherwise``."""
    problem = view.refusal(what)
    return ((f"not known: {problem}" if problem else otherwise, "dim"),)


def nothing(line: Line, height: int) -> list[Line]:
    """The one line of a panel that has nothing to show."""
    return [line][: max(0, height)]

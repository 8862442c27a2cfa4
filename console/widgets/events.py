"""What happened, newest last."""

from __future__ import annotations

from oobleckd.console.model import View
from oobleckd.draw.lines import Line, Role, clipped, length, wrapped
from oobleckd.draw.times import dated
from oobleckd.protocol.changes import Change

_MARKS: dict[str, tuple[str, Role]] = {
    "debug": (" ", "dim"),
    "info": (" ", ""),
    "warn": ("!", "warn"),
    "error": ("✗", "bad"),
}
_WITH_KIND = 48
DEPENDS = ("events", "job")


def paint(view: View, now: float, width: int, height: int) -> list[Line]:
    """The newest events that have room."""
    if not view.events:
        return [(("nothing yet", "dim"),)]
    job, today = view.job.id if view.job is not None else "", view.clock(now)
    return [row(change, job, today, width) for change in view.events[-height:]] if height > 0 else []


def rows(change: Change, job: str, now: float, width: int, most: int) -> list[Line]:
    """One change in ``most`` lines at most: its text to the end, where there is room."""
    whole = row(change, job, now, len(change.text) + width)
    *head, (text, role) = whole
    indent = length(tuple(head))
    told = wrapped(text, width - indent, most)
    if len(told) < 2:
        return [clipped(whole, width)]
    below: list[Line] = [((" " * indent + line, role),) for line in told[1:]]
    return [(*head, (told[0], role)), *below]


def row(change: Change, job: str, now: float, width: int) -> Line:
    """One change: when, how bad, of which kind where there is room, and its text without the
    job's own name.
    """
    mark, role = _MARKS[change.level]
    roomy = width >= _WITH_KIND
    kind = f"{change.kind:<10} " if roomy else ""
    return clipped(
        (
            (dated(change.at, now, digits=1 if roomy else 0), "dim"),
            (f" {mark} ", role),
            (kind, "note"),
            (change.text.removeprefix(f"{job}: "), role if change.level != "debug" else "dim"),
        ),
        width,
    )

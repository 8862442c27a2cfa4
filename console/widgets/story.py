"""What else belongs to a thing: the changes with one of its keys, and one change in full. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from oobleckd.console.model import View
from oobleckd.console.widgets.events import row, rows
from oobleckd.draw.lines import Line, clipped, flow, framed, wrapped
from oobleckd.draw.times import dated
from oobleckd.protocol.changes import Change
from oobleckd.words import short

DEPENDS = ("events", "job")
_NEAREST = ("incident", "node", "job")


def nearest(change: Change) -> str:
    """The key whose story says most about a change: its incident's, else its node's, else its job's; "" where
    it has none.
    """
    keys = [key for key in change.story if _kind(key) in _NEAREST]
    return min(keys, key=lambda key: _NEAREST.index(_kind(key)), default="")


def of_keys(events: tuple[Change, ...], keys: Collection[str]) -> tuple[Change, ...]:
    """The changes with one of ``keys``, the oldest first."""
    return _FOUND.of(events, frozenset(keys))


def paint(view: View, now: float, width: int, height: int, keys: Collection[str]) -> list[Line]:
    """The newest changes with one of ``keys`` that have room, their texts to the end where all have it."""
    found = of_keys(view.events, keys)
    if not found:
        return [clipped((("nothing of it is among the events that are kept here", "dim"),), width)][:height]
    job = view.job.id if view.job is not None else ""
    shown, today = found[-height:] if height > 0 else (), view.clock(now)
    full = [line for change in shown for line in rows(change, job, today, width, len(change.text))]
    return full if len(full) <= height else [row(change, job, today, width) for change in shown]


def one(change: Change, now: float, width: int, height: int) -> list[Line]:
    """A change: which, when, its text to the end, and where there is room its fields."""
    head: list[Line] = [
        ((f"{change.kind}, {change.level}", "note"),),
        ((dated(change.at, now, digits=3), ""),),
        ((f"number {change.seq}", "dim"),),
    ]
    if change.story:
        head.append(((" ".join(change.story), "dim"),))
    lines = flow(head, width)
    lines += [((text, ""),) for text in wrapped(change.text, width, max(1, height - len(lines)))]
    fields = flow(_fields(change), width)
    return framed([*lines, (), *fields] if fields else lines, width, height)


def _fields(change: Change) -> list[Line]:
    """As ``-o json`` names them; those that are lists of other things are left out."""
    if isinstance(change.data, msgspec.Raw):
        return []
    said = {name: _said(value) for name, value in msgspec.to_builtins(change.data).items()}
    return [((f"{name} ", "dim"), (text, "")) for name, text in said.items() if text and name != "type"]


def _said(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return short(value)
        case int():
            return f"{value:,}"
        case str():
            return value
        case _:
            return ""


def _kind(key: str) -> str:
    return key.partition(":")[0]


@dataclass(slots=True)
class _Found:
    """The last story, and of which events: thousands are not looked through in every frame."""

    events: tuple[Change, ...] = ()
    keys: frozenset[str] = frozenset()
    found: tuple[Change, ...] = ()

    def of(self, events: tuple[Change, ...], keys: frozenset[str]) -> tuple[Change, ...]:
        """Those of ``events`` with one of ``keys``."""
        if self.events is not events or self.keys != keys:
            self.events, self.keys = events, keys
            self.found = tuple(change for change in events if not keys.isdisjoint(change.story))
        return self.found


_FOUND = _Found()

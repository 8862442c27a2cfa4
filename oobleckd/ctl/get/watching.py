"""``get --watch``: rows as they change. Whenever the daemon says that something has happened it is asked
anew, once a second at most, and what has changed is printed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from oobleckd.client import Client, Events
from oobleckd.ctl.get.formats import ListFormat, cells_of, columns_of, csv_of, show, show_each
from oobleckd.ctl.get.kinds import ItemsWanted, ListedKind
from oobleckd.ctl.output import emit_line, emit_lines, note
from oobleckd.unixhttp import Unreachable

_EVERY_S = 1.0  # (D-service-025)
_BACK = 200  # steps or evaluations before the newest, where a rollback may have them done again

Look = Callable[[ItemsWanted], Sequence[Any]]


def watch(client: Client, kind: ListedKind, wanted: ItemsWanted, look: Look, put: ItemPrinter) -> None:
    """Print items and go on with those that change, until Ctrl-C. A daemon that goes away is waited for.
    Raises Unreachable where it is away from the start.
    """
    with happening(client) as happened:
        changed = ChangedItems(kind)
        put.all(changed.of(look(wanted)))
        while happened():
            try:
                items = look(changed.next_wanted(wanted))
            except Unreachable:
                continue
            put.all(changed.of(items))
            for name in changed.gone():
                note(f"{kind.singular}/{name} is gone")


class ChangedItems:
    """Remembers what was seen of each item, and tells which are new. What changes by itself with the time,
    such as an age, is no change.
    """

    def __init__(self, kind: ListedKind) -> None:
        self._kind = kind
        self._columns = [column for column in columns_of(kind, "wide") if not column.restless]
        self._seen: dict[str, tuple[tuple[str, ...], ...]] = {}
        self._gone: list[str] = []

    def of(self, items: Sequence[Any]) -> list[Any]:
        """Those of ``items`` that are not as they were."""
        now = {
            self._kind.names(item)[0]: tuple(cells_of(self._kind, [item], self._columns)) for item in items
        }
        fresh = [item for item in items if self._seen.get(name := self._kind.names(item)[0]) != now[name]]
        if self._kind.of_job:  # a part of many
            self._seen |= now
        else:
            self._gone = [name for name in self._seen if name not in now]
            self._seen = now
        return fresh

    def gone(self) -> list[str]:
        """Who was there the last time but one, and the last time was not."""
        return self._gone

    def next_wanted(self, wanted: ItemsWanted) -> ItemsWanted:
        """What to ask for next: of steps and evaluations those since a while before the newest."""
        if not self._kind.of_job or self._kind.one or not self._seen:
            return wanted
        newest = max(map(int, self._seen))
        return wanted._replace(since=max(wanted.since or 1, newest - _BACK, 1), last=None)


class ItemPrinter:
    """Prints items a few at a time: one table that grows, or a stream of documents."""

    def __init__(self, kind: ListedKind, how: ListFormat, *, headers: bool) -> None:
        self._kind, self._how, self._headers = kind, how, headers
        self._columns = columns_of(kind, how)
        self._widths = [len(column.title) for column in self._columns]

    def all(self, items: Sequence[Any]) -> None:
        """Print them; the titles before the first."""
        headers, self._headers = self._headers, False
        match self._how:
            case "table" | "wide":
                self._rows(items, headers=headers)
            case "csv":
                emit_lines(csv_of(self._kind, items, headers=headers))
            case "name":
                show(self._kind, items, "name", single=False, headers=False)
            case _:
                show_each(self._kind, items)

    def _rows(self, items: Sequence[Any], *, headers: bool) -> None:
        rows = cells_of(self._kind, items, self._columns)
        if headers:
            rows = [tuple(column.title for column in self._columns), *rows]
        for row in rows:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, self._widths, strict=True))
            emit_line("  ".join(cells).rstrip())


@contextmanager
def happening(client: Client) -> Iterator[Callable[[], bool]]:
    """Something that waits until anything has happened since it was last asked, though a second at least;
    False: nothing more is told.
    """
    something, over = threading.Event(), threading.Event()

    def on_link(up: bool) -> None:
        if not up:
            note("the daemon is away; training goes on without it, and so does this once it is back")
        something.set()  # what was missed meanwhile

    def listen(events: Events) -> None:
        for _change in events:
            something.set()
        over.set()
        something.set()

    asked_s = 0.0

    def happened() -> bool:
        nonlocal asked_s
        something.wait()
        time.sleep(max(0.0, asked_s + _EVERY_S - time.monotonic()))
        something.clear()
        asked_s = time.monotonic()
        return not over.is_set()

    client.status()  # an absent daemon is an error at the start, and a pause later on
    with client.events(None, on_link=on_link) as events:
        threading.Thread(target=listen, args=(events,), daemon=True).start()
        yield happened

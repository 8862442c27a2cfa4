"""How lists are printed: as a table, a wide one, JSON, one document a line, YAML, names or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any, Literal

from oobleckd.ctl.get.columns import Column
from oobleckd.ctl.get.fields import cell, flat_fields, value_at
from oobleckd.ctl.get.kinds import ListedKind
from oobleckd.ctl.output import emit_item, emit_items, emit_line, emit_lines, emit_table, list_of

ListFormat = Literal["table", "wide", "json", "jsonl", "yaml", "name", "csv"]
MORE = ("wide", "jsonl", "name", "csv")
"""Formats that only lists have."""


def show(kind: ListedKind, items: Sequence[Any], how: ListFormat, *, single: bool, headers: bool) -> None:
    """Print ``items``; ``single``: one was asked for by its name, so JSON is no list."""
    match how:
        case "json" | "yaml" if kind.one or (single and len(items) == 1):
            emit_item(kind.document, items[0])
        case "json" | "yaml":
            emit_items(kind.document, items)
        case "jsonl":
            show_each(kind, items)
        case "name":
            for item in items:
                emit_line(f"{kind.singular}/{kind.names(item)[0]}")
        case "csv":
            emit_lines(csv_of(kind, items, headers=headers))
        case _:
            shown = columns_of(kind, how)
            emit_table([column.title for column in shown], cells_of(kind, items, shown), headers=headers)


def show_several(
    found: Sequence[tuple[ListedKind, Sequence[Any]]], how: ListFormat, *, headers: bool
) -> None:
    """Print items of several kinds: tables with a line between, or one document of lists."""
    if how in {"json", "yaml"}:
        emit_items("", [list_of(kind.document, items) for kind, items in found])
        return
    shown = False
    for kind, items in found:
        if not items:
            continue
        if shown and how in {"table", "wide"}:
            emit_line()
        show(kind, items, how, single=False, headers=headers)
        shown = True


def show_each(kind: ListedKind, items: Sequence[Any]) -> None:
    """A document for each."""
    for item in items:
        emit_item(kind.document, item)


def columns_of(kind: ListedKind, how: ListFormat) -> list[Column[Any]]:
    """Those that a table has; of a wide one all."""
    return [column for column in kind.columns if how == "wide" or not column.wide]


def cells_of(kind: ListedKind, items: Sequence[Any], columns: Sequence[Column[Any]]) -> list[tuple[str, ...]]:
    """What stands in the rows of ``items``."""
    return [tuple(column.cell(row) for column in columns) for item in items for row in kind.rows(item)]


def csv_of(kind: ListedKind, items: Sequence[Any], *, headers: bool) -> str:
    """Every field that has room in a cell, by the name that it has in JSON; numbers are exact."""
    fields = flat_fields(kind.row_type or kind.view_type)
    written = io.StringIO()
    put: Callable[[Sequence[str]], Any] = csv.writer(written, lineterminator="\n").writerow
    if headers:
        put(fields)
    for item in items:
        for row in kind.rows(item):
            put([cell(value_at(row, field)) for field in fields])
    return written.getvalue()

"""What oobleckctl prints, and how it ends: data on stdout, ``error:`` and ``hint:`` on stderr, exit codes.

Exit codes: 0 done, 1 failed, 2 usage, 3 not found or condition false, 4 daemon unreachable, 5 refused, 124
``wait`` timed out, and what a job failed by where a script should know it: 6 not finite, 7 data changed, 8
out of memory. Data is a table for people or, with ``-o json`` or ``yaml``, a document with ``apiVersion``.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NoReturn

import click
import msgspec

from oobleckd.draw.times import dated
from oobleckd.protocol.api import API_VERSION
from oobleckd.protocol.parts import JobCause
from oobleckd.protocol.text import all_visible, of_ours, shown_json, visible
from oobleckd.words import short_age

FAILED, USAGE, NOT_FOUND, UNREACHABLE, REFUSED, TIMED_OUT = 1, 2, 3, 4, 5, 124
CAUSES: dict[JobCause, int] = {"not-finite": 6, "spikes": 6, "data-changed": 7, "out-of-memory": 8}
"""How a command ends that waited for a job which failed by one of these."""


class Failure(Exception):
    """The end of a command that did not do what was asked: one sentence, one hint, one exit code."""

    def __init__(self, problem: str, hint: str = "", code: int = FAILED) -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
        self.code = code


def fail(problem: str, hint: str = "", code: int = FAILED) -> NoReturn:
    """End the command."""
    raise Failure(problem, hint, code)


class OutputLost(Exception):
    """What was to be printed could not be; what the command did is done."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.problem = f"the answer could not be printed: stdout: {error.strerror}"
        self.hint = "what was asked for is done: `oobleckctl status` shows how things stand"


def note(text: str) -> None:
    """A word to the person in front of the terminal, which is no data. Nothing ends because nobody is there
    any more.
    """
    with suppress(OSError):
        click.echo(visible(text), err=True)


def _put(text: str) -> None:
    """Print data. Raises OutputLost, and BrokenPipeError where the reader has gone."""
    if sys.stdout is None:  # it was closed when this program began
        raise OutputLost(OSError(errno.EBADF, os.strerror(errno.EBADF)))
    try:
        click.echo(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(error) from error


def emit_line(text: str = "") -> None:
    """One line of data, whoever wrote what is in it."""
    _put(visible(text))


def emit_lines(text: str) -> None:
    """Lines of data that a program reads, each with its end; texts in them are ``visible``."""
    for line in text.splitlines():
        emit_line(line)


def emit_page(text: str) -> None:
    """Lines of data with our own line breaks and colours; of what others wrote in them nothing else is
    obeyed.
    """
    _put(of_ours(text))


def emit_json(kind: str, fields: Mapping[str, Any]) -> None:
    """One document, in JSON on one line, which says exactly what others wrote, and does nothing to a
    terminal.
    """
    document = {"apiVersion": API_VERSION, "kind": kind, **fields}
    if _is_yaml():
        _put_yaml(document)
        return
    try:
        data = msgspec.json.encode(document, enc_hook=str)
    except UnicodeEncodeError:  # a path that is no UTF-8
        data = msgspec.json.encode(all_visible(msgspec.to_builtins(document, enc_hook=str)))
    _put(shown_json(data).decode())


def _is_yaml() -> bool:
    """Whether this call of oobleckctl is to print YAML."""
    context = click.get_current_context(silent=True)
    loaded = (context.obj or {}).get("loaded") if context is not None else None
    return loaded is not None and loaded.config.output == "yaml"


def _put_yaml(document: Mapping[str, Any]) -> None:
    """With a line between two documents of a stream."""
    kept = click.get_current_context().ensure_object(dict)
    if kept.setdefault("documents", 0):
        _put("---")
    kept["documents"] += 1
    _put(_as_yaml(document))


def _as_yaml(document: Mapping[str, Any]) -> str:
    """In ASCII: nothing in it does anything to a terminal."""
    import yaml

    plain = msgspec.to_builtins(document, enc_hook=str)
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(plain, Dumper=dumper, sort_keys=False)
    return text.rstrip("\n")


def error_document(problem: str, hint: str, code: int, how: Literal["json", "yaml"]) -> str:
    """The end of a command: what is wrong, what to do next, and the exit code."""
    document = {"apiVersion": API_VERSION, "kind": "Error", "problem": problem, "hint": hint, "code": code}
    if how == "yaml":
        return _as_yaml(document)
    return shown_json(msgspec.json.encode(document)).decode()


def emit_items(kind: str, items: Sequence[msgspec.Struct | dict[str, Any]]) -> None:
    """A list document."""
    emit_json(f"{kind}List", {"items": items})


def list_of(kind: str, items: Sequence[msgspec.Struct]) -> dict[str, Any]:
    """The same, to be put into another one."""
    return {"apiVersion": API_VERSION, "kind": f"{kind}List", "items": items}


def emit_item(kind: str, item: msgspec.Struct) -> None:
    """A document of one thing."""
    # By way of JSON, because only there the raw parts of an event are values.
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(item))
    emit_json(kind, {key: value for key, value in fields.items() if key != "apiVersion"})


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, headers: bool = True) -> None:
    """A table for people. In a pipe: no colour, no boxes, nothing cut off."""
    rows = [tuple(map(visible, row)) for row in rows]
    if sys.stdout is None or not sys.stdout.isatty():
        _emit_plain(columns, rows, headers=headers)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, show_header=headers)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _emit_plain(columns: Sequence[str], rows: Sequence[Sequence[str]], *, headers: bool) -> None:
    lines = [*([tuple(columns)] if headers else []), *map(tuple, rows)]
    widths = [max((len(cells[i]) for cells in lines), default=0) for i in range(len(columns))]
    for cells in lines:
        _put("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def emit_fields(fields: Mapping[str, str]) -> None:
    """Name and value, one pair a line; pairs without a value are left out."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        if value:
            _put(f"{name + ':':<{width + 1}} {visible(value)}")


def when(at: float, digits: int = 3) -> str:
    """A time of day, with its date where that is not today's."""
    return dated(at, time.time(), digits)


def since(at: float) -> str:
    """How long ago that was, for a column."""
    return short_age(time.time() - at)


def tolerance(still: int, f: int) -> str:
    """``"1 of 2"``: how many nodes can be lost at once, of how many were asked for; ``"3 (f = 1)"`` where
    that is more.
    """
    if still < 0:
        return "-"
    return f"{still} of {f}" if still <= f else f"{still} (f = {f})"

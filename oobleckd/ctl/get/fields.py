"""Fields of items by name, as ``-o json`` has them: to choose items by (``-l``), to sort by (``--sort-by``),
and as columns of a CSV file. A field in a field is written with a point: ``spec.train.steps``.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec

from oobleckd.ctl.output import USAGE, fail

Item = TypeVar("Item", bound=msgspec.Struct)
_PLAIN = (str, int, float, bool, type(None))
_term = re.compile(r"(?P<path>[\w.]+)(?P<sign>==|!=|=)(?P<value>.*)")


class FieldTerm(NamedTuple):
    """One part of ``-l``: the field at ``path`` has to be ``value``, or with ``other`` anything else."""

    path: str
    value: str
    other: bool

    def holds(self, item: msgspec.Struct) -> bool:
        """Whether ``item`` is wanted; of a list any element counts."""
        found = value_at(item, self.path)
        texts = [_text(each) for each in found] if isinstance(found, list | tuple) else [_text(found)]
        return (self.value in texts) != self.other


def terms_of(text: str, kind: type[msgspec.Struct]) -> list[FieldTerm]:
    """The parts of ``state=running,zone!=a``. Raises Failure with exit code 2."""
    terms = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _term.fullmatch(part)
        if found is None:
            fail(f"-l cannot read {part!r}", "write FIELD=VALUE or FIELD!=VALUE, with commas between", USAGE)
        path = checked(found["path"], kind, "-l")
        terms.append(FieldTerm(path, found["value"], found["sign"] == "!="))
    return terms


def ordered(items: Sequence[Item], path: str, kind: type[msgspec.Struct]) -> list[Item]:
    """By the field at ``path``, which may be written as kubectl's JSONPath is (``.name``, ``{.name}``); with
    a ``-`` before it the most first. Who has none comes last. Raises Failure with exit code 2.
    """
    backwards, path = path.startswith("-"), path.lstrip("-").strip("{}").lstrip(".")
    path = checked(path, kind, "--sort-by")
    having = [item for item in items if value_at(item, path) is not None]
    return [
        *sorted(having, key=lambda item: _sorting(value_at(item, path)), reverse=backwards),
        *(item for item in items if value_at(item, path) is None),
    ]


def checked(path: str, kind: type[msgspec.Struct], option: str) -> str:
    """``path``, whose first part is a field of ``kind``. Raises Failure with exit code 2."""
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    first = path.partition(".")[0]
    if first not in known:
        close = get_close_matches(first, known, n=1)
        also = f"; did you mean {close[0]!r}?" if close else ""
        fail(f"{option}: no field {first!r}{also}", f"fields: {', '.join(sorted(known))}", USAGE)
    return path


def value_at(item: msgspec.Struct, path: str) -> Any:
    """What stands there, as JSON has it; None where nothing does."""
    found: Any = item
    for part in path.split("."):
        found = _in(found, part)
    return found


def _in(holder: Any, name: str) -> Any:
    if isinstance(holder, msgspec.Struct):
        names = {field.encode_name: field.name for field in msgspec.structs.fields(holder)}
        return getattr(holder, names[name]) if name in names else None
    return holder.get(name) if isinstance(holder, dict) else None


def _text(value: Any) -> str:
    """As JSON writes it, without quotes."""
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value, enc_hook=str).decode()


def _sorting(value: Any) -> tuple[int, Any]:
    """Numbers before texts; of anything else its text."""
    if isinstance(value, bool | int | float):
        return 0, value
    return 1, [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in _parts(_text(value))]


def _parts(text: str) -> list[str]:
    """So that node-10 comes after node-9."""
    return [part for part in re.split(r"(\d+)", text) if part]


# --------------------------------------------------------------------------- as columns of a file


def flat_fields(kind: type[msgspec.Struct]) -> list[str]:
    """Fields of one value each, or of a list of such: those that have room in a cell."""
    hints = typing.get_type_hints(kind)
    return [field.encode_name for field in msgspec.structs.fields(kind) if _is_flat(hints[field.name])]


def _is_flat(kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal or kind in _PLAIN:
        return True
    if origin in {Union, types.UnionType}:
        return all(map(_is_flat, args))
    return origin is tuple and args[-1] is ... and args[0] in _PLAIN


def cell(value: Any) -> str:
    """For a CSV file: lists with spaces between, nothing for null."""
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    return _text(value)

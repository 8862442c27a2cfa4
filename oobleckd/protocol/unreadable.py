"""What cannot be read, in words: msgspec's errors are for programmers, and no user sees one as it is.

Owns the translation, in two ways: by the shape that was wanted and the value that is there, where both are at
hand, else by what the error says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from oobleckd.words import count

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""What msgspec raises for bytes that it cannot read; the second where a text is not UTF-8."""
_SHOWN = 40  # characters of a value, in a sentence
_HEX = "not UTF-8"


class Misfit(NamedTuple):
    """What does not fit: ``path`` of the key ("" for the whole), and what is wrong with it, in words that go
    behind "KEY: " as well as behind a file's name.
    """

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


def misfit(error: Exception, kind: Any = None, value: Any = None) -> Misfit:
    """What ``error`` says, raised where ``value`` (as it was read) was to be a ``kind``."""
    if not isinstance(error, msgspec.MsgspecError | UnicodeDecodeError):
        return Misfit("", str(error))  # such as that of a file beside them
    if isinstance(error, UnicodeDecodeError):
        return Misfit("", f"has text that is {_HEX}")
    said, _, where = str(error).partition(" - at `")
    path = _path(where)
    if found := re.fullmatch(r"Object missing required field `(.+)`", said):
        return Misfit(_joined(path, found[1]), "is missing")
    if found := re.fullmatch(r"Object contains unknown field `(.+)`", said):
        return Misfit(_joined(path, found[1]), "unknown key")
    if kind is not None and value is not None and " key " not in f" {where} ":
        told = _compared(kind, value, path)
        if told:
            return Misfit(path, told)
    return Misfit(path, _translated(said))


def problem_of(error: Exception, kind: Any = None, value: Any = None) -> str:
    """The same in one sentence."""
    return str(misfit(error, kind, value))


def _path(where: str) -> str:
    return where.replace("key` in `", "").strip("`").removeprefix("$").removeprefix(".")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# --------------------------------------------------------------------------- by shape and value


def _compared(kind: Any, value: Any, path: str) -> str:
    """What is at ``path`` and what should be; "" where that cannot be found."""
    wanted: inspect.Type | None = inspect.type_info(kind)
    for step in re.findall(r"[^.\[\]]+", path):
        inner = _inside(wanted, value, step)
        if inner is None:
            return ""
        wanted, value = inner
    return f"is {shown(value)}, and has to be {_wanted(wanted)}" if wanted is not None else ""


def _inside(wanted: inspect.Type | None, value: Any, step: str) -> tuple[inspect.Type, Any] | None:
    """One step further down, where ``wanted`` has one such part."""
    wanted = _bare(wanted)
    if isinstance(wanted, inspect.UnionType):
        parts = [inner for each in wanted.types if (inner := _inside(each, value, step)) is not None]
        return parts[0] if len(parts) == 1 else None
    if isinstance(value, Mapping) and step in value:
        if isinstance(wanted, inspect.StructType):
            kinds = {field.encode_name: field.type for field in wanted.fields}
            return (kinds[step], value[step]) if step in kinds else None
        return (wanted.value_type, value[step]) if isinstance(wanted, inspect.DictType) else None
    if isinstance(value, list | tuple) and step.isdigit() and int(step) < len(value):
        if isinstance(wanted, inspect.TupleType):
            kinds_of = dict(enumerate(wanted.item_types))
            return (kinds_of[int(step)], value[int(step)]) if int(step) in kinds_of else None
        if isinstance(wanted, inspect.CollectionType):
            return wanted.item_type, value[int(step)]
    return None


def _bare(wanted: inspect.Type | None) -> inspect.Type | None:
    while isinstance(wanted, inspect.Metadata):
        wanted = wanted.type
    return wanted


def shown(value: object) -> str:
    """A value as a person would say it."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a table"
        case list() | tuple():
            return f"a list of {len(value)}"
        case str() if len(value) > _SHOWN:
            return repr(f"{value[:_SHOWN]}…")
        case _:
            return repr(value)


def _wanted(kind: inspect.Type | None) -> str:
    kind = _bare(kind)
    match kind:
        case inspect.UnionType(types=types):
            said = _or([_wanted(each) for each in types if not isinstance(each, inspect.NoneType)])
        case inspect.LiteralType(values=values):
            said = _or([shown(each) for each in values])
        case inspect.IntType():
            said = f"a whole number{_limits(kind)}"
        case inspect.FloatType():
            said = f"a number{_limits(kind)}"
        case inspect.StrType(pattern=pattern):
            said = _PATTERNS.get(pattern, _OTHER) if pattern else "text"
        case inspect.TupleType(item_types=items):
            said = f"a list of {len(items)}"
        case _:
            said = _NAMES.get(type(kind).__name__, "something else")
    return said


_NAMES = {
    "BoolType": "true or false", "StructType": "a table", "DictType": "a table", "NoneType": "nothing",
    "ListType": "a list", "VarTupleType": "a list", "BytesType": "bytes", "RawType": "anything",
}  # fmt: skip
_OTHER = "text of another form"


def _limits(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    said = [
        f" {words} {limit}"
        for words, limit in (
            ("above", kind.gt), ("of at least", kind.ge), ("below", kind.lt), ("of at most", kind.le)
        )
        if limit is not None
    ]  # fmt: skip
    return " and".join(said)


def _or(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} or {parts[-1]}" if len(parts) > 1 else "".join(parts)


_PATTERNS = {
    r"^[a-z0-9][a-z0-9._-]{0,62}$(?!\n)": "a name of a-z, 0-9, '.', '_' and '-', 63 characters at most, "
    "which begins with one of a-z or 0-9",
}
"""What a text is to look like, in words."""

# --------------------------------------------------------------------------- by what the error says

_KINDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "a table", "null": "nothing", "bytes": "bytes", "raw": "anything", "ext": "bytes",
}  # fmt: skip
_LIMITS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


def _kinds(text: str) -> str:
    return _or([_KINDS.get(part.strip(" `"), "something else") for part in text.split("|")])


_TABLE: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"Expected `(.+)`, got `(.+)`", lambda it: f"is {_kinds(it[2])}, and has to be {_kinds(it[1])}"),
    (r"Expected `(.+)` (>=|<=|>|<) (\S+)", lambda it: f"has to be {_kinds(it[1])}, {_LIMITS[it[2]]} {it[3]}"),
    (r"Expected `(.+)` that's a multiple of (\S+)", lambda it: f"has to be a multiple of {it[2]}"),
    (r"Expected `str` of length (>=|<=) (\d+)",
     lambda it: f"has to have {_LIMITS[it[1]]} {count(int(it[2]), 'character')}"),
    (r"Expected `array` of length (\d+), got (\d+)",
     lambda it: f"has {count(int(it[2]), 'part')}, and has to have {it[1]}"),
    (r"Expected `(?:array|object|bytes)` of (?:at least )?length (>=|<=)? ?(\d+).*",
     lambda it: f"has to have {_LIMITS.get(it[1] or '', '')} {count(int(it[2]), 'part')}".replace("  ", " ")),
    (r"Expected `array` of at (least|most) length (\d+).*",
     lambda it: f"has to have at {it[1]} {count(int(it[2]), 'part')}"),
    (r"Expected `str` matching regex '(.+)'",
     lambda it: f"has to be {_PATTERNS.get(it[1].replace(chr(92) * 2, chr(92)), _OTHER)}"),
    (r"Invalid (?:enum )?value (.+)", lambda it: f"{it[1]} is not known here"),
    (r"Input data was truncated", lambda _: "ends in the middle"),
    (r"(JSON|MessagePack)(?: data)? is malformed: .*?(?:\(byte (\d+)\))?",
     lambda it: f"is no {it[1]}" + (f", from byte {it[2]} on" if it[2] else "")),
    (r"Invalid UTF-8.*", lambda _: f"has text that is {_HEX}"),
    (r".*out of range.*", lambda _: "has a number that is too large"),
)  # fmt: skip
_MADE = tuple((re.compile(pattern), words) for pattern, words in _TABLE)


def _translated(said: str) -> str:
    for pattern, words in _MADE:
        if found := pattern.fullmatch(said):
            return words(found)
    return "cannot be read"

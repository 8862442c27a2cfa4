"""What was typed wrong on a command line, in words. Owns the translation of click's messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

import click

from oobleckd.words import plain

_NUMBERS = {"integer": "a whole number", "float": "a number", "boolean": "true or false"}
Words = Callable[[re.Match[str], str], str]


def problem_of(error: click.UsageError) -> str:
    """What is wrong, in one sentence without a full stop."""
    if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter):
        return _of_parameter(error)
    if isinstance(error, click.NoSuchOption):
        close = difflib.get_close_matches(error.option_name, error.possibilities or (), n=1, cutoff=0)
        return f"no option {error.option_name}" + (f"; did you mean {close[0]}?" if close else "")
    said = error.format_message().rstrip(".")
    for pattern, words in _TABLE:
        if found := re.fullmatch(pattern, said, re.DOTALL):
            return words(found, "")
    return said


def _of_parameter(error: click.BadParameter) -> str:
    kind, said = error.param.type if error.param else None, error.message.rstrip(".")
    name = _name(error)
    if found := re.fullmatch(r"('.*'|\S+) is not a valid (\w+)(?: range)?", said, re.DOTALL):
        wanted = _NUMBERS.get(found[2], f"a {found[2]}")
        return f"{name} is {found[1]}, and has to be {wanted}{_limits(kind)}"
    if found := re.fullmatch(r"(\S+) is not in the range .*", said):
        return f"{name} is {found[1]}, and has to be a number{_limits(kind)}"
    if found := re.fullmatch(r"'(.*)' is not one of .*", said, re.DOTALL):
        return _choice(name, found[1], kind)
    return f"{name}: {said}"


def _name(error: click.BadParameter) -> str:
    """The option or argument as it is typed."""
    if error.param is None:
        return str(error.param_hint or "the value")
    if isinstance(error.param, click.Argument):
        return error.param.metavar or (error.param.name or "").upper()
    return max(error.param.opts, key=len)


def _limits(kind: click.ParamType[Any] | None) -> str:
    match kind:
        case click.IntRange(min=low, max=high) | click.FloatRange(min=low, max=high):
            if low is not None and high is not None:
                return f" from {plain(low)} to {plain(high)}"
            if low is not None:
                return f" {'above' if kind.min_open else 'of at least'} {plain(low)}"
            return f" of at most {plain(high)}" if high is not None else ""
        case _:
            return ""


def _choice(name: str, typed: str, kind: click.ParamType[Any] | None) -> str:
    known = list(map(str, kind.choices)) if isinstance(kind, click.Choice) else []
    close = difflib.get_close_matches(typed, known, n=1)
    also = f"; did you mean {close[0]!r}?" if close else ""
    return f"{name} is {typed!r}, and has to be one of {', '.join(known)}{also}"


_TABLE: tuple[tuple[str, Words], ...] = (
    (r"Missing (?:argument|option|parameter) '(.+?)'(?:\. Choose from:.*)?",
     lambda it, _: f"{it[1]} is missing"),
    (r"Got unexpected extra arguments? \((.*)\)", lambda it, _: f"too many words: {it[1] or repr('')}"),
    (r"Option '(.+)' requires (?:an|\d+) arguments?", lambda it, _: f"{it[1]} needs a value"),
    (r"Option '(.+)' does not take a value", lambda it, _: f"{it[1]} takes no value"),
    (r"Missing command", lambda *_: "a verb is missing"),
)  # fmt: skip

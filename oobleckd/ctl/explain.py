"""The verb ``explain``: what a key of a job.toml or of the settings means, from what the pages are made of.

Owns how a key is looked up. Texts, types, bounds and defaults are those of the models themselves
(``oobleckd.protocol.job`` and the programs' settings), read as docs/job-toml.md and docs/settings.md read
them.
"""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

import click
import msgspec

from oobleckd.ctl import docs
from oobleckd.ctl.options import output_option, wants_json
from oobleckd.ctl.output import (
    NOT_FOUND,
    USAGE,
    Failure,
    emit_fields,
    emit_item,
    emit_line,
    emit_page,
    emit_table,
    fail,
)
from oobleckd.protocol.job import Job

_WIDTH = 100
_PROGRAMS = {
    "ctl": "oobleckctl (docs/settings.md)",
    "daemon": "oobleckd (docs/settings.md)",
    "worker": "oobleck-worker (docs/settings.md)",
}


class ExplainedKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key, or a table with its ``fields``. ``default`` is JSON, or "required"."""

    path: str
    type: str
    text: str
    default: str = ""
    limits: str = ""
    flag: str = ""
    variable: str = ""
    fields: tuple[ExplainedKey, ...] = ()


@click.command()
@click.argument("key", default="")
@click.option("--recursive", is_flag=True, help="Of a table, and of those in it, every key.")
@click.option(
    "--schema", is_flag=True, help="Print the JSON Schema of a job.toml instead, for editors that know such."
)
@output_option
def explain(key: str, recursive: bool, schema: bool) -> None:
    """Explain KEY of a job.toml, such as train.steps, or of the settings, such as daemon.heartbeat_s; a
    table; or, without KEY, say which tables there are.
    """
    if schema:
        if key or recursive:
            fail("--schema is of a whole job.toml", "leave the rest out", USAGE)
        _print_schema()
        return
    found = looked_up(key.strip("[]"))
    if wants_json():
        emit_item("Explanation", found if recursive else _shallow(found))
    elif found.fields:
        _show_table(found, recursive=recursive)
    else:
        _show_key(found)


def _print_schema() -> None:
    from oobleckd.ctl.jobschema import page

    emit_page(page().rstrip("\n"))


def looked_up(path: str) -> ExplainedKey:
    """The key or table at ``path``; "": all that there is. Raises Failure with exit code 3."""
    if not path:
        return _everything()
    first, *rest = path.split(".")
    found = _program(first) if first in _PROGRAMS else _in(job_keys(), first, "")
    for index, name in enumerate(rest):
        if found.path == "model.config":
            fail(
                f"{path}: fields of [model.config] are those of the family's configuration class",
                "docs/models.md says which; `oobleckctl submit FILE --dry-run` names one that is unknown",
                NOT_FOUND,
            )
        found = _in(found, name, ".".join([first, *rest[:index]]))
    return found


def _in(table: ExplainedKey, name: str, path: str) -> ExplainedKey:
    keys = {field.path.rpartition(".")[2]: field for field in table.fields}
    found = keys.get(name)
    if found is not None:
        return found
    where = f"[{path}] has no key" if path else "there is no key or table"
    known = [*keys, *([] if path else _PROGRAMS)]
    close = get_close_matches(name, known, n=1)
    also = f"; did you mean {close[0]!r}?" if close else ""
    hint = f"there are {', '.join(known)}" if known else f"{path} is a key of its own: leave the rest out"
    raise Failure(f"{where} {name!r}{also}", hint, NOT_FOUND)


def job_keys() -> ExplainedKey:
    """All keys of a job.toml."""
    return ExplainedKey("", "table", "", fields=tuple(_keys(Job, "")))


def _keys(kind: type[msgspec.Struct], table: str) -> Iterator[ExplainedKey]:
    """Those of a table. A key that is a table, or may be several, has theirs."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        path = f"{table}.{field.name}" if table else field.name
        name, limits, text = docs.explain(hints[field.name])
        inner = docs.structs_in(hints[field.name])
        is_table = docs.is_one_table(hints[field.name])
        text = text or " ".join(docs.first_paragraph(each) for each in inner)
        default = "" if is_table else docs.default(field).strip("`")
        fields = {key.path: key for each in inner for key in _keys(each, path)}
        yield ExplainedKey(
            path, "table" if is_table else _bare(name), _bare(text), default, _bare(limits),
            fields=tuple(fields.values()),
        )  # fmt: skip


def _program(name: str) -> ExplainedKey:
    from oobleckd.ctl import settingsdocs  # loads what a daemon is made of

    rows = settingsdocs.rows_of_program(name)
    fields = tuple(
        ExplainedKey(
            f"{name}.{row.key}", _bare(row.type), _bare(row.meaning), _bare(row.default),
            flag=_bare(row.flags), variable=settingsdocs.variable(row.key) if row.flags else "",
        )
        for row in rows
    )  # fmt: skip
    return ExplainedKey(name, "table", f"Settings of {_PROGRAMS[name]}.", fields=fields)


def _everything() -> ExplainedKey:
    programs = (ExplainedKey(name, "table", f"Settings of {text}.") for name, text in _PROGRAMS.items())
    return ExplainedKey("", "table", "", fields=(*job_keys().fields, *programs))


def _bare(text: str) -> str:
    """Without the marks of the page."""
    return text.replace("`", "")


# --------------------------------------------------------------------------- showing


def _show_key(found: ExplainedKey) -> None:
    emit_fields({
        "key": found.path,
        "type": found.type,
        "default": found.default,
        "limits": found.limits,
        "flag": found.flag,
        "variable": found.variable,
    })  # fmt: skip
    _show_text(found.text)


def _show_table(found: ExplainedKey, *, recursive: bool) -> None:
    if found.path:
        emit_fields({"key": found.path, "type": found.type, "default": found.default})
        _show_text(found.text)
        emit_line()
    keys = list(_all(found.fields) if recursive else found.fields)
    below = len(found.path) + 1 if found.path else 0
    emit_table(
        ("KEY", "TYPE", "DEFAULT", "MEANING"),
        [(key.path[below:], key.type, key.default or "-", _first_sentence(key.text)) for key in keys],
    )


def _show_text(text: str) -> None:
    if text:
        emit_line()
    for line in textwrap.wrap(text, _WIDTH):
        emit_line(line)


def _first_sentence(text: str) -> str:
    head, stop, _ = text.partition(". ")
    return head + stop.rstrip()


def _all(keys: Iterable[ExplainedKey]) -> Iterator[ExplainedKey]:
    for key in keys:
        yield key
        yield from _all(key.fields)


def _shallow(found: ExplainedKey) -> ExplainedKey:
    fields = tuple(msgspec.structs.replace(field, fields=()) for field in found.fields)
    return msgspec.structs.replace(found, fields=fields)

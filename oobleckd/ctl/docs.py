"""Writes docs/job-toml.md, and docs/job.schema.json for editors, from the model of job.toml:
``python -m oobleckd.ctl.docs [FILE]``.

Owns the page's words around the tables; everything in the tables comes from ``oobleckd.protocol.job``.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from oobleckd.protocol import job

_HEAD = """\
# job.toml

Generated from `oobleckd/protocol/job.py` by `make docs`; do not edit.

A job is one TOML file. `oobleckctl submit FILE --dry-run` checks it without a daemon's help. An unknown key is an
error and comes with a suggestion. Relative paths start at the folder in which `oobleckctl` was called.

```toml
name = "gpt2-stdlib"

[train]
steps = 120
global_batch = 24
micro_batch = 2
sequence = 64
```
"""

_TAIL = """\
## What the result depends on
`model`, `data`, `train`, `optimizer` and `eval.held_out` decide every bit of losses and weights. `fault_tolerance`,
`schedule`, `resources`, `checkpoint`, `sink` and the rest of `eval` decide only how and where the work is
done, and what is kept. With `train.exact = false` there is no such promise. See [exactness](exactness.md).
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, *_tables(), _TAIL]
    return "\n".join(parts)


def _tables() -> Iterator[str]:
    hints = typing.get_type_hints(job.Job, include_extras=True)
    plain = [field for field in msgspec.structs.fields(job.Job) if not _is_table(hints[field.name])]
    yield _table("Top level", "", job.Job, plain)
    for field in plain:
        for each in structs_in(hints[field.name]):
            title = f"`[[{field.encode_name}]]`"
            yield _table(title, first_paragraph(each), each, msgspec.structs.fields(each))
    for field in msgspec.structs.fields(job.Job):
        kind = hints[field.name]
        if _is_table(kind):
            inner = msgspec.structs.fields(kind)
            yield _table(f"`[{field.encode_name}]`", first_paragraph(kind), kind, inner)
            yield from _inner_tables(field.encode_name, kind)


def _inner_tables(table: str, kind: type[msgspec.Struct]) -> Iterator[str]:
    """The tables that keys of ``table`` are, or of which they may have several."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        for each in structs_in(hints[field.name]):
            name = f"[{table}.{field.encode_name}]"
            title = f"`{name}`" if is_one_table(hints[field.name]) else f"`[{name}]`"
            yield _table(title, first_paragraph(each), each, msgspec.structs.fields(each))


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def first_paragraph(kind: type[msgspec.Struct]) -> str:
    """What a table is, by its docstring."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _table(
    title: str, intro: str, kind: type[msgspec.Struct], fields: typing.Iterable[msgspec.structs.FieldInfo]
) -> str:
    hints = typing.get_type_hints(kind, include_extras=True)
    lines = [f"## {title}", *([intro] if intro else []), ""]
    lines += ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for field in fields:
        type_name, bounds, meaning = explain(hints[field.name])
        if structs_in(hints[field.name]):  # which has a section of its own, below
            type_name = "table" if is_one_table(hints[field.name]) else "array of tables"
        said = " ".join(filter(None, [meaning, f"({bounds})" if bounds else ""]))
        lines.append(f"| `{field.name}` | {type_name} | {default(field)} | {_cell(said)} |")
    return "\n".join([*lines, ""])


def default(field: msgspec.structs.FieldInfo) -> str:
    """What a field is where it is left out, as JSON; "required" where it may not be."""
    if field.required:
        return "required"
    if field.default is msgspec.UNSET:
        return ""
    value = field.default if field.default is not msgspec.NODEFAULT else _made(field.default_factory)
    if isinstance(value, msgspec.Struct | msgspec.UnsetType):
        return ""
    return f"`{msgspec.json.encode(value).decode()}`"


def _made(factory: Any) -> Any:
    return factory() if callable(factory) else None


def explain(kind: Any) -> tuple[str, str, str]:
    """Name of a type, its bounds, and what its annotations say."""
    if get_origin(kind) is not Annotated:
        return _name(kind), "", ""
    inner, *metas = get_args(kind)
    name, bounds, meaning = explain(inner)
    for meta in metas:
        if isinstance(meta, Meta):
            bounds = ", ".join(filter(None, [bounds, _bounds(meta)]))
            meaning = meta.description or meaning
    return name, bounds, meaning


def _bounds(meta: Meta) -> str:
    signs = {">=": meta.ge, ">": meta.gt, "<=": meta.le, "<": meta.lt}
    words = [f"{sign} {value}" for sign, value in signs.items() if value is not None]
    return ", ".join([*words, *([f"matches `{meta.pattern}`"] if meta.pattern else [])])


_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", msgspec.Raw: "table"}


def _name(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _name(args[0])
    if origin is Literal:
        return " or ".join(f"`{value!r}`".replace("'", '"') for value in args)
    if origin is dict or kind is dict:
        return "table"
    if origin is tuple:
        many = "" if args[-1] is ... else f"{len(args)} "
        return f"array of {many}{_many(_name(args[0]), args[0])}"
    if args:
        return " or ".join(_name(arg) for arg in args if arg not in {type(None), msgspec.UnsetType})
    return _NAMES.get(kind) or f"`{kind.__name__}`"


def _many(name: str, kind: Any) -> str:
    if name.startswith("array "):
        return name.replace("array", "arrays", 1)
    return name if _is_table(kind) else f"{name}s"


def is_one_table(kind: Any) -> bool:
    """Whether a key of this type is a table, which it may leave out, and not several of them."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return is_one_table(args[0])
    return _is_table(kind) or (origin is not tuple and any(map(_is_table, args)))


def structs_in(kind: Any) -> list[type[msgspec.Struct]]:
    """The structs that a type is made of, itself among them."""
    if _is_table(kind):
        return [kind]
    return [struct for arg in get_args(kind) for struct in structs_in(arg)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page to the file named, or to docs/job-toml.md of the current folder."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/job-toml.md")
    target.write_text(page(), encoding="utf-8")
    print(target)
    from oobleckd.ctl import jobschema

    schema = target.with_name("job.schema.json")
    schema.write_text(jobschema.page(), encoding="utf-8")
    print(schema)


if __name__ == "__main__":
    main()

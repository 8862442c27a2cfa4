"""Prints the settings of ``oobleck-worker`` as JSON: ``python -m oobleckd.worker.tools.docs``.

Owns the rows of [worker] in docs/settings.md, which come from the command's options. The page is
``oobleckd.ctl.settingsdocs``, which may not import a worker and runs this.
"""

from __future__ import annotations

from typing import Any

import click
import msgspec

from oobleckd.worker.agent.main import main as command

Row = tuple[str, str, str, str, str]
"""Key, type, default, flags and meaning, as they are on the page."""


def rows() -> list[Row]:
    """One row for each option, in the order of ``--help``."""
    return [_row(option) for option in command.params if isinstance(option, click.Option)]


def _row(option: click.Option) -> Row:
    assert option.name is not None
    flags = " ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    meaning = " ".join(filter(None, [option.help, _bounds(option.type)]))
    return option.name, _type(option.type), _default(option), flags, meaning


def _type(kind: click.ParamType[Any]) -> str:
    if isinstance(kind, click.Choice):
        return " or ".join(f'`"{choice}"`' for choice in kind.choices)
    if isinstance(kind, click.FloatRange):
        return "number"
    return "boolean" if isinstance(kind, click.types.BoolParamType) else "string"


def _bounds(kind: click.ParamType[Any]) -> str:
    if isinstance(kind, click.FloatRange) and kind.min is not None:
        return f"(>= {kind.min:g})"
    return ""


def _default(option: click.Option) -> str:
    """As JSON; "none" where the command looks for a value itself."""
    if option.required:
        return "required"
    value = option.to_info_dict()["default"]  # ``option.default`` may be a mark of click's own
    return "none" if value is None else f"`{msgspec.json.encode(value).decode()}`"


def main() -> None:
    """Print the rows."""
    print(msgspec.json.encode(rows()).decode())


if __name__ == "__main__":
    main()

"""Command lines of the programs that run as services: their errors as words, their options from files.

Owns a click command whose usage errors read as all others do (``error:``, ``hint:``, exit code 2), and one
whose options may also come from ``OOBLECK_*`` variables and from the program's table in the settings files.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from oobleckd.host import usage
from oobleckd.host.settings import PREFIX, ConfigError, check_renamed, config_files, listed, read_table
from oobleckd.protocol.text import visible
from oobleckd.protocol.units import parse_seconds

EXIT_USAGE = 2


def end(problem: str, hint: str, code: int) -> NoReturn:
    """Say what is wrong and what to do next, and end the program."""
    with suppress(OSError):  # nobody reads it; the exit code says it, too
        click.echo(f"error: {visible(problem)}", err=True)
        if hint:
            click.echo(f"hint: {visible(hint)}", err=True)
    sys.exit(code)


class Seconds(click.FloatRange):
    """A time: a number of seconds, or one with units, such as 90s, 5m or 1h30m."""

    name = "time"

    def __init__(self, min: float = 0.0, *, min_open: bool = False) -> None:  # noqa: A002 - click's name
        super().__init__(min=min, min_open=min_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Seconds."""
        try:
            seconds = parse_seconds(str(value))
        except ValueError as error:
            self.fail(f"{error}; write seconds, or 90s, 5m, 2h", param, ctx)
        return super().convert(seconds, param, ctx)


class Listed(click.ParamType[list[str]]):
    """Several words with commas between."""

    name = "words"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The words."""
        del param, ctx
        return listed(value)


class Program(click.Command):
    """A command whose usage errors are one line and a hint."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the command line, and end."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.UsageError as error:
            end(usage.problem_of(error), f"see `{self.name} --help`", EXIT_USAGE)
        except click.Abort:
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


class ConfiguredProgram(Program):
    """Options also come from variables, then files: flag > ``OOBLECK_*`` > files > default.

    ``table`` names the program's table in the settings files; its keys are the options' names with
    underscores.
    """

    def __init__(self, *args: Any, table: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table
        self.context_settings["auto_envvar_prefix"] = PREFIX.rstrip("_")

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """As click does, with the files' values as defaults. A file that cannot be used ends the program."""
        options = {parameter.name for parameter in self.params if parameter.name is not None}
        values: dict[str, Any] = {}
        try:
            check_renamed(os.environ)
            for path in reversed(config_files(Path.home(), Path.cwd())):
                values |= read_table(path, self._table, options)
        except ConfigError as error:
            end(str(error), error.hint, EXIT_USAGE)
        return super().make_context(info_name, args, parent, default_map=values, **extra)

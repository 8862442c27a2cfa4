"""What every verb can be told: how to print data, and which daemon it is about; oobleckctl's own settings.

Owns the options (``--socket``, ``-o``, ``--to``) and what they say, or ``[ctl]`` in a file of settings. Knows
no daemon: a verb that asks none starts without what it takes to ask one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import click
import msgspec
from msgspec import Meta

from oobleckd.ctl.output import USAGE, Failure, note
from oobleckd.host.settings import ConfigError, LoadedSettings, config_files, load

OUTPUTS = ("table", "json", "yaml")
"""How every verb can print data."""
_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def _keep(name: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def callback(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            ctx.ensure_object(dict)[name] = value

    return callback


def _keep_format(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    """What only some verbs print is to all others as good as a table, or JSON."""
    if value is not None:
        kept = ctx.ensure_object(dict)
        kept["format"] = value
        kept["output"] = value if value in OUTPUTS else "json" if value == "jsonl" else "table"


def output_option(verb: _Verb, *more: str) -> _Verb:
    """Give a verb ``-o``, with ``more`` formats than every verb has."""
    return click.option(
        "-o", "--output", type=click.Choice([*OUTPUTS, *more]), expose_value=False, callback=_keep_format,
        help="How to print data.",
    )(verb)  # fmt: skip


def file_option(text: str, *, old: bool = False) -> Callable[[_Verb], _Verb]:
    """Give a verb ``--to FILE`` as its argument ``file``. ``old``: its ``-o`` named the file once, and may
    still; else ``-o`` may too, so that who is used to it is understood. See ``named_file``.
    """

    def keep(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is None or value in OUTPUTS:
            _keep_format(ctx, parameter, value)
            return
        ctx.ensure_object(dict)["file"] = value
        if old:
            note("-o FILE is --to FILE now: -o says how to print data, here as everywhere")

    def decorate(verb: _Verb) -> _Verb:
        to = click.option("--to", "file", type=click.Path(path_type=Path), metavar="FILE", help=text)
        form = click.option(
            "-o", "--output", *(("--out",) if old else ()), metavar="[table|json|yaml]", expose_value=False,
            callback=keep, help="How to print data.",
        )  # fmt: skip
        return to(form(verb))

    return decorate


def named_file(file: Path | None) -> Path | None:
    """What ``--to`` says, or ``-o`` where it names a file."""
    said = _kept().get("file")
    return file or (Path(str(said)) if said is not None else None)


def socket_option(verb: _Verb) -> _Verb:
    """Give a verb ``--socket``."""
    return click.option(
        "--socket", metavar="PATH", expose_value=False, callback=_keep("socket"), help="The daemon's socket."
    )(verb)


def wants_json() -> bool:
    """Whether data is for a program: documents, in JSON or in YAML."""
    return settings().config.output != "table"


def output_format() -> str:
    """What ``-o`` says, else the setting."""
    output = settings().config.output
    return str(_kept().get("format", output))


class CtlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of oobleckctl. No socket means: look where it usually is."""

    socket: Annotated[
        str,
        Meta(
            description="The daemon's socket; empty: the local cluster's, or the service's where only that "
            "exists."
        ),
    ] = ""
    output: Annotated[Literal["table", "json", "yaml"], Meta(description="How to print data.")] = "table"


def settings() -> LoadedSettings[CtlConfig]:
    """The settings of this call, read once. Raises Failure where a file or variable cannot be used."""
    kept = _kept()
    if "loaded" not in kept:
        flags = {name: kept.get(name) for name in CtlConfig.__struct_fields__}
        try:
            kept["loaded"] = load(CtlConfig, "ctl", flags, os.environ, config_files(Path.home(), Path.cwd()))
        except ConfigError as error:
            raise Failure(str(error), error.hint, USAGE) from error
    loaded: LoadedSettings[CtlConfig] = kept["loaded"]
    return loaded


def _kept() -> dict[str, Any]:
    kept = click.get_current_context().ensure_object(dict)
    assert isinstance(kept, dict)
    return kept

"""The verb ``config``: which settings count here and now, and where each comes from.

Owns how they are shown. The daemon's are those that a daemon would have if this user started it here;
oobleckctl's are those of this very call, flags included.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from oobleckd.client import find_socket
from oobleckd.ctl import options
from oobleckd.ctl.options import CtlConfig, output_option, socket_option, wants_json
from oobleckd.ctl.output import USAGE, Failure, emit_json, emit_table
from oobleckd.daemon.config import Config, load_config
from oobleckd.host.settings import ConfigError, LoadedSettings, config_files
from oobleckd.words import count


class Setting(msgspec.Struct, frozen=True):
    """One value of one program. ``origin``: a flag, a variable, a file, or "default"."""

    program: str
    key: str
    value: str | int | float | bool
    origin: str


@click.group()
def config() -> None:
    """Show settings, and where they come from."""


@config.command()
@click.option("--origin", is_flag=True, help="Also show where each value comes from.")
@socket_option
@output_option
def show(origin: bool) -> None:
    """Show the settings of oobleckctl and of a daemon that would be started here."""
    found = found_here()
    if wants_json():
        emit_json("Config", {"items": found})
        return
    columns = ("PROGRAM", "KEY", "VALUE", "ORIGIN")[: 4 if origin else 3]
    rows = [(each.program, each.key, _word(each.value), each.origin)[: len(columns)] for each in found]
    emit_table(columns, rows)


def found_here() -> list[Setting]:
    """All settings, and where each comes from. Raises Failure where they cannot be used."""
    return [*_of_ctl(options.settings()), *_of_daemon(_daemon())]


def _daemon() -> LoadedSettings[Config]:
    try:
        return load_config({}, os.environ, config_files(Path.home(), Path.cwd()))
    except ConfigError as error:
        raise Failure(str(error), error.hint, USAGE) from error


def _of_ctl(loaded: LoadedSettings[CtlConfig]) -> Iterator[Setting]:
    effective = {"socket": str(find_socket(loaded.config.socket or None))}
    yield from _settings("ctl", loaded, effective)


def _of_daemon(loaded: LoadedSettings[Config]) -> Iterator[Setting]:
    paths = loaded.config
    effective = {
        "state_dir": str(paths.state_path),
        "socket": str(paths.socket_path),
        "keys_dir": str(paths.keys_path),
        "sinks": ", ".join(paths.sinks),
        "sinks_dir": str(paths.sinks_path),
        "on_event": count(len(paths.on_event), "rule"),  # not what they say: a webhook's URL is its secret
    }
    yield from _settings("daemon", loaded, effective)


def _settings(program: str, loaded: LoadedSettings[Any], effective: dict[str, str]) -> Iterator[Setting]:
    for key, origin in loaded.origins.items():
        yield Setting(program, key, effective.get(key, getattr(loaded.config, key)), origin)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""The verb ``token``: who may use the API over TCP, until when."""

from __future__ import annotations

import time
from pathlib import Path
from typing import get_args

import click

from oobleckd.ctl.cluster import usual_keys
from oobleckd.ctl.options import output_option, wants_json
from oobleckd.ctl.output import FAILED, USAGE, emit_json, emit_line, fail, note
from oobleckd.daemon.tokens import Role, TokenError, drop_token, make_token, tokens_path

_DAY_S = 86_400.0


@click.command()
@click.argument("name")
@click.option(
    "--role", type=click.Choice(get_args(Role)), default="read", show_default=True, help="What it allows."
)
@click.option(
    "--days",
    type=click.FloatRange(min=0, min_open=True, max=3650),
    default=90.0,
    show_default=True,
    help="For how long.",
)
@click.option("--drop", is_flag=True, help="Take the token of NAME back.")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="Key folder; if not given, that of keygen."
)
@output_option
def token(name: str, role: Role, days: float, drop: bool, directory: Path | None) -> None:
    """Make a token for the API on TCP, and print it once; NAME is what the audit has of its acts.

    A token that NAME had before is none any more. `systemctl reload oobleckd` makes the daemon read them.
    """
    keys = directory or usual_keys()
    try:
        made = "" if drop else make_token(keys, name, role, time.time() + days * _DAY_S)
        if drop:
            drop_token(keys, name)
    except TokenError as error:
        fail(error.problem, error.hint, USAGE)
    except OSError as error:
        fail(
            f"{tokens_path(keys)}: cannot be written: {error.strerror}",
            "choose another folder with --dir",
            FAILED,
        )
    if wants_json():
        emit_json("Token", {"name": name, "token": made})
    elif made:
        emit_line(made)
    note("the daemon reads tokens when it is reloaded (SIGHUP)")

"""How a verb finds the daemon, and what its errors mean for the exit code.

Owns the options that every verb has (``--socket``, ``-o``), the places where a socket is looked for, and the
translation of client errors.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from oobleckd.client import ApiProblem, Client, ClientError, Unreachable
from oobleckd.ctl.output import FAILED, NOT_FOUND, REFUSED, UNREACHABLE, USAGE, Failure

SERVICE_SOCKET = Path("/run/oobleck/oobleckd.sock")
_CODES = {404: NOT_FOUND, 403: REFUSED, 409: REFUSED, 422: USAGE}
_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def state_dir() -> Path:
    """Where ``up`` keeps a local cluster: OOBLECK_STATE, or below XDG_STATE_HOME or ~/.local/state."""
    if named := os.environ.get("OOBLECK_STATE"):
        return Path(named).absolute()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "oobleck"


def socket_of(state: Path) -> Path:
    """The daemon's socket of the local cluster under ``state``."""
    return state / "run" / "oobleckd.sock"


def find_socket(flag: str | None) -> Path:
    """--socket, OOBLECK_SOCKET, the local cluster's socket, or the service's where only that exists."""
    if named := flag or os.environ.get("OOBLECK_SOCKET"):
        return Path(named)
    local = socket_of(state_dir())
    if not local.exists() and "OOBLECK_STATE" not in os.environ and SERVICE_SOCKET.exists():
        return SERVICE_SOCKET
    return local


@contextmanager
def translated() -> Iterator[None]:
    """Client errors become the end of the command, with the documented exit code."""
    try:
        yield
    except Unreachable as error:
        raise Failure(error.problem, error.hint, UNREACHABLE) from error
    except ApiProblem as error:
        raise Failure(error.problem, error.hint, _CODES.get(error.status, FAILED)) from error
    except ClientError as error:
        raise Failure(error.problem, error.hint) from error


def _keep(name: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def callback(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> None:
        settings = ctx.ensure_object(dict)
        if value is not None:
            settings[name] = value

    return callback


def output_option(verb: _Verb) -> _Verb:
    """Give a verb ``-o``."""
    return click.option(
        "-o", "--output", type=click.Choice(["table", "json"]), expose_value=False, callback=_keep("output"),
        help="How to print data.",
    )(verb)  # fmt: skip


def connected(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb ``--socket``, ``-o``, and a ``Client`` as its first argument."""

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        with translated():
            verb(client(), *args, **kwargs)

    socket = click.option(
        "--socket", metavar="PATH", expose_value=False, callback=_keep("socket"), help="The daemon's socket."
    )
    return output_option(socket(run))


def client() -> Client:
    """A client for the daemon that this call of oobleckctl is about."""
    return Client(find_socket(_settings().get("socket")))


def wants_json() -> bool:
    """Whether data is for a program."""
    return _settings().get("output") == "json"


def _settings() -> dict[str, Any]:
    settings = click.get_current_context().ensure_object(dict)
    return settings if isinstance(settings, dict) else {}

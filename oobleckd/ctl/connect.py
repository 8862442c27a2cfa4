"""How a verb finds the daemon, and what its errors mean for the exit code.

Owns the options that every verb has (``--socket``, ``-o``) and the translation of client errors. Where a
socket is looked for is the client's matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from oobleckd.client import ApiProblem, Client, ClientError, Unreachable, find_socket
from oobleckd.ctl.output import FAILED, NOT_FOUND, REFUSED, UNREACHABLE, USAGE, Failure

_CODES = {404: NOT_FOUND, 403: REFUSED, 409: REFUSED, 422: USAGE}
_Verb = TypeVar("_Verb", bound=Callable[..., Any])


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

"""How a verb finds the daemon, and what its errors mean for the exit code.

Owns the translation of client errors. Where a socket is looked for is the client's matter, and what a verb
can be told is ``options``'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oobleckd.client import TIMEOUT_S, Client, find_socket
from oobleckd.ctl.options import output_option, settings, socket_option
from oobleckd.ctl.output import FAILED, NOT_FOUND, REFUSED, UNREACHABLE, USAGE, Failure
from oobleckd.unixhttp import ApiProblem, ClientError, Unreachable

_CODES = {404: NOT_FOUND, 403: REFUSED, 409: REFUSED, 422: USAGE}


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


def connected(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb ``--socket``, ``-o``, and a ``Client`` as its first argument."""
    return connected_with()(verb)


def connected_with(*more: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same, with ``more`` formats of ``-o`` than every verb has."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def run(*args: Any, **kwargs: Any) -> None:
            with translated():
                verb(client(), *args, **kwargs)

        return output_option(socket_option(run), *more)

    return decorate


def client(timeout_s: float = TIMEOUT_S) -> Client:
    """A client for the daemon that this call of oobleckctl is about."""
    return Client(find_socket(settings().config.socket or None), timeout_s=timeout_s)

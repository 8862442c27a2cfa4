"""The ``oobleck-console`` command. Textual is loaded when a terminal is drawn on, not before.

Exit codes as oobleckctl has them: 0 done, 1 failed, 2 usage, 4 daemon unreachable (with ``--once`` only: on a
terminal the console waits for it).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import NoReturn

import click

from oobleckd import __version__
from oobleckd.client import Client, find_socket
from oobleckd.unixhttp import ClientError, Unreachable

FAILED, USAGE, UNREACHABLE = 1, 2, 4
_PIPE_WIDTH = 120


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="oobleck-console")
@click.option("--socket", metavar="PATH", help="The daemon's socket (or OOBLECK_SOCKET).")
@click.option("--once", is_flag=True, help="Print the overview as text, once, and end.")
def main(socket: str | None, once: bool) -> None:
    """Watch a job: nodes, pipelines, throughput, loss and recoveries, live.

    Without a daemon it waits for one; when the daemon goes away it shows what was last known and says so.
    Exit codes: 0 done, 1 failed, 2 usage, 4 daemon unreachable (with --once).
    """
    client = Client(find_socket(socket), timeout_s=2.0)
    if once:
        _once(client)
    else:
        _watch(client)


def _once(client: Client) -> None:
    from console.once import overview

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    try:
        text = overview(client, time.time(), width)
    except ClientError as error:
        _end(error.problem, error.hint, UNREACHABLE if isinstance(error, Unreachable) else FAILED)
    click.echo(text)


def _watch(client: Client) -> None:
    if not on_terminal():
        _end("the console needs a terminal, and this is none", "`oobleck-console --once` prints text", USAGE)
    try:
        from console.feed import Feed
        from console.tui import ConsoleApp
    except ImportError as error:
        _end(
            f"Textual cannot be loaded: {error}",
            "install oobleckd anew, or use `oobleck-console --once`",
            FAILED,
        )
    app = ConsoleApp(lambda deliver: Feed(client, deliver))
    app.run()
    sys.exit(app.return_code or 0)


def on_terminal() -> bool:
    """Whether there is a terminal to draw on. Textual draws on stderr, so that must be one as well."""
    streams = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    return streams and os.environ.get("TERM", "dumb") != "dumb"


def _end(problem: str, hint: str, code: int) -> NoReturn:
    click.echo(f"error: {problem}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""The ``oobleck-console`` command. Textual is loaded when a terminal is drawn on, not before.

Exit codes as oobleckctl has them: 0 done, 1 failed, 2 usage, 4 daemon unreachable (with ``--once`` only: on a
terminal the console waits for it).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import NoReturn

import click

from oobleckd import __version__
from oobleckd.client import Client, find_socket
from oobleckd.unixhttp import ClientError, Unreachable

FAILED, USAGE, UNREACHABLE = 1, 2, 4
# As in ``themes.THEMES``; that module loads what a help text need not wait for.
THEMES = ("dark", "light", "colour-blind")
_PIPE_WIDTH = 120


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="oobleck-console")
@click.option("--socket", metavar="PATH", help="The daemon's socket (or OOBLECK_SOCKET).")
@click.option("--once", is_flag=True, help="Print the overview as text, once, and end.")
@click.option(
    "--at", metavar="TIME",
    help="Begin in the past: 12:04, 12:04:31, -5m (from the daemon's history; with --bundle, of its "
         "incident's day).",
)  # fmt: skip
@click.option(
    "--bundle", "file", type=click.Path(path_type=Path), metavar="FILE",
    help="Show an exported incident instead of a daemon.",
)  # fmt: skip
@click.option("--theme", type=click.Choice(THEMES), default="dark", show_default=True, help="Colours.")
@click.option(
    "--ascii", "ascii_only", is_flag=True, help="Letters for signs, for terminals that have no others."
)
@click.option(
    "--rate",
    type=click.FloatRange(0.2, 30.0),
    default=4.0,
    show_default=True,
    metavar="HZ",
    help="Frames a second.",
)
@click.option("--read-only", is_flag=True, help="Refuse everything that acts on the cluster.")
@click.option("--web", is_flag=True, help="Serve it, read-only, to browsers on this machine.")
@click.option(
    "--web-port", type=click.IntRange(1, 65_535), default=8000, show_default=True, metavar="PORT",
    help="Where browsers find it.",
)  # fmt: skip
def main(
    socket: str | None,
    once: bool,
    at: str | None,
    file: Path | None,
    theme: str,
    ascii_only: bool,
    rate: float,
    read_only: bool,
    web: bool,
    web_port: int,
) -> None:
    """Watch a job: nodes, pipelines, throughput, loss and recoveries, live.

    Without a daemon it waits for one; when the daemon goes away it shows what was last known and says so.
    NO_COLOR in the environment takes all colours away.
    Exit codes: 0 done, 1 failed, 2 usage, 4 daemon unreachable (with --once).
    """
    client = Client(find_socket(socket), timeout_s=2.0)
    begin = _moment(at, file)
    if web:
        options = {"--socket": socket, "--at": at, "--bundle": file, "--theme": theme, "--rate": rate}
        words = [f"{name}={value}" for name, value in options.items() if value is not None]
        _web([*words, *(["--ascii"] if ascii_only else [])], web_port)
    elif once:
        _once(client, begin, file, ascii_only)
    else:
        _watch(client, begin, file, theme, ascii_only, rate, read_only, socket or "")


def _moment(at: str | None, file: Path | None) -> float | None:
    """``at`` in POSIX seconds: of a file a time of day is the one nearest to its incident."""
    from oobleckd.console.bundle import BundleError, read
    from oobleckd.console.times import moment

    if at is None:
        return None
    try:
        return moment(at, time.time(), read(file).incident.at if file is not None else None)
    except BundleError as error:
        _end(error.problem, error.hint, FAILED)
    except ValueError as error:
        _end(str(error), "", USAGE)


def _once(client: Client, at: float | None, file: Path | None, ascii_only: bool) -> None:
    from oobleckd.console.bundle import BundleError
    from oobleckd.console.letters import ascii_text
    from oobleckd.console.once import overview, past

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    try:
        if file is not None or at is not None:
            text = past(Client(client.socket_path), at, file, width)
        else:
            text = overview(client, time.time(), width)
    except BundleError as error:
        _end(error.problem, error.hint, FAILED)
    except ClientError as error:
        _end(error.problem, error.hint, UNREACHABLE if isinstance(error, Unreachable) else FAILED)
    click.echo(ascii_text(text) if ascii_only else text)


def _watch(
    client: Client,
    at: float | None,
    file: Path | None,
    theme: str,
    ascii_only: bool,
    rate: float,
    read_only: bool,
    socket: str,
) -> None:
    if not on_terminal():
        _end("the console needs a terminal, and this is none", "`oobleck-console --once` prints text", USAGE)
    try:
        from oobleckd.console.start import run
    except ImportError as error:
        _end(
            f"Textual cannot be loaded: {error}",
            "install oobleckd anew, or use `oobleck-console --once`",
            FAILED,
        )
    from oobleckd.console.bundle import BundleError

    try:
        code = run(
            client, at, file, theme=theme, ascii_only=ascii_only, rate_hz=rate, read_only=read_only,
            socket=socket
        )  # fmt: skip
    except BundleError as error:
        _end(error.problem, error.hint, FAILED)
    sys.exit(code)


def _web(words: list[str], port: int) -> None:
    try:
        from oobleckd.console.web import serve
    except ImportError as error:
        _end(f"--web cannot be served: {error}", "pip install 'oobleckd[web]'", FAILED)
    try:
        serve(words, port)
    except OSError as error:
        _end(
            f"port {port} cannot be used: {error.strerror or error}",
            "choose another: --web-port PORT",
            FAILED,
        )


def on_terminal() -> bool:
    """Whether there is somebody to draw for: a terminal, or the driver that Textual was told to use instead
    (a browser's).

    Textual draws on stderr, so that must be a terminal as well.
    """
    if "TEXTUAL_DRIVER" in os.environ:
        return True
    streams = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    return streams and os.environ.get("TERM", "dumb") != "dumb"


def _end(problem: str, hint: str, code: int) -> NoReturn:
    click.echo(f"error: {problem}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""Puts a source, the application and its options together: live, at a time of the past, or from a file."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from oobleckd.client import Client
from oobleckd.console import replay
from oobleckd.console.facts import AnyFact, Wants
from oobleckd.console.feed import Feed, Source
from oobleckd.console.themes import THEMES
from oobleckd.console.tui import ConsoleApp, Options


class Silence:
    """A source that has nothing to tell: beside a file there is no daemon."""

    threads: tuple[Callable[[], None], ...] = ()

    def want(self, wants: Wants) -> None:
        """Nobody can be asked."""

    def close(self) -> None:
        """Nothing is open."""


def run(
    client: Client,
    at: float | None,
    file: Path | None,
    *,
    theme: str,
    ascii_only: bool,
    rate_hz: float,
    read_only: bool,
    socket: str,
) -> int:
    """Show it until somebody quits; the exit code. ``socket``: as it was named, or "". Raises BundleError."""
    # Questions come again; an act does not, and a past is more than a moment takes to gather.
    patient = Client(client.socket_path)
    load, begin = replay.of_daemon(patient), at
    asked: Client | None = patient
    if file is not None:
        load, began = replay.of_file(file)
        begin = began if at is None else at
        asked = None

    def opened(deliver: Callable[[AnyFact], None]) -> Source:
        return Feed(client, deliver) if file is None else Silence()

    options = Options(
        read_only=read_only,
        rate_hz=rate_hz,
        theme=next(name for name in THEMES if name == theme),
        ascii_only=ascii_only,
        client=asked,
        load=load,
        begin=begin,
        socket=socket,
    )
    app = ConsoleApp(opened, options=options)
    # What is loaded by now stays. To look through all of it again and again for what nobody needs costs more
    # than the frames.
    gc.collect()
    gc.freeze()
    app.run()
    return app.return_code or 0

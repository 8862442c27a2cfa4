"""The console in browsers of this machine: a web server that runs one console for every page that is open.

Owns who may look: browsers on this machine only, and no page of another site, which a browser would let read
and press keys here. Such a console is read-only always, for whoever can reach the port is not known to be
allowed to act. The rest is textual-serve's.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from aiohttp import web
from textual_serve.server import Server

from oobleckd.host.interpreter import command

HOST = "localhost"


class ConsoleServer(Server):
    """Serves ``oobleck-console`` with ``words`` on ``port``."""

    def __init__(self, words: Sequence[str], port: int) -> None:
        # Read-only always: whoever reaches a port is not known. (D-console-009)
        line = shlex.join(command("oobleckd.console.app", "--read-only", *words))
        super().__init__(line, host=HOST, port=port, title="oobleck-console")

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run a console for a page that came from here. Browsers say where a page came from, and it cannot
        say otherwise.
        """
        # Any page in a browser may open a web socket to this machine: it would read, and press keys.
        # (D-console-009)
        if request.headers.get("Origin") != self.public_url:
            raise web.HTTPForbidden(text=f"open {self.public_url} instead")
        return await super().handle_websocket(request)


def serve(words: Sequence[str], port: int) -> None:
    """Serve until Ctrl-C. Raises OSError where the port cannot be had."""
    ConsoleServer(words, port).serve()

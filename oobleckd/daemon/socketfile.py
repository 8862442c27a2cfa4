"""The file of the API's socket: made, and made again where somebody removed it.

Owns the file alone. A socket whose file is gone is reached by nobody, and its daemon looks dead to everybody,
while agents go on to talk to it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from aiohttp import web

from oobleckd.daemon.accepting import GuardedSite, Guests

_LOOK_EVERY_S = 0.5
_log = logging.getLogger(__name__)


async def open_at(runner: web.AppRunner, path: Path, guests: Guests) -> GuardedSite:
    """Serve at ``path``, where nobody listens, to whom ``guests`` admits. Raises OSError."""
    site = GuardedSite(runner, _bound(path), guests, path=path)
    await site.start()
    # Everybody may connect and read; who may act is decided by the kernel's word on the peer.
    _let_all(path)
    return site


async def keep_at(runner: web.AppRunner, path: Path) -> None:
    """Serve there again whenever the file is gone, until cancelled. Nothing to do for systemd's socket."""
    sites = (each for each in runner.sites if isinstance(each, GuardedSite))
    site = next((each for each in sites if each.path == path), None)
    failing = False
    while site is not None:
        await asyncio.sleep(_LOOK_EVERY_S)
        if _is_there(path):
            continue
        try:
            made = await open_at(runner, path, site.guests)
        except OSError as error:
            if not failing:
                _log.error("%s is gone, and cannot be made again: %s", path, error)
            failing = True
        else:
            await site.stop()
            site, failing = made, False
            _log.warning("%s was removed, and is there again", path)


def _bound(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    return listening


def _let_all(path: Path) -> None:
    path.chmod(0o666)


def _is_there(path: Path) -> bool:
    return path.exists()

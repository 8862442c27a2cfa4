"""``oobleck-console --web`` in a real browser: it is the same console, a key changes the screen, and it may
not act.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from oobleckd.host.ports import free_port
from tests.helpers.api_server import serving
from tests.helpers.browser import browsing, install
from tests.helpers.busy import BusyApi
from tests.helpers.cluster import BIN
from tests.helpers.fleet import Fleet

pytestmark = pytest.mark.skipif(
    os.environ.get("OOBLECK_NO_BROWSER_TESTS") == "1", reason="OOBLECK_NO_BROWSER_TESTS is 1"
)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A console in front of a small fleet; its address."""
    port = free_port()
    command = [str(BIN / "oobleck-console"), "--web", "--web-port", str(port), "--socket", str(folder / "s")]
    with (
        serving(folder / "s", BusyApi(Fleet((4, 4, 3), standby=1), 5.0)),
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as server,
    ):
        try:
            _until_open(server, port)
            yield f"http://localhost:{port}"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def _until_open(server: subprocess.Popen[bytes], port: int) -> None:
    """Asked and not awaited: a program says nothing of the moment when it listens."""
    pause, deadline = threading.Event(), time.monotonic() + 60.0
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1.0):
            return
        pause.wait(0.05)
    raise AssertionError("it does not listen")


@pytest.mark.asyncio
async def test_a_browser_shows_it_and_a_key_changes_the_screen(tmp_path: Path) -> None:
    if why := install():
        pytest.fail(why)
    with served(tmp_path) as url:
        async with browsing(tmp_path) as page:
            await page.open(url)
            await page.until("● live")
            before = await page.picture()
            await page.click(600, 400)
            await page.press("2")
            await page.until("Live copies of each layer")
            await page.press("d")
            await page.until("not done: this")
            after = await page.picture()
    assert before.startswith(b"\x89PNG")
    assert before != after


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "headers", [{}, {"Origin": "http://localhost:1"}, {"Origin": "https://elsewhere.example"}]
)
async def test_no_other_page_may_look(tmp_path: Path, headers: dict[str, str]) -> None:
    with served(tmp_path) as url:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(f"{url}/ws?width=80&height=24", headers=headers)
    assert refused.value.status == 403

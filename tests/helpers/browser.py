"""A headless Chromium that is driven over its DevTools protocol: opens a page, presses keys, hears its web
sockets, takes pictures.

Owns the process and its profile. Only what the console's tests need of the protocol is here.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
NO_BROWSER = "no Chromium is installed (apt-get install chromium); OOBLECK_NO_BROWSER_TESTS=1 leaves this out"
_INSTALL = (
    ("apt-get", "update", "-q"),
    ("apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium"),
)
_INSTALL_S = 900.0
_LISTENS = "DevTools listening on "
_START_S = 60.0
_SAID = frozenset({"Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"})


def find() -> str | None:
    """Its program."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def install() -> str:
    """Have Debian's package installed where none is there and we may; why there is none afterwards, or ""."""
    if find() is not None:
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return NO_BROWSER
    for command in _INSTALL:
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=_INSTALL_S
        )
        if done.returncode:
            return f"{NO_BROWSER}; {' '.join(command)}: {done.stderr.strip()[-300:]}"
    return "" if find() is not None else NO_BROWSER


class Page:
    """One page. ``heard``: all that its web sockets received, as text; ``logged``: what its console says."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.heard = ""
        self.logged: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask for something, and wait for the answer. Raises RuntimeError where it is refused."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._next()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result

    async def until(self, words: str, timeout_s: float = 60.0) -> None:
        """Wait until ``words`` were received, and forget all up to them. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while words not in self.heard:
                await self._next()
        _, _, self.heard = self.heard.partition(words)

    async def open(self, url: str) -> None:
        """Go there, and listen to its web sockets."""
        for domain in ("Network", "Page", "Log", "Runtime"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def click(self, x: int, y: int) -> None:
        """Press a place of the page."""
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def press(self, key: str) -> None:
        """Press a key that writes a sign."""
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def picture(self) -> bytes:
        """What it shows, as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    async def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json()
        if message.get("method") == "Network.webSocketFrameReceived":
            frame = message["params"]["response"]
            data = frame["payloadData"]
            self.heard += base64.b64decode(data).decode(errors="replace") if frame["opcode"] == 2 else data
        if message.get("method") in _SAID:
            self.logged.append(json.dumps(message["params"]))
        return message


@asynccontextmanager
async def browsing(folder: Path, width: int = 1300, height: int = 800) -> AsyncIterator[Page]:
    """An empty page of a browser of its own. Raises FileNotFoundError where there is none."""
    program = find()
    if program is None:
        raise FileNotFoundError(NO_BROWSER)
    process = await asyncio.create_subprocess_exec(
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
        f"--window-size={width},{height}",
        f"--user-data-dir={folder / 'chromium'}", "about:blank", stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stderr is not None
    rest: asyncio.Task[bytes] | None = None
    try:
        address = await asyncio.wait_for(_address(process.stderr), _START_S)
        rest = asyncio.create_task(process.stderr.read())  # so that it never waits for a reader
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/json/list") as response:
                pages = [target for target in json.loads(await response.text()) if target["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        await process.wait()
        if rest is not None:
            await rest


async def _address(stream: asyncio.StreamReader) -> str:
    """``127.0.0.1:port`` of its protocol."""
    while line := (await stream.readline()).decode(errors="replace"):
        if line.startswith(_LISTENS):
            return line.removeprefix(_LISTENS + "ws://").partition("/")[0]
    raise RuntimeError("Chromium ended before it listened")

"""The agent's part in artifacts: it fetches for its devices what other nodes compiled, and sends what they
compiled.

Owns what is under way, and the order of messages with the daemon: the next part is asked for, or sent, when
the one before is here, so nothing else waits for an artifact. Files are read and written beside the loop.
Where the daemon keeps no artifacts, or is away, devices compile for themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from oobleckd.protocol import codec
from oobleckd.protocol.artifactmessages import (
    ArtifactHere,
    ArtifactKept,
    ArtifactMade,
    ArtifactPart,
    ArtifactTaken,
    GetArtifact,
    NoArtifact,
    PutArtifact,
    WantArtifact,
)
from oobleckd.protocol.artifacts import MAX_BYTES, PART_BYTES, is_key
from oobleckd.protocol.message import Message
from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.words import size

FROM_DEVICE = frozenset({"WantArtifact", "ArtifactMade", "NoArtifact"})
FROM_DAEMON = frozenset({"ArtifactKept", "ArtifactPart", "ArtifactTaken"})
AWAY_S = 30.0
"""What a device waits for a daemon that is away before it compiles for itself."""
PART_S = 60.0
_MAX_AGAIN = 3
Answer = ArtifactKept | ArtifactPart | ArtifactTaken
_T = TypeVar("_T", ArtifactKept, ArtifactPart, ArtifactTaken)
_from_device = msgspec.msgpack.Decoder(WantArtifact | ArtifactMade | NoArtifact)
_log = logging.getLogger(__name__)


class _Lost(Exception):
    """The connection is gone, and with it whatever was asked."""


class Sharing:
    """Of one agent. ``folder``: where its devices keep what they compile. ``say`` sends to the daemon,
    ``answer`` to a device.
    """

    def __init__(
        self, folder: Path, say: Callable[[Message], None], answer: Callable[[str, ArtifactHere], None]
    ) -> None:
        self._folder, self._say, self._answer = folder, say, answer
        self._loop = asyncio.get_running_loop()
        self._daemon = asyncio.Event()  # there is one
        self._keeps = False
        self._open: dict[str, asyncio.Future[Any]] = {}  # key -> the answer
        self._makers: dict[str, str] = {}  # key -> device
        self._wants: dict[str, tuple[str, asyncio.Task[None]]] = {}  # key -> device
        self._offers: dict[str, asyncio.Task[None]] = {}

    def from_device(self, device: str, data: bytes) -> None:
        """``device`` said something of an artifact. Raises CodecError."""
        try:
            message = _from_device.decode(data)
        except UNREADABLE as error:
            raise codec.CodecError(problem_of(error)) from error
        match message:
            case WantArtifact():
                self._want(device, message.key)
            case ArtifactMade():
                self._made(device, message)
            case NoArtifact():
                self._not_made(device, message.key)

    def heard(self, message: Answer) -> None:
        """The daemon answers."""
        future = self._open.get(message.key)
        if future is not None and not future.done():
            future.set_result(message)
        elif isinstance(message, ArtifactKept) and not message.num_bytes and message.key not in self._makers:
            self._say(NoArtifact(message.key))  # the device that was to make it has ended

    def welcomed(self, *, keeps: bool) -> None:
        """There is a daemon, which ``keeps`` artifacts, or does not. Said again and again."""
        self._keeps = keeps
        if keeps and not self._daemon.is_set():
            for key in self._makers:
                self._say(WantArtifact(key, making=True))
        self._daemon.set()

    def lost(self) -> None:
        """The connection to the daemon is gone: what was asked of it has no answer."""
        self._daemon.clear()
        for future in self._open.values():
            if not future.done():
                future.set_exception(_Lost())

    def ended(self, device: str) -> None:
        """The process of ``device`` has ended: it makes nothing, and waits for nothing."""
        for key in [key for key, maker in self._makers.items() if maker == device]:
            self._not_made(device, key)
        for asker, task in list(self._wants.values()):
            if asker == device:
                task.cancel()

    async def close(self) -> None:
        """End all that is under way."""
        tasks = [*(task for _, task in self._wants.values()), *self._offers.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------------ what a device wants

    def _want(self, device: str, key: str) -> None:
        if not is_key(key) or key in self._wants or key in self._offers:
            # Two devices of a node ask for one only where its disk knows no locks.
            self._answer(device, ArtifactHere(key, ""))
            return
        task = self._loop.create_task(self._serve(device, key))
        self._wants[key] = (device, task)
        task.add_done_callback(lambda _: self._wants.pop(key, None))

    async def _serve(self, device: str, key: str) -> None:
        path: Path | None = None
        try:
            path = await self._found(device, key)
        except (OSError, TimeoutError) as error:
            _log.warning("%s compiles for itself, as %s does not come: %s", device, key, error or "too late")
        self._answer(device, ArtifactHere(key, str(path or "")))

    async def _found(self, device: str, key: str) -> Path | None:
        """The file that it is in; None where ``device`` is to make it. Raises OSError, TimeoutError."""
        damaged = ""
        for _ in range(_MAX_AGAIN):
            kept = await self._asked(WantArtifact(key, damaged=damaged), ArtifactKept, None)
            if kept is None:
                return None
            if not kept.num_bytes:
                self._makers[key] = device
                return None
            path = await self._fetched(kept)
            if path is not None:
                return path
            damaged = kept.sha256
        return None

    async def _fetched(self, kept: ArtifactKept) -> Path | None:
        """The file; None where it is not what it is said to be. Raises OSError, TimeoutError."""
        key = kept.key
        if kept.num_bytes > MAX_BYTES:
            raise OSError(f"{size(kept.num_bytes)} are too many")
        path = self._folder / f".{key}.{secrets.token_hex(4)}.part"
        file = await asyncio.to_thread(_new, path)
        digest, offset, whole = hashlib.sha256(), 0, False
        try:
            while offset < kept.num_bytes:
                part = await self._asked(GetArtifact(key, offset), ArtifactPart, PART_S)
                if part is None or part.offset != offset or not part.data:
                    break
                await asyncio.to_thread(file.write, part.data)
                digest.update(part.data)
                offset += len(part.data)
            await asyncio.to_thread(file.close)
            whole = offset == kept.num_bytes and digest.hexdigest() == kept.sha256
        finally:
            if not whole:
                file.close()
                with suppress(OSError):
                    path.unlink()
        if not whole:
            _log.warning("the artifact %s is not what it is said to be", key)
            return None
        _log.info("fetched the artifact %s: %s", key, size(kept.num_bytes))
        return path

    # ------------------------------------------------------------------ what a device made

    def _made(self, device: str, message: ArtifactMade) -> None:
        key, path = message.key, Path(message.path)
        if self._makers.get(key) == device and key not in self._offers:
            self._makers[key] = ""  # it is the agent's now, however the device ends
            self._offers[key] = task = self._loop.create_task(self._offer(key, path))
            task.add_done_callback(lambda _: self._offers.pop(key, None))
        else:
            self._aside(asyncio.to_thread(_unlink, path))

    def _not_made(self, device: str, key: str) -> None:
        if self._makers.get(key) == device:
            del self._makers[key]
            self._say(NoArtifact(key))

    async def _offer(self, key: str, path: Path) -> None:
        """Send the file to the daemon, for other nodes."""
        try:
            await self._put(key, path)
        except (OSError, TimeoutError) as error:
            _log.warning("what was compiled here cannot be sent to others: %s", error or "too late")
            self._say(NoArtifact(key))
        finally:
            self._makers.pop(key, None)
            await asyncio.to_thread(_unlink, path)

    async def _put(self, key: str, path: Path) -> None:
        num_bytes, sha256 = await asyncio.to_thread(_measured, path)
        offset = again = 0
        while offset < num_bytes and again <= _MAX_AGAIN:
            data = await asyncio.to_thread(_read, path, offset)
            put = PutArtifact(key, num_bytes, sha256, offset, data)
            taken = await self._asked(put, ArtifactTaken, PART_S)
            if taken is None or taken.offset < 0:
                return
            again += taken.offset <= offset  # on another connection it may begin anew
            offset = taken.offset
        if offset == num_bytes:
            _log.info("sent the artifact %s: %s", key, size(num_bytes))

    # ------------------------------------------------------------------ the daemon

    async def _asked(
        self, message: WantArtifact | GetArtifact | PutArtifact, kind: type[_T], within_s: float | None
    ) -> _T | None:
        """The daemon's answer; None where it keeps no artifacts. Said again on every new connection. Raises
        TimeoutError.
        """
        key = message.key
        while True:
            await asyncio.wait_for(self._daemon.wait(), AWAY_S)
            if not self._keeps:
                return None
            future: asyncio.Future[Answer] = self._loop.create_future()
            self._open[key] = future
            self._say(message)
            try:
                found = await asyncio.wait_for(future, within_s)
            except _Lost:
                continue
            finally:
                self._open.pop(key, None)
            if isinstance(found, kind):
                return found

    def _aside(self, doing: Coroutine[Any, Any, None]) -> None:
        name = secrets.token_hex(4)
        self._offers[name] = task = self._loop.create_task(doing)
        task.add_done_callback(lambda _: self._offers.pop(name, None))


def _new(path: Path) -> IO[bytes]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _measured(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return file.tell(), digest.hexdigest()


def _read(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PART_BYTES)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)

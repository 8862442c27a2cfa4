"""What nodes compile, for the other nodes: kept in the state folder, sent on, and made by one at a time.

Owns who makes an artifact that nobody has, and who waits for it. Everything comes from nodes and goes to
nodes, over the hub, which knows each by its key: there is no other way in. The core knows nothing of it, as
nothing is decided by it: where an artifact does not come a node compiles for itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from oobleckd.daemon.artifactfiles import ArtifactFiles, Kept, Upload
from oobleckd.daemon.aside import started
from oobleckd.protocol.artifactmessages import (
    ArtifactKept,
    ArtifactPart,
    ArtifactTaken,
    GetArtifact,
    NoArtifact,
    OfArtifacts,
    PutArtifact,
    WantArtifact,
)
from oobleckd.protocol.artifacts import MAX_BYTES, PART_BYTES, is_key, is_sha256
from oobleckd.protocol.messages import ToWorker
from oobleckd.words import size

MAKING_S = 1800.0
"""What a node gets to make one, as long as its connection stands: those who wait have as long again before
their watchdogs end them.
"""
AWAY_S = 10.0
"""After so long without a connection another node makes it."""
MAX_WAITING = 100_000
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Making:
    """``node`` makes an artifact, or sends it (``upload``, of which ``received`` bytes are here); the
    ``waiting`` are told when it is there. ``late``: gives up on it.
    """

    node: str
    late: asyncio.TimerHandle
    waiting: list[str] = field(default_factory=list)
    upload: Upload | None = None
    received: int = 0


class Artifacts:
    """``folder``: where they are kept, ``max_bytes`` at most (0: none are, and no node is told otherwise).
    ``tell`` sends to a node, if it is connected.
    """

    def __init__(self, folder: Path, max_bytes: int, tell: Callable[[str, ToWorker], None]) -> None:
        self._tell, self._max_bytes = tell, max_bytes
        self._files = ArtifactFiles(folder, max_bytes)
        self._making: dict[str, _Making] = {}
        self._away: dict[str, asyncio.TimerHandle] = {}  # node -> gives up on it
        self._said: asyncio.Queue[tuple[str, OfArtifacts]] = asyncio.Queue(MAX_WAITING)
        self._task: asyncio.Task[None] | None = None
        # One thread, so that files are written and dropped in the order in which that is decided.
        self._thread = started(1, "artifacts") if max_bytes else None

    def start(self) -> None:
        """Look what is there, on the running event loop."""
        if self._max_bytes:
            self._task = asyncio.create_task(self._run(), name="artifacts")

    async def close(self) -> None:
        """Nothing more is heard or told."""
        for handle in (*(making.late for making in self._making.values()), *self._away.values()):
            handle.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown)

    def heard(self, node: str, message: OfArtifacts) -> None:
        """``node`` said something of one. What is no key, or more than there is room for, is dropped."""
        if not (self._max_bytes and is_key(message.key)):
            return
        if isinstance(message, PutArtifact) and len(message.data) > PART_BYTES:
            return
        if (handle := self._away.pop(node, None)) is not None:
            handle.cancel()
        with suppress(asyncio.QueueFull):
            self._said.put_nowait((node, message))

    def lost(self, node: str) -> None:
        """The connection of ``node`` closed: it forgets what it waits for, and what it makes is another's
        when it does not come back.
        """
        for making in self._making.values():
            making.waiting = [each for each in making.waiting if each != node]
        if any(making.node == node for making in self._making.values()) and node not in self._away:
            loop = asyncio.get_running_loop()
            self._away[node] = loop.call_later(AWAY_S, self._give_up_on, node)

    # ------------------------------------------------------------------ who makes it

    async def _run(self) -> None:
        """Heed what is said, one after the other."""
        try:
            await self._aside(self._files.open, time.time())
        except OSError as error:
            _log.warning("what nodes compiled earlier cannot be read: %s", error)
        while True:
            node, message = await self._said.get()
            match message:
                case WantArtifact():
                    await self._want(node, message)
                case GetArtifact():
                    await self._get(node, message)
                case PutArtifact():
                    await self._put(node, message)
                case NoArtifact():
                    if self._is_maker(node, message.key):
                        self._next(message.key)

    async def _want(self, node: str, message: WantArtifact) -> None:
        key = message.key
        if message.damaged:
            await self._aside(self._files.check, key)
        kept, making = self._files.index.get(key), self._making.get(key)
        if kept is not None:
            self._tell(node, ArtifactKept(key, *kept))
        elif making is None or making.node == node:
            self._grant(node, key, tell=not message.making)
        elif not message.making and node not in making.waiting and len(making.waiting) < MAX_WAITING:
            making.waiting.append(node)

    def _grant(self, node: str, key: str, waiting: list[str] | None = None, *, tell: bool = True) -> None:
        """``node`` makes it, from now on."""
        before = self._making.pop(key, None)
        if before is not None:
            self._forget(before)
            waiting = before.waiting if waiting is None else waiting
        loop = asyncio.get_running_loop()
        late = loop.call_later(MAKING_S, self._next, key)
        self._making[key] = _Making(node, late, [each for each in waiting or [] if each != node])
        if tell:
            self._tell(node, ArtifactKept(key))

    def _next(self, key: str) -> None:
        """Who makes it does not, so the next of those who wait does."""
        making = self._making.pop(key)
        self._forget(making)
        if making.waiting:
            self._grant(making.waiting[0], key, making.waiting[1:])

    def _give_up_on(self, node: str) -> None:
        self._away.pop(node, None)
        for key in [key for key, making in self._making.items() if making.node == node]:
            self._next(key)

    def _forget(self, making: _Making) -> None:
        making.late.cancel()
        if making.upload is not None and self._thread is not None:
            self._thread.submit(self._files.abandon, making.upload)
            making.upload = None

    def _is_maker(self, node: str, key: str) -> bool:
        making = self._making.get(key)
        return making is not None and making.node == node

    # ------------------------------------------------------------------ bytes

    async def _get(self, node: str, message: GetArtifact) -> None:
        data = b""
        if message.offset >= 0:
            data = await self._aside(self._files.read, message.key, message.offset, PART_BYTES)
        self._tell(node, ArtifactPart(message.key, message.offset, data))

    async def _put(self, node: str, message: PutArtifact) -> None:
        """Take the next bytes of one that ``node`` was told to make."""
        key, making = message.key, self._making.get(message.key)
        # Else any node could put a program in the place of another's, at any time. (D-compile-008)
        if making is None or making.node != node:
            self._tell(node, ArtifactTaken(key, -1))
            return
        try:
            received = await self._taken(making, message)
        except (OSError, _Refused) as error:
            _log.warning("what %s compiled is not kept: %s", node, error)
            if self._making.get(key) is making:
                self._next(key)
            self._tell(node, ArtifactTaken(key, -1))
            return
        self._tell(node, ArtifactTaken(key, received))
        if received == message.num_bytes and self._making.get(key) is making:
            making.late.cancel()
            del self._making[key]
            for each in making.waiting:
                self._tell(each, ArtifactKept(key, *self._files.index[key]))

    async def _taken(self, making: _Making, message: PutArtifact) -> int:
        """How many bytes are here then. Raises OSError, _Refused."""
        kept = Kept(message.num_bytes, message.sha256)
        upload = making.upload
        if message.offset == 0:
            if not (0 < kept.num_bytes <= min(MAX_BYTES, self._max_bytes) and is_sha256(kept.sha256)):
                raise _Refused(f"{size(kept.num_bytes)} are too many, or no checksum came with them")
            if upload is not None:  # it begins anew, on another connection
                await self._aside(self._files.abandon, upload)
            upload = making.upload = await self._aside(self._files.begin, message.key, kept)
            making.received = 0
        if upload is None or upload.kept != kept or message.offset != making.received:
            return making.received if upload is not None else 0  # said twice, or of one that began anew
        if not message.data or making.received + len(message.data) > kept.num_bytes:
            raise _Refused("another number of bytes came than was said")
        await self._aside(self._files.write, upload, message.data)
        making.received += len(message.data)
        if making.received == kept.num_bytes:
            making.upload = None
            if not await self._aside(self._files.end, upload, time.time()):
                raise _Refused("its bytes are not those that its checksum is of")
            _log.info("%s compiled %s: %s for other nodes", making.node, message.key, size(kept.num_bytes))
        return making.received

    # ------------------------------------------------------------------ beside the loop

    async def _aside(self, do: Callable[..., _T], *args: object) -> _T:
        assert self._thread is not None
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(do, *args))


class _Refused(Exception):
    """What came is not taken."""

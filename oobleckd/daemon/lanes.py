"""Lanes to the planner: each has calls made one after another, in a process of its own.

Owns these processes and the one that forks them (``planforker``): started without waiting, forked anew at
once when one is lost, gone with the daemon however that ends. A call whose process is lost raises
``ProcessLost``; whether it is made again is ``planning``'s.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import msgspec

from oobleckd.daemon.planforker import LENGTH, LaneOrder, frame
from oobleckd.host.interpreter import command

_STAYED_S = 1.0  # who was lost after less is forked anew when he is wanted: he might be lost for ever
_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class ProcessLost(Exception):
    """The process that was at it has ended: killed, or out of memory."""


LOST = (ProcessLost, MemoryError)


class PlanForker:
    """The process that forks others. Made when the first one is ordered."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None

    @property
    def pid(self) -> int:
        """Its process number; 0 before it is wanted."""
        return self._process.pid if self._process is not None else 0

    def fork(self, order: LaneOrder) -> socket.socket:
        """The link to a process that is forked in a while; it ends when there can be none. Raises OSError."""
        link, theirs = socket.socketpair()
        with theirs:
            try:
                self._send(order, theirs)
            except OSError:  # there is none, or no more
                self.close()
                self._begin()
                self._send(order, theirs)
        link.setblocking(False)
        return link

    def close(self) -> None:
        """End it, and with it all that it forked."""
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._orders = None

    def _begin(self) -> None:
        # A start for each process took 0.8 s of a core each, and a fork takes some ms. (D-daemon-031)
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = command("oobleckd.daemon.planforker", str(theirs.fileno()))
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def _send(self, order: LaneOrder, theirs: socket.socket) -> None:
        if self._orders is None:
            raise BrokenPipeError
        socket.send_fds(self._orders, [msgspec.msgpack.encode(order)], [theirs.fileno()])


class Lane:
    """Calls of one kind, each in its turn. To be used in a loop."""

    def __init__(self, forker: PlanForker, order: LaneOrder, on_lost: Callable[[], None]) -> None:
        self.num_lost = 0
        self._forker, self._order, self._on_lost = forker, order, on_lost
        self._turn = asyncio.Lock()
        self._process: _Process | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none, or it has not begun."""
        return self._process.pid if self._process is not None else 0

    def warm(self) -> None:
        """Have the process forked, without waiting for it."""
        try:
            self._present()
        except OSError:
            _log.exception("the planner cannot be started; it is tried again when it is wanted")

    def close(self) -> None:
        """End the process; what is under way is dropped."""
        process, self._process = self._process, None
        if process is not None:
            process.drop()

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Run it there, after those that came before; once more if the process is lost over it. Raises what
        it raises, and one of LOST.
        """
        data = pickle.dumps((function, arguments))
        try:
            return cast("Result", await self._once(data))
        except LOST:
            return cast("Result", await self._once(data))

    async def _once(self, data: bytes) -> Any:
        await self._turn.acquire()
        call = asyncio.ensure_future(self._answer(data))
        # Who asks may go away meanwhile; the process is at it all the same, and nobody else's turn comes.
        call.add_done_callback(self._over)
        returned, value = await asyncio.shield(call)
        if returned:
            return value
        raise value

    def _over(self, call: asyncio.Future[tuple[bool, Any]]) -> None:
        self._turn.release()
        if not call.cancelled():
            call.exception()  # it is known, also if nobody waits for it any more

    async def _answer(self, data: bytes) -> tuple[bool, Any]:
        try:
            process = self._present()
        except OSError as error:
            raise ProcessLost(f"it cannot be started: {error}") from error
        returned, value = pickle.loads(await process.ask(data))  # noqa: S301 - of a process of ours
        if not returned and isinstance(value, MemoryError):
            process.drop()  # who had no room is not to keep what he has: it ends with its link
            self._lost(process)
        return returned, value

    def _present(self) -> _Process:
        if self._process is None:
            self._process = _Process(self._forker.fork(self._order), self._lost)
        return self._process

    def _lost(self, process: _Process) -> None:
        if process is not self._process:
            return  # it was dropped
        self._process = None
        self.num_lost += 1
        self._on_lost()
        if process.age_s >= _STAYED_S:
            self.warm()


class _Process:
    """A process from its order to its end, and the loop's side of its ``link``."""

    def __init__(self, link: socket.socket, on_end: Callable[[_Process], None]) -> None:
        self.pid = 0
        self._link, self._on_end = link, on_end
        self._began = time.monotonic()
        self._asked: asyncio.Future[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self._reading = self._loop.create_task(self._read())

    @property
    def age_s(self) -> float:
        """Since it was ordered."""
        return time.monotonic() - self._began

    async def ask(self, data: bytes) -> bytes:
        """Its answer. Raises ProcessLost."""
        asked: asyncio.Future[bytes] = self._loop.create_future()
        self._asked = asked
        with suppress(OSError):  # it has ended, which the reader sees
            await self._loop.sock_sendall(self._link, frame(data))
        return await asked

    def drop(self) -> None:
        """Let go of it, and of what it was asked."""
        self._reading.cancel()
        if self._asked is not None:
            self._asked.cancel()

    async def _read(self) -> None:
        with self._link:
            try:
                self.pid = int(await self._frame())
                while True:
                    data = await self._frame()
                    if self._asked is not None and not self._asked.done():
                        self._asked.set_result(data)
            except (EOFError, OSError):
                if self._asked is not None and not self._asked.done():
                    self._asked.set_exception(ProcessLost("killed, or out of memory"))
                self._on_end(self)

    async def _frame(self) -> bytes:
        return bytes(await self._bytes(*LENGTH.unpack(await self._bytes(LENGTH.size))))

    async def _bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            more = await self._loop.sock_recv_into(self._link, view[got:])
            if not more:
                raise EOFError("it has ended")
            got += more
        return data

"""The process that prepares data for an agent: started, heard, ended.

Owns the process, which is ordinary (neither urgent nor nice) and ends with the agent, also by kill -9. What
it does is ``oobleckd.prepare``'s, which the agent never imports.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from oobleckd.host.interpreter import command
from oobleckd.protocol.datamessages import PrepareData
from oobleckd.protocol.unreadable import UNREADABLE
from oobleckd.worker.processes.orphans import Orphans
from oobleckd.worker.processes.preparing import Word

PROGRAM = command("oobleckd.prepare.program")
_MAX_LINE_BYTES = 1 << 20
_log = logging.getLogger(__name__)
_word: msgspec.json.Decoder[Word] = msgspec.json.Decoder(Word)


class Preparers:
    """Of one agent, in its loop: ``begin`` as ``preparing.Begin`` has it. ``orphans`` are not to reap what is
    started here.
    """

    def __init__(self, orphans: Orphans) -> None:
        self._loop, self._orphans = asyncio.get_running_loop(), orphans
        self._followed: set[asyncio.Task[None]] = set()

    def begin(
        self, order: PrepareData, heard: Callable[[Word], None], ended: Callable[[str], None]
    ) -> Callable[[], None]:
        """Start a process. Raises OSError."""
        process = _started(order)
        self._orphans.own.add(process.pid)
        _log.info("pid %d prepares the data of %s", process.pid, order.job)
        task = self._loop.create_task(self._follow(process, heard, ended))
        self._followed.add(task)
        task.add_done_callback(self._followed.discard)
        return process.kill

    async def ended(self) -> None:
        """Wait until all have ended; nobody begins another one."""
        if self._followed:
            await asyncio.wait(self._followed)

    async def _follow(
        self, process: subprocess.Popen[bytes], heard: Callable[[Word], None], ended: Callable[[str], None]
    ) -> None:
        reader = asyncio.StreamReader(_MAX_LINE_BYTES)
        assert process.stdout is not None
        await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
        async for line in reader:
            try:
                heard(_word.decode(line))
            except UNREADABLE as error:
                _log.error("who prepares data said what is no word: %s", error)
        code = await self._reaped(process)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        _log.info("pid %d, which prepared data, ended %s", process.pid, how)
        ended(how)

    async def _reaped(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit code, once it has ended."""
        seen, pidfd = asyncio.Event(), os.pidfd_open(process.pid)
        self._loop.add_reader(pidfd, seen.set)
        await seen.wait()
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        code = process.wait()
        self._orphans.own.discard(process.pid)
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        return code


def _started(order: PrepareData) -> subprocess.Popen[bytes]:
    """Raises OSError."""
    # A job may be longer than what a pipe takes at once, and the agent's loop waits for nobody.
    told = os.memfd_create("order")
    try:
        Path(f"/proc/self/fd/{told}").write_bytes(msgspec.json.encode(order))
        return subprocess.Popen(
            [*PROGRAM, f"--order=/proc/self/fd/{told}"],
            stdin=subprocess.PIPE,  # its life line
            stdout=subprocess.PIPE,
            pass_fds=(told,),
            start_new_session=True,
        )
    finally:
        os.close(told)

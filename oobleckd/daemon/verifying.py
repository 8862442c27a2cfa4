"""Has the old part of the journal looked at while the daemon works: once after a start, and once a day.

Owns when, the process that does it (``verify``), and what becomes of what it finds: the writer thread puts
right what is damaged, from the copy, and whoever watches is told. Before it, steps of jobs that were over for
long enough are dropped from the journal; their curves stay.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from oobleckd.daemon.journal import Journal, JournalClosed
from oobleckd.daemon.mend import CHECK, Damage
from oobleckd.daemon.records import Row, rows_in
from oobleckd.daemon.verify import Verified
from oobleckd.host import interpreter
from oobleckd.protocol.unreadable import UNREADABLE

FIRST_S = 60.0  # after a start others have to do
EVERY_S = 86_400.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verifying:
    """``over`` names the jobs whose steps were kept for long enough. ``on_damage`` is told what was found;
    ``mended``: whether it is put right already, and else it is at the next start.
    """

    journal: Journal
    over: Callable[[], Sequence[str]]
    on_damage: Callable[[Damage, bool], None]

    async def run(self, first_s: float = FIRST_S, every_s: float = EVERY_S) -> None:
        """Until it is cancelled."""
        await asyncio.sleep(first_s)
        while True:
            try:
                await self.once()
            except (OSError, sqlite3.Error, JournalClosed, *UNREADABLE) as error:
                _log.warning("the old part of the journal was not verified: %s", error)
            await asyncio.sleep(every_s)

    async def once(self) -> Verified:
        """Drop what was kept for long enough, and look at the rest. Raises OSError, sqlite3.Error,
        JournalClosed, and one of UNREADABLE where the process was killed.
        """
        over = self.over()
        if over:
            await asyncio.wrap_future(await asyncio.to_thread(self.journal.drop_steps, over))
        found = msgspec.msgpack.decode(await self._output(over), type=Verified)
        if found.rows:
            await asyncio.wrap_future(self.journal.restore(_records(found.rows)))
        self._tell(found)
        return found

    async def _output(self, over: Sequence[str]) -> bytes:
        """What the process says. It reads a file of any size at the pace of whoever has nothing to do."""
        words = (str(self.journal.path), str(self.journal.closed_until), *over)
        command = interpreter.command("oobleckd.daemon.verify", *words)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        return output

    def _tell(self, found: Verified) -> None:
        _log.info("verified %d old records; %d files of the copy anew", found.num_rows, len(found.rewritten))
        if found.wrong:
            # Not beside the writer thread: SQLite may write into any page of such a file. All records are in
            # the copy, and a start makes a new file of them. (D-daemon-022)
            self.journal.path.with_name(CHECK).touch()
            self.on_damage(Damage(found.wrong, None, lost=False), False)
        elif found.lost:
            what = f"{len(found.lost)} old records are gone from both files, from number {found.lost[0]} on"
            self.on_damage(Damage(what, None, lost=False), True)
        elif found.num_damaged:
            what = f"{found.num_damaged} old records were not what was written"
            self.on_damage(Damage(what, None, lost=False), True)


def _records(frames: bytes) -> list[Row]:
    return [*rows_in(frames)]

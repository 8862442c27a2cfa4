"""The loop: feeds events to the core, and performs its commands in order.

Commands wait for the disk (``waiting`` says which, and for what); those that gather while it syncs share the
next sync. Owns no decision: that is the core's, and no wire: hub and HTTP call in here.

A fault of the core ends the loop (and the daemon, which is restarted and reads its journal): going on
with a state that nobody understands could lose steps, standing still for a second cannot.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, assert_never

from oobleckd.core.events import (
    Announce,
    Asked,
    Command,
    Discard,
    Event,
    FiguresHeard,
    Heard,
    KeepState,
    LinkLost,
    LookAtRoom,
    MakePlan,
    ManifestWritten,
    Planned,
    Record,
    Reply,
    RoomSeen,
    SetAside,
    Tell,
    Tick,
    WriteManifest,
)
from oobleckd.daemon.clock import Clock
from oobleckd.daemon.folders import Folders
from oobleckd.daemon.history import History
from oobleckd.daemon.journal import Journal, JournalClosed
from oobleckd.daemon.stepseconds import StepSeconds
from oobleckd.daemon.waiting import OnDisk, Waiting
from oobleckd.host import checkpoint, journald
from oobleckd.host.durable import errno_of
from oobleckd.protocol.agentmessages import FiguresTold
from oobleckd.protocol.changes import DaemonTrouble
from oobleckd.protocol.checkpoint import PARTIAL
from oobleckd.protocol.messages import ToDecideBy, ToWorker
from oobleckd.protocol.requests import Request, Response

_MANIFEST_RETRY_S = (1.0, 5.0, 15.0, 60.0)
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
_log = logging.getLogger(__name__)


class MachineLike(Protocol):
    """What the loop needs of the core."""

    def handle(self, event: Event, now: float) -> Sequence[Command]:
        """Take an event, give commands."""

    def next_deadline(self) -> float | None:
        """When ``Tick`` is due, in the time of ``handle``."""


class PlannerLike(Protocol):
    """What the loop needs of the pool."""

    async def plan(self, request: MakePlan) -> Planned:
        """Answer a request."""


class Stopped(Exception):
    """The daemon stops; the question was not answered and may be asked again."""


class Loop:
    """One core at work. ``run`` performs until ``stop`` or a fault; feed it from the same event loop."""

    def __init__(
        self,
        machine: MachineLike,
        journal: Journal,
        history: History,
        planner: PlannerLike,
        tell: Callable[[str, ToWorker], None],
        clock: Clock,
        folders: Folders | None = None,
    ) -> None:
        self.num_events = 0
        self.num_manifest_errors = 0
        self.step_seconds = StepSeconds()
        self._machine = machine
        self._journal = journal
        self._history = history
        self._planner = planner
        self._tell = tell
        self._clock = clock
        self._waiting = Waiting()
        self._news = asyncio.Event()
        self._fault: Exception | None = None
        self._stopping = False
        self._deadline: asyncio.TimerHandle | None = None
        self._armed_for = 0.0
        self._tickets = 0
        self._asked: dict[int, asyncio.Future[Response]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._files = asyncio.Lock()
        self._folders = folders

    # ------------------------------------------------------------------- in

    def heard(self, node: str, message: ToDecideBy | FiguresTold) -> None:
        """A node said something."""
        if isinstance(message, FiguresTold):
            self.feed(FiguresHeard(node, message))
        else:
            self.feed(Heard(node, message))

    def lost(self, node: str) -> None:
        """A node's connection closed."""
        self.feed(LinkLost(node))

    async def ask(self, request: Request) -> Response:
        """The core's answer, once what it rests on is durable. Raises Stopped."""
        self._tickets += 1
        ticket = self._tickets
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._asked[ticket] = answer
        try:
            self.feed(Asked(ticket, request))
            return await answer
        finally:
            del self._asked[ticket]

    def feed(self, event: Event) -> None:
        """Hand an event to the core now; its commands are performed soon, in order."""
        if self._stopping:
            if isinstance(event, Asked):
                self._asked[event.ticket].set_exception(Stopped())
            return
        self.num_events += 1
        try:
            commands = self._machine.handle(event, self._clock.now())
        except Exception as error:  # noqa: BLE001 - the core's boundary, logged with the event that caused it
            _log.exception("the core failed at %r", event)
            self._fail(error)
            return
        if commands:
            for command in self._waiting.put(commands):
                self._do(command)
            self._news.set()
        self._arm()

    # ------------------------------------------------------------------- lifecycle

    async def run(self) -> None:
        """Perform until ``stop``. Raises what the core raised."""
        self._arm()
        try:
            while self._waiting or not self._stopping:
                if not self._waiting:
                    self._news.clear()
                    await self._news.wait()
                await self._perform()
        except JournalClosed as error:
            _log.error("%s", error)
        finally:
            self._end()
        if self._fault is not None:
            raise self._fault

    def stop(self) -> None:
        """Take no more events; ``run`` ends when what was taken is performed."""
        self._stopping = True
        self._news.set()

    def _fail(self, error: Exception) -> None:
        self._fault = error
        self.stop()

    def _end(self) -> None:
        self._stopping = True
        if self._deadline is not None:
            self._deadline.cancel()
        for task in self._tasks:
            task.cancel()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(Stopped())

    def _arm(self) -> None:
        """See to it that there is a Tick when one is due. One that comes too early only looks again."""
        due = self._machine.next_deadline()
        if due is None or (self._deadline is not None and self._armed_for <= due):
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._armed_for = due
        delay_s = max(due - self._clock.now(), 0.0)
        self._deadline = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._deadline = None
        self.feed(Tick())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------- out

    async def _perform(self) -> None:
        first, on_disk, rest = self._waiting.take()
        for command in first:
            self._do(command)
        written = self._write(on_disk)
        if written is not None:
            await asyncio.wrap_future(written)
        for command in rest:
            self._do(command)
        self._waiting.done()

    def _write(self, on_disk: Sequence[OnDisk]) -> Future[None] | None:
        """Give the journal records and snapshots, in order; what says that the last record is durable."""
        written = None
        for kind, together in itertools.groupby(on_disk, type):
            if kind is Record:
                entries = [each.entry for each in together if isinstance(each, Record)]
                self.step_seconds.note(entries)
                written = self._journal.append(entries)
            else:
                for each in together:
                    assert isinstance(each, KeepState)
                    self._journal.keep_state(each.data)
        return written

    def _do(self, command: Command) -> None:
        match command:
            case Record() | KeepState():
                raise AssertionError("the journal's")
            case MakePlan():
                self._spawn(self._plan(command))
            case Tell(node, message):
                self._tell(node, message)
            case Reply(ticket, response):
                answer = self._asked.get(ticket)
                if answer is not None and not answer.done():
                    answer.set_result(response)
            case Announce(change):
                fields = {journald.FIELDS: journald.of_story(change.kind, change.story)}
                _log.log(_LEVELS[change.level], "%s: %s", change.kind, change.text, extra=fields)
                self._history.publish(change)
            case WriteManifest():
                self._spawn(self._write_manifest(command))
            case SetAside(directory):
                self._spawn(self._set_aside(Path(directory)))
            case Discard(directory):
                self._spawn(self._discard(Path(directory)))
            case LookAtRoom():
                self._spawn(self._look_at_room(command))
            case _:
                assert_never(command)

    async def _plan(self, request: MakePlan) -> None:
        self.feed(await self._planner.plan(request))

    async def _write_manifest(self, command: WriteManifest) -> None:
        """Complete a checkpoint, as often as it takes: the file system may be full or away for a while. Other
        files are not kept waiting meanwhile.
        """
        directory = Path(command.directory)
        for attempt in itertools.count():
            try:
                async with self._files:
                    await asyncio.to_thread(self._complete, command)
            except OSError as error:
                self._manifest_failed(directory, f"{error}; trying again", say=attempt == 0)
                if not attempt:
                    words = error.strerror or str(error)
                    self.feed(ManifestWritten(command.directory, words, again=True, errno=errno_of(error)))
            except (ValueError, AssertionError) as error:
                self._manifest_failed(directory, str(error), say=True)
                self.feed(ManifestWritten(command.directory, str(error)))
                return
            else:
                self.feed(ManifestWritten(command.directory))
                return
            await asyncio.sleep(_MANIFEST_RETRY_S[min(attempt, len(_MANIFEST_RETRY_S) - 1)])

    async def _discard(self, folder: Path) -> None:
        async with self._files:
            await asyncio.to_thread(self._throw_away, folder)

    async def _look_at_room(self, command: LookAtRoom) -> None:
        """Beside everything else: a file system that is away may not answer at all."""
        seen = RoomSeen(command.job)
        with suppress(OSError):
            seen = RoomSeen(command.job, *await asyncio.to_thread(checkpoint.room, Path(command.directory)))
        self.feed(seen)

    def _complete(self, command: WriteManifest) -> None:
        directory = Path(command.directory)
        if self._folders is not None:
            self._folders.enter(command.job, directory.parent)
        checkpoint.complete(directory, command.manifest, command.keep, command.spared)

    def _throw_away(self, folder: Path) -> None:
        of_job = folder.parent if folder.name.endswith(PARTIAL) else folder
        with suppress(OSError):  # what cannot be looked at stays
            if self._folders is None or self._folders.owns(of_job):
                checkpoint.discard_partial(folder)

    def _move_aside(self, directory: Path) -> None:
        if self._folders is None or self._folders.owns(directory.parent):
            checkpoint.set_aside(directory)

    async def _set_aside(self, directory: Path) -> None:
        """Only for people and for the count of those that are kept: the core does not go back
        there anyway.
        """
        async with self._files:
            try:
                await asyncio.to_thread(self._move_aside, directory)
            except OSError as error:
                text = f"the damaged checkpoint {directory} keeps its name: {error}"
                _log.warning("%s", text)
                said = DaemonTrouble("set-aside", str(directory), str(error))
                self._history.notice(text, said, "warn")

    def _manifest_failed(self, directory: Path, why: str, *, say: bool) -> None:
        self.num_manifest_errors += 1
        if say:
            text = f"the checkpoint {directory} cannot be completed: {why}"
            _log.error("%s", text)
            self._history.notice(text, DaemonTrouble("manifest", str(directory), why), "error")

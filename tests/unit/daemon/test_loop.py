"""The loop over a tiny core and a real journal: durable first, then told, in order."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from oobleckd.core.events import (
    Announce,
    Asked,
    Command,
    Discard,
    Event,
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
from oobleckd.daemon.history import History
from oobleckd.daemon.journal import Journal
from oobleckd.daemon.loop import Loop, Stopped
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import Profile
from oobleckd.protocol import checkpoint
from oobleckd.protocol.agentmessages import Ack, Heartbeat
from oobleckd.protocol.changes import Change, DaemonTrouble
from oobleckd.protocol.checkpoint import Manifest
from oobleckd.protocol.job import Job, Train
from oobleckd.protocol.messages import Release
from oobleckd.protocol.parts import Counters
from oobleckd.protocol.requests import Accepted, Drain

WAIT_S = 120.0
REQUEST = Drain("node-1")
MANIFEST = Manifest(checkpoint.FORMAT, "", Counters(), (), Job("j", Train(1, 1, 1, 1)))


class Fact(msgspec.Struct, frozen=True, tag=True):
    number: int


@dataclass
class TinyCore:
    """Answers each event by a function of the test."""

    answer: Callable[[Event], Sequence[Command]]
    deadline: float | None = None
    seen: list[Event] = field(default_factory=list)

    def handle(self, event: Event, now: float) -> Sequence[Command]:
        self.seen.append(event)
        return self.answer(event)

    def next_deadline(self) -> float | None:
        return self.deadline


class World:
    """A loop with everything real but the core and the wire."""

    def __init__(self, folder: Path, answer: Callable[[Event], Sequence[Command]]) -> None:
        self.core = TinyCore(answer)
        self.clock = Clock()
        self.journal = Journal(folder, step_of=lambda _: None, on_trouble=lambda _: None)
        self.history = History(100)
        self.told: asyncio.Queue[tuple[str, Any, list[Fact]]] = asyncio.Queue()
        self.loop = Loop(self.core, self.journal, self.history, self, self.tell, self.clock)

    def tell(self, node: str, message: Any) -> None:
        self.told.put_nowait((node, message, self.journal.read(Fact)))

    async def plan(self, request: MakePlan) -> Planned:
        return Planned(request.ticket, error="no plan")

    async def __aenter__(self) -> Self:
        self.running = asyncio.create_task(self.loop.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.loop.stop()
        await asyncio.wait({self.running}, timeout=WAIT_S)
        self.journal.close()


def change(seq: int) -> Change:
    return Change(seq, 0.0, "node", "info", f"change {seq}", ())


@pytest.mark.asyncio
async def test_what_is_told_is_durable_and_in_order(tmp_path: Path) -> None:
    def answer(event: Event) -> Sequence[Command]:
        assert isinstance(event, Heard)
        number = int(event.message.incarnation)  # type: ignore[union-attr]
        return [Record(Fact(2 * number)), Tell("n", Ack("j", number)), Record(Fact(2 * number + 1))]

    async with World(tmp_path, answer) as world:
        for number in range(50):
            world.loop.heard("n", Heartbeat(str(number)))
        for number in range(50):
            _, message, on_disk = await asyncio.wait_for(world.told.get(), WAIT_S)
            assert message == Ack("j", number)
            assert Fact(2 * number) in on_disk
            assert on_disk == [Fact(i) for i in range(len(on_disk))]


@pytest.mark.asyncio
async def test_a_snapshot_comes_to_the_journal_behind_the_records_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where many wait for the disk together."""
    given: list[Any] = []

    def answer(event: Event) -> Sequence[Command]:
        assert isinstance(event, Heard)
        number = int(event.message.incarnation)  # type: ignore[union-attr]
        keep = [KeepState(b"%d" % number)] if number % 3 == 0 else []
        return [Record(Fact(number)), *keep, Tell("n", Ack("j", number))]

    async with World(tmp_path, answer) as world:
        append = world.journal.append
        monkeypatch.setattr(world.journal, "append", lambda entries: given.extend(entries) or append(entries))
        monkeypatch.setattr(world.journal, "keep_state", given.append)
        for number in range(1, 31):
            world.loop.heard("n", Heartbeat(str(number)))
        for _ in range(30):
            await asyncio.wait_for(world.told.get(), WAIT_S)
    wanted = [[Fact(number), *([b"%d" % number] if number % 3 == 0 else [])] for number in range(1, 31)]
    assert given == [each for together in wanted for each in together]


@pytest.mark.asyncio
async def test_what_goes_ahead_is_told_before_it_is_durable(tmp_path: Path) -> None:
    question, answer = Ack("j", 1), Ack("j", 2)
    commands = [Record(Fact(1)), Tell("n", question, ahead=True), Tell("n", answer)]

    async with World(tmp_path, lambda _: commands) as world:
        world.loop.lost("n")
        assert world.told.get_nowait() == ("n", question, [])
        assert await asyncio.wait_for(world.told.get(), WAIT_S) == ("n", answer, [Fact(1)])


@pytest.mark.asyncio
async def test_replies_and_announcements_wait_for_the_record_before_them(tmp_path: Path) -> None:
    commands: list[Command] = [Announce(change(1)), Record(Fact(1)), Announce(change(2))]

    async with World(tmp_path, lambda e: [*commands, Reply(e.ticket, Accepted("x"))]) as world:  # type: ignore[union-attr]
        asking = asyncio.create_task(world.loop.ask(REQUEST))
        assert await asyncio.wait_for(asking, WAIT_S) == Accepted("x")
        assert world.journal.read(Fact) == [Fact(1)]
        assert world.history.last == 2


@pytest.mark.asyncio
async def test_a_plan_is_asked_for_at_once_and_comes_back_as_an_event(tmp_path: Path) -> None:
    setup = Setup(Profile("k", "cpu", ()), 1, 0, 0, 1, 1)

    def answer(event: Event) -> Sequence[Command]:
        match event:
            case LinkLost():
                return [MakePlan(7, "oobleck", setup)]
            case Planned():
                return [Tell("n", Release("n/0", "job", event.error))]
            case _:
                return []

    async with World(tmp_path, answer) as world:
        world.loop.lost("n")
        assert (await asyncio.wait_for(world.told.get(), WAIT_S))[1] == Release("n/0", "job", "no plan")


@pytest.mark.asyncio
async def test_a_deadline_becomes_a_tick(tmp_path: Path) -> None:
    ticked = asyncio.Event()

    def answer(event: Event) -> Sequence[Command]:
        world.core.deadline = None
        if isinstance(event, Tick):
            ticked.set()
        return []

    world = World(tmp_path, answer)
    world.core.deadline = world.clock.now()
    async with world:
        await asyncio.wait_for(ticked.wait(), WAIT_S)
    assert world.core.seen == [Tick()]


@pytest.mark.asyncio
async def test_a_fault_of_the_core_ends_the_loop_and_leaves_no_question_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(event: Event) -> Sequence[Command]:
        if isinstance(event, Asked):
            return []
        raise AssertionError("cannot be")

    async with World(tmp_path, answer) as world:
        asking = asyncio.create_task(world.loop.ask(REQUEST))
        await asyncio.sleep(0)
        world.loop.lost("n")
        with pytest.raises(AssertionError, match="cannot be"):
            await asyncio.wait_for(world.running, WAIT_S)
        with pytest.raises(Stopped):
            await asking
        with pytest.raises(Stopped):
            await world.loop.ask(REQUEST)
    assert (LinkLost("n"),) in [record.args for record in caplog.records if record.exc_info]


@pytest.mark.asyncio
async def test_a_checkpoint_that_cannot_be_completed_is_told_and_stops_nothing(tmp_path: Path) -> None:
    def answer(event: Event) -> Sequence[Command]:
        return [WriteManifest(str(tmp_path / "step-00000001.partial"), MANIFEST, 1), Tell("n", Ack("j", 1))]

    async with World(tmp_path / "state", answer) as world:
        cursor = world.history.cursor(None)
        world.loop.lost("n")
        await asyncio.wait_for(world.told.get(), WAIT_S)
        assert await cursor.wait(WAIT_S)
        (notice,) = cursor.take()
        assert notice.level == "error"
        assert isinstance(notice.data, DaemonTrouble)
        assert (notice.data.what, notice.data.over) == ("manifest", False)
        assert notice.data.path == str(tmp_path / "step-00000001.partial")
    assert world.loop.num_manifest_errors == 1


@pytest.mark.asyncio
async def test_a_disk_that_refuses_a_manifest_holds_up_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, which the core is told once; other folders are written meanwhile."""
    full, other = str(tmp_path / "full.partial"), str(tmp_path / "other.partial")
    heard: asyncio.Queue[ManifestWritten] = asyncio.Queue()

    def complete(directory: Path, *_: object) -> None:
        if str(directory) == full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def answer(event: Event) -> Sequence[Command]:
        if isinstance(event, ManifestWritten):
            heard.put_nowait(event)
            return []
        return [WriteManifest(full, MANIFEST, 1), WriteManifest(other, MANIFEST, 1)]

    monkeypatch.setattr("oobleckd.host.checkpoint.complete", complete)
    async with World(tmp_path / "state", answer) as world:
        world.loop.lost("n")
        first, second = [await asyncio.wait_for(heard.get(), WAIT_S) for _ in range(2)]
    assert first == ManifestWritten(full, "No space left on device", again=True, errno="ENOSPC")
    assert second == ManifestWritten(other)


@pytest.mark.asyncio
async def test_room_is_looked_at_and_given_back(tmp_path: Path) -> None:
    partial = tmp_path / "step-00000002.partial"
    partial.mkdir()
    heard: asyncio.Queue[RoomSeen] = asyncio.Queue()

    def answer(event: Event) -> Sequence[Command]:
        if isinstance(event, RoomSeen):
            heard.put_nowait(event)
            return []
        return [Discard(str(tmp_path)), LookAtRoom("job-1", str(tmp_path / "job-1"))]

    async with World(tmp_path / "state", answer) as world:
        world.loop.lost("n")
        seen = await asyncio.wait_for(heard.get(), WAIT_S)
        await asyncio.wait_for(asyncio.gather(*world.loop._tasks), WAIT_S)  # the folder goes beside it
    assert seen.job == "job-1"
    assert seen.free_bytes > 0
    assert not await asyncio.to_thread(partial.exists)


@pytest.mark.asyncio
async def test_a_damaged_checkpoint_that_keeps_its_name_is_told_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001.damaged").touch()  # no folder, as nobody but a person makes it

    def answer(event: Event) -> Sequence[Command]:
        return [SetAside(str(tmp_path / "step-00000001")), Tell("n", Ack("j", 1))]

    async with World(tmp_path / "state", answer) as world:
        cursor = world.history.cursor(None)
        world.loop.lost("n")
        await asyncio.wait_for(world.told.get(), WAIT_S)
        assert await cursor.wait(WAIT_S)
        (notice,) = cursor.take()
        assert notice.level == "warn"
        assert isinstance(notice.data, DaemonTrouble)
        assert (notice.data.what, notice.data.path) == ("set-aside", str(tmp_path / "step-00000001"))

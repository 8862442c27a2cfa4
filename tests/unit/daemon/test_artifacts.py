"""What nodes compile and the daemon keeps: who makes it, who gets it, and who is not believed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from oobleckd.daemon import artifactfiles, artifacts
from oobleckd.daemon.artifactfiles import ArtifactFiles, Kept
from oobleckd.daemon.artifacts import Artifacts
from oobleckd.daemon.openapi import document
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
from oobleckd.protocol.artifacts import PART_BYTES, is_key
from oobleckd.protocol.job import parse_job
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.messages import ToWorker
from tests.helpers.cluster import tiny_job

KEY = f"{1:016x}-{2:016x}"
BYTES = bytes(range(256)) * (PART_BYTES // 256) + b"the end"
SHA = hashlib.sha256(BYTES).hexdigest()
KEPT = ArtifactKept(KEY, len(BYTES), SHA)


class Nodes:
    """Stand-ins that say and hear."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 24) -> None:
        self.told: asyncio.Queue[tuple[str, ToWorker]] = asyncio.Queue()
        self.artifacts = Artifacts(folder, max_bytes, lambda node, said: self.told.put_nowait((node, said)))

    def say(self, node: str, message: OfArtifacts) -> None:
        self.artifacts.heard(node, message)

    async def hear(self) -> tuple[str, ToWorker]:
        return await self.told.get()

    async def put(self, node: str, data: bytes = BYTES, sha: str = SHA, *, offset: int = 0) -> int:
        """Send it, as the answers say; where that ended."""
        while offset < len(data):
            part = data[offset : offset + PART_BYTES]
            self.say(node, PutArtifact(KEY, len(data), sha, offset, part))
            who, said = await self.hear()
            assert who == node
            assert isinstance(said, ArtifactTaken)
            if said.offset < 0:
                return said.offset
            offset = said.offset
        return offset

    async def get(self, node: str) -> bytes:
        found = b""
        while True:
            self.say(node, GetArtifact(KEY, len(found)))
            who, said = await self.hear()
            assert who == node
            assert isinstance(said, ArtifactPart)
            assert said.offset == len(found)
            if not said.data:
                return found
            found += said.data


def modes(folder: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in folder.iterdir()]


@asynccontextmanager
async def nodes(folder: Path, max_bytes: int = 1 << 24) -> AsyncIterator[Nodes]:
    made = Nodes(folder, max_bytes)
    made.artifacts.start()
    try:
        yield made
    finally:
        await made.artifacts.close()


@pytest.mark.asyncio
async def test_the_first_who_asks_makes_it_and_the_others_get_its_bytes(tmp_path: Path) -> None:
    async with nodes(tmp_path) as world:
        for node in ("one", "two", "three"):
            world.say(node, WantArtifact(KEY))
        assert await world.hear() == ("one", ArtifactKept(KEY))  # and the others hear nothing yet
        assert await world.put("one") == len(BYTES)
        assert await world.hear() == ("two", KEPT)
        assert await world.hear() == ("three", KEPT)
        assert await world.get("two") == BYTES
    async with nodes(tmp_path) as restarted:
        restarted.say("later", WantArtifact(KEY))
        assert await restarted.hear() == ("later", KEPT)
        assert await restarted.get("later") == BYTES
    assert modes(tmp_path) == [0o600]


@pytest.mark.asyncio
async def test_nobody_sends_what_it_was_not_told_to_make(tmp_path: Path) -> None:
    async with nodes(tmp_path) as world:
        assert await world.put("one") == -1
        world.say("one", WantArtifact(KEY))
        assert await world.hear() == ("one", ArtifactKept(KEY))
        assert await world.put("two") == -1
        assert await world.put("one") == len(BYTES)
        assert await world.put("two", b"other bytes") == -1  # nor in the place of what is there
        assert await world.get("two") == BYTES


@pytest.mark.parametrize("key", ["", "../../etc/passwd", f"{KEY}/", KEY.upper().replace("1", "G"), f" {KEY}"])
@pytest.mark.asyncio
async def test_what_is_no_key_is_dropped(tmp_path: Path, key: str) -> None:
    async with nodes(tmp_path / "in") as world:
        assert not is_key(key)
        world.say("one", WantArtifact(key))
        world.say("one", PutArtifact(key, len(BYTES), SHA, 0, BYTES))
        world.say("one", WantArtifact(KEY))
        assert await world.hear() == ("one", ArtifactKept(KEY))
    assert modes(tmp_path / "in") == []


@pytest.mark.asyncio
async def test_bytes_that_are_not_those_of_the_checksum_are_not_kept(tmp_path: Path) -> None:
    async with nodes(tmp_path) as world:
        world.say("one", WantArtifact(KEY))
        await world.hear()
        world.say("two", WantArtifact(KEY))
        world.say("one", PutArtifact(KEY, 4, SHA, 0, b"evil"))
        assert await world.hear() == ("two", ArtifactKept(KEY))  # who waits makes it
        assert await world.hear() == ("one", ArtifactTaken(KEY, -1))
        assert await world.put("two") == len(BYTES)
        assert await world.get("one") == BYTES


@pytest.mark.parametrize(
    ("num_bytes", "sha", "data"), [(1 << 40, SHA, b"x"), (2, SHA, b"xyz"), (1, "../x", b"x")]
)
@pytest.mark.asyncio
async def test_too_large_a_one_is_refused_at_once(
    tmp_path: Path, num_bytes: int, sha: str, data: bytes
) -> None:
    async with nodes(tmp_path) as world:
        world.say("one", WantArtifact(KEY))
        await world.hear()
        world.say("one", PutArtifact(KEY, num_bytes, sha, 0, data))
        assert await world.hear() == ("one", ArtifactTaken(KEY, -1))
    assert modes(tmp_path) == []


@pytest.mark.asyncio
async def test_another_makes_it_where_the_first_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "AWAY_S", 0.0)
    async with nodes(tmp_path) as world:
        for node in ("one", "two", "three", "four"):
            world.say(node, WantArtifact(KEY))
        assert await world.hear() == ("one", ArtifactKept(KEY))
        world.say("one", NoArtifact(KEY))
        assert await world.hear() == ("two", ArtifactKept(KEY))
        world.artifacts.lost("three")  # it waits no more
        world.artifacts.lost("two")
        assert await world.hear() == ("four", ArtifactKept(KEY))


@pytest.mark.asyncio
async def test_a_maker_that_is_back_goes_on(tmp_path: Path) -> None:
    async with nodes(tmp_path) as world:
        world.say("one", WantArtifact(KEY))
        await world.hear()
        world.say("one", PutArtifact(KEY, len(BYTES), SHA, 0, BYTES[:PART_BYTES]))
        assert await world.hear() == ("one", ArtifactTaken(KEY, PART_BYTES))
        world.artifacts.lost("one")
        world.say("one", PutArtifact(KEY, len(BYTES), SHA, 0, BYTES[:PART_BYTES]))  # the answer was lost
        assert await world.hear() == ("one", ArtifactTaken(KEY, PART_BYTES))
        assert await world.put("one", offset=PART_BYTES) == len(BYTES)
    async with nodes(tmp_path / "new") as restarted:
        restarted.say("one", WantArtifact(KEY, making=True))
        restarted.say("two", WantArtifact(KEY))
        restarted.say("one", PutArtifact(KEY, len(BYTES), SHA, PART_BYTES, BYTES[PART_BYTES:]))
        assert await restarted.hear() == ("one", ArtifactTaken(KEY, 0))  # from the beginning, please
        assert await restarted.put("one") == len(BYTES)
        assert await restarted.hear() == ("two", KEPT)


@pytest.mark.asyncio
async def test_what_is_damaged_on_disk_is_made_anew(tmp_path: Path) -> None:
    async with nodes(tmp_path) as world:
        world.say("one", WantArtifact(KEY))
        await world.hear()
        await world.put("one")
        world.say("two", WantArtifact(KEY, damaged=SHA))
        assert await world.hear() == ("two", KEPT)  # it was damaged on its way, or two is mistaken
        path = tmp_path / f"{KEY}.{SHA}"
        path.write_bytes(BYTES[:-1] + b"D")
        world.say("two", WantArtifact(KEY, damaged=SHA))
        assert await world.hear() == ("two", ArtifactKept(KEY))
        assert not path.exists()


@pytest.mark.asyncio
async def test_without_room_for_any_nobody_is_answered(tmp_path: Path) -> None:
    async with nodes(tmp_path / "none", 0) as world:
        world.say("one", WantArtifact(KEY))
        assert world.told.empty()
    assert not (tmp_path / "none").exists()


def test_the_oldest_go_where_there_are_too_many(tmp_path: Path) -> None:
    now = time.time()
    files = ArtifactFiles(tmp_path, 2500)
    files.open(now)
    keys = [f"{number:016x}-{number:016x}" for number in range(4)]
    for age, key in enumerate(reversed(keys)):
        kept(files, key, bytes(1000), now)
        for path in tmp_path.glob(f"{key}.*"):
            os.utime(path, (now - 1000 + age, now - 1000 + age))
    assert len(files.index) == 2
    assert files.read(keys[0], 0, 10) == bytes(10)
    assert files.read(keys[3], 0, 10) == b""
    for path in tmp_path.iterdir():
        os.utime(path, (0, now - artifactfiles.KEPT_S - 1))
    (tmp_path / "other").touch()
    (tmp_path / f"{keys[1]}.part").touch()
    again = ArtifactFiles(tmp_path, 2500)
    again.open(now)
    assert len(again.index) == 1  # of those that nobody asked for the last stays until another one comes
    assert {path.name.partition(".")[2] for path in tmp_path.iterdir()} == {
        "",
        next(iter(again.index.values())).sha256,
    }


def kept(files: ArtifactFiles, key: str, data: bytes, now: float) -> None:
    upload = files.begin(key, Kept(len(data), hashlib.sha256(data).hexdigest()))
    files.write(upload, data)
    assert files.end(upload, now)


def test_there_is_no_way_in_for_who_submits_a_job() -> None:
    """Neither the API nor a job.toml has any; and what comes from a node comes by the hub, which knows its
    key (tests/loopback/test_daemon_hub.py).
    """
    assert "rtifact" not in document().decode()
    raw = msgspec.to_builtins(tiny_job("any"))
    for section, field in (("train", "artifact"), ("train", "compiled_dir"), ("model", "artifacts")):
        with pytest.raises(JobError):
            parse_job({**raw, section: {**raw[section], field: "evil"}})

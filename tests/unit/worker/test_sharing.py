"""Artifacts on their way: devices, agents and the daemon's part, in one loop, without sockets or compiler."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from oobleckd.daemon.artifacts import Artifacts
from oobleckd.protocol import codec
from oobleckd.protocol.artifactmessages import (
    ArtifactHere,
    ArtifactKept,
    ArtifactMade,
    ArtifactPart,
    ArtifactTaken,
    NoArtifact,
    WantArtifact,
)
from oobleckd.protocol.artifacts import PART_BYTES
from oobleckd.protocol.message import Message
from oobleckd.protocol.messages import ToWorker
from oobleckd.worker.artifacts import sharing
from oobleckd.worker.artifacts.sharing import Sharing

KEY, OTHER = f"{1:016x}-{2:016x}", f"{1:016x}-{3:016x}"
MADE = os.urandom(PART_BYTES + 7)
pytestmark = pytest.mark.asyncio


class Cluster:
    """Nodes with devices, of which each asks and makes as it is told to; ``net``: what becomes of what the
    daemon says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, Node] = {}
        self.net: Callable[[ToWorker], ToWorker] = lambda message: message
        self.daemon = self._daemon()

    def _daemon(self) -> Artifacts:
        made = Artifacts(self.folder / "daemon", 1 << 24, self.tell)
        made.start()
        return made

    def tell(self, node: str, message: ToWorker) -> None:
        if (to := self.nodes.get(node)) is not None and to.linked:
            heard = codec.decode_to_worker(codec.encode(self.net(message)))
            assert isinstance(heard, ArtifactKept | ArtifactPart | ArtifactTaken)
            to.sharing.heard(heard)

    async def restart(self) -> None:
        """Another daemon, on the same state."""
        for node in self.nodes.values():
            node.unlink()
        await self.daemon.close()
        self.daemon = self._daemon()
        for node in self.nodes.values():
            node.link()


class Node:
    def __init__(self, cluster: Cluster, name: str, *, keeps: bool = True) -> None:
        self.cluster, self.name, self.keeps = cluster, name, keeps
        self.linked = False
        self.answers: dict[str, asyncio.Queue[ArtifactHere]] = {}
        self.sharing = Sharing(cluster.folder / name, self._say, self._answer)
        cluster.nodes[name] = self
        self.link()

    def link(self) -> None:
        self.linked = True
        self.sharing.welcomed(keeps=self.keeps)

    def unlink(self) -> None:
        self.linked = False
        self.sharing.lost()
        self.cluster.daemon.lost(self.name)

    def _say(self, message: Message) -> None:
        if self.linked:
            heard = codec.decode_from_worker(codec.encode(message))
            self.cluster.daemon.heard(self.name, heard)  # type: ignore[arg-type]

    def _answer(self, device: str, answer: ArtifactHere) -> None:
        self.answers.setdefault(device, asyncio.Queue()).put_nowait(answer)

    def ask(self, device: str, key: str = KEY) -> None:
        self.sharing.from_device(device, codec.encode(WantArtifact(key)))

    async def told(self, device: str) -> bytes | None:
        """What ``device`` is told: bytes, or to compile (None)."""
        answer = await self.answers.setdefault(device, asyncio.Queue()).get()
        return await asyncio.to_thread(Path(answer.path).read_bytes) if answer.path else None

    async def made(self, device: str, key: str = KEY) -> None:
        path = self.cluster.folder / self.name / f"{key}.made"
        await asyncio.to_thread(write, path)
        self.sharing.from_device(device, codec.encode(ArtifactMade(key, str(path))))


def write(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(MADE)


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    running = Cluster(folder)
    try:
        yield running
    finally:
        for node in running.nodes.values():
            await node.sharing.close()
        await running.daemon.close()


async def test_one_compiles_and_all_others_load_now_and_later_and_after_a_restart(tmp_path: Path) -> None:
    compiled = 0
    async with cluster(tmp_path) as world:
        one, two = Node(world, "one"), Node(world, "two")
        one.ask("one/0")
        two.ask("two/0")
        assert await one.told("one/0") is None
        compiled += 1
        await one.made("one/0")
        assert await two.told("two/0") == MADE
        later = Node(world, "later")
        later.ask("later/0")
        assert await later.told("later/0") == MADE
        await world.restart()
        newest = Node(world, "newest")
        newest.ask("newest/0")
        assert await newest.told("newest/0") == MADE
        assert not (tmp_path / "one" / f"{KEY}.made").exists()  # it was the agent's to take away
    assert compiled == 1


async def test_a_daemon_that_is_restarted_meanwhile_hears_who_compiles(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        one, two = Node(world, "one"), Node(world, "two")
        one.ask("one/0")
        assert await one.told("one/0") is None
        two.ask("two/0")
        await world.restart()
        await one.made("one/0")
        assert await two.told("two/0") == MADE


async def test_where_the_device_that_compiles_ends_another_node_does(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        one, two = Node(world, "one"), Node(world, "two")
        one.ask("one/0")
        assert await one.told("one/0") is None
        two.ask("two/0")
        one.sharing.ended("one/0")
        assert await two.told("two/0") is None
        one.ask("one/0")  # the next process in its place
        await two.made("two/0")
        assert await one.told("one/0") == MADE


async def test_a_device_that_cannot_compile_lets_another_try(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        one, two = Node(world, "one"), Node(world, "two")
        one.ask("one/0")
        assert await one.told("one/0") is None
        two.ask("two/0")
        one.sharing.from_device("one/0", codec.encode(NoArtifact(KEY)))
        assert await two.told("two/0") is None


async def test_a_device_that_ended_while_it_waited_is_not_waited_for(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        one, two, three = (Node(world, name) for name in ("one", "two", "three"))
        one.ask("one/0")
        assert await one.told("one/0") is None
        two.ask("two/0")
        three.ask("three/0")
        two.sharing.ended("two/0")
        one.sharing.from_device("one/0", codec.encode(NoArtifact(KEY)))
        assert await three.told("three/0") is None  # two was told first, and said at once that it does not


async def test_bytes_that_were_damaged_on_their_way_are_fetched_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        one, two = Node(world, "one"), Node(world, "two")
        one.ask("one/0")
        await one.told("one/0")
        await one.made("one/0")
        damaged = 0

        def net(message: ToWorker) -> ToWorker:
            nonlocal damaged
            if isinstance(message, ArtifactPart) and not damaged:
                damaged += 1
                return ArtifactPart(message.key, message.offset, bytes(len(message.data)))
            return message

        world.net = net
        two.ask("two/0")
        assert await two.told("two/0") == MADE
        assert damaged == 1


async def test_bytes_that_come_damaged_each_time_are_never_used(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        one, two = Node(world, "one"), Node(world, "two")
        one.ask("one/0")
        await one.told("one/0")
        await one.made("one/0")
        world.net = lambda message: (
            ArtifactPart(message.key, message.offset, bytes(len(message.data)))
            if isinstance(message, ArtifactPart)
            else message
        )
        two.ask("two/0")
        assert await two.told("two/0") is None
        assert await asyncio.to_thread(os.listdir, tmp_path / "two") == []


async def test_an_older_daemon_or_none_lets_devices_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "AWAY_S", 0.05)
    async with cluster(tmp_path) as world:
        one = Node(world, "one", keeps=False)
        one.ask("one/0")
        assert await one.told("one/0") is None
        await one.made("one/0")  # which nobody wants
        one.unlink()
        one.ask("one/0", OTHER)
        assert await one.told("one/0") is None


async def test_a_connection_that_is_lost_on_the_way_is_no_end(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        one, two = Node(world, "one"), Node(world, "two")
        one.ask("one/0")
        await one.told("one/0")
        await one.made("one/0")
        two.ask("two/0")
        lost = 0

        def net(message: ToWorker) -> ToWorker:
            nonlocal lost
            if isinstance(message, ArtifactPart) and message.offset and not lost:
                lost += 1
                asyncio.get_running_loop().call_soon(two.unlink)
                asyncio.get_running_loop().call_soon(two.link)
                return ArtifactPart(OTHER, 0, b"")  # nobody waits for that
            return message

        world.net = net
        assert await two.told("two/0") == MADE
        assert lost == 1

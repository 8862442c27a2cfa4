"""When a spare counts as ready, where devices of its node compile: when it has loaded what they have."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import msgspec
import pytest

from oobleckd.protocol import codec
from oobleckd.protocol.job import Job
from oobleckd.protocol.nodemessages import LayersLoaded, LoadLayers, SpareUp
from oobleckd.worker.agent.spare import SpareKeeper
from oobleckd.worker.processes.children import Burials, Child, Watch
from oobleckd.worker.runtime.framing import FrameBuffer, frame
from tests.helpers.models import small_job

JOB = small_job("gpt2", train={"compile": True})
OTHER = small_job("gpt2", train={"compile": True, "sequence": 4})
pytestmark = pytest.mark.asyncio


class StandIn:
    """A spare's process, as far as its keeper looks at it."""

    is_fork = False
    device, is_loading = "", False

    def __init__(self) -> None:
        self.link, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self.process = self
        self.pid = 4711

    def poll(self) -> None:
        return None

    def own_bytes(self) -> int:
        return 1

    def kill(self) -> None:
        """Nothing runs."""

    def say(self, message: msgspec.Struct) -> None:
        self._theirs.send(frame(codec.encode(message)))

    def heard(self) -> list[Job]:
        """The jobs of which it was told to load layers."""
        try:
            frames = FrameBuffer().feed(self._theirs.recv(1 << 20))
        except BlockingIOError:
            return []
        return [msgspec.msgpack.decode(data, type=LoadLayers).spec for data in frames]

    def close(self) -> None:
        self.link.close()
        self._theirs.close()


class NoWatch:
    def add(self, _child: object) -> None:
        """Nobody ends."""

    def discard(self, _children: object) -> None:
        """Nobody was watched."""


async def test_a_spare_is_ready_when_it_has_loaded_what_devices_compiled() -> None:
    child, changed = StandIn(), asyncio.Event()

    async def begin() -> Child:
        return cast("Child", child)

    keeper = SpareKeeper(
        asyncio.get_running_loop(), begin, lambda: False, cast("Watch", NoWatch()), Burials(),
        on_change=changed.set, on_heir=lambda _place, _child: False,
    )  # fmt: skip

    async def ready() -> bool:
        """After the next change."""
        await changed.wait()
        changed.clear()
        return keeper.state is not None and keeper.state.ready

    keeper.keep()
    child.say(SpareUp())
    assert await ready()
    keeper.compiled(JOB)
    assert not await ready()
    assert child.heard() == [JOB]
    keeper.compiled(JOB)  # as each device says that it is ready
    assert child.heard() == []
    keeper.compiled(OTHER)
    assert not await ready()
    assert child.heard() == [OTHER]
    child.say(LayersLoaded(2))
    child.say(LayersLoaded(2))
    assert await ready()
    taken = keeper.take("node-1/0")
    assert cast("StandIn", taken) is child
    assert not child.is_loading
    child.close()


async def test_one_that_still_loads_can_be_taken_all_the_same() -> None:
    child, changed = StandIn(), asyncio.Event()

    async def begin() -> Child:
        return cast("Child", child)

    keeper = SpareKeeper(
        asyncio.get_running_loop(), begin, lambda: False, cast("Watch", NoWatch()), Burials(),
        on_change=changed.set, on_heir=lambda _place, _child: False,
    )  # fmt: skip
    keeper.keep()
    child.say(SpareUp())
    await changed.wait()
    keeper.compiled(JOB)
    assert keeper.state is not None
    assert not keeper.state.ready
    taken = keeper.take("node-1/0")
    assert taken is not None
    assert taken.is_loading  # so it gets longer to be up
    child.close()

"""The hub over real sockets: keys decide who is who, and a dead peer is known at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import zmq

from oobleckd.daemon import keys
from oobleckd.daemon.hub import Hub, HubError
from oobleckd.protocol.agentmessages import Heartbeat, Hello, Refused, Welcome
from oobleckd.protocol.messages import PROTOCOL, FromWorker, ToWorker
from oobleckd.protocol.parts import DatagramSession
from tests.helpers.agents import Agent, hello

WAIT_S = 120.0
WELCOME = Welcome(PROTOCOL, "daemon", 0.5, 5.0)


@dataclass
class World:
    """A hub with keys for node-1 and node-2, and everything that it passed on."""

    folder: Path
    curve: bool = True
    agents: list[Agent] = field(default_factory=list)
    passed_on: asyncio.Queue[tuple[str, FromWorker | None]] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.server = keys.make_server_keys(self.folder)
        self.pairs = {node: keys.make_node_keys(self.folder, node) for node in ("node-1", "node-2")}

    def open(self) -> Hub:
        self.hub = Hub(
            "tcp://127.0.0.1:0",
            pair=self.server if self.curve else None,
            allowed=keys.load_authorized(self.folder),
        )
        self.hub.start(
            on_heard=lambda node, message: self.passed_on.put_nowait((node, message)),
            on_lost=lambda node: self.passed_on.put_nowait((node, None)),
        )
        return self.hub

    def agent(self, node: str, *, identity: bytes = b"") -> Agent:
        pair = self.pairs[node] if self.curve else None
        agent = Agent(self.hub.endpoint, pair, self.server.public, identity=identity)
        self.agents.append(agent)
        return agent

    async def welcomed(self, agent: Agent, node: str, incarnation: str = "incarnation.1") -> DatagramSession:
        """``agent`` joins as ``node``, and hears how it may send heartbeats."""
        agent.say(hello(node, incarnation=incarnation))
        assert (await self.next())[0] == node
        self.hub.tell(node, WELCOME)
        message = await agent.heard()
        assert isinstance(message, Welcome)
        assert message.datagrams is not None
        return message.datagrams

    async def next(self) -> tuple[str, FromWorker | None]:
        return await asyncio.wait_for(self.passed_on.get(), WAIT_S)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.hub.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def plain(message: ToWorker) -> ToWorker:
    """As the core said it: how to send heartbeats by UDP is the hub's part of a Welcome."""
    assert isinstance(message, Welcome)
    return msgspec.structs.replace(message, datagrams=None)


def start_victim(endpoint: str, files: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.helpers.agents", endpoint, "node-1", *files]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


@pytest.mark.asyncio
async def test_a_good_key_is_heard_and_told(world: World) -> None:
    hub = world.open()
    agent = world.agent("node-1")
    agent.say(hello("node-1"))
    assert await world.next() == ("node-1", hello("node-1"))
    hub.tell("node-1", WELCOME)
    assert plain(await agent.heard()) == WELCOME
    agent.say(Heartbeat("incarnation.1"))
    assert await world.next() == ("node-1", Heartbeat("incarnation.1"))


@pytest.mark.asyncio
async def test_an_unknown_key_is_never_heard(world: World) -> None:
    hub = world.open()
    stranger = keys.KeyPair(*zmq.curve_keypair())
    agent = Agent(hub.endpoint, stranger, world.server.public)
    world.agents.append(agent)
    monitor = agent.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    agent.say(hello("node-1"))
    assert await asyncio.to_thread(monitor.poll, 120_000), "the door says no"
    agent.socket.disable_monitor()
    monitor.close()
    assert hub.num_refused_keys >= 1
    assert hub.counters.received == 0


@pytest.mark.asyncio
async def test_the_key_decides_which_node_a_peer_is(world: World) -> None:
    hub = world.open()
    liar = world.agent("node-2")
    liar.say(hello("node-1"))
    answer = await liar.heard()
    assert isinstance(answer, Refused)
    assert answer.cause == "other-node"
    assert "--node node-2" in answer.hint
    liar.say(Heartbeat("incarnation.1"))
    honest = world.agent("node-1")
    honest.say(hello("node-1"))
    assert await world.next() == ("node-1", hello("node-1")), "nothing of the liar was passed on"
    assert hub.counters.refused == 1


@pytest.mark.asyncio
async def test_a_name_that_a_terminal_obeys_is_none(world: World) -> None:
    """Without keys a node calls itself what it likes."""
    world.curve = False
    hub = world.open()
    agent = world.agent("node-1")
    for name in ("", "node-1\r\nnode-2", "\x1b[2J", "node\u202e"):
        agent.say(hello(name))
        answer = await agent.heard()
        assert isinstance(answer, Refused)
        assert answer.cause == "other-node"
    agent.say(hello("node-1"))
    assert await world.next() == ("node-1", hello("node-1"))
    assert hub.counters.refused == 4


@pytest.mark.asyncio
async def test_a_chosen_zeromq_identity_is_refused(world: World) -> None:
    world.open()
    agent = world.agent("node-1", identity=b"node-1")
    agent.say(hello("node-1"))
    answer = await agent.heard()
    assert isinstance(answer, Refused)
    assert answer.cause == "chosen-identity"


@pytest.mark.asyncio
async def test_another_protocol_is_refused_even_with_other_fields(world: World) -> None:
    hub = world.open()
    agent = world.agent("node-1")
    for message in (
        hello("node-1", protocol=PROTOCOL + 1),
        msgspec.msgpack.encode({"type": "Hello", "protocol": PROTOCOL + 2, "name": "node-1"}),
    ):
        agent.say(message)
        answer = await agent.heard()
        assert isinstance(answer, Refused)
        assert answer.cause == "other-protocol"
        assert "same version" in answer.hint
    assert (hub.counters.refused, hub.counters.damaged) == (2, 0)


@pytest.mark.asyncio
async def test_a_newer_worker_that_also_speaks_ours_is_let_in(world: World) -> None:
    world.open()
    agent = world.agent("node-1")
    newer = msgspec.structs.replace(hello("node-1", protocol=PROTOCOL + 1), oldest=PROTOCOL)
    agent.say(newer)
    assert await world.next() == ("node-1", newer)


@pytest.mark.asyncio
async def test_unknown_tags_and_damage_are_counted_and_ignored(world: World) -> None:
    hub = world.open()
    agent = world.agent("node-1")
    agent.say(hello("node-1"))
    agent.say(msgspec.msgpack.encode({"type": "Novelty", "x": 1}))
    agent.say(b"\xc1 no msgpack")
    agent.say(msgspec.msgpack.encode({"type": "Beat"}))
    agent.socket.send_multipart([b"two", b"frames"])
    agent.say(Heartbeat("incarnation.1"))
    assert (await world.next())[0] == "node-1"
    assert await world.next() == ("node-1", Heartbeat("incarnation.1"))
    assert (hub.counters.unknown, hub.counters.damaged) == (1, 3)


@pytest.mark.asyncio
async def test_what_came_before_hello_waits_for_it(world: World) -> None:
    world.open()
    agent = world.agent("node-1")
    agent.say(Heartbeat("early"))
    agent.say(hello("node-1"))
    assert isinstance((await world.next())[1], Hello)
    assert await world.next() == ("node-1", Heartbeat("early"))


@pytest.mark.asyncio
async def test_a_newer_connection_takes_over_and_the_old_one_is_not_heard_any_more(world: World) -> None:
    hub = world.open()
    old, new = world.agent("node-1"), world.agent("node-1")
    old.say(hello("node-1"))
    await world.next()
    new.say(hello("node-1", incarnation="incarnation.2"))
    assert await world.next() == ("node-1", None)  # what was on its way on the old one is lost
    await world.next()
    old.say(Heartbeat("incarnation.1"))
    hub.tell("node-1", WELCOME)
    assert plain(await new.heard()) == WELCOME
    old.close()
    new.say(Heartbeat("incarnation.2"))
    assert await world.next() == ("node-1", Heartbeat("incarnation.2"))
    new.close()
    assert await world.next() == ("node-1", None)
    hub.tell("node-1", WELCOME)
    assert hub.counters.undeliverable == 1


@pytest.mark.asyncio
async def test_a_revoked_key_is_neither_heard_nor_told(world: World) -> None:
    hub = world.open()
    agent = world.agent("node-1")
    agent.say(hello("node-1"))
    await world.next()
    hub.allow({})
    hub.tell("node-1", WELCOME)
    assert hub.counters.undeliverable == 1
    agent.say(Heartbeat("incarnation.1"))
    answer = await agent.heard()
    assert isinstance(answer, Refused)
    assert answer.cause == "key-revoked"
    assert world.passed_on.empty()


@pytest.mark.asyncio
async def test_many_messages_do_not_starve_the_loop_and_keep_their_order(world: World) -> None:
    world.open()
    agent = world.agent("node-1")
    agent.say(hello("node-1"))
    await world.next()
    for number in range(2000):
        agent.say(Heartbeat(str(number)))
    heard = [await world.next() for _ in range(2000)]
    assert [message.incarnation for _, message in heard if isinstance(message, Heartbeat)] == [
        str(number) for number in range(2000)
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize("curve", [True, False])
async def test_kill_9_of_a_peer_is_a_lost_link_at_once(world: World, curve: bool) -> None:
    world.curve = curve
    hub = world.open()
    files = [str(keys.node_secret_path(world.folder, "node-1")), str(keys.server_public_path(world.folder))]
    for _ in range(3):  # the kernel gives the same descriptor again
        victim = start_victim(hub.endpoint, files if curve else [])
        try:
            assert await world.next() == ("node-1", hello("node-1"))
            hub.tell("node-1", WELCOME)
            assert victim.stdout is not None
            assert await asyncio.to_thread(victim.stdout.readline) == b"welcome\n"
            victim.kill()
            assert await world.next() == ("node-1", None)
        finally:
            victim.kill()
            victim.wait()
            assert victim.stdout is not None
            victim.stdout.close()


@pytest.mark.asyncio
async def test_last_words_are_heard_before_the_end(world: World) -> None:
    world.curve = False
    world.open()
    for _ in range(20):
        agent = Agent(world.hub.endpoint)
        agent.socket.linger = 5000
        agent.say(hello("node-1"))
        for number in range(300):
            agent.say(Heartbeat(str(number)))
        agent.close()
        heard = [await world.next() for _ in range(302)]
        assert heard[-1] == ("node-1", None)


@pytest.mark.asyncio
async def test_without_curve_the_first_hello_names_the_node(world: World) -> None:
    world.curve = False
    world.open()
    agent = world.agent("node-1")
    agent.say(hello("anything"))
    assert (await world.next())[0] == "anything"
    agent.say(hello("something-else"))
    assert isinstance(await agent.heard(), Refused)


def test_beyond_loopback_there_must_be_keys() -> None:
    with pytest.raises(HubError, match="beyond this machine") as caught:
        Hub("tcp://0.0.0.0:0", pair=None, allowed={})
    assert "keygen" in caught.value.hint


@pytest.mark.asyncio
async def test_a_taken_port_is_an_error_with_a_hint(world: World) -> None:
    hub = world.open()
    with pytest.raises(HubError, match="cannot listen") as caught:
        Hub(hub.endpoint, pair=None, allowed={})
    assert "--endpoint" in caught.value.hint

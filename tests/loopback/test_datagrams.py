"""Heartbeats of idle nodes as datagrams, at the hub, over real sockets: what counts, what is answered, and
what is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oobleckd.daemon import heartbeats, keys
from oobleckd.daemon.connections import Connection
from oobleckd.daemon.heartbeats import Heartbeats
from oobleckd.daemon.hub import Hub
from oobleckd.host.ports import free_port
from oobleckd.protocol.agentmessages import Dismiss, Heartbeat, Refused
from oobleckd.protocol.datagrams import Sender
from oobleckd.protocol.messages import FromWorker
from oobleckd.protocol.parts import DatagramSession
from tests.helpers.agents import Agent, hello
from tests.loopback.test_daemon_hub import WAIT_S, WELCOME, World

HEARD = ("node-1", Heartbeat("incarnation.1"))


class Idle:
    """The agent's end of a session, step by step."""

    def __init__(self, session: DatagramSession, host: str = "127.0.0.1") -> None:
        self.sender = Sender(session.session, session.key)
        self.to = host, session.port
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)

    def send(self, data: bytes) -> None:
        self.socket.sendto(data, self.to)

    def heartbeat(self) -> bool:
        """Send the next one; whether it stands for a heartbeat."""
        data, stands = self.sender.heartbeat()
        self.send(data)
        return stands

    async def asked(self) -> bytes:
        """The answer to the next thing that comes, which is a question."""
        async with asyncio.timeout(WAIT_S):
            data = await asyncio.get_running_loop().sock_recv(self.socket, 1000)
        answer = self.sender.answer(data)
        assert answer is not None
        return answer

    async def answered(self) -> None:
        """Take in an acknowledgement of the newest."""
        before = self.sender.acked
        async with asyncio.timeout(WAIT_S):
            data = await asyncio.get_running_loop().sock_recv(self.socket, 1000)
        self.sender.heard(data)
        assert self.sender.acked == self.sender.counter > before

    def unanswered(self) -> bool:
        """Nothing has come (to be asked after something that comes later was seen)."""
        try:
            self.socket.recv(1000)
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        self.socket.close()


class Idlers(World):
    """A hub, and nodes of it that send heartbeats by datagrams."""

    def idle(self, session: DatagramSession) -> Idle:
        made = Idle(session)
        self.agents.append(made)  # type: ignore[arg-type]  # closed with the others
        return made

    async def heartbeating(self, node: str = "node-1") -> tuple[Agent, Idle]:
        """One whose next datagram stands for a heartbeat."""
        agent = self.agent(node)
        session = await self.welcomed(agent, node)
        agent.say(Heartbeat("incarnation.1"))
        assert await self.next() == (node, Heartbeat("incarnation.1"))
        idle = self.idle(session)
        assert not idle.heartbeat(), "the first only asks"
        await idle.answered()
        return agent, idle


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Idlers]:
    world = Idlers(tmp_path)
    yield world
    world.close()


async def until(check: Callable[[], bool]) -> None:
    """A counter tells nobody."""
    async with asyncio.timeout(WAIT_S):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.asyncio
@pytest.mark.parametrize("curve", [True, False])
async def test_a_datagram_is_a_heartbeat_and_is_acknowledged(world: Idlers, curve: bool) -> None:
    world.curve = curve
    hub = world.open()
    assert hub.endpoint == f"tcp://127.0.0.1:{hub.heartbeats.port}", "the same number"
    _, idle = await world.heartbeating()
    for count in (1, 2, 3):
        assert idle.heartbeat()
        assert await world.next() == HEARD
        await idle.answered()
        assert hub.heartbeats.counters.datagram_heartbeats == count
    assert hub.counters.received == 2, "a Hello and a Heartbeat, and nothing more over ZeroMQ"


@pytest.mark.asyncio
async def test_what_only_asks_is_no_heartbeat(world: Idlers) -> None:
    hub = world.open()
    _, idle = await world.heartbeating()
    idle.sender.acked = 0  # it never hears of us
    for _ in range(5):
        assert not idle.heartbeat()
    await until(lambda: not idle.unanswered())
    assert world.passed_on.empty()
    assert hub.heartbeats.counters.datagram_heartbeats == 0


@pytest.mark.asyncio
async def test_a_replayed_datagram_is_refused(world: Idlers) -> None:
    hub = world.open()
    _, idle = await world.heartbeating()
    data, stands = idle.sender.heartbeat()
    assert stands
    idle.send(data)
    await idle.answered()
    assert await world.next() == HEARD
    idle.send(data)
    assert idle.heartbeat()
    await idle.answered()  # of the newer one, so the older was looked at
    assert await world.next() == HEARD
    assert world.passed_on.empty()
    assert idle.unanswered()
    assert hub.heartbeats.counters.datagrams_replayed == 1


@pytest.mark.asyncio
async def test_a_wrong_code_and_an_unknown_session_are_refused(world: Idlers) -> None:
    hub = world.open()
    _, idle = await world.heartbeating()
    session = idle.sender.session
    for sender in (Sender(session, bytes(32), 100, 100), Sender(b"nobody's", idle.sender.key, 100, 100)):
        idle.send(sender.heartbeat()[0])
    for size in (0, 1, 40, 42, 1400):
        idle.send(bytes(size))
    assert idle.heartbeat()
    await idle.answered()
    assert await world.next() == HEARD
    assert world.passed_on.empty()
    assert idle.unanswered()
    found = hub.heartbeats.counters
    assert (found.datagrams_forged, found.datagrams_strange, found.datagrams_replayed) == (1, 6, 0)


@pytest.mark.asyncio
async def test_a_session_of_a_revoked_key_is_refused(world: Idlers) -> None:
    hub = world.open()
    agent, idle = await world.heartbeating()
    _, other = await world.heartbeating("node-2")
    hub.allow({key: node for key, node in keys.load_authorized(world.folder).items() if node == "node-2"})
    assert idle.heartbeat()
    assert other.heartbeat()
    await other.answered()
    assert (await world.next())[0] == "node-2"
    assert world.passed_on.empty()
    assert idle.unanswered(), "so it sends heartbeats over ZeroMQ, and hears why"
    agent.say(Heartbeat("incarnation.1"))
    assert isinstance(await agent.heard(), Refused)


@pytest.mark.asyncio
async def test_a_session_ends_with_its_connection(world: Idlers) -> None:
    hub = world.open()
    agent, idle = await world.heartbeating()
    agent.close()
    world.agents.remove(agent)
    assert await world.next() == ("node-1", None)
    assert idle.heartbeat()
    await until(lambda: hub.heartbeats.counters.datagrams_strange == 1)
    assert world.passed_on.empty()
    assert idle.unanswered()


@pytest.mark.asyncio
async def test_a_session_ends_where_another_connection_takes_over(world: Idlers) -> None:
    world.open()
    _, idle = await world.heartbeating()
    _, other = await world.heartbeating("node-2")
    newer = world.agent("node-1")
    newer.say(hello("node-1", incarnation="incarnation.2"))
    assert await world.next() == ("node-1", None)
    assert isinstance((await world.next())[1], FromWorker)
    assert idle.heartbeat()
    assert other.heartbeat()
    await other.answered()
    assert (await world.next())[0] == "node-2"
    assert world.passed_on.empty()
    assert idle.unanswered()


@pytest.mark.asyncio
async def test_a_welcome_opens_a_session_of_the_incarnation_it_answers(world: Idlers) -> None:
    hub = world.open()
    agent, idle = await world.heartbeating()
    session = await world.welcomed(agent, "node-1", "incarnation.2")
    assert session.session != idle.sender.session
    assert session.key != idle.sender.key
    agent.say(Heartbeat("incarnation.2"))
    assert await world.next() == ("node-1", Heartbeat("incarnation.2"))
    renewed = world.idle(session)
    idle.heartbeat()
    renewed.heartbeat()
    await until(lambda: hub.heartbeats.counters.datagrams_strange == 1)
    await renewed.answered()
    assert renewed.heartbeat()
    assert await world.next() == ("node-1", Heartbeat("incarnation.2"))


@pytest.mark.asyncio
async def test_who_was_told_something_has_to_say_a_word_over_zeromq(world: Idlers) -> None:
    """Else a connection that carries nothing any more would show on no idle node to which work is given."""
    hub = world.open()
    agent, idle = await world.heartbeating()
    hub.tell("node-1", Dismiss())
    assert await agent.heard() == Dismiss()
    assert idle.heartbeat()
    assert await world.next() == HEARD, "it counts"
    assert idle.unanswered(), "and the next will not"
    assert not idle.heartbeat()
    agent.say(Heartbeat("incarnation.1"))
    assert await world.next() == HEARD
    assert not idle.heartbeat()
    await idle.answered()
    assert idle.heartbeat()
    assert await world.next() == HEARD


@pytest.mark.asyncio
async def test_a_flood_does_not_starve_the_loop(world: Idlers) -> None:
    """Other nodes are heard over ZeroMQ meanwhile, and over UDP when there is room again."""
    hub = world.open()
    agent, idle = await world.heartbeating()
    flood = [os.urandom(41) for _ in range(64)]
    for number in range(200):
        for data in flood:
            idle.send(data)
        agent.say(Heartbeat(str(number)))
        assert await world.next() == ("node-1", Heartbeat(str(number)))
    await until(lambda: hub.heartbeats.counters.datagrams_strange > 1000)

    def heard_again() -> bool:
        idle.heartbeat()
        return not idle.unanswered()

    await until(heard_again)


@pytest.mark.asyncio
async def test_where_the_port_is_taken_it_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        port = free_port()  # to ZeroMQ, too
        taken.bind(("127.0.0.1", port))
        hub = Hub(f"tcp://127.0.0.1:{port}", pair=None, allowed={})
        assert hub.heartbeats.port == 0
        (warned,) = [record for record in caplog.records if record.name == heartbeats.__name__]
        assert warned.args is not None
        assert warned.args[0] == f"tcp://127.0.0.1:{port}"
        heard: asyncio.Queue[FromWorker] = asyncio.Queue()
        hub.start(lambda _node, message: heard.put_nowait(message), lambda _node: None)
        agent = Agent(hub.endpoint)
        agent.say(hello("node-1"))
        await asyncio.wait_for(heard.get(), WAIT_S)
        hub.tell("node-1", WELCOME)
        assert await agent.heard() == WELCOME
        agent.close()
        hub.close()


def test_another_port_will_do_where_any_was_asked_for() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        heartbeats: Heartbeats[Connection] = Heartbeats(lambda _connection, _heartbeat: True)
        heartbeats.bind(f"tcp://127.0.0.1:{taken.getsockname()[1]}", any_port=True)
        assert heartbeats.port not in {0, taken.getsockname()[1]}
        heartbeats.close()


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/nowhere", ""])
def test_where_there_is_no_address_there_is_no_session(endpoint: str) -> None:
    heartbeats: Heartbeats[Connection] = Heartbeats(lambda _connection, _heartbeat: True)
    heartbeats.bind(endpoint, any_port=True)
    heartbeats.start()
    assert heartbeats.open_session(Connection(), "incarnation.1") is None
    heartbeats.close()


@pytest.mark.asyncio
async def test_ipv6() -> None:
    heard: list[Heartbeat | None] = []

    def on_datagram(_connection: Connection, heartbeat: Heartbeat | None) -> bool:
        heard.append(heartbeat)
        return True

    heartbeats: Heartbeats[Connection] = Heartbeats(on_datagram)
    heartbeats.bind("tcp://[::1]:0", any_port=True)
    heartbeats.start()
    session = heartbeats.open_session(Connection(node="node-1"), "incarnation.1")
    assert session is not None
    idle = Idle(session, "::1")
    for _ in range(3):
        idle.heartbeat()
        await idle.answered()
    assert heard == [None, Heartbeat("incarnation.1"), Heartbeat("incarnation.1")]
    idle.close()
    heartbeats.close()


HEARTBEAT_S = 0.05


class Silent:
    """A node that trains and says nothing, or not over ZeroMQ; ``heard``: of it."""

    def __init__(self) -> None:
        self.heard: list[Heartbeat | None] = []
        self.connection = Connection(node="node-1")
        self.heartbeats: Heartbeats[Connection] = Heartbeats(self._on_datagram, HEARTBEAT_S)
        self.heartbeats.bind("tcp://127.0.0.1:0", any_port=True)
        self.heartbeats.start()
        session = self.heartbeats.open_session(self.connection, "incarnation.1")
        assert session is not None
        self.node = Idle(session)

    def _on_datagram(self, _connection: Connection, heartbeat: Heartbeat | None) -> bool:
        self.heard.append(heartbeat)
        return True

    async def known(self) -> None:
        """It has said where it is."""
        self.node.heartbeat()
        await self.node.answered()
        self.heard.clear()

    def close(self) -> None:
        self.node.close()
        self.heartbeats.close()


@pytest.fixture
def silent() -> Iterator[Callable[[], Silent]]:
    made: list[Silent] = []

    def make() -> Silent:
        made.append(Silent())
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.asyncio
async def test_who_is_silent_is_asked_and_an_answer_is_a_heartbeat(silent: Callable[[], Silent]) -> None:
    world = silent()
    await world.known()
    began = asyncio.get_running_loop().time()
    for count in (1, 2, 3):
        answer = await world.node.asked()
        assert len(world.heard) == count - 1
        world.node.send(answer)
        await until(lambda wanted=count: len(world.heard) == wanted)  # type: ignore[misc]
    assert world.heard == [Heartbeat("incarnation.1")] * 3
    assert world.heartbeats.counters.datagram_answers == 3
    assert asyncio.get_running_loop().time() - began >= 4 * HEARTBEAT_S, (
        "two heartbeats, and one between two answers"
    )


@pytest.mark.asyncio
async def test_it_is_asked_until_an_answer_comes(silent: Callable[[], Silent]) -> None:
    """Of questions and answers some are lost, too."""
    world = silent()
    await world.known()
    answers = [await world.node.asked() for _ in range(4)]
    assert not world.heard
    world.node.send(answers[2])
    await until(lambda: world.heard == [Heartbeat("incarnation.1")])


@pytest.mark.asyncio
async def test_an_answer_counts_once(silent: Callable[[], Silent]) -> None:
    world = silent()
    await world.known()
    answer = await world.node.asked()
    for _ in range(3):
        world.node.send(answer)
    await until(lambda: world.heartbeats.counters.datagrams_forged == 2)
    assert world.heard == [Heartbeat("incarnation.1")]


@pytest.mark.asyncio
async def test_who_is_heard_is_not_asked(silent: Callable[[], Silent]) -> None:
    world, other = silent(), silent()
    await world.known()
    await other.known()

    async def talks() -> None:
        while True:
            world.heartbeats.heard(world.connection)
            await asyncio.sleep(0)

    talking = asyncio.create_task(talks())
    for _ in range(4):
        await other.node.asked()
    talking.cancel()
    assert world.node.unanswered()


@pytest.mark.asyncio
async def test_nobody_is_asked_where_it_is_not_known_where_or_when_its_connection_is_gone(
    silent: Callable[[], Silent],
) -> None:
    unknown, gone, other = silent(), silent(), silent()
    await gone.known()
    await other.known()
    gone.heartbeats.end_session(gone.connection)
    for _ in range(4):
        await other.node.asked()
    assert unknown.node.unanswered()
    assert gone.node.unanswered()


@pytest.mark.asyncio
async def test_who_says_nothing_for_as_long_as_tcp_waits_is_asked_no_more(
    silent: Callable[[], Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent lives, and its connection will not carry anything again: it shall be missed."""
    monkeypatch.setattr("oobleckd.daemon.heartbeats._MAX_ASK_S", 4 * HEARTBEAT_S)
    world = silent()
    await world.known()
    world.node.send(await world.node.asked())
    await until(lambda: not world.heartbeats._heard)
    while not world.node.unanswered():
        pass
    other = silent()
    await other.known()
    await other.node.asked()
    assert world.node.unanswered()
    world.heartbeats.heard(world.connection)
    await world.node.asked()


@pytest.mark.asyncio
async def test_a_daemon_that_slept_asks_nobody(silent: Callable[[], Silent]) -> None:
    """What was said meanwhile has not been read yet."""
    world = silent()
    await world.known()
    world.heartbeats._look(asyncio.get_running_loop().time() - 1.0)
    assert world.node.unanswered()

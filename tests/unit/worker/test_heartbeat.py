"""Which way each heartbeat of an agent goes: a real UDP socket in the daemon's place, and heartbeats one by
one.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

import pytest

from oobleckd.protocol.agentmessages import Welcome
from oobleckd.protocol.datagrams import HEARTBEAT_BYTES, Receiver
from oobleckd.protocol.messages import PROTOCOL
from oobleckd.protocol.parts import DatagramSession
from oobleckd.worker.agent import heartbeat as module
from oobleckd.worker.agent.heartbeat import HeartbeatSender

WAIT_S = 30.0
KEY = bytes(32)


@dataclass
class Uplink:
    """What the sender asks of it."""

    blocked: bool = False


class World:
    """A sender of heartbeats, and the other end of its datagrams."""

    def __init__(self, host: str = "127.0.0.1", name: str = "") -> None:
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((host, 0))
        self.socket.settimeout(WAIT_S)
        self.port = int(self.socket.getsockname()[1])
        self.receiver = Receiver(b"session1", KEY)
        self.uplink, self.idle, self.num_heartbeats = Uplink(), True, 0
        self.agent: tuple[str, int] = ("", 0)
        endpoint = f"tcp://{name or (f'[{host}]' if ':' in host else host)}:7077"
        self.heartbeat_sender = HeartbeatSender(
            asyncio.get_running_loop(),
            endpoint,
            self.uplink,  # type: ignore[arg-type]
            heartbeat=self.beaten,
            is_idle=lambda: self.idle,
        )

    def beaten(self) -> None:
        self.num_heartbeats += 1

    def welcome(self, session: bytes = b"session1") -> None:
        self.receiver = Receiver(session, KEY)
        datagrams = DatagramSession(self.port, session, KEY)
        self.heartbeat_sender.welcome(Welcome(PROTOCOL, "daemon", 3600.0, 7200.0, (), datagrams))

    def heartbeat(self) -> None:
        """The time for one has come."""
        self.heartbeat_sender._every(3600.0)

    def answer(self) -> str:
        """Take the datagram that must have come, and acknowledge it; what it is."""
        data, self.agent = self.socket.recvfrom(1000)
        verdict = self.receiver.take(data)
        self.socket.sendto(self.receiver.ack(), self.agent)
        return verdict

    async def asked(self, question: bytes) -> bytes:
        """What it answers to a question."""
        self.socket.sendto(question, self.agent)
        self.socket.setblocking(False)
        async with asyncio.timeout(WAIT_S):
            return await asyncio.get_running_loop().sock_recv(self.socket, 1000)

    def nothing_came(self) -> bool:
        self.socket.setblocking(False)
        try:
            self.socket.recv(1000)
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(WAIT_S)
        return False

    def close(self) -> None:
        self.heartbeat_sender.close()
        self.socket.close()


async def turns() -> None:
    """What was sent on loopback is there already: the loop has looked at it, and whoever waits for it has
    run.
    """
    for _ in range(3):
        await asyncio.sleep(0)


pytestmark = pytest.mark.asyncio


async def test_zeromq_too_until_an_answer_came_and_then_datagrams_alone() -> None:
    world = World()
    world.welcome()
    assert (world.answer(), world.num_heartbeats) == ("question", 1)
    for _ in range(5):
        world.heartbeat()
        assert (world.answer(), world.num_heartbeats) == ("heartbeat", 1)
    world.close()


async def test_zeromq_at_the_next_heartbeat_when_answers_stop_and_datagrams_again_when_they_come() -> None:
    world = World()
    world.welcome()
    world.answer()
    world.heartbeat()
    assert world.receiver.take(world.socket.recv(1000)) == "heartbeat"
    for count in (2, 3, 4):  # nobody knew until now that no answer comes
        world.heartbeat()
        assert world.num_heartbeats == count
        assert world.receiver.take(world.socket.recv(1000)) == "question"
    world.heartbeat()
    assert (world.answer(), world.num_heartbeats) == ("question", 5)
    world.heartbeat()
    assert (world.answer(), world.num_heartbeats) == ("heartbeat", 5)
    world.close()


async def test_a_node_that_trains_heartbeats_over_zeromq_alone() -> None:
    world = World()
    world.welcome()
    world.answer()
    world.idle = False
    for count in (2, 3):
        world.heartbeat()
        assert world.num_heartbeats == count
    assert world.nothing_came()
    world.idle = True
    world.heartbeat()
    assert (world.answer(), world.num_heartbeats) == ("heartbeat", 3), "its last one was answered"
    world.close()


async def test_a_node_that_trains_answers_questions_at_once() -> None:
    world = World()
    world.welcome()
    world.answer()
    world.idle = False
    world.heartbeat()
    for _ in range(3):
        assert world.receiver.is_answer(await world.asked(world.receiver.ask()))
    assert world.num_heartbeats == 2, "and no heartbeat of its own"
    world.uplink.blocked = True
    world.socket.sendto(world.receiver.ask(), world.agent)
    await turns()
    assert world.nothing_came()
    world.close()


async def test_an_idle_node_answers_none() -> None:
    """Else one to which work is given on a connection that carries nothing any more would not show."""
    world = World()
    world.welcome()
    world.answer()
    world.idle = False
    world.heartbeat()
    world.idle = True
    for _ in range(2):  # it still listens, and then not
        world.socket.sendto(world.receiver.ask(), world.agent)
        await turns()
        assert world.nothing_came()
        world.heartbeat()
        assert world.answer() == "heartbeat"
    world.close()


async def test_a_node_that_trains_tells_where_it_is_until_that_is_acknowledged() -> None:
    """The daemon may have been started again meanwhile, and knows no address."""
    world = World()
    world.idle = False
    world.welcome()
    world.heartbeat()
    assert [world.receiver.take(world.socket.recv(1000)) for _ in range(2)] == ["question"] * 2
    world.heartbeat()
    world.answer()
    world.heartbeat()
    assert world.nothing_came()
    assert world.num_heartbeats == 4
    world.welcome(b"session2")
    for _ in range(20):  # nobody answers
        world.heartbeat()
    await asyncio.sleep(0)
    for _ in range(module._MAX_QUESTIONS):
        assert world.receiver.take(world.socket.recv(1000)) == "question"
    assert world.nothing_came()
    world.close()


async def test_a_blocked_uplink_holds_datagrams_back() -> None:
    world = World()
    world.welcome()
    world.answer()
    world.uplink.blocked = True
    world.heartbeat()
    assert world.nothing_came()
    assert world.num_heartbeats == 2, "which the uplink drops"
    world.close()


async def test_the_session_goes_with_the_connection() -> None:
    world = World()
    world.welcome()
    world.answer()
    world.heartbeat_sender.forget()
    world.heartbeat()
    assert world.nothing_came()
    assert world.num_heartbeats == 2
    world.welcome(b"session2")
    assert (world.answer(), world.num_heartbeats) == ("question", 3)
    world.heartbeat()
    assert (world.answer(), world.num_heartbeats) == ("heartbeat", 3)
    world.close()


async def test_where_nobody_listens_zeromq_speaks() -> None:
    world = World()
    world.welcome()
    world.socket.close()
    for count in (2, 3, 4):
        world.heartbeat()
        assert world.num_heartbeats == count
    world.close()


async def test_what_strangers_send_changes_nothing() -> None:
    world = World()
    world.welcome()
    data, sender = world.socket.recvfrom(1000)
    assert len(data) == HEARTBEAT_BYTES
    for junk in (b"", b"x", data, bytes(33), bytes(1400)):
        world.socket.sendto(junk, sender)
    world.heartbeat()
    assert (world.answer(), world.num_heartbeats) == ("question", 2)
    world.close()


@pytest.mark.parametrize("endpoint", ["ipc:///nowhere", "inproc://here"])
async def test_where_there_is_no_address_zeromq_speaks(endpoint: str) -> None:
    world = World()
    world.heartbeat_sender._endpoint = endpoint
    world.welcome()
    world.heartbeat()
    assert world.num_heartbeats == 2
    world.close()


async def test_a_daemon_of_before_says_nothing_of_datagrams() -> None:
    world = World()
    world.heartbeat_sender.welcome(Welcome(PROTOCOL, "daemon", 3600.0, 7200.0))
    world.heartbeat()
    assert world.num_heartbeats == 2
    world.close()


async def test_ipv6() -> None:
    world = World("::1")
    world.welcome()
    assert (world.answer(), world.num_heartbeats) == ("question", 1)
    world.heartbeat()
    assert (world.answer(), world.num_heartbeats) == ("heartbeat", 1)
    world.close()


async def test_a_name_is_looked_up_beside_the_loop() -> None:
    world = World(name="localhost")
    world.welcome()
    assert world.num_heartbeats == 1
    assert world.nothing_came()
    assert world.heartbeat_sender._looking_up is not None
    await asyncio.wait_for(world.heartbeat_sender._looking_up, WAIT_S)
    world.heartbeat()
    assert (world.answer(), world.num_heartbeats) == ("question", 2)
    world.heartbeat()
    assert (world.answer(), world.num_heartbeats) == ("heartbeat", 2)
    world.close()


async def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_args: object) -> list[tuple[int, object]]:
        raise socket.gaierror(socket.EAI_NONAME, "nobody of that name")

    world = World(name="nobody.invalid")
    monkeypatch.setattr(module, "_addresses", unknown)
    world.welcome()
    assert world.heartbeat_sender._looking_up is not None
    await asyncio.wait_for(world.heartbeat_sender._looking_up, WAIT_S)
    world.heartbeat()
    assert world.num_heartbeats == 2
    world.close()

"""Sends an agent's heartbeats: over ZeroMQ, or as a UDP datagram while no device of its node has a job.

Owns the heartbeats' timer and the UDP socket of the session that the last Welcome opened. A heartbeat goes
over ZeroMQ unless a datagram stands for it (``protocol.datagrams``): so both go until an answer comes, and
where UDP is blocked, or a packet lost, ZeroMQ speaks at the next heartbeat. Nodes that train use it always:
what they say otherwise goes there too. Their connection may be held up by lost packets, and then the daemon
asks by UDP whether they are there: they answer at once. So that it knows where, they send datagrams until one
is acknowledged.

Acknowledgements are looked for when the next heartbeat is due, and wake nobody.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

from oobleckd.protocol.agentmessages import Welcome
from oobleckd.protocol.datagrams import ACK_BYTES, Sender, address_of
from oobleckd.protocol.parts import DatagramSession
from oobleckd.worker.agent.daemon_link import Uplink

_MAX_ANSWERS = 64  # looked at for one heartbeat: others than the daemon may send here
_MAX_QUESTIONS = 8  # of a node that trains, where datagrams seem not to get through
_log = logging.getLogger(__name__)


class _Datagrams:
    """The way to the daemon in one session. Its socket is not connected: a daemon of several addresses may
    answer from another, and who it was the answer's code tells. Raises OSError where there can be no socket.
    """

    def __init__(self, session: DatagramSession, family: int, address: Any) -> None:
        self._sender = Sender(session.session, session.key)
        self._address = address
        # Not connected: a daemon that listens on all addresses may answer from another one than it was
        # asked at. (D-detection-010)
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_known(self) -> bool:
        """Whether the daemon has acknowledged one, or never will."""
        return self._sender.acked > 0 or self._sender.counter >= _MAX_QUESTIONS

    def send(self) -> bool:
        """Send the next datagram; whether it stands for a heartbeat."""
        data, stands = self._sender.heartbeat()
        return self._send(data) and stands

    def take(self, *, answers: bool) -> None:
        """Take in what has come; whether questions are answered."""
        try:
            for _ in range(_MAX_ANSWERS):
                data = self._socket.recv(ACK_BYTES + 1)
                self._sender.heard(data)
                if answers and (answer := self._sender.answer(data)) is not None:
                    self._send(answer)
        except OSError:
            pass  # no more has come

    def listen(self, loop: asyncio.AbstractEventLoop, came: Callable[[], None]) -> None:
        """Call ``came`` when something comes, from now on."""
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._socket, came)

    def rest(self) -> None:
        """Stop calling whoever listens."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop = None

    def close(self) -> None:
        self.rest()
        self._socket.close()

    def _send(self, data: bytes) -> bool:
        try:
            self._socket.sendto(data, self._address)
        except OSError:
            return False
        return True


class HeartbeatSender:
    """Heartbeats of the agent whose ``uplink`` goes to ``endpoint``. ``heartbeat`` says one over ZeroMQ;
    ``is_idle``: no device has a job.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: str,
        uplink: Uplink,
        *,
        heartbeat: Callable[[], None],
        is_idle: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._endpoint = endpoint
        self._uplink = uplink
        self._heartbeat = heartbeat
        self._is_idle = is_idle
        self._timer: asyncio.TimerHandle | None = None
        self._datagrams: _Datagrams | None = None
        self._looking_up: asyncio.Task[None] | None = None

    def welcome(self, message: Welcome) -> None:
        """Send heartbeats as it says from now on, the first time at once."""
        self.forget()
        address = address_of(self._endpoint)
        if message.datagrams is not None and address is not None:
            self._open(message.datagrams, address[0])
        self._every(message.heartbeat_s)

    def forget(self) -> None:
        """The connection is gone, or another one: its session went with it."""
        if self._looking_up is not None:
            self._looking_up.cancel()
            self._looking_up = None
        if self._datagrams is not None:
            self._datagrams.close()
            self._datagrams = None

    def close(self) -> None:
        """Send no more heartbeats."""
        self.forget()
        if self._timer is not None:
            self._timer.cancel()

    def _every(self, heartbeat_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._sent():
            self._heartbeat()
        self._timer = self._loop.call_later(heartbeat_s, self._every, heartbeat_s)

    def _sent(self) -> bool:
        """Whether a datagram stands for this heartbeat."""
        if self._datagrams is None or self._uplink.blocked:
            return False
        # Nodes that train say other things over their connection anyway; for idle ones a datagram spares
        # the daemon what a ZeroMQ connection takes in the long run, some 750 MB for 10,000. (D-detection-007)
        if self._is_idle():
            self._datagrams.rest()
            self._datagrams.take(answers=False)
            return self._datagrams.send()
        self._datagrams.listen(self._loop, self._came)
        self._came()
        if not self._datagrams.is_known:
            self._datagrams.send()
        return False

    def _came(self) -> None:
        """A question is answered at once; by an idle node never, which sends heartbeats by datagrams itself,
        and where those are not acknowledged that has a reason.
        """
        # An idle node answers no question: it must be missed where its connection carries nothing. One that
        # trains may be silent because packets were lost, three in a row. (D-detection-013)
        if self._datagrams is not None:
            self._datagrams.take(answers=not (self._uplink.blocked or self._is_idle()))

    def _open(self, session: DatagramSession, host: str) -> None:
        """Addresses at once; names are looked up beside the loop, and ZeroMQ has the heartbeats
        until then.
        """
        try:
            self._found(session, _addresses(host, session.port, socket.AI_NUMERICHOST))
        except (socket.gaierror, UnicodeError):
            self._looking_up = self._loop.create_task(self._look_up(session, host))

    async def _look_up(self, session: DatagramSession, host: str) -> None:
        try:
            found = await self._loop.run_in_executor(None, _addresses, host, session.port, 0)
        except (OSError, UnicodeError) as error:
            _log.info("no heartbeats by UDP to %s: %s", host, error)
        else:
            self._found(session, found)

    def _found(self, session: DatagramSession, addresses: list[tuple[int, Any]]) -> None:
        try:
            self._datagrams = _Datagrams(session, *addresses[0])
        except OSError as error:
            _log.info("no heartbeats by UDP: %s", error)


def _addresses(host: str, port: int, flags: int) -> list[tuple[int, Any]]:
    """Family and address of each that the host has, those first that ZeroMQ connects to. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=flags)
    return sorted(
        ((int(family), address) for family, _, _, _, address in found),
        key=lambda each: each[0] != socket.AF_INET,
    )

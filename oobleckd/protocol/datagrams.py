"""Heartbeats of idle nodes as UDP datagrams and the daemon's acknowledgements, questions and their answers:
their bytes, and which of them count.

A datagram stands for a heartbeat only if it says that the one before it was acknowledged; any other merely
asks whether datagrams get through, and its agent sends heartbeats over ZeroMQ at the same time. So a lost
datagram costs one interval, who hears nothing of the daemon does not look alive, and of what somebody holds
back on the way one heartbeat at most would count later.

A node that trains sends heartbeats over ZeroMQ, whose connection may be held up by packets that are lost.
When two of its heartbeats are missing the daemon *asks*, and an *answer* proves that its agent lives. Each
question has a number of its own, and each answer counts once.

Both ends know a session's key, which came with the ``Welcome``. The code at a datagram's end is made with it,
and for its direction: a heartbeat cannot be sent back as its acknowledgement. Counters only rise, so nothing
counts twice. An acknowledgement is shorter than what it answers.

Layout, big-endian: version (1 byte), session (8), counter (8; of a question and its answer the question's
number), of a heartbeat the newest counter that was acknowledged (8), code (16: keyed BLAKE2b).

Pure: no socket. Who sends when is ``oobleckd.worker.agent.heartbeat``'s, who is heard
``oobleckd.daemon.heartbeats``'.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from oobleckd.protocol.parts import DATAGRAM_SESSION_BYTES

VERSION = 1
_CODE_BYTES = 16
_HEARTBEAT = struct.Struct(f"!B{DATAGRAM_SESSION_BYTES}sQQ")
_ACK = struct.Struct(f"!B{DATAGRAM_SESSION_BYTES}sQ")
HEARTBEAT_BYTES = _HEARTBEAT.size + _CODE_BYTES
ACK_BYTES = _ACK.size + _CODE_BYTES
_FROM_AGENT, _FROM_DAEMON = b"oobleck beat", b"oobleck ack"
_QUESTION, _ANSWER = b"oobleck ask", b"oobleck here"

Verdict = Literal["heartbeat", "question", "forged", "replayed"]


def stands(counter: int, acked: int) -> bool:
    """Whether a datagram stands for a heartbeat: the one before it got through, and the word of that came
    back.
    """
    # One rule for both ends, without a clock or a state "UDP works": a lost packet costs one heartbeat, a
    # blocked port only memory, and no heartbeat comes twice, which would teach leases wrong.
    # (D-detection-008)
    return 0 < acked == counter - 1


@dataclass(slots=True)
class Sender:
    """The agent's end of a session."""

    session: bytes
    key: bytes
    counter: int = 0
    acked: int = 0
    asked: int = 0

    def heartbeat(self) -> tuple[bytes, bool]:
        """The next datagram, and whether it stands for a heartbeat: if not, ZeroMQ has to bear one."""
        self.counter += 1
        head = _HEARTBEAT.pack(VERSION, self.session, self.counter, self.acked)
        return head + _code(head, self.key, _FROM_AGENT), stands(self.counter, self.acked)

    def heard(self, data: bytes) -> None:
        """Take in what may be an acknowledgement."""
        counter = _number(data, self.session, self.key, _FROM_DAEMON)
        if counter is not None and self.acked < counter <= self.counter:
            self.acked = counter

    def answer(self, data: bytes) -> bytes | None:
        """The answer to what may be a question; None where it is none, or was answered before."""
        number = _number(data, self.session, self.key, _QUESTION)
        if number is None or number <= self.asked:
            return None
        self.asked = number
        return _short(self.session, number, self.key, _ANSWER)


@dataclass(slots=True)
class Receiver:
    """The daemon's end of a session."""

    session: bytes
    key: bytes
    newest: int = 0
    asked: int = 0
    answered: int = 0

    def take(self, data: bytes) -> Verdict:
        """What a datagram is whose ``session_of`` is this one."""
        head = data[: _HEARTBEAT.size]
        if not _is_of(self.key, _FROM_AGENT, head, data):
            return "forged"
        _, _, counter, acked = _HEARTBEAT.unpack(head)
        if counter <= self.newest:
            return "replayed"
        self.newest = counter
        return "heartbeat" if stands(counter, acked) else "question"

    def ack(self) -> bytes:
        """Answer to the newest datagram."""
        return _short(self.session, self.newest, self.key, _FROM_DAEMON)

    def ask(self) -> bytes:
        """A question: whether the agent is there."""
        self.asked += 1
        return _short(self.session, self.asked, self.key, _QUESTION)

    def is_answer(self, data: bytes) -> bool:
        """Whether that is an answer, to a question that is newer than any that was answered before."""
        number = _number(data, self.session, self.key, _ANSWER)
        if number is None or not self.answered < number <= self.asked:
            return False
        self.answered = number
        return True


def session_of(data: bytes) -> bytes:
    """The session that a datagram of an agent names; empty where it is none of this version."""
    if len(data) != HEARTBEAT_BYTES or data[0] != VERSION:
        return b""
    return data[1 : 1 + DATAGRAM_SESSION_BYTES]


def short_session_of(data: bytes) -> bytes:
    """The session that an acknowledgement, a question or an answer names, for who has many on one socket;
    empty where it is none.
    """
    return data[1 : 1 + DATAGRAM_SESSION_BYTES] if len(data) == ACK_BYTES else b""


def address_of(endpoint: str) -> tuple[str, int] | None:
    """Host and port of ``tcp://host:port``, without the brackets of IPv6; None where datagrams have nowhere
    to go (ipc).
    """
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(";")[2].rpartition(":")  # what is before a semicolon is the own end
    return (host.strip("[]"), int(port)) if scheme == "tcp" and host and port.isdigit() else None


def _short(session: bytes, number: int, key: bytes, direction: bytes) -> bytes:
    head = _ACK.pack(VERSION, session, number)
    return head + _code(head, key, direction)


def _number(data: bytes, session: bytes, key: bytes, direction: bytes) -> int | None:
    """The number in ``data`` where it is a datagram of this kind and session."""
    head = data[: _ACK.size]
    if len(data) != ACK_BYTES or not _is_of(key, direction, head, data):
        return None
    version, named, number = _ACK.unpack(head)
    return number if version == VERSION and named == session else None


def _code(head: bytes, key: bytes, direction: bytes) -> bytes:
    return blake2b(head, digest_size=_CODE_BYTES, key=key, person=direction).digest()


def _is_of(key: bytes, direction: bytes, head: bytes, data: bytes) -> bool:
    return hmac.compare_digest(_code(head, key, direction), data[len(head) :])

"""Datagrams byte by byte: what counts as a heartbeat, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.protocol import codec
from oobleckd.protocol.agentmessages import Welcome
from oobleckd.protocol.datagrams import (
    ACK_BYTES,
    HEARTBEAT_BYTES,
    VERSION,
    Receiver,
    Sender,
    address_of,
    session_of,
    short_session_of,
    stands,
)
from oobleckd.protocol.messages import PROTOCOL
from oobleckd.protocol.parts import DatagramSession

SESSION, KEY = b"session1", bytes(range(32))


def ends() -> tuple[Sender, Receiver]:
    return Sender(SESSION, KEY), Receiver(SESSION, KEY)


def exchanged(sender: Sender, receiver: Receiver) -> str:
    """A datagram there, and the answer back."""
    data, counts = sender.heartbeat()
    verdict = receiver.take(data)
    assert counts == (verdict == "heartbeat"), "both ends see it alike"
    sender.heard(receiver.ack())
    return verdict


def test_the_layout() -> None:
    sender, receiver = Sender(SESSION, KEY, counter=0x0102, acked=0x0101), Receiver(SESSION, KEY)
    data, _ = sender.heartbeat()
    assert len(data) == HEARTBEAT_BYTES == 41
    assert data[:25] == bytes([VERSION]) + SESSION + bytes.fromhex("0000000000000103 0000000000000101")
    receiver.take(data)
    ack = receiver.ack()
    assert len(ack) == ACK_BYTES == 33 < HEARTBEAT_BYTES, "an answer is never longer than what it answers"
    assert ack[:17] == bytes([VERSION]) + SESSION + bytes.fromhex("0000000000000103")
    assert session_of(data) == short_session_of(ack) == SESSION
    assert session_of(ack) == short_session_of(data) == b""


def test_the_first_asks_and_the_next_are_heartbeats() -> None:
    sender, receiver = ends()
    assert [exchanged(sender, receiver) for _ in range(4)] == [
        "question",
        "heartbeat",
        "heartbeat",
        "heartbeat",
    ]


@pytest.mark.parametrize(
    ("counter", "acked", "heartbeat"),
    [(1, 0, False), (2, 1, True), (2, 0, False), (9, 8, True), (9, 7, False), (9, 9, False), (9, 10, False)],
)
def test_a_heartbeat_says_that_the_one_before_it_got_through(
    counter: int, acked: int, heartbeat: bool
) -> None:
    assert stands(counter, acked) is heartbeat


def test_after_a_loss_one_asks_again() -> None:
    sender, receiver = ends()
    exchanged(sender, receiver)
    assert sender.heartbeat()[1], "nobody knows yet that this one is lost"
    assert [exchanged(sender, receiver) for _ in range(2)] == ["question", "heartbeat"]
    data, _ = sender.heartbeat()
    assert receiver.take(data) == "heartbeat"  # and its answer is lost
    assert [exchanged(sender, receiver) for _ in range(2)] == ["question", "heartbeat"]


def test_who_is_never_answered_never_heartbeats() -> None:
    sender, receiver = ends()
    assert {receiver.take(sender.heartbeat()[0]) for _ in range(20)} == {"question"}


def test_nothing_counts_twice_or_late() -> None:
    sender, receiver = ends()
    exchanged(sender, receiver)
    first, second = sender.heartbeat()[0], sender.heartbeat()[0]
    assert receiver.take(second) == "question"
    assert receiver.take(second) == receiver.take(first) == "replayed"
    assert receiver.newest == 3


def test_any_changed_bit_is_refused() -> None:
    sender, receiver = ends()
    data, _ = sender.heartbeat()
    for bit in range(8 * HEARTBEAT_BYTES):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert session_of(bytes(changed)) != SESSION or receiver.take(bytes(changed)) == "forged"
    assert receiver.take(data) == "question", "nothing of that was taken in"
    ack = receiver.ack()
    for bit in range(8 * ACK_BYTES):
        changed = bytearray(ack)
        changed[bit // 8] ^= 1 << bit % 8
        sender.heard(bytes(changed))
    assert sender.acked == 0
    sender.heard(ack)
    assert sender.acked == 1


def test_lengths_and_versions() -> None:
    sender, receiver = ends()
    data, _ = sender.heartbeat()
    receiver.take(data)
    for wrong in (b"", data[:-1], data + b"\0", data * 2, bytes([VERSION + 1]) + data[1:]):
        assert session_of(wrong) == b""
    ack = receiver.ack()
    for wrong in (b"", ack[:-1], ack + b"\0", ack * 2):
        assert short_session_of(wrong) == b""
        sender.heard(wrong)
    assert sender.acked == 0


def test_a_direction_is_no_other() -> None:
    """What the daemon says, padded to the agent's layout, is not taken for the agent's, and the other way
    round.
    """
    sender, receiver = ends()
    data, _ = sender.heartbeat()
    assert receiver.take(data) == "question"
    sender.heard(data[:17] + data[-16:])
    assert sender.acked == 0
    ack = receiver.ack()
    assert receiver.take(ack[:17] + bytes(8) + ack[-16:]) == "forged"


def test_another_key_or_session() -> None:
    sender, receiver = Sender(SESSION, bytes(32)), Receiver(SESSION, KEY)
    assert receiver.take(sender.heartbeat()[0]) == "forged"
    receiver = Receiver(SESSION, KEY)
    receiver.take(Sender(SESSION, KEY).heartbeat()[0])
    other = Sender(b"session2", KEY, counter=1)
    other.heard(receiver.ack())
    assert other.acked == 0


def test_an_acknowledgement_of_what_was_never_sent_is_ignored() -> None:
    sender, receiver = Sender(SESSION, KEY, counter=1), Receiver(SESSION, KEY, newest=5)
    sender.heard(receiver.ack())
    assert sender.acked == 0


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://127.0.0.1:7077", ("127.0.0.1", 7077)),
        ("tcp://[::1]:7077", ("::1", 7077)),
        ("tcp://oobleckd-0.oobleckd:7077", ("oobleckd-0.oobleckd", 7077)),
        ("tcp://10.0.0.2:0;10.0.0.1:7077", ("10.0.0.1", 7077)),
        ("ipc:///run/oobleck/agents", None),
        ("inproc://here:1", None),
        ("tcp://nothing", None),
        ("", None),
    ],
)
def test_where_datagrams_go(endpoint: str, address: tuple[str, int] | None) -> None:
    assert address_of(endpoint) == address


def test_a_welcome_of_before_and_for_agents_of_before() -> None:
    """A new field with a default: either end may know nothing of it."""
    session = DatagramSession(7077, SESSION, KEY)
    said = Welcome(PROTOCOL, "daemon", 0.5, 5.0, (), session)
    assert codec.decode_to_worker(codec.encode(said)) == said
    fields = msgspec.msgpack.decode(codec.encode(said))
    del fields["datagrams"]
    before = codec.decode_to_worker(msgspec.msgpack.encode(fields))
    assert isinstance(before, Welcome)
    assert before.datagrams is None

    class WelcomeOfBefore(msgspec.Struct, tag="Welcome"):
        protocol: int
        daemon: str
        beat_s: float
        lease_s: float
        incarnations: tuple[str, ...] = ()

    assert msgspec.msgpack.decode(codec.encode(said), type=WelcomeOfBefore).beat_s == 0.5


@pytest.mark.parametrize("wrong", [{"session": b"short"}, {"key": b""}, {"key": bytes(65)}])
def test_a_session_has_its_lengths(wrong: dict[str, bytes]) -> None:
    session = msgspec.structs.replace(DatagramSession(7077, SESSION, KEY), **wrong)
    with pytest.raises(codec.CodecError):
        codec.decode_to_worker(codec.encode(Welcome(PROTOCOL, "daemon", 0.5, 5.0, (), session)))


def test_a_question_is_answered_once() -> None:
    sender, receiver = ends()
    question = receiver.ask()
    assert len(question) == ACK_BYTES
    answer = sender.answer(question)
    assert answer is not None
    assert len(answer) == ACK_BYTES, "nobody gets more than he sent"
    assert short_session_of(question) == short_session_of(answer) == SESSION
    assert sender.answer(question) is None, "said before"
    assert receiver.is_answer(answer)
    assert not receiver.is_answer(answer), "said before"


def test_an_answer_to_an_older_question_counts_until_a_newer_one_has_come() -> None:
    sender, receiver = ends()
    answers = [sender.answer(receiver.ask()) for _ in range(4)]
    assert [receiver.is_answer(answers[index] or b"") for index in (1, 0, 3, 2)] == [True, False, True, False]


def test_nothing_else_is_an_answer() -> None:
    sender, receiver = ends()
    question = receiver.ask()
    answer = sender.answer(question)
    assert answer is not None
    other = Sender(SESSION, bytes(32)).answer(Receiver(SESSION, bytes(32)).ask())
    elsewhere = Sender(b"session2", KEY).answer(Receiver(b"session2", KEY).ask())
    sender.heartbeat()
    for wrong in (question, receiver.ack(), other, elsewhere, b"", answer[:-1], answer + b"x"):
        assert wrong is not None
        assert not receiver.is_answer(wrong)
    for wrong in (
        answer,
        receiver.ack(),
        Receiver(SESSION, bytes(32)).ask(),
        Receiver(b"session2", KEY).ask(),
    ):
        assert sender.answer(wrong) is None
    never_asked = Sender(SESSION, KEY).answer(Receiver(SESSION, KEY, asked=6).ask())
    assert never_asked is not None
    assert not receiver.is_answer(never_asked)
    assert receiver.is_answer(answer)

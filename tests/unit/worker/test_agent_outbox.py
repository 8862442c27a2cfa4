"""What the agent keeps, and for how long."""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.protocol import codec
from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.message import Message
from oobleckd.protocol.messages import (
    Decide,
    Emptied,
    Flag,
    Held,
    LinkDown,
    Progress,
    Ready,
    Release,
    Report,
    Resume,
    StepDone,
)
from oobleckd.protocol.parts import Counters, Flags
from oobleckd.worker.agent.outbox import MessageHead, Outbox, peek


class Box(Outbox):
    """An outbox that takes messages as they are."""

    def say(self, *messages: Message) -> None:
        for message in messages:
            data = codec.encode(message)
            self.said(peek(data), data)

    def tell(self, message: Message) -> None:
        self.told(peek(codec.encode(message)))

    def kept(self) -> list[object]:
        return [codec.decode_from_worker(data) for data in self.pending()]


def step(round_: int, device: str = "n/0", job: str = "j") -> StepDone:
    counters = Counters(round_, round_, round_)
    return StepDone(device, job, 1, counters, "applied", 0.5, 1.0, 1e-3, 8, "d", 0.1, 0.1)


def part(round_: int, bucket: int) -> CheckpointPart:
    return CheckpointPart("n/0", "j", Counters(round_), "dir", bucket, 2, "file", 1, "hash", {})


def progress(epoch: int, device: str = "n/0") -> Progress:
    return Progress(device, epoch, Counters(), {}, {})


def decide(epoch: int) -> Decide:
    return Decide("n/0", epoch, 0, None, (), {}, hold=False)


def test_rounds_and_parts_are_kept_until_acknowledged() -> None:
    box = Box()
    box.say(step(1), part(1, 0), part(1, 1), step(2), step(2, "n/1"), step(1, job="k"))
    box.acknowledge("j", 1)
    assert box.kept() == [step(2), step(2, "n/1"), step(1, job="k")]
    box.acknowledge("j", 9)
    assert box.kept() == [step(1, job="k")]


def test_rounds_outlive_the_device_that_said_them() -> None:
    box = Box()
    box.say(step(1), Ready("n/0", 2))
    box.forget("n/0")
    assert box.kept() == [step(1)]


def test_the_last_standing_answer_is_kept() -> None:
    box = Box()
    box.say(Ready("n/0", 2), Ready("n/1", 2), Ready("n/0", 2, 77))
    assert box.kept() == [Ready("n/0", 2, 77), Ready("n/1", 2)]


@pytest.mark.parametrize(
    ("answer", "order"),
    [
        (Held("n/0", 2, Counters()), Resume("n/0", 2, 2)),
        (Ready("n/0", 2), Resume("n/0", 2, 2)),
        (progress(2), decide(2)),
        (progress(2), Report("n/0", 2, 1, ())),
        (Ready("n/0", 2), Release("n/0", "j", "d.1")),
        (Held("n/0", 2, Counters()), Report("n/0", 3, 1, ())),
    ],
)
def test_an_order_supersedes_answers(answer: Message, order: Message) -> None:
    box = Box()
    box.say(answer)
    box.tell(msgspec.structs.replace(order, device="n/1"))
    assert box.kept() == [answer]
    box.tell(order)
    assert box.kept() == []


def test_a_resume_that_is_said_twice_does_not_supersede_the_next_hold() -> None:
    box = Box()
    box.say(Held("n/0", 2, Counters(5)))
    box.tell(Resume("n/0", 2, 2, 4))
    assert box.kept() == [Held("n/0", 2, Counters(5))]
    box.tell(Resume("n/0", 2, 2, 5))
    assert box.kept() == []


def test_that_a_job_was_dropped_is_said_again_until_the_next_order() -> None:
    box = Box()
    box.say(Emptied("n/0", "d.1"))
    assert box.kept() == [Emptied("n/0", "d.1")]
    box.tell(Release("n/0", "j", "d.2"))
    assert box.kept() == []


def test_other_orders_supersede_nothing() -> None:
    box = Box()
    box.say(Held("n/0", 2, Counters()))
    box.tell(Flag("n/0", 2, Flags(hold=True)))
    box.tell(decide(2))
    assert box.kept() == [Held("n/0", 2, Counters())]


def test_a_released_job_is_over() -> None:
    box = Box()
    box.say(step(1), step(1, "n/1"), step(1, job="k"))
    box.tell(Release("n/0", "j", "d.1"))
    assert box.kept() == [step(1, "n/1"), step(1, job="k")]


def test_a_higher_epoch_drops_older_answers() -> None:
    box = Box()
    box.say(Ready("n/0", 2), Ready("n/1", 2))
    box.say(progress(3))
    assert box.kept() == [Ready("n/1", 2), progress(3)]


def test_peek_refuses_what_is_no_message() -> None:
    with pytest.raises(codec.CodecError):
        peek(b"\xc1")
    with pytest.raises(codec.CodecError):
        peek(msgspec.msgpack.encode({"device": "n/0"}))


def test_a_broken_link_is_said_again_until_its_device_has_new_ones() -> None:
    """Nobody else knows of it: a daemon that was away, or a connection that took it along, would leave both
    ends waiting.
    """
    box = Box()
    first, second = LinkDown("n/0", "m/0", "reset"), LinkDown("n/0", "k/0", "reset")
    other = LinkDown("n/1", "m/0", "reset")
    box.say(first, second, other)
    box.tell(Report("n/0", 5, 1, ("k/0",)))
    assert box.kept() == [first, second, other]
    box.told(MessageHead("Deploy", "n/0", epoch=6))
    assert box.kept() == [other]
    box.say(first)
    box.tell(Release("n/0", "job", "d.1"))
    box.forget("n/1")
    assert box.kept() == []

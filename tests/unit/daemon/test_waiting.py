"""What may leave before the disk has it: plans, and one round of questions at a time."""

from __future__ import annotations

from oobleckd.core.entries import Restarted
from oobleckd.core.events import Command, KeepState, MakePlan, Record, Tell
from oobleckd.daemon.waiting import Waiting
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import Profile
from oobleckd.protocol.agentmessages import Ack
from oobleckd.protocol.messages import Report

RECORD = Record(Restarted(1, 0.0))
PLAN = MakePlan(7, "oobleck", Setup(Profile("k", "cpu", ()), 1, 0, 0, 1, 1))


def told(node: str, number: int) -> Tell:
    return Tell(node, Ack("j", number))


def asked(node: str, epoch: int = 2) -> Tell:
    return Tell(node, Report(f"{node}/0", epoch, 1, ("x/0",)), ahead=True)


def everything(waiting: Waiting) -> list[Command]:
    first, records, rest = waiting.take()
    waiting.done()
    return [*first, *records, *rest]


def test_what_was_recorded_goes_first_and_the_rest_keeps_its_order() -> None:
    waiting = Waiting()
    assert not waiting
    assert waiting.put([told("a", 1), RECORD, told("b", 2), RECORD, told("a", 3)]) == []
    assert waiting
    assert waiting.take() == ([told("a", 1)], [RECORD, RECORD], [told("b", 2), told("a", 3)])
    assert not waiting


def test_a_snapshot_stays_between_its_records() -> None:
    waiting, kept = Waiting(), KeepState(b"of the first")
    waiting.put([RECORD, kept, told("a", 1)])
    waiting.put([RECORD, told("b", 2)])
    assert waiting.take() == ([], [RECORD, kept, RECORD], [told("a", 1), told("b", 2)])


def test_plans_and_questions_leave_at_once_and_are_said_once() -> None:
    waiting = Waiting()
    assert waiting.put([RECORD, PLAN, asked("a"), asked("b")]) == [PLAN, asked("a"), asked("b")]
    assert everything(waiting) == [RECORD]
    assert waiting.put([asked("a", 3)]) == [asked("a", 3)]


def test_a_question_overtakes_nothing_that_is_told_to_anybody() -> None:
    """Not what waits, nor what is on its way to the disk, nor what the same event says first."""
    waiting = Waiting()
    assert waiting.put([RECORD, told("b", 1), asked("a")]) == []
    waiting.take()
    assert waiting.put([RECORD, asked("a", 3)]) == []
    waiting.done()
    assert waiting.take() == ([], [RECORD], [asked("a", 3)])


def test_two_losses_are_not_both_told_before_the_disk_knows_one() -> None:
    """So of all that survivors were told, a journal lacks one epoch at most."""
    waiting = Waiting()
    assert waiting.put([RECORD, asked("a", 2)]) == [asked("a", 2)]
    assert waiting.put([RECORD, asked("a", 3)]) == []
    waiting.take()
    assert waiting.put([RECORD, asked("a", 4)]) == []
    waiting.done()
    assert waiting.put([asked("a", 5)]) == []
    assert everything(waiting) == [RECORD, asked("a", 4), asked("a", 5)]

"""Which events stay, and what thousands of them cost in a frame."""

from __future__ import annotations

import time

import msgspec

from oobleckd.console.kept import EVENTS_KEPT, MIN_OF_LEVEL, SLACK
from oobleckd.console.model import View, fold
from oobleckd.console.widgets import log
from tests.unit.console.build import NOW, change, heard
from tests.unit.console.test_painters import LIVE


def test_thousands_of_events_stay() -> None:
    view = fold(View(), (heard(change(seq, "node", "is back")) for seq in range(3000)))
    assert len(view.events) == 3000


def test_an_aftermath_pushes_out_no_error() -> None:
    told = [change(1, "job", "a checkpoint cannot be written", level="error")]
    told += [change(seq, "node", "is silent", level="warn") for seq in range(2, 1000)]
    told += [change(seq, "node", "is back") for seq in range(1000, 3 * EVENTS_KEPT)]
    view = fold(View(), map(heard, told))
    assert view.events[0] == told[0]
    assert sum(each.level == "warn" for each in view.events) == 998
    assert view.events[-1] == told[-1]
    assert [each.seq for each in view.events] == sorted(each.seq for each in view.events)
    assert EVENTS_KEPT <= len(view.events) < EVENTS_KEPT + SLACK


def test_of_each_level_the_newest_stay() -> None:
    loud = [change(seq, "node", "is silent", level="warn") for seq in range(2 * EVENTS_KEPT)]
    view = fold(View(), map(heard, [change(0, "node", "first"), *loud]))
    assert view.events[0].text == "first"
    assert view.events[1:] == tuple(loud[-len(view.events) + 1 :])
    assert MIN_OF_LEVEL * 4 <= EVENTS_KEPT


def test_a_warning_of_the_console_itself_is_there_once() -> None:
    def warning(at: float, text: str = "the stream cannot be read") -> object:
        return heard(msgspec.structs.replace(change(3, "console", text, level="warn"), at=at))

    view = fold(LIVE, [warning(NOW + 5 * number) for number in range(100)])  # type: ignore[misc]
    assert [each.at for each in view.events if each.kind == "console"] == [NOW + 495]
    assert len(view.events) == len(LIVE.events) + 1
    other = fold(view, [warning(NOW + 500, "the disk is full")])  # type: ignore[list-item]
    assert [each.at for each in other.events if each.kind == "console"] == [NOW + 495, NOW + 500]


def test_rows_are_picked_again_only_where_events_are_new() -> None:
    view = fold(View(), (heard(change(seq, "node", f"n{seq % 7} is back")) for seq in range(3000)))
    look = log.LogLook(words="n3 back")
    began = time.process_time()
    found = log.selected(view, look)
    first_s = time.process_time() - began
    assert log.selected(view, look) is found
    newer = fold(view, [heard(change(3000, "node", "n3 is back")), heard(change(3001, "node", "n4 is back"))])
    began = time.process_time()
    again = log.selected(newer, look)
    assert time.process_time() - began < first_s / 4
    assert [each.seq for each in again] == [*(each.seq for each in found), 3000]
    assert log.selected(view, look) == found
    assert log.selected(newer, log.LogLook()) == newer.events
    assert [each.seq for each in log.selected(newer, log.LogLook(words="n4"))][-1] == 3001

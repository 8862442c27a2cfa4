"""The ring behind the event stream: resumed by number, honest about gaps."""

from __future__ import annotations

import asyncio

import pytest

from oobleckd.daemon.history import Cursor, History
from oobleckd.protocol.changes import Change, DaemonTrouble


def change(seq: int) -> Change:
    return Change(seq, 0.0, "step", "info", f"change {seq}", ("job:j",) if seq % 2 else ())


def history(*seqs: int, size: int = 100) -> History:
    made = History(size)
    for seq in seqs:
        made.publish(change(seq))
    return made


def taken(cursor: Cursor) -> list[str]:
    return [f"{c.kind} {c.seq}" for c in cursor.take()]


def test_from_now_on() -> None:
    h = history(1, 2)
    cursor = h.cursor(None)
    assert taken(cursor) == []
    h.publish(change(3))
    assert taken(cursor) == ["step 3"]
    assert taken(cursor) == []


@pytest.mark.parametrize(
    ("since", "expected"), [(0, ["step 1", "step 2", "step 3"]), (2, ["step 3"]), (3, [])]
)
def test_resumed_by_number(since: int, expected: list[str]) -> None:
    assert taken(history(1, 2, 3).cursor(since)) == expected


def test_a_gap_is_told_before_what_follows_it() -> None:
    h = history(*range(1, 11), size=3)
    assert taken(h.cursor(4)) == ["gap 7", "step 8", "step 9", "step 10"]
    cursor = h.cursor(None)
    for seq in range(11, 20):
        h.publish(change(seq))
    assert taken(cursor) == ["gap 16", "step 17", "step 18", "step 19"]


def test_holes_of_an_earlier_incarnation_are_gaps() -> None:
    h = History(100)
    h.restore([change(2), change(5)], last=7)
    assert taken(h.cursor(1)) == ["step 2", "gap 4", "step 5", "gap 7"]
    assert taken(h.cursor(7)) == []
    h.publish(change(8))
    assert taken(h.cursor(7)) == ["step 8"]


def test_a_reader_of_another_history_is_told() -> None:
    assert taken(history(1, 2).cursor(50)) == ["gap 2"]


def test_notices_take_no_number() -> None:
    h = history(1, 2)
    cursor = h.cursor(1)
    h.notice("the disk is full", DaemonTrouble("journal"), "error")
    h.publish(change(3))
    assert taken(cursor) == ["step 2", "daemon 2", "step 3"]
    assert taken(h.cursor(2)) == ["step 3"]


def test_story() -> None:
    assert [c.seq for c in history(1, 2, 3).story("job:j")] == [1, 3]


@pytest.mark.asyncio
async def test_waiting_ends_with_news_or_with_time() -> None:
    h = history()
    cursor = h.cursor(None)
    assert not await cursor.wait(0.0)
    waiting = asyncio.create_task(cursor.wait(20.0))
    await asyncio.sleep(0)
    h.publish(change(1))
    assert await waiting
    assert await cursor.wait(0.0), "nothing was taken yet"

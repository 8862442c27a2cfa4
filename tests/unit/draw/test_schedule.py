"""What a drawn schedule looks like, cell by cell."""

from __future__ import annotations

from oobleckd.draw.lines import length, plain
from oobleckd.draw.schedule import Row, ScheduleMark, draw

FIRST = Row(
    "stage 0",
    [ScheduleMark(0, False, 0.0, 1.0), ScheduleMark(0, True, 3.0, 5.0), ScheduleMark(12, True, 5.0, 6.0)],
)
LAST = Row("stage 1", [ScheduleMark(0, False, 1.0, 2.0), ScheduleMark(0, True, 2.0, 3.0)])


def test_ops_waits_and_numbers() -> None:
    drawn = draw([FIRST, LAST], 9 + 18, 10)
    assert [plain(line) for line in drawn] == [
        "stage 0  0░░······0█████12█",
        "stage 1  ···0░░0██·········",
    ]
    assert {length(line) for line in drawn} == {27}


def test_what_is_short_keeps_a_cell_and_loses_its_number() -> None:
    assert plain(draw([FIRST], 9 + 6, 10)[0]) == "stage 0  ░··0██"


def test_many_stages_leave_out_the_middle() -> None:
    rows = [Row(f"stage {number}", LAST.marks) for number in range(20)]
    drawn = [plain(line) for line in draw(rows, 40, 5)]
    assert len(drawn) == 5
    assert [line.split("  ")[0].strip() for line in drawn] == [
        "stage 0", "stage 1", "… 16 more stages", "stage 18", "stage 19",
    ]  # fmt: skip


def test_nothing_to_draw() -> None:
    assert draw([], 80, 5) == []
    assert plain(draw([Row("stage 0", [])], 12, 5)[0]) == "stage 0  ···"

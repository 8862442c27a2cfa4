"""What a screen does with the room that it has: nothing twice, nothing empty that could say something."""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.console.model import View, fold
from oobleckd.console.widgets import copies, coverage, optimes, templatetable, timeline
from oobleckd.draw.lines import length, plain
from tests.unit.console.build import NOW, fetched, job
from tests.unit.console.piloted import shown
from tests.unit.console.scenery import other_jobs, told
from tests.unit.console.scenes import recovered, thousand

SMALL, MEDIUM, WIDE = (80, 24), (120, 40), (200, 50)
FLEET = thousand()


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [SMALL, MEDIUM, WIDE])
async def test_pipelines_that_are_all_in_sight_have_no_strip(size: tuple[int, int]) -> None:
    async with shown(size, recovered().told) as console:
        await console.press("3")
        assert not console.panel("fleet").display
        text = console.panel("timeline").text()
        assert all(f"▾ P{number}" in text for number in range(3))
        assert " s2   n010" in text, "to the last stage"


@pytest.mark.asyncio
async def test_a_thousand_nodes_have_the_strip() -> None:
    async with shown(WIDE, told((), (), fleet=FLEET)) as console:
        await console.press("3")
        assert console.panel("fleet").display
        await console.press("1")
        assert "a cell for each pipeline" in console.panel("pipelines").text()


@pytest.mark.asyncio
async def test_in_a_small_terminal_few_nodes_are_all_in_the_table() -> None:
    async with shown(SMALL, recovered().told) as console:
        await console.press("2")
        assert not console.panel("grid").display
        assert all(f"n{number:03}" in console.panel("table").text() for number in range(12))
    async with shown(SMALL, told((), (), fleet=FLEET)) as console:
        await console.press("2")
        assert console.panel("grid").display


@pytest.mark.asyncio
async def test_in_a_small_terminal_few_jobs_leave_room_for_curves() -> None:
    for others, has_curves in ((0, True), (19, False)):
        async with shown(SMALL, told((), (), others=other_jobs(others))) as console:
            await console.press("9")
            assert console.panel("curves").display == has_curves


@pytest.mark.asyncio
async def test_in_a_small_terminal_coverage_has_the_rows_that_few_templates_leave() -> None:
    async with shown(SMALL, recovered().told) as console:
        await console.press("4")
        assert "▸   11  5 + 2 \u00d7 3" in console.panel("coverage").text()
        assert "     3  3" in console.panel("coverage").text()


def test_a_table_of_op_times_has_no_column_that_is_cut() -> None:
    view = fold(View(), recovered().told)
    assert view.schedule is not None
    for width in (76, 116, 196):
        lines = optimes.paint(view.schedule, timeline.by_pipeline(view.schedule), width)
        assert all("…" not in plain(line) and length(line) <= width for line in lines)
        assert plain(lines[1]).endswith("88%")
    assert "an op" in plain(lines[0])


def test_what_is_not_there_says_why() -> None:
    none = fold(View(), [fetched(templates=())])
    assert plain(templatetable.paint(none, NOW, 80, 5)[0]) == "none: they are made when a job is planned"
    assert "once there are templates" in plain(coverage.paint(none, NOW, 80, 5)[0])
    assert plain(copies.paint(none, NOW, 80, 5)[0]) == "not known yet"
    over = msgspec.structs.replace(none, job=job(state="done"))
    assert plain(copies.paint(over, NOW, 80, 5)[0]) == "nobody holds layers: job-1 is done"
    assert plain(copies.paint(View(), NOW, 80, 5)[0]) == "no job: nobody holds layers"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("screen", "below"),
    [
        ("3", {"timeline": "events"}),
        ("4", {"coverage": "plan", "plan": "copies", "table": "events"}),
        ("8", {"plan": "copies", "impact": "events"}),
    ],
)
async def test_in_a_wide_terminal_a_panel_has_what_another_one_leaves(
    screen: str, below: dict[str, str]
) -> None:
    async with shown(WIDE, recovered().told) as console:
        await console.press(screen)
        for panel, other in below.items():
            upper, lower = console.panel(panel), console.panel(other)
            assert lower.display
            assert (lower.region.x, lower.region.y) == (upper.region.x, upper.region.bottom)
            assert upper.text().splitlines()[-1].strip(), "its last row says something"
    async with shown(SMALL, recovered().told) as console:
        await console.press(screen)
        assert not any(console.panel(other).display for other in below.values())


@pytest.mark.asyncio
async def test_with_marked_nodes_the_ranking_leaves_rows_for_events() -> None:
    async with shown(WIDE, recovered().told) as console:
        await console.press("8", "m")
        ranking, events = console.panel("ranking"), console.panel("events")
        assert ranking.display
        assert events.display
        assert events.region.y == ranking.region.bottom

"""All screens under Textual's pilot: sizes, keys, filters, looks, loads."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from textual.command import CommandPalette
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static

from oobleckd.console.facts import AnyFact, Away, Wants, Watched
from oobleckd.console.keys import SCREENS, TITLES, ScreenName
from oobleckd.console.screens.events import EventsPage
from oobleckd.console.screens.help import Help
from oobleckd.console.screens.nodes import NodesPage
from oobleckd.console.screens.pipelines import Pipelines
from oobleckd.console.screens.prompt import Prompt
from oobleckd.console.themes import COLOURED, THEMES
from oobleckd.console.widgets import nodetable, timeline
from oobleckd.console.widgets.panel import Panel
from tests.helpers.api_server import node_view
from tests.unit.console import build, watching
from tests.unit.console.build import NOW, change, fetched, heard
from tests.unit.console.piloted import Console, shown
from tests.unit.console.test_feed import WAIT_S

SIZES = [(160, 46), (120, 36), (80, 24)]
NAMED: dict[ScreenName, tuple[str, ...]] = {
    "overview": ("node-5/0", "node-4"), "nodes": ("node-4",), "pipelines": ("node-5",), "templates": (),
    "incidents": ("inc-1",), "job": (), "events": ("node-3",), "whatif": ("node-3",),
    "jobs": ("job-1", "running", "exact"),
}  # fmt: skip
"""What is named on each screen, in every size."""


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
async def test_every_screen_in_three_sizes(size: tuple[int, int]) -> None:
    async with shown(size) as console:
        for number, name in enumerate(SCREENS, 1):
            await console.press(str(number))
            assert console.here == name
            assert all(part in console.text() for part in NAMED[name]), name
            assert all(panel.text().strip() for panel in console.app.screen.query(Panel) if panel.display)
            panels = [panel.region for panel in console.app.screen.query(Panel) if panel.display]
            assert sum(region.area for region in panels) == size[0] * size[1], name
            assert not any(a.overlaps(b) for a in panels for b in panels if a is not b), name
            assert TITLES[name] in console.panel("footer").text()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "told",
    [(), (Away(NOW, "no daemon"),), (*watching.facts(), Away(NOW + 3, "gone")), (fetched(jobs=(), nodes=()),)]
)  # fmt: skip
async def test_every_screen_on_bad_days_and_at_any_size(told: tuple[AnyFact, ...]) -> None:
    async with shown((80, 24), told) as console:
        for number in range(1, 9):
            await console.press(str(number), "down", "m", "m", "s", "left")
            for size in ((20, 5), (1, 1), (80, 24)):
                await console.pilot.resize_terminal(*size)
                await console.settle()
            assert console.here == SCREENS[number - 1]


@pytest.mark.asyncio
async def test_a_screen_wants_only_what_it_shows() -> None:
    async with shown() as console:
        wanted = console.source.wanted
        assert (wanted.schedule, wanted.layers, wanted.goodput, wanted.modelled) == (True, True, True, False)
        assert wanted.impacts == (("node-2",), ("node-5",), ("node-1",))
        await console.press("3", "m")
        assert console.source.wanted == Wants(schedule=True, modelled=True)
        await console.press("7")
        assert console.source.wanted == Wants()


@pytest.mark.asyncio
async def test_back_goes_where_one_was() -> None:
    async with shown() as console:
        await console.press("3", "5", "5", "2", "escape")
        assert console.here == "incidents"
        await console.press("escape", "escape", "escape")
        assert console.here == "overview"


@pytest.mark.asyncio
async def test_who_types_before_the_line_has_the_focus_loses_no_key() -> None:
    async with shown() as console:
        await console.press("colon")
        console.app.screen.set_focus(None)
        await console.press(*"nodes", "enter")
        assert console.here == "nodes"


@pytest.mark.asyncio
async def test_commands_by_name() -> None:
    async with shown() as console:
        await console.press("colon")
        assert isinstance(console.app.screen, Prompt)
        await console.write("incid")
        assert console.here == "incidents"
        await console.press("colon")
        await console.write("pipleines")
        assert console.here == "incidents"
        assert "did you mean :pipelines" in console.said()
        await console.press("colon")
        await console.write("theme light")
        assert console.app.theme == "oobleck-light"
        await console.press("colon")
        await console.write("theme pink")
        assert "there is no theme 'pink'" in console.said()
        await console.press("colon", "escape")
        assert console.here == "incidents"
        await console.press("colon")
        await console.write("help")
        assert isinstance(console.app.screen, Help)
        await console.press("escape", "colon")
        await console.write("q")
        assert not console.app.is_running


@pytest.mark.asyncio
async def test_a_filter_stays_until_escape() -> None:
    async with shown() as console:
        await console.press("2", "slash")
        await console.write("lost")
        table = console.panel("table").text()
        assert "node-4" in table
        assert "node-1" not in table
        await console.press("escape")
        assert "node-1" in console.panel("table").text()
        assert console.here == "nodes"


@pytest.mark.asyncio
@pytest.mark.parametrize("words", ["[/]", "[red]x", "[b", "a[/b]c"])
async def test_a_filter_is_shown_letter_by_letter(words: str) -> None:
    async with shown() as console:
        for number, title in (("2", "Table"), ("4", "Templates"), ("5", "Incidents"), ("7", "Events")):
            await console.press(number, "slash")
            await console.write(words)
            assert f'─ {title}: "{words}" ─' in console.drawn()
        await console.press("7", "slash")
        assert words in console.drawn()


@pytest.mark.asyncio
async def test_where_there_is_nothing_to_filter_that_is_said() -> None:
    async with shown() as console:
        await console.press("2")
        for number, here in (("1", "overview"), ("3", "pipelines"), ("6", "job")):
            await console.press(number, "slash")
            assert console.here == here
            assert "there is nothing to filter here" in console.said()
            await console.press("colon")
            await console.write("filter x")
            await console.press("escape")
            assert console.here != here


@pytest.mark.asyncio
async def test_marks_made_on_one_screen_are_seen_on_another() -> None:
    async with shown() as console:
        await console.press("8")
        unmarked = console.panel("table").text()
        await console.press("2", "m", "down", "m", "8")
        assert console.app.marks.names == ("node-1", "node-2")
        marked = [line for line in console.panel("table").text().split("\n") if line not in unmarked]
        assert len(marked) == 2
        await console.press("c", "2")
        assert console.app.marks.names == ()


@pytest.mark.asyncio
async def test_y_copies_the_command_of_what_is_looked_at() -> None:
    expected = {
        "1": "oobleckctl describe job job-1", "2": "oobleckctl describe node node-3",
        "3": "oobleckctl describe schedule job-1",
        "4": "oobleckctl get templates", "5": "oobleckctl describe incident inc-1",
        "6": "oobleckctl describe job job-1",
        "7": "oobleckctl events -f", "8": "oobleckctl what-if --without node-3",
    }  # fmt: skip
    async with shown() as console:
        for number, command in expected.items():
            await console.press(number, *(("down", "down") if number in "28" else ()))
            if number == "8":
                await console.press("m")
            await console.press("y")
            assert console.app.clipboard == command
            assert console.said() == command


@pytest.mark.asyncio
async def test_the_palette_finds_keys_by_their_words() -> None:
    async with shown() as console:
        await console.press("ctrl+p")
        assert isinstance(console.app.screen, CommandPalette)
        console.app.screen.query_one(Input).value = "Incidents"
        async with asyncio.timeout(WAIT_S):
            while console.here != "incidents":
                await console.press("enter")


@pytest.mark.asyncio
async def test_the_palette_is_ascii_where_all_is() -> None:
    async with shown(ascii_only=True) as console:
        await console.press("ctrl+p")
        options = console.app.screen.query_one(OptionList)
        async with asyncio.timeout(WAIT_S):
            while options.option_count < 10:
                await console.pilot.pause()
        drawn = console.drawn()
        assert "Search for keys by their words" in drawn
        assert "Incidents" in drawn
        assert drawn.isascii(), {sign for sign in drawn if not sign.isascii()}


@pytest.mark.asyncio
async def test_help_is_of_the_screen_one_is_on() -> None:
    async with shown() as console:
        await console.press("3", "question_mark")
        text = str(console.app.screen.query_one(Static).render())
        assert "measured, modelled, and the difference of both" in text
        await console.press("question_mark", "8", "question_mark")
        assert "oobleckctl kill-node" in str(console.app.screen.query_one(Static).render())


@pytest.mark.asyncio
async def test_marked_panels_open_their_screens() -> None:
    async with shown() as console:
        await console.press("tab", "enter")
        assert console.here == "nodes"
        await console.press("1", "shift+tab", "enter")
        assert console.here == "events"


@pytest.mark.asyncio
async def test_scrubbing_asks_for_another_step() -> None:
    async with shown() as console:
        await console.press("3", "left")
        assert console.source.wanted.step == 15
        await console.tell(Watched(NOW, schedule=watching.schedule(15)))
        assert console.view.schedule is not None
        assert console.view.schedule.step == 15
        await console.press("right")
        assert console.source.wanted.step == 0


def order_of(console: Console) -> str:
    """By what the rows in sight are sorted."""
    page = console.app.page
    assert isinstance(page, NodesPage | Pipelines)
    return (nodetable.ORDERS if isinstance(page, NodesPage) else timeline.ORDERS)[page.order]


@pytest.mark.asyncio
async def test_sorting_grouping_and_levels() -> None:
    async with shown() as console:
        await console.press("2", "s")
        assert order_of(console) == "state"
        assert "node-4" in console.panel("table").text().split("\n")[1]
        await console.press("g")
        assert "P0" in console.panel("grid").text()
        for order in (*timeline.ORDERS[1:], timeline.ORDERS[0]):
            await console.press("3", "s")
            assert order_of(console) == order
        await console.press("7", "l")
        events = console.app.pages["events"]
        assert isinstance(events, EventsPage)
        assert {told.level for told in events.names()} <= {"warn", "error"}
        assert events.follow
        await console.press("l", "l", "up")
        assert not events.follow
        standing = console.panel("list").text()
        await console.press("f")
        assert events.follow
        assert console.panel("list").text() != standing


@pytest.mark.asyncio
async def test_earlier_incidents_on_the_overview() -> None:
    two = (build.incident(), build.incident(id="inc-2", at=NOW - 10.0))
    async with shown() as console:
        await console.tell(fetched(incidents=two))
        assert "inc-2" in console.panel("recovery").text()
        await console.press("left_square_bracket")
        assert console.panel("recovery").text().startswith("inc-1")
        await console.press("right_square_bracket")
        assert console.panel("recovery").text().startswith("inc-2")


# --------------------------------------------------------------------------- looks and loads


@pytest.mark.asyncio
async def test_ascii_is_ascii_in_frames_too() -> None:
    async with shown(ascii_only=True) as console:
        for number in range(1, 9):
            await console.press(str(number))
            drawn = "".join(
                segment.text for strip in console.app.screen._compositor.render_strips() for segment in strip
            )
            titles = "".join(
                f"{p.border_title or ''}{p.border_subtitle or ''}" for p in console.app.screen.query(Panel)
            )
            assert "".join(c for c in drawn if c not in titles).isascii(), number


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
async def test_ascii_is_ascii_in_all_that_lies_over_a_screen(size: tuple[int, int]) -> None:
    async with shown(size, ascii_only=True) as console:
        for keys in (
            ("t",),
            ("colon",),
            ("question_mark",),
            ("2", "down", "d"),
            ("2", "slash"),
            ("8", "down", "m", "i"),
        ):
            await console.press(*keys)
            assert isinstance(console.app.screen, ModalScreen)
            assert "+- " in console.drawn()
            assert console.drawn().isascii(), keys
            await console.press("escape")
        console.app.say("five … ✗")
        await console.settle()
        assert console.said() == "five ~ x"
        assert console.drawn().isascii()


@pytest.mark.asyncio
async def test_two_thousand_nodes_and_three_hundred_events_a_frame() -> None:
    many = tuple(
        node_view(f"node-{i}", state="lost" if i == 7 else "active", zone=f"r{i % 50}") for i in range(2000)
    )
    async with shown((120, 36), (*watching.facts(), fetched(nodes=many))) as console:
        for number in (2, 8, 7):
            await console.press(str(number), "end", "pageup", "up")
            await console.tell(
                *(heard(change(100 + number * 300 + i, "node", f"event {i}")) for i in range(300))
            )
        assert "event" in console.text()
        await console.press("2", "home")
        assert "node-0 " in console.panel("table").text()
        assert console.panel("table").text().count("\n") < 36


@pytest.mark.asyncio
async def test_an_empty_history_after_a_restart_is_a_new_picture() -> None:
    async with shown() as console:
        gap = msgspec.structs.replace(change(0, "gap", "changes were missed", level="warn"), seq=0)
        await console.tell(
            Away(NOW, "gone"),
            heard(gap),
            fetched(jobs=(), incidents=(), pipelines=(), nodes=(), templates=()),
        )
        for number in range(1, 9):
            await console.press(str(number))
            assert console.view.link == "live"
            assert (console.view.job, console.view.nodes, console.view.events) == (None, (), ())
            assert console.panel("verdict").text().strip()


@pytest.mark.asyncio
async def test_another_theme_is_drawn_at_once() -> None:
    async with shown((80, 24)) as console:
        for theme in THEMES:
            await console.press("colon")
            await console.write(f"theme {theme}")
            first = next(each for each in console.panel("verdict").render_line(0) if each.text.strip())
            assert first.style is not None
            assert first.style.color == COLOURED[theme]["good"].color


@pytest.mark.asyncio
async def test_a_screen_never_comes_with_the_picture_that_it_was_left_with() -> None:
    async with shown((160, 46)) as console:
        await console.press("5", "1")
        newer = (build.incident(), build.incident(id="inc-2", nodes=("node-2",)))
        await console.tell(fetched(incidents=newer))
        console.app.goto("incidents")  # no frame and no message since
        coming = console.app.pages["incidents"]
        assert "inc-2" in coming.query_one("#list", Panel).text()

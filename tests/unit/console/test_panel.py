"""The one widget: what is on the screen after each change, and that only lines that changed are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from textual.app import App, ComposeResult
from textual.strip import Strip

from oobleckd.console.model import View, fold
from oobleckd.console.themes import PLAIN
from oobleckd.console.widgets import grid, nodes, training
from oobleckd.console.widgets.panel import Painter, Panel
from oobleckd.draw.lines import Line, framed, length
from tests.unit.console import build

PICTURES: tuple[tuple[str, ...], ...] = (
    ("one", "two", "three"), ("one", "2", "three"), ("one",), (), ("one", "two", "three", "four", "five"),
    ("1", "two", "three", "4", "5"), ("1", "two", "three", "4"),
)  # fmt: skip


class Framed(App[None]):
    """One panel that shows what it is told."""

    CSS = "Panel { width: 20; height: 8; }"

    def __init__(self, *, ascii_only: bool = False) -> None:
        super().__init__()
        self.ascii_only = ascii_only
        self.lines: tuple[str, ...] = ()
        self.drawn: list[int] = []

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return {"edge": "#808080"}

    def compose(self) -> ComposeResult:
        yield Watched(self)

    def paint(self, _view: View, _now: float, width: int, height: int) -> list[Line]:
        assert width
        assert height
        return [((text, ""),) for text in self.lines]


class Watched(Panel):
    """Tells its application which lines were asked for."""

    def __init__(self, host: Framed) -> None:
        super().__init__(host.paint, "told", id="told")
        self._host = host

    def render_line(self, y: int) -> Strip:
        self._host.drawn.append(y)
        return super().render_line(y)


def seen(app: Framed) -> list[str]:
    """The lines of the panel as the terminal has them."""
    rows = [strip.text for strip in app.screen._compositor.render_strips()]
    return [row[2:18].rstrip() for row in rows[1:7]]


def expected(lines: Sequence[str]) -> list[str]:
    return [*lines, *[""] * (6 - len(lines))]


@pytest.mark.asyncio
async def test_after_each_change_the_screen_shows_all_of_it() -> None:
    app = Framed()
    async with app.run_test(size=(30, 10)) as pilot:
        panel = app.query_one(Panel)
        for app.lines in PICTURES:
            panel.show(View(), 0.0)
            await pilot.pause()
            assert seen(app) == expected(app.lines)


@pytest.mark.asyncio
async def test_a_line_that_looks_as_before_is_not_drawn_again() -> None:
    app = Framed()
    async with app.run_test(size=(30, 10)) as pilot:
        panel = app.query_one(Panel)
        app.lines = PICTURES[0]
        panel.show(View(), 0.0)
        await pilot.pause()
        app.drawn.clear()
        app.lines = PICTURES[1]
        panel.show(View(), 1.0)
        await pilot.pause()
        assert set(app.drawn) == {1}
        app.drawn.clear()
        panel.show(View(), 2.0)
        await pilot.pause()
        assert app.drawn == []


@pytest.mark.asyncio
async def test_another_theme_is_seen_at_once_on_lines_that_did_not_change() -> None:
    app = Framed()
    async with app.run_test(size=(30, 10)) as pilot:
        app.lines = PICTURES[0]
        panel = app.query_one(Panel)
        panel.show(View(), 0.0)
        await pilot.pause()
        before = panel.render_line(0)
        app.theme = "textual-light"
        await pilot.pause()
        assert [segment.style for segment in panel.render_line(0)] != [segment.style for segment in before]


@pytest.mark.asyncio
@pytest.mark.parametrize(("width", "height"), [(4, 8), (20, 2), (1, 1), (0, 0)])
async def test_without_room_nothing_is_painted(width: int, height: int) -> None:
    app = Framed()
    async with app.run_test(size=(30, 10)) as pilot:
        panel = app.query_one(Panel)
        app.lines = PICTURES[0]
        panel.show(View(), 0.0)
        panel.styles.width, panel.styles.height = width, height
        await pilot.pause()
        panel.show(View(), 1.0)
        assert panel.text() == ""
        panel.styles.width, panel.styles.height = 20, 8
        await pilot.pause()
        assert seen(app) == expected(app.lines)


@pytest.mark.parametrize("paint", [training.paint, nodes.paint, grid.paint])
@pytest.mark.parametrize("height", [0, 1, 3, 9])
def test_these_painters_need_no_room(paint: Painter, height: int) -> None:
    painted = framed(paint(fold(View(), build.facts()), build.NOW, 0, height), 0, height)
    assert sum(map(length, painted)) == 0


TITLES = ("[/]", "[red]x", 'Events: "[/"', r"\[b", "plain", "", "[@click=app.quit]x[/]", "$accent 50%")


@pytest.mark.asyncio
@pytest.mark.parametrize("title", TITLES)
async def test_a_title_is_shown_as_it_is_and_set_once(title: str) -> None:
    app = Framed()
    async with app.run_test(size=(60, 10)) as pilot:
        panel = app.query_one(Panel)
        panel.styles.width = 50
        panel.entitle(title, title)
        await pilot.pause()
        rows = [strip.text for strip in app.screen._compositor.render_strips()]
        assert title in rows[0]
        assert title in rows[7]
        refreshed: list[object] = []
        panel.refresh = lambda *args, **_more: refreshed.append(args)  # type: ignore[method-assign, assignment, return-value]
        panel.entitle(title, title)
        assert not refreshed


@pytest.mark.asyncio
@pytest.mark.parametrize("ascii_only", [False, True])
async def test_a_marked_panel_is_seen_without_colours(
    ascii_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = Framed(ascii_only=ascii_only)
    async with app.run_test(size=(30, 10)) as pilot:
        before = _looks(app)
        app.query_one(Panel).set_class(True, "marked")
        await pilot.pause()
        assert _looks(app) != before


def test_without_colours_what_is_done_again_is_not_what_is_moved() -> None:
    assert len({PLAIN["op-again"], PLAIN["op-moved"], PLAIN["op-F"]}) == 3


def _looks(app: Framed) -> list[tuple[str, bool]]:
    """The panel's upper edge, but for its colours."""
    return [
        (each.text, bool(each.style and each.style.reverse))
        for each in app.screen._compositor.render_strips()[0]
    ]

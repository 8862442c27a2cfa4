"""The one widget: what is on the screen after each change, and that only lines that changed are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from textual.app import App, ComposeResult
from textual.strip import Strip

from console.model import View
from console.widgets.panel import Panel
from oobleckd.draw.lines import Line

PICTURES: tuple[tuple[str, ...], ...] = (
    ("one", "two", "three"), ("one", "2", "three"), ("one",), (), ("one", "two", "three", "four", "five"),
    ("1", "two", "three", "4", "5"), ("1", "two", "three", "4"),
)  # fmt: skip


class Framed(App[None]):
    """One panel that shows what it is told."""

    CSS = "Panel { width: 20; height: 8; }"

    def __init__(self) -> None:
        super().__init__()
        self.lines: tuple[str, ...] = ()
        self.drawn: list[int] = []

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return {"edge": "#808080"}

    def compose(self) -> ComposeResult:
        yield Watched(self)

    def paint(self, _view: View, _now: float, _width: int, _height: int) -> list[Line]:
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

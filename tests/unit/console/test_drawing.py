"""Drawings: what a terminal would show, as text that people can compare, and as a picture."""

from __future__ import annotations

import pytest
from textual.app import App, ComposeResult
from textual.widgets import Static

from tests.unit.console.drawing import Drawing, Look, drawn, picture

INK, GROUND = "#ff0000", "#000080"
LOUD = Look(INK, GROUND, bold=True)
QUIET = Look("", "")
SMALL = Drawing(6, ((("ab", LOUD), ("    ", QUIET)), (("▀█│   ", LOUD),)))


def test_a_drawing_as_text_says_every_cell_and_how_it_looks() -> None:
    assert SMALL.text() == (f"ab\n▀█│\n\na = bold {INK} on {GROUND}\nb = ink on ground\n\n2a 4b\n6a\n")


def test_another_colour_of_one_cell_is_another_text() -> None:
    other = Drawing(6, ((("a", LOUD), ("b", LOUD._replace(reverse=True)), ("    ", QUIET)), SMALL.rows[1]))
    assert other.text() != SMALL.text()
    assert other.text().split("\n")[0] == "ab"


def test_a_picture_has_a_place_for_each_cell_and_blocks_reach_the_edges() -> None:
    image = picture(SMALL).convert("RGB")
    width, height = image.width // 6, image.height // 2
    assert (image.width, image.height) == (6 * width, 2 * height)
    ink, ground = (255, 0, 0), (0, 0, 128)
    below = height
    assert image.getpixel((0, below)) == image.getpixel((width - 1, below)) == ink
    assert image.getpixel((0, below + height - 1)) == ground, "the lower half"
    assert image.getpixel((width, below)) == image.getpixel((2 * width - 1, below + height - 1)) == ink
    column = [image.getpixel((2 * width + width // 2, below + y)) for y in range(height)]
    assert set(column) == {ink}, "a frame has no gaps"
    half = picture(SMALL, 0.5)
    assert (half.width, half.height) == (image.width // 2, image.height // 2)


class Two(App[None]):
    def compose(self) -> ComposeResult:
        yield Static("one")
        yield Static("[bold red]two[/]")


@pytest.mark.asyncio
async def test_an_application_is_drawn_as_it_is_shown() -> None:
    app = Two()
    async with app.run_test(size=(10, 3)) as pilot:
        await pilot.pause()
        found = drawn(app)
    assert found.width == 10
    assert ["".join(text for text, _ in row).rstrip() for row in found.rows] == ["one", "two", ""]
    assert [sum(len(text) for text, _ in row) for row in found.rows] == [10, 10, 10]
    assert found.rows[1][0][1].bold

"""The panels of every screen tile the terminal."""

from __future__ import annotations

import itertools

import pytest

from oobleckd.console.screens import places
from oobleckd.console.screens.places import Places, arrangement

SIZES = [(160, 46), (120, 36), (80, 24), (200, 24), (81, 60), (300, 90), (57, 16)]


def tiled(found: Places, width: int, height: int) -> None:
    cells = [
        (x, y)
        for place in found.values()
        for x in range(place.x, place.x + place.width)
        for y in range(place.y, place.y + place.height)
    ]
    assert len(cells) == len(set(cells)) == width * height
    assert set(cells) == {(x, y) for x in range(width) for y in range(height)}


@pytest.mark.parametrize(
    ("width", "height", "name"),
    [
        (160, 46, "wide"),
        (120, 36, "medium"),
        (80, 24, "small"),
        (200, 24, "small"),
        (81, 60, "small"),
        (300, 90, "wide"),
        (20, 5, "tiny"),
    ],
)
def test_every_cell_of_the_overview_belongs_to_one_panel(width: int, height: int, name: str) -> None:
    assert arrangement(width, height) == name
    found = places.overview(width, height)
    tiled(found, width, height)
    if name != "tiny":
        assert all(place.height >= 3 and place.width >= 20 for key, place in found.items() if key != "footer")
        assert ("templates" in found) == (name != "small")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_other_arrangements_tile_too(width: int, height: int) -> None:
    parts = (("a", 0), ("b", 5), ("c", 9))
    tiled(places.one_below_other(width, height, "a", parts), width, height)
    tiled(places.side_by_side(width, height, "a", "b", 40), width, height)


def test_no_size_is_too_small() -> None:
    for width, height in itertools.product((1, 2, 20, 55, 56), (1, 2, 3, 5, 15, 16)):
        tiled(places.overview(width, height), width, height)
        tiled(places.one_below_other(width, height, "a", (("a", 0), ("b", 5))), width, height)


def test_what_has_no_room_goes_from_the_last_one_on() -> None:
    area = places.PagePlace(0, 0, 10, 9)
    assert list(places.above(area, ("a", 0), ("b", 4), ("c", 5))) == ["a", "b"]
    assert places.above(area, ("a", 0), ("b", 4))["a"].height == 5

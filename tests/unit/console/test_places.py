"""The overview's panels tile the terminal."""

from __future__ import annotations

import pytest

from console.screens.places import arrangement, places


@pytest.mark.parametrize(
    ("width", "height", "name"),
    [
        (160, 46, "wide"),
        (120, 36, "medium"),
        (80, 24, "small"),
        (200, 24, "small"),
        (81, 60, "small"),
        (300, 90, "wide"),
    ],
)
def test_every_cell_belongs_to_one_panel(width: int, height: int, name: str) -> None:
    assert arrangement(width, height) == name
    found = places(width, height - 1)
    cells = [
        (x, y)
        for place in found.values()
        for x in range(place.x, place.x + place.width)
        for y in range(place.y, place.y + place.height)
    ]
    assert len(cells) == len(set(cells)) == width * (height - 1)
    assert set(cells) == {(x, y) for x in range(width) for y in range(height - 1)}
    assert all(place.height >= 3 and place.width >= 20 for place in found.values())
    assert ("templates" in found) == (name != "small")

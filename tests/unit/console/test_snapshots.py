"""Every screen in three sizes, and every state, cell by cell: text and styles, against the files in
``snapshots``.

``make snapshots`` writes the files anew; ``git diff`` then shows what looks different.
"""

from __future__ import annotations

import asyncio
import difflib
from pathlib import Path

import pytest

from tests.unit.console import pictures
from tests.unit.console.shots import SHOTS, Shot, complete, taken

FOLDER = Path(__file__).with_name("snapshots")


@pytest.mark.asyncio
@pytest.mark.parametrize("shot", SHOTS, ids=lambda shot: shot.name)
async def test_it_looks_as_it_did(shot: Shot) -> None:
    different = []
    for name, drawing in (await taken(shot)).items():
        path = FOLDER / f"{name}.txt"
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        now = drawing.text()
        if now != before:
            lines = difflib.unified_diff(
                before.splitlines(), now.splitlines(), f"{name} as it was", "as it is", lineterm=""
            )
            different.append("\n".join(lines))
    assert not different, "\n".join([*different, "", "if that is meant: `make snapshots`"])


def test_every_screen_is_there_in_every_size_and_no_file_is_left_over() -> None:
    assert complete()
    expected = {name for shot in SHOTS for name in shot.names}
    assert {path.stem for path in FOLDER.glob("*.txt")} == expected


def test_the_page_of_pictures_shows_them_all() -> None:
    assert pictures.GALLERY.read_text(encoding="utf-8") == pictures.gallery(), "run `make pictures`"
    files = pictures.FOLDER.glob(f"{pictures.PREFIX}*.png")
    made = {path.stem.removeprefix(pictures.PREFIX) for path in files}
    assert made == {name for shot in SHOTS for name in shot.names} | {"web"}
    assert pictures.shown() <= made


async def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.txt"):
        path.unlink()
    for shot in SHOTS:
        for name, drawing in (await taken(shot)).items():
            (FOLDER / f"{name}.txt").write_text(drawing.text(), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(write())

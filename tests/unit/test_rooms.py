"""Rooms of worker and planner are small enough to be looked over, and nothing lies beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = {"plan.py", "policy.py", "profile.py", "schedule.py"}
MAX_FILES = 15


@pytest.mark.parametrize(("part", "flat"), [("worker", set()), ("planner", VOCABULARY)])
def test_nothing_lies_beside_the_rooms(part: str, flat: set[str]) -> None:
    assert {file.name for file in (ROOT / part).glob("*.py")} == {"__init__.py", *flat}


@pytest.mark.parametrize("part", ["worker", "planner"])
def test_a_room_has_no_more_files_than_can_be_looked_over(part: str) -> None:
    rooms = [
        folder for folder in (ROOT / part).rglob("*") if folder.is_dir() and folder.name != "__pycache__"
    ]
    sizes = {folder.name: len(list(folder.glob("*.py"))) for folder in rooms}
    assert {name for name, size in sizes.items() if size > MAX_FILES} == set()

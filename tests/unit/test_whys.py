"""Decisions and the code that they explain name each other: comments by an entry's id, entries by the
modules' paths.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("console", "oobleckd", "planner", "worker")
PAGES = sorted(ROOT.glob("docs/decisions/*.md"))
ID = re.compile(r"\bD-[a-z]+-\d{3}\b")
PATH = re.compile(r"`((?:\w+/)+\w+\.\w+)`")
BELOW = (ROOT, ROOT / "oobleckd")


def modules() -> Iterator[Path]:
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(ROOT)):
                yield path


def ids_in(path: Path) -> set[str]:
    """Ids of decisions that comments of a module name."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return {name for token in tokens if token.type == tokenize.COMMENT for name in ID.findall(token.string)}


def entries() -> dict[str, str]:
    """Id -> text of every decision."""
    found = {}
    for page in PAGES:
        _, *parts = re.split(r"^## (D-\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        found |= dict(zip(parts[::2], parts[1::2], strict=True))
    return found


def code_of(entry: str) -> list[str]:
    """The modules that the last line of ``entry`` names."""
    _, said, line = entry.rpartition("\nCode: ")
    return PATH.findall(line) if said else []


def test_every_id_in_a_comment_is_a_decision_which_names_the_module() -> None:
    named = defaultdict(list)
    for path in modules():
        for name in ids_in(path):
            named[name].append(path.relative_to(ROOT).as_posix())
    known = entries()
    assert sorted(set(named) - set(known)) == [], "no such entry in docs/decisions"
    said = {name: code_of(entry) for name, entry in known.items() if code_of(entry)}
    assert said == {name: sorted(paths) for name, paths in named.items()}, (
        "the line `Code:` of an entry names the modules whose comments have its id, in order"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_decisions_in_force_name_files_that_are_there(page: Path) -> None:
    mine = {name: entry for name, entry in entries().items() if name.startswith(f"D-{page.stem}-")}
    missing = {
        (name, file)
        for name, entry in mine.items()
        if ", in force" in entry
        for file in PATH.findall(entry)
        if not any((folder / file).exists() for folder in BELOW)
    }
    assert missing == set()

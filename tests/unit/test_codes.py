"""Tests of behaviour go by codes and fields. A sentence that people read may be worded anew in one place, and
the snapshots beside its maker are all that changes with it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = frozenset({"reason", "text", "why", "cause", "what", "detail"})
"""Fields that hold a sentence: those of changes, views, proposals, findings and log records."""
SEARCHES = frozenset({"startswith", "endswith", "partition", "removeprefix", "removesuffix", "count"})
EXEMPT = {
    "tests/helpers/folders.py": "what the helper did to a folder, in words of its own",
    "tests/loopback/test_backends.py": "the log files of workers are text and nothing else",
    "tests/unit/console/test_new_history.py": "changes that the test itself has worded",
    "tests/unit/console/test_past.py": "changes that the test itself has worded",
    "tests/unit/test_old_data.py": "sentences of earlier versions, which had no fields",
}


def test_no_test_looks_for_words_of_a_sentence() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in EXEMPT and path != Path(__file__).resolve()
        for line in read(path.read_text())
    ]
    assert not found, "go by a code or a field:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "assert job.reason == 'waits for one-1 to end'",
        "assert 'needs 2 nodes' in world.job().reason",
        "assert found.reason.startswith('merge: b and c')",
        "assert any(' is slow: ' in change.text for change in changes)",
        "assert f'{node} is slow' in caplog.text",
        "assert f'{node} lost' in ' '.join(change.text for change in changes)",
    ],
)
def test_a_sentence_is_found(line: str) -> None:
    assert read(line) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "assert job.cause == 'too-few-nodes'",
        "assert node in incident.reason",
        "assert job.reason == ''",
        "assert 'inc-2 ' in panel.text()",
        "with pytest.raises(PlanError, match='needs 2 nodes'): pass",
    ],
)
def test_a_code_is_not(line: str) -> None:
    assert read(line) == []


def read(source: str) -> list[int]:
    """The lines of ``source`` that compare a field of ``SENTENCES`` with a literal of several words."""
    return sorted({node.lineno for node in ast.walk(ast.parse(source)) if _looks_for_words(node)})


def _looks_for_words(node: ast.AST) -> bool:
    match node:
        case ast.Compare():
            sides = [node.left, *node.comparators]
        case ast.Call(func=ast.Attribute(attr=attr)) if attr in SEARCHES:
            sides = [node.func, *node.args]
        case _:
            return False
    return any(map(_is_sentence, sides)) and any(map(_has_words, sides))


def _is_sentence(node: ast.AST) -> bool:
    called = {id(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
    fields = (part for part in ast.walk(node) if isinstance(part, ast.Attribute) and id(part) not in called)
    return any(field.attr in SENTENCES for field in fields)  # a panel's text() is what a screen shows


def _has_words(node: ast.AST) -> bool:
    """Whether a literal of ``node`` has a space in it."""
    return any(" " in text for text in _literals(node))


def _literals(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.strip():
            yield part.value

"""Who may import whom inside the console, and from the rest of the house."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd import console
from tests.unit.test_imports import loaded_by

HOME = Path(console.__file__).parent
ALLOWED = (
    "oobleckd.console",
    "oobleckd.host.anyfile",
    "oobleckd.host.interpreter",
    "oobleckd.protocol",
    "oobleckd.client",
    "oobleckd.draw",
    "oobleckd.unixhttp",
    "oobleckd.words",
)


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", sorted(HOME.rglob("*.py")), ids=lambda path: str(path.relative_to(HOME)))
def test_of_the_house_the_console_knows_protocol_and_client(path: Path) -> None:
    for name in imported(path):
        top = name.partition(".")[0]
        # One module is a web server, and is loaded for that alone.
        banned = {"torch", "zmq"} | ({"aiohttp"} if path.name != "web.py" else set())
        assert top not in banned, name
        assert top != "oobleckd" or name.startswith(ALLOWED) or name == "oobleckd.__version__", name


@pytest.mark.parametrize(
    "module",
    ["oobleckd.console.app", "oobleckd.console.model", "oobleckd.console.feed", "oobleckd.console.once"],
)
def test_what_needs_no_terminal_loads_no_textual(module: str) -> None:
    assert loaded_by(module).isdisjoint({"textual", "rich", "asyncio", "torch", "numpy", "zmq", "aiohttp"})

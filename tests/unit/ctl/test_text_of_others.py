"""Whatever a verb prints of what others wrote, a terminal obeys none of it; also of an older daemon."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest

from oobleckd import ctl as package
from oobleckd.protocol.changes import Change
from oobleckd.protocol.text import visible
from tests.helpers.api_server import job_view, node_view
from tests.unit.ctl.conftest import Ctl

RAW = "\x1b[2J\x1b]0;title\x07\r\nnode-9  active\u202e\u200b\x9b1m"
OWN_ECHO = {"main.py", "output.py", "completion.py", "docs.py", "apidocs.py", "settingsdocs.py"}


@pytest.mark.parametrize("more", [(), ("-o", "json")])
def test_raw_text_of_an_old_daemon_is_shown_escaped(ctl: Ctl, more: tuple[str, ...]) -> None:
    """Rows, fields, events and errors; and JSON, which says what it was."""
    ctl.api.nodes = [msgspec.structs.replace(node_view("node-1"), reason=RAW, host=RAW)]
    ctl.api.jobs = [msgspec.structs.replace(job_view(), reason=RAW)]
    ctl.api.changes = [Change(1, 1.0, "node", "info", RAW, ("node:node-1",))]
    for words in (
        ("get", "nodes"), ("describe", "node", "node-1"), ("get", "jobs"), ("describe", "job", "job-1"),
        ("events", "--since", "0"), ("story", "node:node-1"), ("pause", RAW),
    ):  # fmt: skip
        result = ctl(*words, *more)
        for line in (result.stdout + result.stderr).split("\n"):
            assert visible(line) == line, words
            assert not line.startswith("node-9"), words


def test_no_verb_prints_past_what_escapes() -> None:
    """Each prints by way of ``ctl.output``."""
    for file in sorted(Path(package.__path__[0]).glob("*.py")):
        if file.name not in OWN_ECHO:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                assert not (isinstance(node, ast.Attribute) and node.attr in {"echo", "secho"}), (
                    f"{file}:{node.lineno}"
                )

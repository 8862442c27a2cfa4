"""The newest lines of a node's log: of the agent, and of its devices where they are to be had."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from oobleckd.worker.telemetry.loglines import MAX_BYTES, MAX_LINES, LogKeeper


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield writer
    os.close(reader)
    os.close(writer)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "file", 1, text, (), None)


def test_the_agent_s_own_lines_are_kept_within_bounds(pipe: int) -> None:
    keeper = LogKeeper(pipe)
    for number in range(MAX_LINES + 5):
        keeper.emit(record(f"line {number}"))
    lines, complete = keeper.newest(10**6)
    assert (len(lines), complete) == (MAX_LINES, False)
    assert (lines[0], lines[-1]) == ("line 5", f"line {MAX_LINES + 4}")
    assert keeper.newest(2)[0] == lines[-2:]
    assert keeper.newest(0)[0] == ()
    for _ in range(100):
        keeper.emit(record("é" * 10_000))
    lines, _ = keeper.newest(MAX_LINES)
    assert sum(len(line.encode()) + 1 for line in lines) <= MAX_BYTES
    assert len(lines) == MAX_BYTES // 20_001


def test_an_entry_of_several_lines_is_several_lines(pipe: int) -> None:
    keeper = LogKeeper(pipe)
    keeper.emit(record("one\n    two"))
    assert keeper.newest(1)[0] == ("    two",)


def test_where_stderr_is_a_file_it_has_what_devices_print_too(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    path.write_text("of a run before\n")
    with path.open("a") as file:
        keeper = LogKeeper(file.fileno())
        keeper.emit(record("of the agent alone"))
        assert keeper.newest(9) == ((), True)
        file.write("a device prints\nand dies\n")
        file.flush()
        assert keeper.newest(9) == (("a device prints", "and dies"), True)
        path.unlink()
        assert keeper.newest(1) == (("and dies",), True), "its name is gone, and it is there"


def test_of_a_long_file_the_end_is_told_by_whole_lines(tmp_path: Path) -> None:
    with (tmp_path / "node.log").open("a") as file:
        keeper = LogKeeper(file.fileno())
        for number in range(50_000):
            file.write(f"line {number}\n")
        file.flush()
        lines, _ = keeper.newest(MAX_LINES)
        assert len(lines) == MAX_LINES
        assert lines[-1] == "line 49999"
        file.write(f"{'x' * (MAX_BYTES - 100)}\n")
        file.flush()
        lines, _ = keeper.newest(MAX_LINES)
        assert all(line.startswith(("line ", "x")) for line in lines)
        assert len(lines) < 12


def test_a_file_that_was_cut_short_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    path.write_text("x" * 100 + "\n")
    with path.open("a") as file:
        keeper = LogKeeper(file.fileno())
        os.truncate(path, 0)
        file.write("after\n")
        file.flush()
        assert keeper.newest(9) == (("after",), True)


def test_a_file_that_may_not_be_read_leaves_the_agent_s_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: object) -> int:
        raise PermissionError

    with (tmp_path / "node.log").open("a") as file:
        keeper = LogKeeper(file.fileno())
        keeper.emit(record("mine"))
        monkeypatch.setattr(os, "open", refused)
        assert keeper.newest(9) == (("mine",), False)

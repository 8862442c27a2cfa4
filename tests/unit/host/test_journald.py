"""Entries for the journal, over a real datagram socket in its place."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.host import journald
from oobleckd.host.journald import FIELDS, JournalHandler, of_story


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "journal"))
        sock.settimeout(60)
        yield sock


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[logging.Logger]:
    handler = JournalHandler(tmp_path / "journal", {"OOBLECK_NODE": "n1"})
    made = logging.getLogger("oobleckd.test")
    made.setLevel(logging.INFO)
    made.propagate = False
    made.addHandler(handler)
    yield made
    made.removeHandler(handler)
    handler.close()


def fields(data: bytes) -> list[tuple[str, str]]:
    """Read an entry as the journal does."""
    found = []
    while data:
        line, _, data = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(data[:8], "little")
            value, data = data[8 : 8 + size], data[8 + size + 1 :]
        found.append((name.decode(), value.decode()))
    return found


def test_an_entry_has_what_it_concerns_in_fields(journal: socket.socket, logger: logging.Logger) -> None:
    story = ("job:tiny-1", "incident:inc-2", "node:n3", "node:n4")
    logger.warning("%s: %s", "incident", "n3 and n4 lost", extra={FIELDS: of_story("incident", story)})
    found = fields(journal.recv(100_000))
    assert {
        ("MESSAGE", "incident: n3 and n4 lost"), ("PRIORITY", "4"), ("OOBLECK_NODE", "n1"),
        ("OOBLECK_KIND", "incident"),
        ("OOBLECK_JOB", "tiny-1"), ("OOBLECK_INCIDENT", "inc-2"), ("OOBLECK_NODE", "n3"),
        ("OOBLECK_NODE", "n4"),
        ("LOGGER", "oobleckd.test"),
    } <= set(found)  # fmt: skip
    assert dict(found)["CODE_FUNC"] == "test_an_entry_has_what_it_concerns_in_fields"


def test_a_traceback_is_one_entry(journal: socket.socket, logger: logging.Logger) -> None:
    try:
        int("no")
    except ValueError:
        logger.exception("it failed")
    found = dict(fields(journal.recv(100_000)))
    assert found["MESSAGE"].splitlines()[0] == "it failed"
    assert found["MESSAGE"].splitlines()[-1] == "ValueError: invalid literal for int() with base 10: 'no'"
    assert found["PRIORITY"] == "3"


def test_an_entry_that_is_too_long_is_cut_and_arrives(journal: socket.socket, logger: logging.Logger) -> None:
    logger.info("ö" * 100_000)
    assert dict(fields(journal.recv(200_000)))["MESSAGE"] == "ö" * 32_768


def test_where_the_journal_is_gone_it_goes_to_stderr(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.info("still said")
    assert capsys.readouterr().err == "still said\n"


def test_the_journal_is_used_only_where_stderr_is_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, journal: socket.socket
) -> None:
    monkeypatch.setattr(journald, "SOCKET", Path(journal.getsockname()))
    with (tmp_path / "stderr").open("w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        own = os.fstat(stderr.fileno())
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
        assert not journald.reaches_journal()
        monkeypatch.setenv("JOURNAL_STREAM", f"{own.st_dev}:{own.st_ino}")
        assert journald.reaches_journal()
        monkeypatch.setenv("JOURNAL_STREAM", f"{own.st_dev}:{own.st_ino + 1}")
        assert not journald.reaches_journal()

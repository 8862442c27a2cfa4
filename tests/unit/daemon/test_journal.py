"""The journal: durable, in order, one owner, and honest on a disk that is full."""

from __future__ import annotations

import math
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from oobleckd.daemon.journal import Journal, JournalClosed, JournalError, JournalLocked, StepRow
from tests.helpers.smalldisk import SmallDisk
from tests.helpers.troubles import Troubles

WAIT_S = 120.0


class Fact(msgspec.Struct, frozen=True, tag=True):
    text: str


class Done(msgspec.Struct, frozen=True, tag=True):
    job: str
    round: int
    loss: float


def step_of(entry: msgspec.Struct) -> StepRow | None:
    if isinstance(entry, Done):
        return StepRow(entry.job, entry.round, entry.round, "applied", entry.loss)
    return None


@contextmanager
def journal_in(folder: Path, troubles: Troubles | None = None) -> Iterator[Journal]:
    journal = Journal(folder, step_of=step_of, on_trouble=troubles or Troubles())
    try:
        yield journal
    finally:
        journal.close()


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond the limit: the kernel's EFBIG, SQLite's "disk is full"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wal_bytes(folder: Path) -> int:
    return (folder / "journal.sqlite-wal").stat().st_size


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    entries = [Fact("a"), Done("j", 0, 0.1), Fact("b"), Done("j", 1, math.inf), Done("k", 0, -0.0)]
    with journal_in(tmp_path) as journal:
        for entry in entries:
            journal.append([entry]).result(WAIT_S)
        assert journal.read(Fact | Done) == entries
    with journal_in(tmp_path) as journal:
        assert journal.read(Fact | Done) == entries
        journal.append([Fact("c"), Fact("d")]).result(WAIT_S)
        assert journal.read(Fact | Done) == [*entries, Fact("c"), Fact("d")]


def test_what_resolved_is_there_for_another_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from tests.unit.daemon.test_journal import Fact, Journal, Troubles, step_of\n"
        "journal = Journal(Path(sys.argv[1]), step_of=step_of, on_trouble=Troubles())\n"
        "journal.append([Fact('kept')]).result(20)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert done.returncode == -9
    with journal_in(tmp_path) as journal:
        assert journal.read(Fact | Done) == [Fact("kept")]


def test_steps_can_be_queried_by_columns(tmp_path: Path) -> None:
    with journal_in(tmp_path) as journal:
        journal.append([Done("j", r, loss) for r, loss in enumerate([2.5, math.nan, 0.1])]).result(WAIT_S)
        with closing(sqlite3.connect(journal.path)) as database:
            rows = database.execute("SELECT step, loss FROM steps WHERE job = 'j' ORDER BY step").fetchall()
        assert rows == [(0, 2.5), (1, None), (2, 0.1)]
        replayed = journal.read(Fact | Done)
    assert math.isnan(replayed[1].loss), "the entry itself keeps every bit"


def test_a_second_owner_is_refused_and_the_first_named(tmp_path: Path) -> None:
    with journal_in(tmp_path):
        code = (
            "import sys; from pathlib import Path; from oobleckd.daemon.journal import *\n"
            "try: Journal(Path(sys.argv[1]), step_of=lambda e: None, on_trouble=print)\n"
            "except JournalLocked as error: print(error, error.hint)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
        )
        assert "another oobleckd (pid " in done.stdout
        assert "--state" in done.stdout
        with pytest.raises(JournalLocked):
            Journal(tmp_path, step_of=step_of, on_trouble=Troubles())
    with journal_in(tmp_path):
        pass


def test_a_full_disk_holds_back_says_so_once_and_loses_nothing(tmp_path: Path) -> None:
    troubles = Troubles()
    with journal_in(tmp_path, troubles) as journal:
        journal.append([Fact("before")]).result(WAIT_S)
        with full_disk(wal_bytes(tmp_path) + 4096):
            held = [journal.append([Fact("x" * 20_000)]) for _ in range(3)]
            troubles.wait_for(1)
            late = journal.append([Fact("after")])
            assert not any(future.done() for future in [*held, late])
            assert journal.trouble
            assert journal.read(Fact | Done) == [Fact("before")]
        for future in [*held, late]:
            future.result(WAIT_S)
        assert not journal.trouble
        assert journal.num_errors >= 1
        assert len(journal.read(Fact | Done)) == 5
    assert "full" in troubles.said[0] or "I/O" in troubles.said[0]
    assert troubles.said[1:] == [""]


def test_closed_on_a_full_disk_tells_nobody_that_it_was_written(tmp_path: Path) -> None:
    troubles = Troubles()
    journal = Journal(tmp_path, step_of=step_of, on_trouble=troubles)
    journal.append([Fact("before")]).result(WAIT_S)
    with full_disk(wal_bytes(tmp_path) + 4096):
        held = journal.append([Fact("x" * 20_000)])
        troubles.wait_for(1)
        journal.close()
    with pytest.raises(JournalClosed):
        held.result(WAIT_S)
    with pytest.raises(JournalClosed):
        journal.append([Fact("late")])
    with journal_in(tmp_path) as again:
        assert again.read(Fact | Done) == [Fact("before")]


def test_unusable_folders_and_files_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be used") as caught:
        Journal(tmp_path / "file", step_of=step_of, on_trouble=Troubles())
    assert "--state" in caught.value.hint


def test_entries_of_another_version_are_an_error(tmp_path: Path) -> None:
    with journal_in(tmp_path) as journal:
        journal.append([Fact("a")]).result(WAIT_S)
        with pytest.raises(JournalError, match="cannot be read"):
            journal.read(Done)
        database = sqlite3.connect(journal.path)
        with closing(database), database:
            database.execute("UPDATE meta SET value = 99 WHERE key = 'format'")
    (
        tmp_path / "journal.copy"
    ).unlink()  # which says the format, too: else the number would be taken for damage
    with pytest.raises(JournalError, match="format 99"):
        Journal(tmp_path, step_of=step_of, on_trouble=Troubles())


def test_a_journal_that_is_removed_under_it_acknowledges_nothing(tmp_path: Path) -> None:
    troubles = Troubles()
    journal = Journal(tmp_path / "state", step_of=step_of, on_trouble=troubles)
    journal.append([Fact("before")]).result(WAIT_S)
    (tmp_path / "state").rename(tmp_path / "moved")
    held = journal.append([Fact("held")])
    troubles.wait_for(1)
    assert "removed while in use" in troubles.said[0]
    assert not held.done()
    (tmp_path / "moved").rename(tmp_path / "state")
    held.result(WAIT_S)
    journal.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
@pytest.mark.parametrize("room", [0, 20_000])
def test_no_room_at_the_start_is_said_as_that(tmp_path: Path, room: int) -> None:
    with SmallDisk(tmp_path / "disk", 2**17 + room) as disk:
        (disk.path / "other").write_bytes(bytes(2**17))
        with pytest.raises(JournalError) as caught:
            Journal(disk.path, step_of=lambda _entry: None, on_trouble=lambda _text: None)
    assert "df" in caught.value.hint
    assert str(disk.path) in caught.value.problem

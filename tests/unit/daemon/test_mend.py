"""A journal whose bytes changed, or whose end is gone: never read as if nothing were, and whole again where
anybody has what is missing.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from oobleckd.core.config import CoreConfig
from oobleckd.core.entries import AnyEntry, Entry
from oobleckd.core.machine import Machine
from oobleckd.daemon import mend as mending
from oobleckd.daemon import records, tables
from oobleckd.daemon.journal import Journal, JournalError
from oobleckd.daemon.mend import Damage
from oobleckd.daemon.service import step_row
from oobleckd.daemon.tables import FORMAT
from tests.helpers.simjobs import make_job
from tests.helpers.world import World

WAIT_S = 120.0


@pytest.fixture(scope="module")
def recorded() -> list[Entry]:
    """The journal of a job that lost a node, came back and was finished."""
    world = World(5, 4)
    world.run_for(1.0)
    world.submit(make_job(steps=12, memory=350, every=4))
    world.until_step(5)
    world.kill("n02")
    world.until_state("recovering")
    world.until_state("done")
    return world.daemon.disk.entries()


def opened(folder: Path) -> Journal:
    return Journal(folder, step_of=step_row, on_trouble=lambda _: None)


def written(folder: Path, entries: list[Entry]) -> Path:
    journal = opened(folder)
    for start in range(0, len(entries), 7):
        journal.append(entries[start : start + 7]).result(WAIT_S)
    journal.close()
    return folder


def read(folder: Path) -> tuple[list[Entry], Damage | None]:
    """What a daemon that starts reads, and what it says of the file."""
    journal = opened(folder)
    try:
        return journal.read(AnyEntry), journal.damage
    finally:
        journal.close()


def named(folder: Path) -> tuple[str, ...]:
    journal = opened(folder)
    journal.close()
    return journal.names


def attempted(folder: Path) -> tuple[list[Entry], Damage | None] | JournalError:
    """The same, or why it cannot start."""
    try:
        return read(folder)
    except JournalError as error:
        return error


def same(one: list[Entry], other: list[Entry]) -> bool:
    return [*map(msgspec.msgpack.encode, one)] == [*map(msgspec.msgpack.encode, other)]


def flip(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def of_page(path: Path, table: str, change: Callable[[sqlite3.Connection], None]) -> None:
    database = sqlite3.connect(path)
    with closing(database), database:
        change(database)


# ---------------------------------------------------------------------- killed


def test_killed_after_every_single_record_the_state_is_that_of_a_prefix(recorded, tmp_path: Path) -> None:
    """A process writes a record, waits until it is durable, and is killed; the next one goes on. Each time
    the state is that of what was written.
    """
    folder = tmp_path / "state"
    config = CoreConfig(daemon="d", state_dir="state")
    for count, entry in enumerate(recorded, 1):
        _in_child(lambda entry=entry: opened(folder).append([entry]).result(WAIT_S))
        entries, damage = read(folder)
        assert damage is None
        assert same(entries, recorded[:count])
        Machine.restore(entries, 1e10, config)


def _in_child(act: Callable[[], object]) -> None:
    """Do it in a process of its own, which is killed right after it."""
    pid = os.fork()
    if not pid:
        try:
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"{sys.executable}: the writer failed"


def test_killed_in_the_middle_of_many_records_none_is_half_there(recorded, tmp_path: Path) -> None:
    """Copies of the files at any moment, as a killed process leaves them."""
    folder, journal = tmp_path / "state", opened(tmp_path / "state")
    for number, start in enumerate(range(0, len(recorded), 5)):
        journal.append(recorded[start : start + 5]).result(WAIT_S)
        left = tmp_path / f"left-{number}"
        shutil.copytree(folder, left)
        entries, damage = read(left)
        assert damage is None
        assert same(entries, recorded[: start + 5])
    journal.close()


# ---------------------------------------------------------------------- flipped


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("which", ["journal.sqlite", "journal.copy"])
def test_one_flipped_bit_loses_nothing(recorded, tmp_path: Path, which: str, seed: int) -> None:
    folder = written(tmp_path / "state", recorded)
    flip(folder / which, random.Random(f"{which} {seed}"))
    entries, damage = read(folder)
    assert same(entries, recorded)
    assert damage is None or (not damage.lost and damage.aside.exists())
    assert read(folder)[1] is None, "mended once is mended"


def test_a_bit_that_makes_texts_of_blobs_loses_nothing(recorded, tmp_path: Path) -> None:
    folder = written(tmp_path / "state", recorded)
    of_page(
        folder / "journal.sqlite",
        "entries",
        lambda db: db.execute("UPDATE entries SET data = CAST(data AS TEXT) WHERE seq < 4"),
    )
    assert same(read(folder)[0], recorded)


@pytest.mark.parametrize("seed", range(60))
def test_many_flipped_bits_are_never_taken_for_what_was_written(recorded, tmp_path: Path, seed: int) -> None:
    """In both files, and in the log that SQLite has not worked in yet."""
    dice = random.Random(seed)
    journal = opened(tmp_path / "live")
    for entry in recorded:
        journal.append([entry]).result(WAIT_S)
    shutil.copytree(tmp_path / "live", tmp_path / "state")
    journal.close()
    folder = tmp_path / "state"
    for _ in range(dice.randrange(1, 40)):
        flip(folder / dice.choice(["journal.sqlite", "journal.sqlite-wal", "journal.copy"]), dice)
    found = attempted(folder)
    if isinstance(found, JournalError):
        assert "format" in found.problem  # the number of the format itself was hit
        return
    entries, damage = found
    assert same(entries, recorded[: len(entries)])
    assert len(entries) == len(recorded) or (damage is not None and damage.lost)
    assert read(folder)[1] is None


def test_a_record_that_was_replaced_by_another_is_found(recorded, tmp_path: Path) -> None:
    """Valid for SQLite in every way."""
    folder = written(tmp_path / "state", recorded)
    of_page(
        folder / "journal.sqlite",
        "entries",
        lambda db: db.execute(
            "UPDATE entries SET data = (SELECT data FROM entries WHERE seq = 2) WHERE seq = 1"
        ),
    )
    entries, damage = read(folder)
    assert same(entries, recorded)
    assert damage is not None
    assert not damage.lost


def test_a_column_that_only_curves_are_drawn_from_is_sealed_too(recorded, tmp_path: Path) -> None:
    folder = written(tmp_path / "state", recorded)
    of_page(folder / "journal.sqlite", "steps", lambda db: db.execute("UPDATE steps SET loss = loss + 1e-9"))
    assert read(folder)[1] is not None


def test_records_that_are_gone_from_the_end_are_missed(recorded, tmp_path: Path) -> None:
    folder = written(tmp_path / "state", recorded)
    of_page(folder / "journal.sqlite", "entries", lambda db: db.execute("DELETE FROM entries WHERE seq > 20"))
    of_page(folder / "journal.sqlite", "steps", lambda db: db.execute("DELETE FROM steps WHERE seq > 20"))
    entries, damage = read(folder)
    assert same(entries, recorded)
    assert damage is not None
    assert not damage.lost


def test_what_neither_file_has_is_lost_with_all_after_it(recorded, tmp_path: Path) -> None:
    folder = written(tmp_path / "state", recorded)
    copied = [*records.Scan(folder / "journal.copy")]
    (folder / "journal.copy").write_bytes(b"".join(records.framed(row) for row in copied if row[1] != 9))
    of_page(folder / "journal.sqlite", "entries", lambda db: db.execute("DELETE FROM entries WHERE seq = 9"))
    of_page(folder / "journal.sqlite", "steps", lambda db: db.execute("DELETE FROM steps WHERE seq = 9"))
    entries, damage = read(folder)
    assert same(entries, recorded[:8])
    assert damage is not None
    assert damage.lost


def test_a_file_that_is_no_database_is_set_aside_and_says_that_all_may_be_lost(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "journal.sqlite").write_bytes(b"no database" * 1000)
    entries, damage = read(folder)
    assert entries == []
    assert damage is not None
    assert damage.lost
    assert damage.aside.read_bytes().startswith(b"no database")


def test_a_journal_that_is_gone_is_mended_from_its_copy(recorded, tmp_path: Path) -> None:
    folder = written(tmp_path / "state", recorded)
    name = named(folder)
    (folder / "journal.sqlite").unlink()
    entries, damage = read(folder)
    assert same(entries, recorded)
    assert damage == Damage("the file was gone", None, lost=False)
    assert read(folder)[1] is None
    assert named(folder) == name


def test_a_journal_of_which_only_the_log_is_left_is_mended_and_the_log_kept(recorded, tmp_path: Path) -> None:
    folder = written(tmp_path / "state", recorded)
    (folder / "journal.sqlite").unlink()
    (folder / "journal.sqlite-wal").write_bytes(b"frames")
    entries, damage = read(folder)
    assert same(entries, recorded)
    assert damage is not None
    assert (folder / "journal.sqlite.damaged-1-wal").read_bytes() == b"frames"


def test_a_journal_that_is_gone_before_anything_was_written_is_no_damage(tmp_path: Path) -> None:
    folder = written(tmp_path / "state", [])
    name = named(folder)
    (folder / "journal.sqlite").unlink()
    assert read(folder) == ([], None)
    assert named(folder) == name


@pytest.mark.parametrize("left", [None, b"", b"garbage" * 100])
def test_a_journal_that_is_gone_with_its_copy_is_lost(recorded, tmp_path: Path, left: bytes | None) -> None:
    folder = written(tmp_path / "state", recorded)
    name = named(folder)
    (folder / "transport.secret").touch()  # a daemon has lived here
    (folder / "journal.sqlite").unlink()
    (folder / "journal.copy").unlink()
    if left is not None:
        (folder / "journal.copy").write_bytes(left)
    entries, damage = read(folder)
    assert entries == []
    assert damage is not None
    assert damage.lost
    assert read(folder) == ([], None)
    assert named(folder) != name


@pytest.mark.parametrize("which", ["journal.sqlite", "journal.copy"])
def test_an_empty_file_is_mended_from_the_other(recorded, tmp_path: Path, which: str) -> None:
    folder = written(tmp_path / "state", recorded)
    name = named(folder)
    (folder / which).write_bytes(b"")
    entries, damage = read(folder)
    assert same(entries, recorded)
    assert damage is None or not damage.lost
    assert named(folder) == name


def test_a_name_that_was_changed_in_one_file_is_that_of_the_other(recorded, tmp_path: Path) -> None:
    folder = written(tmp_path / "state", recorded)
    name = named(folder)
    change = "UPDATE meta SET value = value || 'b' WHERE key = 'names'"
    of_page(folder / "journal.sqlite", "meta", lambda db: db.execute(change))
    assert read(folder)[1] is not None
    assert named(folder) == name


def test_another_name_stands_in_both_files_and_the_one_before_is_known(recorded, tmp_path: Path) -> None:
    folder = written(tmp_path / "state", recorded)
    journal = opened(folder)
    before = journal.names
    journal.rename()
    after = journal.names
    journal.close()
    assert after[1:] == before
    assert named(folder) == after
    (folder / "journal.sqlite").unlink()
    assert named(folder) == after


def test_what_a_full_disk_left_of_a_new_file_goes_at_the_next_start(recorded, tmp_path: Path) -> None:
    folder = written(tmp_path / "state", recorded)
    part = "journal.copy.000000000001-000000000010.77.tmp"
    for name in ("journal.sqlite.new", "journal.sqlite.new-journal", "journal.copy.new", part):
        (folder / name).write_bytes(b"half")
    read(folder)
    assert not [*folder.glob("*.new*"), *folder.glob("*.tmp")]


def test_a_copy_that_is_gone_or_torn_is_written_again(recorded, tmp_path: Path) -> None:
    folder = written(tmp_path / "state", recorded)
    copy = folder / "journal.copy"
    whole = copy.read_bytes()
    for left in (0, len(whole) // 2, len(whole) - 1):
        copy.write_bytes(whole[:left])
        assert read(folder)[1] is None
        assert copy.read_bytes() == whole


def test_a_start_that_is_cut_short_while_it_mends_begins_again(
    recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "state", recorded)
    of_page(folder / "journal.sqlite", "steps", lambda db: db.execute("UPDATE steps SET loss = loss + 1e-9"))

    def cut(*_args: object) -> None:
        raise OSError(5, "the power went")

    with monkeypatch.context() as patched:
        patched.setattr(mending, "write_database", cut)
        with pytest.raises(JournalError, match="the power went"):
            opened(folder)
    entries, damage = read(folder)
    assert same(entries, recorded)
    assert damage is not None
    assert not damage.lost


def test_a_full_disk_is_no_damage(recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "state", recorded)

    def full(_table: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(tables.Table, "check", full)
    with pytest.raises(JournalError, match="disk is full"):
        opened(folder)
    assert not [*folder.glob("*.damaged-*")]


# ---------------------------------------------------------------------- older formats


@pytest.mark.parametrize("format_", [3, 4, 5])
def test_a_journal_of_an_older_format_is_read_and_kept_beside(recorded, tmp_path: Path, format_: int) -> None:
    """Of format 3 records had no seals, of format 4 the journal no name, and of format 5 no snapshots."""
    folder = tmp_path / "state"
    of_format(folder, recorded, format_)
    journal = opened(folder)
    journal.append([recorded[0]]).result(WAIT_S)
    assert same(journal.read(AnyEntry), [*recorded, recorded[0]])
    journal.close()
    assert len(journal.names) == 1
    assert tables.format_of(folder / f"journal.sqlite.format-{format_}") == format_
    assert read(folder)[1] is None
    assert named(folder) == journal.names
    assert tables.format_of(folder / "journal.sqlite") == FORMAT


def test_a_damaged_journal_of_format_4_is_mended_and_then_brought_to_the_present_one(
    recorded, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    of_format(folder, recorded, 4)
    of_page(folder / "journal.sqlite", "steps", lambda db: db.execute("UPDATE steps SET loss = loss + 1e-9"))
    entries, damage = read(folder)
    assert same(entries, recorded)
    assert damage is not None
    assert not damage.lost
    assert read(folder)[1] is None


def test_a_copy_of_format_4_alone_is_enough(recorded, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    of_format(folder, recorded, 4)
    (folder / "journal.sqlite").unlink()
    entries, damage = read(folder)
    assert same(entries, recorded)
    assert damage is not None
    assert read(folder)[1] is None


def test_a_copy_of_a_format_to_come_is_left_alone(recorded, tmp_path: Path) -> None:
    folder = written(tmp_path / "state", recorded)
    (folder / "journal.sqlite").unlink()
    (folder / "journal.copy").write_bytes(records.framed(records.format_row(FORMAT + 1, ["n"])))
    with pytest.raises(JournalError, match=f"has format {FORMAT + 1}"):
        opened(folder)
    assert not (folder / "journal.sqlite").exists()


def of_format(folder: Path, entries: list[Entry], format_: int) -> None:
    """A journal as it was written then."""
    folder.mkdir()
    database = sqlite3.connect(folder / "journal.sqlite")
    seal = ", seal BLOB NOT NULL" if format_ > 3 else ""
    rows: list[records.Row] = []
    with closing(database), database:
        database.executescript(
            "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);"
            f"CREATE TABLE entries (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, data BLOB NOT NULL{seal});"
            "CREATE TABLE steps (seq INTEGER PRIMARY KEY, job TEXT NOT NULL, round INTEGER NOT NULL, step "
            "INTEGER NOT NULL,"
            f" outcome TEXT NOT NULL, loss REAL, data BLOB NOT NULL{seal});"
            "CREATE INDEX steps_of_job ON steps (job, step);"
            f"INSERT INTO meta VALUES ('format', {format_});"
        )
        if format_ > 4:
            database.execute("INSERT INTO meta VALUES ('names', ?)", (records.sealed("n"),))
        for seq, entry in enumerate(entries, 1):
            data, row = msgspec.msgpack.encode(entry), step_row(entry)
            if row is None:
                rows.append(("entries", seq, type(entry).__name__, data))
            else:
                rows.append(("steps", seq, row.job, row.round, row.step, row.outcome, row.loss, data))
            columns = (*rows[-1][1:], *([records.seal(rows[-1])] if format_ > 3 else []))
            database.execute(
                f"INSERT INTO {rows[-1][0]} VALUES ({', '.join('?' * len(columns))})",
                columns,
            )
    if format_ > 3:
        head = ("format", records.FORMAT_ROW, format_, *([["n"]] if format_ > 4 else []))
        (folder / "journal.copy").write_bytes(b"".join(map(records.framed, [head, *rows])))


def test_a_last_record_that_is_damaged_in_both_files_is_said_to_be_lost(recorded, tmp_path: Path) -> None:
    """No number after it shows that it was there, but its torn place in the copy does."""
    folder = written(tmp_path / "state", recorded)
    with closing(sqlite3.connect(folder / "journal.sqlite")) as database, database:
        for table in ("entries", "steps"):
            database.execute(f"DELETE FROM {table} WHERE seq = ?", (len(recorded),))
            database.execute(f"DELETE FROM {table} WHERE seq = ?", (len(recorded) // 2,))
    copy = bytearray((folder / "journal.copy").read_bytes())
    copy[-1] ^= 1
    (folder / "journal.copy").write_bytes(copy)
    entries, damage = read(folder)
    assert same(entries, recorded[:-1])
    assert damage is not None
    assert damage.lost

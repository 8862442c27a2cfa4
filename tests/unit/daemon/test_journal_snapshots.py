"""Snapshots of the state in the journal: what a start comes to is the same with them and without, whatever
dies, is lost or changes a bit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from oobleckd.daemon.journal import Journal
from oobleckd.daemon.mend import Damage
from oobleckd.daemon.records import Scan, framed
from oobleckd.daemon.segments import closed_segments, look_into
from tests.unit.daemon.test_journal import WAIT_S, Done, Fact, full_disk, step_of, wal_bytes

Known = Fact | Done
EVERY = 10
NUM = 47
FILES = ("journal.sqlite", "journal.copy", "journal.copy.000000000021-000000000030")
CALLS = frozenset(
    {"write", "rename", "replace", "unlink", "execute", "fsync", "open", "close", "mkdir", "remove"}
)


def decode(data: bytes) -> list[Known] | None:
    """A snapshot's state in these tests: all that was written."""
    return msgspec.msgpack.decode(data, type=list[Known])


def opened(folder: Path, read: Callable[[bytes], Any] = decode) -> Journal:
    return Journal(folder, step_of=step_of, on_trouble=lambda _: None, decode=read)


def entry(number: int) -> Known:
    return Done("j", number, number / 7) if number % 3 else Fact(f"fact {number}")


def grow(journal: Journal, known: list[Known], upto: int, every: int = EVERY) -> None:
    """Write entries up to number ``upto``, with a snapshot after each ``every``."""
    while len(known) < upto:
        known.append(entry(len(known) + 1))
        last = journal.append([known[-1]])
        if len(known) % every == 0:
            journal.keep_state(msgspec.msgpack.encode(known))
    last.result(WAIT_S)


def written(folder: Path, upto: int = NUM) -> list[Known]:
    known: list[Known] = []
    journal = opened(folder)
    grow(journal, known, upto)
    journal.close()
    return known


def state(folder: Path, read: Callable[[bytes], Any] = decode) -> tuple[list[Known], Damage | None, int]:
    """What a daemon comes to that starts, what it says of the file, and how many records it read."""
    journal = opened(folder, read)
    try:
        start = journal.start(Known)
        return [*(start.state or []), *start.entries], journal.damage, journal.num_read
    finally:
        journal.close()


def in_child(act: Callable[[], object]) -> bool:
    """Do it in a process of its own; whether that was killed meanwhile."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status), f"{sys.executable}: the child failed"
    return os.WIFSIGNALED(status)


def killing(number: int, within: str) -> Callable[[FrameType, str, Any], None]:
    """A profiler that kills its process before call ``number`` into the system, or SQLite, counted from the
    beginning of the function ``within``.
    """
    inside, count = 0, 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal inside, count
        if frame.f_code.co_name == within and event in {"call", "return"}:
            inside += 1 if event == "call" else -1
        elif inside and event == "c_call" and arg.__name__ in CALLS:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return profile


# ---------------------------------------------------------------------- as it should be


def test_a_start_reads_the_newest_snapshot_and_what_came_after_it(tmp_path: Path) -> None:
    known = written(tmp_path)
    found, damage, num_read = state(tmp_path)
    assert (found, damage) == (known, None)
    assert num_read == 2 * (NUM % EVERY), "in both files"
    assert [(each.first, each.last) for each in closed_segments(tmp_path / "journal.copy")] == [
        (1, 10), (11, 20), (21, 30), (31, 40),
    ]  # fmt: skip
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database:
        kept = database.execute("SELECT seq FROM snapshots ORDER BY seq").fetchall()
    assert kept == [(30,), (40,)]


def test_a_journal_goes_on_after_each_start(tmp_path: Path) -> None:
    known: list[Known] = []
    for upto in range(3, 60, 4):
        journal = opened(tmp_path)
        start = journal.start(Known)
        assert [*(start.state or []), *start.entries] == known
        grow(journal, known, upto)
        assert journal.read(Known) == known
        journal.close()
    assert state(tmp_path)[:2] == (known, None)


def test_a_snapshot_is_of_what_was_appended_before_it(tmp_path: Path) -> None:
    """Also where the writer thread has had no turn between."""
    journal, known = opened(tmp_path), [entry(number) for number in range(1, 31)]
    journal.append(known[:10])
    journal.keep_state(msgspec.msgpack.encode(known[:10]))
    journal.append(known[10:20])
    journal.keep_state(msgspec.msgpack.encode(known[:20]))
    journal.append(known[20:]).result(WAIT_S)
    journal.close()
    found, damage, num_read = state(tmp_path)
    assert (found, damage, num_read) == (known, None, 20)


def test_without_any_snapshot_the_state_is_the_same(tmp_path: Path) -> None:
    known = written(tmp_path)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database, database:
        database.execute("DELETE FROM snapshots")
    found, _, _ = state(tmp_path, lambda _: None)
    assert found == known


def test_snapshots_that_this_version_cannot_read_are_passed_over(tmp_path: Path) -> None:
    known = written(tmp_path)

    def older(data: bytes) -> list[Known] | None:
        found = decode(data)
        return found if found is not None and len(found) <= 30 else None

    assert state(tmp_path, older) == (known, None, 2 * 17)
    assert state(tmp_path, lambda _: None) == (known, None, 2 * NUM)
    assert state(tmp_path) == (known, None, 2 * 7), "and are there for the one that can"


def test_a_state_that_nothing_was_written_for_is_kept_once(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.keep_state(b"nothing")
    journal.append([entry(1)])
    journal.keep_state(msgspec.msgpack.encode([entry(1)]))
    journal.keep_state(b"again")
    journal.close()
    assert state(tmp_path)[0] == [entry(1)]


# ---------------------------------------------------------------------- killed


def test_killed_before_every_call_while_a_snapshot_is_kept_nothing_is_lost(tmp_path: Path) -> None:
    known = written(tmp_path / "before", 25)
    for number in range(1, 100):
        folder = tmp_path / f"killed-{number}"
        shutil.copytree(tmp_path / "before", folder)

        def act(folder: Path = folder, number: int = number) -> None:
            threading.setprofile(killing(number, "_keep_states"))
            journal = opened(folder)
            grow(journal, [*known], 33)
            journal.close()

        killed = in_child(act)
        found, damage, _ = state(folder)
        assert found == [entry(each) for each in range(1, len(found) + 1)]
        assert len(found) >= 30
        assert damage is None
        again = [*found]
        journal = opened(folder)
        grow(journal, again, 52)
        journal.close()
        assert state(folder)[:2] == (again, None)
        assert state(folder, lambda _: None)[:2] == (again, None), "and all records are there"
        (folder / "journal.sqlite").unlink()
        found, damage, _ = state(folder, lambda _: None)
        assert (found, damage is not None and not damage.lost) == (again, True), "in the copy as well"
        if not killed:
            assert number > 5
            return
    raise AssertionError("it ends")


@pytest.mark.parametrize("each", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["rotation", "damaged", "gone", "older"])
def test_a_start_killed_before_every_call_begins_again(tmp_path: Path, how: str, each: int) -> None:
    known = written(tmp_path / "before")
    _prepare(tmp_path / "before", how)
    for number in range(1, 400, each):
        folder = tmp_path / f"killed-{number}"
        shutil.copytree(tmp_path / "before", folder)

        def act(folder: Path = folder, number: int = number) -> None:
            sys.setprofile(killing(number, "mend"))
            opened(folder)

        killed = in_child(act)
        found, damage, _ = state(folder)
        assert found == known
        assert damage is None or not damage.lost
        assert state(folder)[:2] == (known, None)
        shutil.rmtree(folder)
        if not killed:
            assert number > 5
            return
    raise AssertionError("it ends")


def _prepare(folder: Path, how: str) -> None:
    journal, copy = folder / "journal.sqlite", folder / "journal.copy"
    match how:
        case "rotation":  # killed before the new file of the copy had its name
            copy.unlink()
        case "damaged":
            with closing(sqlite3.connect(journal)) as database, database:
                database.execute("UPDATE steps SET loss = loss + 1 WHERE seq > 40")
        case "gone":
            journal.unlink()
        case _:  # the copy is of before the newest snapshot
            copy.unlink()
            (segment,) = [each for each in closed_segments(copy) if each.last == 40]
            segment.path.rename(copy)


# ---------------------------------------------------------------------- flipped


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("which", FILES)
def test_one_flipped_bit_changes_no_state(tmp_path: Path, which: str, seed: int) -> None:
    known = written(tmp_path)
    dice = random.Random(f"{which} {seed}")
    data = bytearray((tmp_path / which).read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    (tmp_path / which).write_bytes(data)
    found, damage, _ = state(tmp_path)
    assert found == known
    assert damage is None or not damage.lost
    found, again, _ = state(tmp_path)
    assert (found, again) == (known, None), "mended once is mended"


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(40))
def test_many_flipped_bits_are_never_taken_for_what_was_written(tmp_path: Path, seed: int) -> None:
    known = written(tmp_path)
    dice = random.Random(seed)
    for _ in range(dice.randrange(1, 60)):
        path = tmp_path / dice.choice(FILES)
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
    found, damage, _ = state(tmp_path)
    assert found == known[: len(found)]
    assert len(found) == NUM or (damage is not None and damage.lost)
    assert state(tmp_path)[:2] == (found, None)


@pytest.mark.parametrize("file", ["sqlite", "both"])
def test_a_damaged_snapshot_is_that_of_the_other_file_or_the_one_before(tmp_path: Path, file: str) -> None:
    known = written(tmp_path)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database, database:
        database.execute("UPDATE snapshots SET data = x'80' WHERE seq = 40")
    if file == "both":
        copy = tmp_path / "journal.copy"
        data = bytearray(copy.read_bytes())
        at = data.find(look_into(copy).snapshots[40])
        data[at + 5] ^= 1
        copy.write_bytes(data)
    found, damage, _ = state(tmp_path)
    assert found == known
    assert damage is not None
    assert state(tmp_path)[:2] == (known, None)


# ---------------------------------------------------------------------- lost


@pytest.mark.parametrize("gone", [(name,) for name in FILES] + [FILES[1:], FILES[::2]])
def test_lost_files_are_made_up_for_by_the_others(tmp_path: Path, gone: tuple[str, ...]) -> None:
    known = written(tmp_path)
    for name in gone:
        (tmp_path / name).unlink()
    found, damage, _ = state(tmp_path)
    assert found == known
    assert damage is None or not damage.lost
    assert state(tmp_path)[:2] == (known, None)


def test_without_journal_and_present_copy_the_end_is_said_to_be_lost(tmp_path: Path) -> None:
    known = written(tmp_path)
    (tmp_path / "journal.sqlite").unlink()
    (tmp_path / "journal.copy").unlink()
    found, damage, _ = state(tmp_path)
    assert found == known[:40]
    assert damage is not None
    assert damage.lost
    assert state(tmp_path)[:2] == (found, None)


def test_numbers_that_are_used_again_do_not_meet_what_was_lost(tmp_path: Path) -> None:
    """A record after the snapshot is gone from both, and those after it are set aside."""
    known = written(tmp_path)
    _cut_out(tmp_path, 44)
    found, damage, _ = state(tmp_path)
    assert found == known[:43]
    assert damage is not None
    assert damage.lost
    journal, again = opened(tmp_path), [*found]
    journal.start(Known)
    for number in range(44, 75):
        again.append(Fact(f"another {number}"))
        journal.append([again[-1]])
    journal.keep_state(msgspec.msgpack.encode(again))
    journal.close()
    assert state(tmp_path)[:2] == (again, None)
    assert state(tmp_path, lambda _: None)[:2] == (again, None)


def _cut_out(folder: Path, seq: int) -> None:
    with closing(sqlite3.connect(folder / "journal.sqlite")) as database, database:
        database.execute("DELETE FROM entries WHERE seq = ?", (seq,))
        database.execute("DELETE FROM steps WHERE seq = ?", (seq,))
    copy = folder / "journal.copy"
    copy.write_bytes(b"".join(framed(row) for row in [*Scan(copy)] if row[1] != seq))


# ---------------------------------------------------------------------- a full disk


def test_a_full_disk_keeps_no_snapshot_and_loses_nothing(tmp_path: Path) -> None:
    known: list[Known] = []
    journal = opened(tmp_path)
    grow(journal, known, 25)
    with full_disk(wal_bytes(tmp_path) + 60_000):
        journal.keep_state(bytes(200_000))
        known.append(entry(26))
        journal.append(known[-1:]).result(WAIT_S)
    journal.close()
    assert state(tmp_path)[:2] == (known, None)
    journal = opened(tmp_path)
    grow(journal, known, 45)
    journal.close()
    found, damage, num_read = state(tmp_path)
    assert (found, damage, num_read) == (known, None, 10)


def test_a_copy_that_cannot_be_cut_goes_on_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Known] = []
    journal = opened(tmp_path)
    grow(journal, known, 15)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", _full)
        grow(journal, known, 45)
    journal.close()
    assert len(closed_segments(tmp_path / "journal.copy")) == 1
    assert state(tmp_path)[:2] == (known, None)
    assert look_into(tmp_path / "journal.copy").snapshots.keys() == {40}, "cut at the next start"
    (tmp_path / "journal.sqlite").unlink()
    assert state(tmp_path, lambda _: None)[0] == known


def _full(_self: Path, _target: Path) -> None:
    raise OSError(28, "No space left on device")


def test_a_present_copy_that_was_removed_is_there_again_after_the_next_snapshot(tmp_path: Path) -> None:
    known: list[Known] = []
    journal = opened(tmp_path)
    grow(journal, known, 15)
    (tmp_path / "journal.copy").unlink()
    grow(journal, known, 25)
    journal.close()
    (tmp_path / "journal.sqlite").unlink()
    found, damage, _ = state(tmp_path)
    assert found == known
    assert damage is not None
    assert not damage.lost

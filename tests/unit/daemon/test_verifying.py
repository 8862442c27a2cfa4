"""The old part of the journal: verified in a process of its own, put right from the other file, and dropped
when its steps were kept for long enough.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from oobleckd.daemon.curves import CurveQuestion
from oobleckd.daemon.mend import CHECK, Damage
from oobleckd.daemon.records import rows_in
from oobleckd.daemon.segments import closed_segments, look_into
from oobleckd.daemon.verify import Verified, verify
from oobleckd.daemon.verifying import Verifying
from tests.unit.daemon.test_journal import WAIT_S, Done
from tests.unit.daemon.test_journal_snapshots import FILES, NUM, Known, entry, opened, state, written


class Damages:
    """What was told."""

    def __init__(self) -> None:
        self.said: list[tuple[Damage, bool]] = []

    def __call__(self, damage: Damage, mended: bool) -> None:
        self.said.append((damage, mended))


def verified(folder: Path, over: tuple[str, ...] = ()) -> tuple[Verified, list[tuple[Damage, bool]]]:
    """What a daemon finds that runs on ``folder``."""
    journal, damages = opened(folder), Damages()
    journal.start(Known)
    try:
        return asyncio.run(Verifying(journal, lambda: over, damages).once()), damages.said
    finally:
        journal.close()


def calm(folder: Path, upto: int = NUM) -> list[Known]:
    """A journal in which nothing is left to do."""
    known = written(folder, upto)
    verified(folder)
    return known


def sql(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / "journal.sqlite")) as database, database:
        for statement in statements:
            database.execute(statement)


def read(folder: Path) -> list[Known]:
    journal = opened(folder)
    try:
        return journal.read(Known)
    finally:
        journal.close()


def test_what_is_whole_is_left_alone(tmp_path: Path) -> None:
    calm(tmp_path)
    found, said = verified(tmp_path)
    assert found == Verified(num_rows=40)
    assert said == []


def test_snapshots_that_no_start_would_read_leave_the_copy(tmp_path: Path) -> None:
    written(tmp_path)
    copy = tmp_path / "journal.copy"
    before = [each.path.name for each in closed_segments(copy) if look_into(each.path).snapshots]
    found, _ = verified(tmp_path)
    assert before == [*found.rewritten, before[-1]]


def test_old_records_that_were_changed_or_are_gone_are_those_of_the_copy_again(tmp_path: Path) -> None:
    known = calm(tmp_path)
    sql(
        tmp_path,
        "UPDATE steps SET loss = loss + 1 WHERE seq = 4",
        "DELETE FROM entries WHERE seq = 12",
        "UPDATE entries SET data = CAST(data AS TEXT) WHERE seq = 15",
    )
    assert state(tmp_path)[:2] == (known, None), "a start does not look there"
    found, said = verified(tmp_path)
    assert found.num_damaged == 2
    assert [mended for _, mended in said] == [True]
    assert read(tmp_path) == known
    assert verified(tmp_path) == (Verified(num_rows=40), [])


@pytest.mark.parametrize("harm", ["gone", "torn", "flipped", "no head"])
def test_a_closed_file_of_the_copy_is_written_anew_from_the_journal(tmp_path: Path, harm: str) -> None:
    known = calm(tmp_path)
    path = tmp_path / FILES[2]
    data = path.read_bytes()
    match harm:
        case "gone":
            path.unlink()
        case "torn":
            path.write_bytes(data[: len(data) // 2])
        case "flipped":
            path.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
        case _:
            path.write_bytes(data[5:])
    found, said = verified(tmp_path)
    assert found.rewritten == (path.name,)
    assert said == []
    assert verified(tmp_path)[0] == Verified(num_rows=40)
    (tmp_path / "journal.sqlite").unlink()
    assert state(tmp_path, lambda _: None)[0] == known


def test_what_neither_has_of_old_records_is_said_and_nothing_else_suffers(tmp_path: Path) -> None:
    known = written(tmp_path)
    sql(tmp_path, "DELETE FROM steps WHERE seq = 25")
    (tmp_path / FILES[2]).unlink()
    found, said = verified(tmp_path)
    assert found.lost in {(), (25,)}
    assert state(tmp_path)[:2] == (known, None)
    assert not any(damage.lost for damage, _ in said)


def test_a_file_that_is_no_sound_database_is_made_anew_at_the_next_start(tmp_path: Path) -> None:
    known = calm(tmp_path, 400)
    sql(
        tmp_path,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_schema SET rootpage = (SELECT rootpage FROM sqlite_schema WHERE name = 'bins') "
        "WHERE name = 'steps_of_job'",
    )
    found, said = verified(tmp_path)
    assert found.wrong
    assert [mended for _, mended in said] == [False]
    assert (tmp_path / CHECK).exists()
    found_again, damage, _ = state(tmp_path)
    assert found_again == known
    assert damage is not None
    assert not damage.lost
    assert not (tmp_path / CHECK).exists()
    assert verified(tmp_path)[0] == Verified(num_rows=400)


@pytest.mark.thin(5)
@pytest.mark.parametrize("seed", range(60))
def test_one_flipped_bit_anywhere_is_put_right_in_time(tmp_path: Path, seed: int) -> None:
    known = calm(tmp_path, 300)
    dice = random.Random(seed)
    path = dice.choice(sorted(tmp_path.glob("journal.*")))
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    for _ in range(3):  # at a start, beside the daemon, and at the next start
        assert state(tmp_path)[0] == known
        journal = opened(tmp_path)
        found = verify(journal.path, journal.closed_until)
        if found.wrong:
            (tmp_path / CHECK).touch()
        elif found.rows:
            journal.restore([*rows_in(found.rows)]).result(WAIT_S)
        journal.close()
    assert verified(tmp_path)[0] == Verified(num_rows=300)
    assert read(tmp_path) == known


# ---------------------------------------------------------------------- steps that are dropped


def two_jobs(folder: Path) -> list[Known]:
    journal, known = opened(folder), []
    for number in range(1, 101):
        job = "old" if number <= 45 else "new"
        known.append(Done(job, number, 0.5) if number % 5 else entry(number * 3))
        journal.append(known[-1:])
        if number % 10 == 0:
            journal.keep_state(msgspec.msgpack.encode(known))
    journal.close()
    return known


def jobs_in(folder: Path) -> dict[str, int]:
    with closing(sqlite3.connect(folder / "journal.sqlite")) as database:
        return dict(database.execute("SELECT job, count(*) FROM steps GROUP BY job").fetchall())


def test_steps_that_were_kept_for_long_enough_go_and_their_curve_stays(tmp_path: Path) -> None:
    known = two_jobs(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("journal.copy*"))
    found, said = verified(tmp_path, ("old",))
    assert jobs_in(tmp_path) == {"old": 1, "new": 44}, "the last one says where the job ended"
    assert len(found.rewritten) == 9, "five with such steps, and those with snapshots that nobody needs"
    assert found.lost == ()
    assert said == []
    assert sum(path.stat().st_size for path in tmp_path.glob("journal.copy*")) < size
    assert state(tmp_path)[:2] == (known, None)
    assert verified(tmp_path, ("old",))[0].lost == ()
    assert jobs_in(tmp_path) == {"old": 1, "new": 44}, "and do not come back"
    journal = opened(tmp_path)
    assert sum(each.count for each in journal.curve(CurveQuestion("new", 0, 20_000, 10))) == 44
    assert sum(each.count for each in journal.curve(CurveQuestion("old", 0, 20_000, 10))) == 36
    journal.close()


def test_without_a_snapshot_what_is_left_is_replayed(tmp_path: Path) -> None:
    known = two_jobs(tmp_path)
    verified(tmp_path, ("old",))
    left = [each for n, each in enumerate(known, 1) if not (isinstance(each, Done) and n < 44)]
    found, damage, _ = state(tmp_path, lambda _: None)
    assert (found, damage) == (left, None)
    (tmp_path / "journal.sqlite").unlink()
    found, damage, _ = state(tmp_path, lambda _: None)
    assert found == left
    assert damage is not None
    assert not damage.lost


def test_nothing_goes_that_the_snapshot_before_the_newest_needs(tmp_path: Path) -> None:
    written(tmp_path)
    verified(tmp_path, ("j",))
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database:
        (left,) = database.execute("SELECT count(*) FROM steps WHERE seq > 30").fetchone()
    assert left == sum(isinstance(entry(number), Done) for number in range(31, NUM + 1))


def test_a_file_with_no_records_left_goes(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    known: list[Known] = []
    for number in range(1, 61):
        known.append(Done("j" if number <= 40 else "k", number, 0.5))
        journal.append(known[-1:])
        if number % 10 == 0:
            journal.keep_state(msgspec.msgpack.encode(known))
    journal.close()
    verified(tmp_path, ("j",))
    left = [each.first for each in closed_segments(tmp_path / "journal.copy")]
    assert left == [31, 41, 51], "number 40 says where the job ended"
    assert verified(tmp_path, ("j",))[0].rewritten == ()


def test_a_daemon_that_ends_meanwhile_leaves_no_process(tmp_path: Path) -> None:
    written(tmp_path)
    journal = opened(tmp_path)

    async def cut_short() -> None:
        task = asyncio.create_task(Verifying(journal, lambda: (), Damages()).once())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cut_short())
    journal.close()

"""Steps and curves that are read from the journal: those of the history that goes on."""

from __future__ import annotations

import math
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from oobleckd.daemon.journal import Journal, StepRow
from oobleckd.protocol.api import CurveBin

WAIT_S = 120.0


class Trained(msgspec.Struct, frozen=True, tag=True):
    """A step as far as curves need it, and which of its tries it is."""

    job: str
    step: int
    loss: float
    step_s: float = 0.5
    lr: float = 1e-3
    grad_norm: float = 1.0
    outcome: str = "applied"
    tried: int = 1


decode = msgspec.msgpack.Decoder(Trained).decode


def row(entry: msgspec.Struct) -> StepRow | None:
    assert isinstance(entry, Trained)
    return StepRow(entry.job, entry.step, entry.step, entry.outcome, entry.loss)


def opened(folder: Path) -> Journal:
    return Journal(folder, step_of=row, on_trouble=print)


def written(folder: Path, entries: list[Trained], at_once: int = 97) -> Journal:
    journal = opened(folder)
    done = [journal.append(entries[at : at + at_once]) for at in range(0, len(entries), at_once)]
    for future in done:
        future.result(WAIT_S)
    return journal


def ran(job: str, first: int, until: int, tried: int = 1) -> list[Trained]:
    dice = random.Random(f"{job} {first} {tried}")
    return [
        Trained(job, step, 3 * dice.random(), dice.random(), step / 1e6, 2.0, "applied", tried)
        for step in range(first, until)
    ]


def test_steps_are_those_of_a_range_in_order(tmp_path: Path) -> None:
    known = ran("a", 0, 300)
    journal = written(tmp_path, [each for pair in zip(known, ran("b", 0, 300), strict=True) for each in pair])
    assert [decode(data) for data in journal.steps("a", 10, 299, 5)] == known[10:15]
    assert [decode(data) for data in journal.steps("a", 290, 294, 50)] == known[290:295]
    assert journal.steps("a", 300, 400, 50) == []
    assert journal.steps("c", 0, 400, 50) == []
    journal.close()


def test_of_a_step_that_was_done_again_the_last_word_counts(tmp_path: Path) -> None:
    gone_on = [*ran("a", 0, 20), *ran("a", 20, 30, tried=2)]
    repeated = Trained("a", 25, 9.0, outcome="repeated")
    journal = written(tmp_path, [*ran("a", 0, 50), *ran("a", 20, 30, tried=2), repeated])
    assert [decode(data) for data in journal.steps("a", 0, 29, 100)] == gone_on
    assert [decode(data) for data in journal.steps("a", 0, 29, 25)] == gone_on[:25]
    assert [decode(data).tried for data in journal.newest_steps(12)] == [1, *[2] * 10, 1]
    journal.close()


def test_a_row_that_was_changed_is_taken_from_the_copy(tmp_path: Path) -> None:
    known = ran("a", 0, 40)
    journal = written(tmp_path, known)
    journal.keep_state(b"")
    journal.append(ran("a", 40, 41)).result(WAIT_S)
    with closing(sqlite3.connect(journal.path)) as database, database:
        database.execute("UPDATE steps SET data = x'80' WHERE seq = 7")
    assert [decode(data) for data in journal.steps("a", 0, 39, 100)] == known
    journal.close()


# ---------------------------------------------------------------------- curves


def expected(entries: list[Trained], first: int) -> CurveBin:
    losses = [each.loss for each in entries if math.isfinite(each.loss)]
    times = [each.step_s for each in entries]
    norms = [each.grad_norm for each in entries if math.isfinite(each.grad_norm)]
    return CurveBin(
        first + 1, entries[-1].step + 1, len(entries), sum(each.outcome == "skipped" for each in entries),
        min(losses, default=None), _mean(losses), max(losses, default=None),
        min(times), sum(times) / len(times), max(times), entries[-1].lr, _mean(norms),
    )  # fmt: skip


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def same(found: list[CurveBin], entries: list[Trained], width: int) -> None:
    parts = [
        ([each for each in entries if each.step // width == at // width], at)
        for at in range(0, entries[-1].step + 1, width)
    ]
    wanted = [expected(part, at) for part, at in parts if part]
    assert [msgspec.structs.asdict(each) for each in found] == [
        pytest.approx(msgspec.structs.asdict(each), nan_ok=False) for each in wanted
    ]


def test_a_short_curve_is_of_single_steps_and_a_long_one_of_bins(tmp_path: Path) -> None:
    known = ran("a", 0, 12_345)
    journal = written(tmp_path, known, 1000)
    same(journal.curve("a", 100, 200), known[:100], 1)
    same(journal.curve("a", 1000, 100), known[:1000], 10)
    same(journal.curve("a", 12_345, 200), known, 1000)
    same(journal.curve("a", 12_345, 5), known, 3000)
    same(journal.curve("a", 11_500, 200), known[:11_500], 1000)
    assert journal.curve("b", 12_345, 5) == []
    assert journal.curve("a", 0, 5) == []
    journal.close()


def test_a_curve_is_of_the_history_that_goes_on_after_each_rollback_and_start(tmp_path: Path) -> None:
    dice = random.Random(1)
    history: list[Trained] = []
    for tried in range(6):
        back = dice.randrange(len(history) + 1) if tried else 0
        history = history[:back] + ran("a", back, back + dice.randrange(100, 9000), tried)
        written(tmp_path, history[back:], 1000).close()
    more = ran("a", len(history), len(history) + 11_000, 99)
    history += more
    journal = written(tmp_path, more, 1000)
    same(journal.curve("a", len(history), 200), history, 1000)
    journal.close()


def test_what_is_not_finite_is_in_no_mean(tmp_path: Path) -> None:
    bad = [Trained("a", step, math.nan, 1.0, 0.1, math.inf, "skipped") for step in range(3)]
    mixed = [*bad, *ran("a", 3, 6), Trained("a", 6, math.inf)]
    journal = written(tmp_path, mixed)
    same(journal.curve("a", 3, 1), bad, 3)
    same(journal.curve("a", 7, 1), mixed, 7)
    journal.close()


def test_bins_that_were_changed_or_are_gone_are_made_from_their_steps(tmp_path: Path) -> None:
    known = ran("a", 0, 12_345)
    journal = written(tmp_path, known, 1000)
    with closing(sqlite3.connect(journal.path)) as database, database:
        database.execute("UPDATE bins SET data = (SELECT data FROM bins WHERE first = 0) WHERE first = 3000")
        database.execute("DELETE FROM bins WHERE first = 5000")
    same(journal.curve("a", 12_345, 200), known, 1000)
    journal.close()


def test_bins_are_there_after_the_journal_was_made_anew(tmp_path: Path) -> None:
    known = ran("a", 0, 12_345)
    written(tmp_path, known, 1000).close()
    (tmp_path / "journal.sqlite").unlink()
    journal = opened(tmp_path)
    with closing(sqlite3.connect(journal.path)) as database:
        assert database.execute("SELECT count(*) FROM bins").fetchone() == (13,)
    same(journal.curve("a", 12_345, 200), known, 1000)
    journal.close()

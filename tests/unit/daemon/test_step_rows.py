"""Steps and curves that are read from the journal: those of the history that goes on."""

from __future__ import annotations

import itertools
import math
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.daemon.bins import width_at
from oobleckd.daemon.curves import CurveQuestion, starts
from oobleckd.daemon.journal import Journal, StepRow
from oobleckd.daemon.records import seal
from oobleckd.protocol.jobviews import CurveBin

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
    samples: int = 8


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

SEQUENCE = 16


def curve(journal: Journal, job: str, until: int, num_bins: int, first: int = 0, *, log: bool = False) -> Any:
    return journal.curve(CurveQuestion(job, first, until, num_bins, log, SEQUENCE))


def expected(entries: list[Trained]) -> CurveBin:
    losses = [each.loss for each in entries if math.isfinite(each.loss)]
    times = [each.step_s for each in entries]
    norms = [each.grad_norm for each in entries if math.isfinite(each.grad_norm)]
    rates = [SEQUENCE * each.samples / each.step_s for each in entries]
    rates_lr = [each.lr for each in entries]
    return CurveBin(
        entries[0].step + 1, entries[-1].step + 1, len(entries),
        sum(each.outcome == "skipped" for each in entries),
        min(losses, default=None), _mean(losses), max(losses, default=None),
        min(times), sum(times) / len(times), max(times), entries[-1].lr, _mean(norms),
        min(norms, default=None), max(norms, default=None), min(rates_lr), max(rates_lr),
        SEQUENCE * sum(each.samples for each in entries) / sum(times), min(rates), max(rates),
    )  # fmt: skip


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def same(found: list[CurveBin], parts: list[list[Trained]]) -> None:
    assert [msgspec.structs.asdict(each) for each in found] == [
        pytest.approx(msgspec.structs.asdict(expected(part)), nan_ok=False) for part in parts
    ]


def equal(entries: list[Trained], width: int) -> list[list[Trained]]:
    """In parts of ``width`` steps."""
    groups = itertools.groupby(entries, lambda each: each.step // width)
    return [[*group] for _, group in groups]


def test_what_is_in_a_bin_by_hand(tmp_path: Path) -> None:
    known = [
        Trained("a", 0, 4.0, 2.0, 0.1, 1.0, samples=4),
        Trained("a", 1, 2.0, 1.0, 0.2, 3.0, samples=4),
        Trained("a", 2, math.nan, 1.0, 0.3, math.inf, "skipped", samples=4),
        Trained("a", 3, 9.0, 0.0, 0.15, 5.0, samples=4),
    ]
    journal = written(tmp_path, known)
    assert curve(journal, "a", 4, 1) == [
        CurveBin(
            first=1, last=4, count=4, skipped=1, loss_min=2.0, loss_mean=5.0, loss_max=9.0,
            step_s_min=0.0, step_s_mean=1.0, step_s_max=2.0, lr=0.15, grad_norm=3.0,
            grad_norm_min=1.0, grad_norm_max=5.0, lr_min=0.1, lr_max=0.3,
            tokens_per_s=3 * 4 * 16 / 4.0, tokens_per_s_min=32.0, tokens_per_s_max=64.0,
        ),
    ]  # fmt: skip
    journal.close()


def test_a_short_curve_is_of_single_steps_and_a_long_one_of_bins(tmp_path: Path) -> None:
    known = ran("a", 0, 12_345)
    journal = written(tmp_path, known, 1000)
    same(curve(journal, "a", 100, 200), equal(known[:100], 1))
    same(curve(journal, "a", 1000, 100), equal(known[:1000], 10))
    same(curve(journal, "a", 4000, 200), equal(known[:4000], 20))
    same(curve(journal, "a", 9999, 400), equal(known[:9999], 40))
    same(curve(journal, "a", 12_345, 200), equal(known, 100))
    same(curve(journal, "a", 12_345, 5), equal(known, 2500))
    same(curve(journal, "a", 11_511, 2000), equal(known[:11_511], 100))
    assert curve(journal, "b", 12_345, 5) == []
    assert curve(journal, "a", 0, 5) == []
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
    same(curve(journal, "a", len(history), 200), equal(history, 100 * -(-len(history) // 20_000)))
    journal.close()


def test_what_is_not_finite_is_in_no_mean(tmp_path: Path) -> None:
    bad = [Trained("a", step, math.nan, 1.0, 0.1, math.inf, "skipped") for step in range(3)]
    mixed = [*bad, *ran("a", 3, 6), Trained("a", 6, math.inf)]
    journal = written(tmp_path, mixed)
    same(curve(journal, "a", 3, 1), [bad])
    same(curve(journal, "a", 7, 1), [mixed])
    journal.close()


def test_bins_that_were_changed_or_are_gone_are_made_from_their_steps(tmp_path: Path) -> None:
    known = ran("a", 0, 12_345)
    journal = written(tmp_path, known, 1000)
    with closing(sqlite3.connect(journal.path)) as database, database:
        database.execute("UPDATE bins SET data = (SELECT data FROM bins WHERE first = 0) WHERE first = 3000")
        database.execute("DELETE FROM bins WHERE first = 5000")
    same(curve(journal, "a", 12_345, 200), equal(known, 100))
    journal.close()


def test_bins_are_there_after_the_journal_was_made_anew(tmp_path: Path) -> None:
    known = ran("a", 0, 12_345)
    written(tmp_path, known, 1000).close()
    (tmp_path / "journal.sqlite").unlink()
    journal = opened(tmp_path)
    with closing(sqlite3.connect(journal.path)) as database:
        assert database.execute("SELECT count(*) FROM bins").fetchone() == (500 + 24,)
    same(curve(journal, "a", 12_345, 200), equal(known, 100))
    journal.close()


# ---------------------------------------------------------------------- bins of before


class OldBin(msgspec.Struct, array_like=True):
    """As it was written when all bins were of a thousand steps."""

    first: int
    last: int
    count: int
    skipped: int
    loss: tuple[int, float, float, float]
    step_s: tuple[int, float, float, float]
    grad_norm: tuple[int, float, float, float]
    lr: float


def spread(values: list[float]) -> tuple[int, float, float, float]:
    return len(values), min(values), max(values), sum(values)


def with_old_bins(path: Path, known: list[Trained]) -> None:
    """The table as the version before had it."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM bins")
        for part in equal(known, 1000):
            spreads = [
                spread([getattr(each, name) for each in part]) for name in ("loss", "step_s", "grad_norm")
            ]
            old = OldBin(part[0].step, part[-1].step, len(part), 0, *spreads, part[-1].lr)
            row = ("bins", known[0].job, part[0].step, msgspec.msgpack.encode(old))
            database.execute("INSERT INTO bins VALUES (?, ?, ?, ?)", (*row[1:], seal(row)))


def test_bins_of_the_version_before_are_made_anew_from_their_steps_and_stored(tmp_path: Path) -> None:
    known = ran("a", 0, 12_345)
    written(tmp_path, known, 1000).close()
    with_old_bins(tmp_path / "journal.sqlite", known)
    journal = opened(tmp_path)
    same(curve(journal, "a", 12_345, 200), equal(known, 100))
    for _ in range(2):  # what was to be stored takes two turns
        journal.drop_steps([]).result(WAIT_S)
    with closing(sqlite3.connect(journal.path)) as database:
        first = [
            first for (first,) in database.execute("SELECT first FROM bins WHERE job = 'a' ORDER BY first")
        ]
    assert first == [*range(0, 10_000, 20), *range(10_000, 12_300, 100)]
    same(curve(journal, "a", 12_345, 200), equal(known, 100))
    journal.close()


def test_where_the_steps_are_gone_a_curve_is_of_what_bins_had(tmp_path: Path) -> None:
    known = ran("a", 0, 12_345)
    written(tmp_path, known, 1000).close()
    journal = opened(tmp_path)
    with_old_bins(journal.path, known)
    with closing(sqlite3.connect(journal.path)) as database, database:
        database.execute("DELETE FROM steps WHERE step < 12344")
    for log in (False, True):
        found = curve(journal, "a", 12_345, 200, log=log)
        assert [(each.first, each.count) for each in found] == [
            (at + 1, min(1000, 12_345 - at)) for at in range(0, 12_345, 1000)
        ]
        assert found[3].loss_min == min(each.loss for each in known[3000:4000])
        assert (found[3].tokens_per_s, found[3].lr_max) == (0.0, None)
    journal.close()


@pytest.mark.parametrize("log", [False, True])
def test_a_short_run_whose_steps_are_gone_keeps_its_curve(tmp_path: Path, log: bool) -> None:
    known = ran("a", 0, 130)
    journal = written(tmp_path, known)
    with closing(sqlite3.connect(journal.path)) as database, database:
        database.execute("DELETE FROM steps WHERE step < 129")
    same(curve(journal, "a", 130, 200, log=log), equal(known, 20))
    journal.close()


# ---------------------------------------------------------------------- bins that grow


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Journal, list[Trained]]]:
    known = ran("a", 0, 23_456)
    journal = written(tmp_path_factory.mktemp("journal"), known, 1000)
    yield journal, known
    journal.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_bins=st.integers(1, 400))
def test_bins_that_grow_join_exactly_and_have_each_step_once(
    long_run: tuple[Journal, list[Trained]], data: st.DataObject, num_bins: int
) -> None:
    journal, known = long_run
    first = data.draw(st.one_of(st.just(0), st.integers(0, len(known) - 1)))
    until = data.draw(st.integers(first + 1, len(known)))
    found = curve(journal, "a", until, num_bins, first, log=True)
    assert len(found) <= num_bins
    assert (found[0].first, found[-1].last) == (first + 1, until)
    assert [each.first for each in found[1:]] == [each.last + 1 for each in found[:-1]]
    assert all(each.count == each.last - each.first + 1 for each in found)
    same(found, [known[each.first - 1 : each.last] for each in found])


@given(st.integers(0, 10**7), st.integers(1, 10**8), st.integers(1, 2000), st.booleans())
def test_where_bins_begin(first: int, steps: int, num_bins: int, log: bool) -> None:
    question = CurveQuestion("a", first, first + steps, num_bins, log)
    begins = starts(question)
    assert begins == sorted(set(begins))
    assert len(begins) <= num_bins
    assert begins[0] <= first < (begins[1:] or [first + steps])[0]
    assert begins[-1] < first + steps
    if log:
        assert begins[0] == first
        # Wider and wider, but for where they begin to lie on those that are stored.
        widths = [after - at for at, after in itertools.pairwise(begins)]
        assert all(
            after + width_at(at) >= width
            for at, (width, after) in zip(begins, itertools.pairwise(widths), strict=False)
        )


def test_the_beginning_of_a_long_run_is_seen_step_by_step() -> None:
    begins = starts(CurveQuestion("a", 0, 1_000_000, 200, log=True))
    assert begins[:12] == [*range(12)]
    assert 150 < len(begins) <= 200
    assert max(after / at for at, after in itertools.pairwise(begins[20:])) < 1.2


def test_bins_of_a_run_that_goes_on_stay_where_they_are() -> None:
    one, other = (starts(CurveQuestion("a", 0, until, 200, log=True)) for until in (17_000, 31_000))
    assert other[: len(one)] == one

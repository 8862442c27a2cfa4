"""Where a job's time went: it adds up, whatever happens in which order."""

from __future__ import annotations

import random

import pytest

from oobleckd.core.goodput import Book
from oobleckd.protocol.incidentviews import IncidentView, Phase, PhaseView


def incident(at: float, total_s: float, *phases: tuple[Phase, float, float]) -> IncidentView:
    return IncidentView(
        "inc-1", "job-1", "signal 9", ("n1",), at, 2, 3, open=False,
        phases=tuple(PhaseView(*phase) for phase in phases), total_s=total_s, reason="",
    )  # fmt: skip


def trained(steps: int = 10, num_devices: int = 4) -> Book:
    """A step a second."""
    book = Book()
    book.deployed(0.0, num_devices)
    for step in range(steps):
        book.step(step + 1.0, step)
    return book


def close(found: float, wanted: float) -> bool:
    return abs(found - wanted) < 1e-6


def test_undisturbed_steps_are_useful() -> None:
    book = trained()
    assert (book.total_s, book.useful_s) == (40.0, 40.0)
    assert not any(book.lost_s.values())
    assert (book.pace_s, book.best_s, book.best_device_s) == (1.0, 1.0, 4.0)
    assert book.of_fault_free == 1.0


def test_a_step_that_made_no_update_is_lost_as_a_whole() -> None:
    book = trained()
    for step in (10, 11):
        book.step(step + 1.0, step, skipped=True)
    book.step(13.0, 12)
    assert (book.useful_s, book.lost_s["skipped"], book.total_s) == (44.0, 8.0, 52.0)
    book.rolled_back(13.0, 11)
    assert (book.useful_s, book.lost_s["skipped"], book.lost_s["redone"]) == (40.0, 4.0, 8.0)


def test_nothing_counts_before_the_first_layout_and_after_the_end() -> None:
    book = Book()
    book.state(5.0, "waiting")
    book.deployed(10.0, 4)
    book.state(10.0, "running")
    book.step(11.0, 0)
    book.state(12.0, "done")
    book.until(100.0)
    assert book.total_s == 8.0


def test_what_a_loss_took_goes_to_its_phases_and_the_rest_is_done_again() -> None:
    book = trained()
    book.opened()
    book.devices(10.5, 3)
    book.step(12.0, 10)
    book.deployed(13.0, 3)
    book.step(14.0, 11)
    phases: list[tuple[Phase, float, float]] = [
        ("detect", 0.0, 0.1), ("plan", 0.1, 0.2), ("reconfigure", 0.3, 0.4), ("copy", 0.7, 0.8),
        ("resume", 1.5, 2.5),
    ]  # fmt: skip
    book.closed(incident(10.0, 4.0, *phases), 11)
    over_s = 4.0 - 2 * 1.0
    per = (0.5 * 4 + 3.5 * 3) / 4.0
    lost = book.lost_s
    found = [lost["detect"], lost["plan"], lost["reconfigure"], lost["copy"], lost["redone"]]
    wanted = [0.1 * per, 0.2 * per, 0.4 * per, 0.8 * per, (over_s - 1.5) * per]
    assert all(map(close, found, wanted))
    assert close(book.useful_s + sum(lost.values()), book.total_s)


def test_rounds_that_evaluate_are_neither_useful_nor_lost() -> None:
    book = trained()
    book.evaluated(10.4, 9)
    book.evaluated(10.8, 9)
    book.step(11.8, 10)
    assert close(book.evaluated_s, 0.8 * 4)
    assert close(book.useful_s, 44.0)
    assert (book.pace_s, sum(book.lost_s.values())) == (1.0, 0.0)
    book.rolled_back(11.8, 9)
    assert close(book.lost_s["redone"], 0.8 * 4 + 8.0)
    assert (close(book.evaluated_s, 0.0), close(book.useful_s, 36.0)) == (True, True)


def test_what_a_loss_took_in_an_evaluation_is_not_the_evaluation_itself() -> None:
    book = trained()
    book.evaluated(10.4, 9)
    book.opened()
    book.evaluated(12.8, 9)  # of which a round takes 0.4
    book.step(13.8, 10)
    book.closed(incident(10.4, 3.4, ("detect", 0.0, 0.5), ("resume", 0.5, 2.9)), 10)
    assert close(book.evaluated_s, 0.8 * 4)
    assert close(book.useful_s, 44.0)
    assert (close(book.lost_s["detect"], 2.0), close(book.lost_s["redone"], 6.0)) == (True, True)


def test_standing_still_is_waiting() -> None:
    book = trained()
    book.state(10.0, "paused")
    book.state(20.0, "running")
    book.step(21.0, 10)
    assert book.lost_s["waiting"] == 40.0
    assert book.useful_s == 44.0


def test_a_slower_plan_is_degraded() -> None:
    book = trained()
    book.deployed(10.0, 2)
    for step in range(10, 40):
        book.step(10.0 + 4 * (step - 9), step)  # 8 device-seconds a step, where 4 were enough
    assert 0.35 < book.lost_s["degraded"] / (120.0 * 2) <= 0.5
    assert book.of_fault_free == 0.25


def test_a_larger_batch_is_not_degraded_and_a_slower_plan_for_it_is() -> None:
    """Steps of twice the batch take 1.8 s instead of 1; on half as fast a plan 3.6."""
    book = trained()
    assert not book.sized(8)
    at = 10.0
    for step in range(10, 30):
        assert book.sized(16) == (step == 10)
        at += 1.8
        book.step(at, step)
    assert close(book.lost_s["degraded"], 0.0)
    assert (close(book.pace_s, 1.8), close(book.best_s, 1.8), book.of_fault_free) == (True, True, 1.0)
    book.deployed(at, 4)
    for step in range(30, 50):
        assert not book.sized(16)
        at += 3.6
        book.step(at, step)
    assert book.of_fault_free == pytest.approx(0.5)
    assert book.lost_s["degraded"] > 0


def test_back_at_a_smaller_batch_the_best_of_the_larger_one_says_nothing() -> None:
    book = trained()
    book.sized(16)
    assert book.sized(8)
    assert (book.pace_s, book.best_s, book.best_device_s) == (0.5, 0.0, 0.0)
    assert book.of_fault_free == 1.0


def test_a_rollback_makes_what_was_useful_redone() -> None:
    book = trained()
    book.safe(6)
    book.opened()
    book.rolled_back(10.0, 6)
    assert book.lost_s["redone"] == 16.0
    assert close(book.useful_s, 24.0)
    assert [each.step for each in book.stretches] == []


@pytest.mark.parametrize("seed", range(30))
def test_it_adds_up(seed: int) -> None:
    dice, book, now, step, open_at = random.Random(seed), Book(), 0.0, 0, -1.0
    book.deployed(now, 8)

    def act(which: int) -> None:
        match which:
            case 0:
                book.devices(now, dice.randrange(1, 9))
            case 1:
                book.deployed(now, dice.randrange(1, 9))
            case 2:
                book.state(now, dice.choice(["running", "waiting", "paused", "recovering"]))
            case 3:
                book.rerouted()
            case 4:
                book.rolled_back(now, max(0, step - 2))
            case 5:
                book.safe(step - 1)
            case 6 | 7 | 8:
                book.evaluated(now, step)
            case _:
                book.step(now, step)

    for _ in range(400):
        now += dice.uniform(-0.05, 1.0)  # another incarnation's clock may be behind
        act(dice.randrange(18))
        step += 1
        if open_at < 0 and dice.random() < 0.05:
            open_at = now
            book.opened()
        elif open_at >= 0 and dice.random() < 0.2:
            phases: list[tuple[Phase, float, float]] = [
                ("detect", 0.0, dice.random()),
                ("copy", 1.0, dice.random()),
            ]
            book.closed(incident(open_at, max(0.0, now - open_at), *phases), step)
            open_at = -1.0
    pending, evaluated_s = book.split({})
    lost = {cause: book.lost_s[cause] + more for cause, more in pending.items()}
    assert min(lost.values()) >= -1e-9
    assert book.evaluated_s + evaluated_s >= 0.0
    assert sum(lost.values()) + book.evaluated_s + evaluated_s <= book.total_s + 1e-6
    booked_s = book.useful_s + book.evaluated_s + sum(book.lost_s.values())
    assert close(booked_s + book.devices_s, book.total_s)

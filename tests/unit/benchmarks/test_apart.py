"""Stretches of two journals side by side, and what a step takes besides its timeline, worked out by hand."""

from __future__ import annotations

from math import inf

import pytest

from benchmarks.apart import interval_s, overhead, steps_by, stretch
from oobleckd.core.entries import AnyEntry, CheckpointWritten, LayoutDeployed, RolledBack, StepEntry
from oobleckd.planner.plan import Layers, Layout, Plan, Range
from oobleckd.protocol.parts import Counters
from tests.unit.simulator.build import even_profile, job_of


def step(number: int, at: float, step_s: float = 1.0) -> StepEntry:
    counters = Counters(number, number, number)
    return StepEntry("job", counters, "applied", 1, 0.0, 0.0, 0.0, 4, "", step_s, at, 0)


def back(to: int, at: float) -> RolledBack:
    return RolledBack("job", "", Counters(to, to, to), 0, at)


def deployed(step_s: float, devices: str) -> LayoutDeployed:
    """Every device holds all of two layers."""
    layout = Layout(1, 2, {device: Layers.of(Range(0, 2)) for device in devices}, ())
    return LayoutDeployed("job", layout, Plan((), step_s=step_s), Counters(), {}, (), 0.0)


LIVE: list[AnyEntry] = [step(0, 1.0), step(1, 2.5, 1.5), back(0, 3.0), step(0, 5.0, 2.0), step(1, 6.0)]
TOLD_TOGETHER: list[AnyEntry] = [step(2, 3.0), step(3, 4.5), step(9, 10.5)]


def test_steps_that_count() -> None:
    assert [steps_by(LIVE, when) for when in (0.5, 1.0, 2.9, 3.0, 5.5, inf)] == [0, 1, 2, 0, 1, 2]


def test_a_stretch() -> None:
    whole = stretch(LIVE, 2.6, 7.0)
    assert (whole.steps, whole.step_s, whole.first_s) == (0, 1.0, pytest.approx(2.4))
    assert stretch(LIVE, 3.0, 5.0).steps == 1
    empty = stretch(LIVE, 3.0, 4.0)
    assert (empty.steps, empty.step_s, empty.first_s) == (0, 0.0, 1.0)


def test_how_old_the_newest_checkpoint_was_when_a_stretch_began() -> None:
    written = [CheckpointWritten("job", Counters(), "", at) for at in (1.2, 2.6)]
    entries: list[AnyEntry] = [step(0, 1.0), written[0], step(1, 2.5), written[1]]
    assert [stretch(entries, start, 7.0).checkpoint_s for start in (1.0, 2.5, 2.6, 4.0)] == [
        None, pytest.approx(1.3), 0.0, pytest.approx(1.4),
    ]  # fmt: skip


def test_a_round_of_many_steps_began_with_its_first() -> None:
    assert stretch(TOLD_TOGETHER, 0.0, 4.0).first_s == pytest.approx(1.0)
    assert stretch(TOLD_TOGETHER, 4.0, 11.0).first_s == pytest.approx(0.5)
    assert stretch(TOLD_TOGETHER, 4.5, 11.0).first_s == pytest.approx(1.0)


def test_a_round_of_many_steps_counts_as_so_many() -> None:
    mixed: list[AnyEntry] = [step(0, 1.0, 1.0), step(1, 3.0, 2.0), step(2, 5.0, 2.0), step(7, 10.0, 1.0)]
    assert stretch(mixed, 0.0, 11.0).step_s == 1.0


def test_what_a_step_takes_besides() -> None:
    """Alone 0.25 s more than its timeline; with two further holders half a second more than that, for one and
    a half times the sums of two layers of 60 bytes: two thirds to either maker, and a third of means.
    """
    alone = [deployed(1.0, "a"), *(step(n, 1.25 * n) for n in range(6))]
    three = [deployed(1.0, "abc"), *(step(n, 1.75 * n) for n in range(6)), step(6, 99.0)]
    assert interval_s(three, 20.0) == pytest.approx(1.75)
    found = overhead(job_of(), even_profile(2), alone, three, 20.0)
    assert found.commit_s == pytest.approx(0.25)
    assert found.sums_bytes_per_s == pytest.approx(1.5 * 2 * 60 / 0.5)


def test_no_slower_than_alone_means_that_sums_take_no_time() -> None:
    alone = [deployed(1.0, "a"), *(step(n, 1.25 * n) for n in range(6))]
    three = [deployed(1.0, "abc"), *(step(n, 1.2 * n) for n in range(6))]
    assert overhead(job_of(), even_profile(2), alone, three, 20.0).sums_bytes_per_s == inf

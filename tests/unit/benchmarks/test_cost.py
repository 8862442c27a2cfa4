"""What a kill cost, from steps that are written down by hand: torchft's way, torchrun's, and ours."""

import msgspec
import pytest

from benchmarks import surviving
from benchmarks.cost import Cost, summarise
from benchmarks.goals import goals_of
from benchmarks.peers.attempts import Attempt
from benchmarks.peers.recovering import TORCHFT, TORCHRUN, cost_of
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import StepView

KILLED_AT = 5.4


def steady(who, pid, numbers, start_at=0.0, groups=4):
    """A step a second."""
    return [Attempt(who, pid, n, start_at + i, start_at + i + 1, True, groups) for i, n in enumerate(numbers)]


def in_time(*lists):
    return sorted((a for attempts in lists for a in attempts), key=lambda a: a.ended_at)


def test_torchft_discards_the_attempt_and_goes_on_short_until_the_group_is_back():
    survivor = [
        *steady("group0", 1, range(1, 6)),
        Attempt("group0", 1, 5, 5.0, 6.5, False, 4),
        *steady("group0", 1, [6, 7], 6.5, groups=3),
        *steady("group0", 1, [8], 8.5),
    ]
    victim, again = steady("group1", 2, range(1, 6)), steady("group1", 3, [8], 8.5)
    cost = cost_of(TORCHFT, in_time(survivor, victim, again), KILLED_AT)
    assert cost.step_s == 1.0
    assert cost.next_step_s == pytest.approx(7.5 - KILLED_AT)
    assert cost.stall_s == pytest.approx(7.5 - KILLED_AT - 1)
    assert (cost.steps_redone, cost.attempts_discarded, cost.samples_lost) == (0, 1, 16)
    assert (cost.missing, cost.missing_s) == (0.25, pytest.approx(0.25))
    assert cost.samples_short == 2 * 4
    assert cost.whole_s == pytest.approx(9.5 - KILLED_AT)


def test_torchrun_goes_back_to_its_checkpoint_and_loses_no_sample():
    before = [steady(f"rank{r}", r, range(1, 6)) for r in range(4)]
    after = [steady(f"rank{r}", 10 + r, [3, 4, 5], 20.0) for r in range(4)]
    cost = cost_of(TORCHRUN, in_time(*before, *after), KILLED_AT)
    assert cost.next_step_s == cost.whole_s == pytest.approx(21 - KILLED_AT)
    assert (cost.steps_redone, cost.attempts_discarded, cost.samples_lost, cost.samples_short) == (3, 0, 0, 0)


def test_an_attempt_that_began_before_the_kill_is_not_the_next_step():
    in_flight = Attempt("group0", 1, 6, 5.0, 6.0, True, 4)
    seen = in_time(steady("group0", 1, range(1, 6)), [in_flight], steady("group0", 1, [7], 6.0))
    assert cost_of(TORCHFT, seen, KILLED_AT).next_step_s == pytest.approx(7 - KILLED_AT)


def step(number, at, epoch, samples=16):
    return StepView(number, 1.0, "0x1p0", 1.0, 1e-3, samples, "", "applied", epoch, at)


def incident(**changes):
    view = IncidentView("i1", "j", "", ("node-1",), KILLED_AT, 2, 6, False, (), 1.0, "")
    return msgspec.structs.replace(view, **changes)


def test_ours_counts_from_the_kill_to_the_first_step_of_a_later_epoch():
    steps = [step(n, float(n), 1) for n in range(1, 6)] + [step(6, 5.41, 1), step(7, 6.2, 2), step(8, 7.2, 4)]
    done = incident(copied_bytes=500, layer_gradients=6, step_layer_gradients=60)
    cost = surviving.cost_of(steps, [done], KILLED_AT, 1, 4, {2: 3, 4: 4})
    assert cost.step_s == 1.0
    assert cost.next_step_s == pytest.approx(6.2 - KILLED_AT)
    assert cost.whole_s == pytest.approx(7.2 - KILLED_AT)
    assert (cost.steps_redone, cost.attempts_discarded, cost.samples_lost, cost.samples_short) == (0, 0, 0, 0)
    assert (cost.redone_share, cost.copied_bytes) == (0.1, 500)
    assert cost.missing == 0.25
    assert cost.cost_s == pytest.approx(cost.stall_s)


def test_capacity_is_missing_from_the_next_step_until_the_job_is_whole():
    steps = [step(n, float(n), 1) for n in range(1, 6)]
    steps += [step(6, 6.2, 2), step(7, 7.4, 2), step(8, 8.6, 3), step(9, 9.6, 4), step(10, 10.6, 5)]
    cost = surviving.cost_of(steps, [], KILLED_AT, 1, 4, {2: 4, 3: 3, 4: 4, 5: 4})
    assert (cost.missing, cost.missing_s) == (0.25, pytest.approx(2.4 / 4))
    assert cost.whole_s == pytest.approx(9.6 - KILLED_AT)


def test_of_an_absent_daemon_the_longest_step_counts():
    steps = [msgspec.structs.replace(step(n, 1.0, 1), step_s=1.5 if n == 8 else 1.0) for n in range(1, 11)]
    cost = surviving.absence(steps, 5, 0)
    assert (cost.step_s, cost.in_steps, cost.stall_s, cost.attempts_discarded) == (1.0, 1.5, 0.5, 0)
    assert surviving.absence(steps[:6] + steps[7:], 5, 1).samples_lost == 16
    assert surviving.absence(steps, 5, 1).attempts_discarded == 1


def test_ours_does_not_hide_what_was_lost():
    steps = [step(n, float(n), 1) for n in range(1, 6)] + [step(7, 6.2, 2, samples=12)]
    cost = surviving.cost_of(steps, [incident(steps_lost=2)], KILLED_AT, 1, 2, {2: 4})
    assert (cost.steps_redone, cost.samples_lost, cost.samples_short) == (2, 16, 4)


def kill(next_step_s, **counts):
    counted = dict.fromkeys(["steps_redone", "attempts_discarded", "samples_lost", "samples_short"], 0)
    return Cost(step_s=1.0, next_step_s=next_step_s, whole_s=9.0, **(counted | counts))


def test_goals_are_held_against_the_better_shape_of_torchft():
    summaries = {
        "oobleckd": summarise([kill(0.5), kill(1.2), kill(2.6)]),
        "torchft": summarise([kill(3.0, samples_lost=16)]),
        "torchft-2x2": summarise([kill(1.5)]),
    }
    met = {goal.what.split(",")[0]: (goal.met, goal.most) for goal in goals_of(summaries)}
    assert met["median time to the next step"] == (True, 1.25)
    assert met["worst time to the next step"] == (False, 2.5)
    assert met["median stall in s"] == (False, pytest.approx(0.1))
    assert met["samples lost"] == (True, 0)
    with_spare = summaries | {"spare": summarise([kill(0.5, missing_s=0.1)])}
    cost = next(goal for goal in goals_of(with_spare) if "cost" in goal.what)
    assert (cost.value, cost.most) == (pytest.approx(0.1), pytest.approx(0.5 / 3))
    assert goals_of({"torchft": summaries["torchft"]}) == []

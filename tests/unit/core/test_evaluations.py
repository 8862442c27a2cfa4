"""Evaluations: put together exactly, kept within bounds, and dropped with a rollback."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import msgspec
import pytest

from oobleckd.core import evaluations, snapshot, view
from oobleckd.core.entries import Evaluated
from oobleckd.core.evaluations import Evaluations, begun_anew, planned_s, planned_share
from oobleckd.core.events import Announce, Heard
from oobleckd.planner.costs.forward import forward_s
from oobleckd.planner.plan import Pipeline, Plan, Range, Segment
from oobleckd.protocol.changes import EvaluationDone, LossDisputed
from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.messages import StepDone
from oobleckd.protocol.parts import Counters, EvalSum
from tests.helpers.simjobs import evaluation, make_job, profile
from tests.helpers.world import World


def entry(step: int, evaluated: int, *sums: EvalSum, round_: int = 0) -> Evaluated:
    return Evaluated("job-1", Counters(round_, step, step, 0, evaluated), 1, sums, 0.5, 9.0)


def whole(book: Evaluations, step: int, loss: float) -> None:
    """An evaluation of one round."""
    last = entry(step, 0, EvalSum("web", loss * 4, 4), round_=step)
    totals, seconds = book.totals(last.sums, last.step_s)
    book.add(msgspec.structs.replace(last, totals=totals, seconds=seconds))


def test_rounds_add_up_exactly_whatever_their_sizes() -> None:
    dice = random.Random(3)
    parts = [dice.uniform(0, 10) * 10.0 ** dice.randrange(-9, 9) for _ in range(200)]
    book = Evaluations()
    for number, part in enumerate(parts):
        totals, seconds = book.totals((EvalSum("web", part, 3),), 0.5)
        book.add(entry(5, number, EvalSum("web", part, 3), round_=number))
    assert totals == (EvalSum("web", float(sum(map(Fraction, parts))), 600),)
    assert (seconds, len(book.partial["web"].parts) < 20) == (100.0, True)


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_a_loss_that_is_no_number_stays_none(odd: float) -> None:
    book = Evaluations()
    book.add(entry(5, 0, EvalSum("web", 1.0, 3)))
    book.add(entry(5, 1, EvalSum("web", odd, 3)))
    ((total,), _) = book.totals((EvalSum("web", 2.0, 3),), 0.5)
    assert repr(total.loss) == repr(odd)
    assert evaluations.same((total,), (total,))


def test_the_perplexity_of_a_huge_loss_is_infinite() -> None:
    assert EvalSum("web", 8.0, 4).perplexity == math.exp(2.0)
    assert EvalSum("web", 1e5, 2).perplexity == math.inf


def test_a_rollback_drops_what_is_behind_it_and_remembers_it_to_compare() -> None:
    book = Evaluations()
    for step, loss in ((0, 9.0), (10, 5.0), (20, 4.0), (30, 6.0)):
        whole(book, step, loss)
    assert [(least.step, least.loss) for least in book.least["web"]] == [(0, 9.0), (10, 5.0), (20, 4.0)]
    book.rolled_back(Counters(99, 20, 20))
    assert [each.step for each in book.results] == [0, 10]
    assert book.least["web"][-1].loss == 5.0
    assert book.given_up == {20: (EvalSum("web", 16.0, 4),), 30: (EvalSum("web", 24.0, 4),)}
    whole(book, 20, 4.0)
    book.rolled_back(Counters(120, 20, 20, 0, 1))  # behind the evaluation
    assert [each.step for each in book.results] == [0, 10, 20]


def test_memory_is_bounded() -> None:
    book = Evaluations()
    for step in range(2 * evaluations.KEPT_RESULTS):
        whole(book, step, 2.0 - step / 2000)
    kept = evaluations.KEPT_RESULTS
    assert (len(book.results), len(book.least["web"]), len(book.told) <= kept) == (kept, kept, True)


def test_a_loaded_state_begins_the_evaluation_anew_that_it_was_in() -> None:
    rounds = EvalRounds(steps=20, per_step=4, total=9, every=10)
    assert begun_anew(rounds, Counters(7, 10, 10, 0, 2)) == Counters(7, 10, 10)
    over = Counters(9, 10, 10, 0, 3)
    assert begun_anew(rounds, over) == over


def test_when_evaluations_are_due() -> None:
    rounds = EvalRounds(steps=25, per_step=4, total=9, every=10, at_start=True, at_end=True)
    assert [*rounds.due_steps(0, 25)] == [0, 10, 20, 25]
    assert [*rounds.due_steps(10, 24)] == [10, 20]
    assert rounds.num_evaluations == 4
    assert rounds.next_due(Counters(0, 10, 10)) == 10
    assert rounds.next_due(Counters(0, 10, 10, 0, 3)) == 20
    assert rounds.next_due(Counters(0, 25, 25, 0, 3)) == -1
    bare = EvalRounds(steps=20, per_step=4, total=9, every=10)
    assert ([*bare.due_steps(0, 20)], bare.num_evaluations) == ([10], 1)


def plan(num: int) -> Plan:
    """One pipeline of two devices, of ``num`` micro-batches."""
    segments = (Segment("a/0", Range(0, 1)), Segment("b/0", Range(1, 4)))
    return Plan((Pipeline(("a", "b"), segments, tuple(range(num))),), step_s=1.0)


def test_what_it_costs_is_forward_passes_through_the_pipeline() -> None:
    costs = profile(4)
    one, sent = costs.layers[0].forward_s, forward_s(plan(1), costs, 1) - 4 * costs.layers[0].forward_s
    assert 0.0 <= sent < one
    assert forward_s(plan(6), costs, 6) == pytest.approx(one + sent + 6 * 3 * one)
    assert forward_s(plan(6), costs, 2) == pytest.approx(one + sent + 2 * 3 * one)
    rounds = EvalRounds(steps=100, per_step=6, total=14, every=10)
    each_s = planned_s(rounds, plan(6), costs)
    assert each_s == pytest.approx(3 * (one + sent) + 14 * 3 * one)
    assert planned_share(rounds, each_s, 1.0) == pytest.approx(9 * each_s / (9 * each_s + 100))


@pytest.fixture
def evaluated() -> World:
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(make_job(steps=12, evaluation=evaluation(every=4, at_start=True)))
    world.run(lambda: world.job("job-1").final)
    return world


def test_a_job_is_over_behind_its_last_evaluation_and_says_what_it_found(evaluated: World) -> None:
    job = evaluated.job("job-1")
    assert job.state == "done"
    entries = [each for each in evaluated.daemon.disk.entries() if isinstance(each, Evaluated)]
    done = [each for each in entries if each.totals]
    assert [each.counters.step for each in done] == [0, 4, 8, 12]
    assert len(entries) == 4 * job.spec.eval_rounds.num_rounds
    found = view.job_view(evaluated.machine.core, job).evaluation
    assert found is not None
    assert found.last is not None
    assert (found.last.step, found.next_step, found.rounds_done) == (12, -1, 0)
    assert [each.loss for each in found.last.losses] == [each.loss for each in done[-1].totals]
    least = {each.source: each.loss for each in found.best}
    assert least == {s: min(t.loss for e in done for t in e.totals if t.source == s) for s in least}
    assert 0.0 < found.measured_share < 1.0


def test_a_second_device_must_say_the_same_sums() -> None:
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(make_job(steps=200, evaluation=evaluation(every=150, at_start=True)))
    world.until_step(3)
    job = world.job("job-1")
    round_, sums = next(iter(job.evaluations.told.items()))

    def heard(said: tuple[EvalSum, ...]) -> list[object]:
        told = StepDone(
            "n01/0", job.id, job.epoch, Counters(round_), "evaluated", 0.0, 0.0, 0.0, 0, "", 0.1, 0.1,
            evaluated=said,
        )  # fmt: skip
        commands = world.machine.handle(Heard("n01", told), world.now)
        return [c.change.data for c in commands if isinstance(c, Announce)]

    assert heard(sums) == []
    other = (msgspec.structs.replace(sums[0], loss_sum=math.nextafter(sums[0].loss_sum, 9e9)), *sums[1:])
    assert heard(other) == [LossDisputed("n01/0", job.id)]


def test_an_evaluation_is_announced_once_and_kept_in_a_snapshot(evaluated: World) -> None:
    state = evaluated.machine.core.state
    again = snapshot.decode(snapshot.encode(state))
    assert again is not None
    assert again.jobs["job-1"].evaluations == state.jobs["job-1"].evaluations
    said = [change.data for change in evaluated.daemon.changes if isinstance(change.data, EvaluationDone)]
    assert [each.step for each in said] == [0, 4, 8, 12]

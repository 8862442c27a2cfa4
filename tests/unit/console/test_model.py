"""The fold: facts in any order that threads may bring them in, one picture out."""

from __future__ import annotations

import math

import msgspec
import pytest

from oobleckd.console.facts import Away
from oobleckd.console.kept import EVENTS_KEPT, SLACK
from oobleckd.console.model import STEPS_KEPT, View, fold, shown_job
from oobleckd.protocol.jobviews import JobView
from tests.unit.console.build import (
    NOW,
    change,
    facts,
    fetched,
    heard,
    history,
    incident,
    job,
    nodes,
    step_change,
)

LIVE = fold(View(), facts())


def test_before_the_first_answer_there_is_no_daemon_yet() -> None:
    view = fold(View(), [Away(NOW, "no daemon", "start it")])
    assert (view.link, view.problem, view.hint, view.age_s(NOW + 9)) == (
        "waiting",
        "no daemon",
        "start it",
        0.0,
    )


def test_an_answer_makes_the_picture_live_and_silence_makes_it_stale_with_its_age() -> None:
    view = fold(LIVE, [Away(NOW + 3, "no daemon")])
    assert (LIVE.link, view.link, view.age_s(NOW + 12)) == ("live", "stale", 12.0)
    assert view.clock(NOW + 12) == NOW
    assert (view.job, view.nodes, view.points) == (LIVE.job, LIVE.nodes, LIVE.points)
    back = fold(view, [fetched(at=NOW + 20)])
    assert (back.link, back.problem, back.age_s(NOW + 20)) == ("live", "", 0.0)


def test_what_was_not_asked_stays() -> None:
    view = fold(
        LIVE, [fetched(jobs=None, pipelines=None, templates=None, incidents=None, status=None, nodes=())]
    )
    assert view.nodes == ()
    assert (view.job, view.pipelines, view.templates) == (LIVE.job, LIVE.pipelines, LIVE.templates)


def test_a_step_moves_job_and_curve() -> None:
    view = fold(LIVE, [heard(step_change(4, 21, loss=1.5))])
    assert view.job is not None
    assert (view.job.step, view.job.loss, view.points[-1].step, view.points[-1].loss) == (21, 1.5, 21, 1.5)


def test_a_loss_that_is_no_number_stays_none() -> None:
    view = fold(LIVE, [heard(step_change(4, 21, loss=math.nan))])
    assert math.isnan(view.points[-1].loss)


def test_an_answer_that_events_have_overtaken_does_not_turn_the_step_back() -> None:
    view = fold(LIVE, [heard(step_change(4, 21)), fetched()])
    assert view.job is not None
    assert view.job.step == 21


def test_a_step_that_an_answer_has_overtaken_still_brings_its_point() -> None:
    view = fold(View(), [fetched(jobs=(job(step=2),)), heard(step_change(1, 1)), heard(step_change(2, 2))])
    assert view.job is not None
    assert (view.job.step, [point.step for point in view.points]) == (2, [1, 2])


def test_a_rollback_takes_steps_back() -> None:
    back = fold(LIVE, [fetched(jobs=(job(step=10, epoch=5),))])
    assert back.job is not None
    assert (back.job.step, back.points[-1].step) == (10, 10)
    again = fold(back, [heard(step_change(4, 15, epoch=3)), heard(step_change(5, 11, epoch=5, loss=9.0))])
    assert [point.step for point in again.points] == list(range(1, 12))
    assert again.points[-1].loss == 9.0


def test_a_repeated_try_and_another_job_are_no_steps() -> None:
    data = {"job": "job-1", "step": 21, "loss": 1.0, "outcome": "repeated", "epoch": 3}
    told = [change(4, "step", "", level="warn", **data), step_change(5, 30, job_id="job-9")]
    view = fold(LIVE, map(heard, told))
    assert (view.job, view.points) == (LIVE.job, LIVE.points)
    assert view.events[-1] == told[0]


def test_a_step_change_without_a_step_is_only_an_event() -> None:
    told = change(4, "step", "job-1: silent corruption", level="error", device="node-1/0")
    view = fold(LIVE, [heard(told)])
    assert (view.points, view.events[-1]) == (LIVE.points, told)


def test_ordinary_steps_are_not_among_the_events_and_old_events_fall_out() -> None:
    told = [heard(step_change(seq, seq)) for seq in range(4, 3000)]
    view = fold(LIVE, told)
    assert view.events == LIVE.events
    assert len(view.points) == STEPS_KEPT
    many = fold(LIVE, [heard(change(seq, "node", "x")) for seq in range(4, 2 * EVENTS_KEPT)])
    assert EVENTS_KEPT <= len(many.events) < EVENTS_KEPT + SLACK


def test_a_stream_that_is_told_again_changes_nothing() -> None:
    again = [fact for fact in facts() if not isinstance(fact, type(history()))][1:]
    assert fold(LIVE, again) == LIVE


def test_a_notice_shares_the_number_of_the_change_before_it() -> None:
    notice = change(3, "daemon", "the disk is full", level="error")
    view = fold(LIVE, [heard(notice), heard(notice)])
    assert view.events[-1] == notice
    assert len(view.events) == len(LIVE.events) + 1


def test_a_gap_may_lead_to_lower_numbers() -> None:
    told = [change(1, "gap", "changes were missed", level="warn"), change(2, "node", "node-9 is here")]
    view = fold(LIVE, map(heard, told))
    assert view.seq == 2
    assert view.events[-2:] == tuple(told)


def test_the_history_of_a_job_joins_the_steps_heard_since() -> None:
    view = fold(View(), [fetched(), heard(step_change(1, 21)), heard(step_change(2, 22)), history(21)])
    assert [point.step for point in view.points] == list(range(1, 23))
    assert view.points[20].loss == 2.5
    assert fold(View(), [history()]).points == ()


def test_another_job_begins_with_an_empty_curve() -> None:
    view = fold(LIVE, [fetched(jobs=(job(state="done"), job(id="job-2", step=0)))])
    assert view.job is not None
    assert (view.job.id, view.points, view.num_queued) == ("job-2", (), 0)


def test_the_jobs_that_wait_are_counted_beside_the_one_that_is_shown() -> None:
    waiting = [job(id=f"job-{number}", state="queued") for number in (2, 3)]
    assert fold(LIVE, [fetched(jobs=(job(), *waiting))]).num_queued == 2
    alone = fold(LIVE, [fetched(jobs=(job(state="done"), *waiting))])
    assert alone.job is not None
    assert (alone.job.id, alone.num_queued) == ("job-2", 1)


def test_an_incident_closes_with_its_own_event() -> None:
    is_open = fold(View(), [fetched(incidents=(incident(id="inc-0"), incident(open=True, total_s=0.2)))])
    assert is_open.incident is not None
    assert is_open.incident.open
    closed = fold(is_open, [heard(change(4, "incident", "", view=incident()))])
    assert closed.incidents == (incident(id="inc-0"), incident())


def test_the_incident_shown_is_the_open_one_or_the_newest() -> None:
    several = (incident(id="inc-1", open=True), incident(id="inc-2"))
    found = fold(View(), [fetched(incidents=several)]).incident
    assert found is not None
    assert found.id == "inc-1"
    assert View().incident is None


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (["done", "running", "queued"], 1),
        (["done", "queued", "queued"], 1),
        (["done", "failed"], 1),
        (["waiting"], 0),
    ],
)
def test_the_job_shown_is_at_work_or_next_or_last(states: list[JobView], shown: int) -> None:
    jobs = [job(id=f"job-{index}", state=state) for index, state in enumerate(states)]
    assert shown_job(jobs) == jobs[shown]
    assert shown_job([]) is None


def test_facts_are_the_api_structs_as_they_are() -> None:
    assert LIVE.nodes == nodes()


def test_a_loss_is_seen_before_the_list_of_nodes_comes_again() -> None:
    said = {"type": "node-lost", "node": "node-2", "cause": "signal 9", "code": "device-lost"}
    told = change(9, "node", "node-2 lost: signal 9", level="warn", **said)
    old = fold(LIVE, [heard(told)])
    assert {node.name: node.state for node in old.nodes}["node-2"] == "active", "the answers are newer"
    view = fold(LIVE, [heard(msgspec.structs.replace(told, at=NOW + 1.0))])
    states = {node.name: (node.state, node.cause) for node in view.nodes}
    assert states["node-2"] == ("lost", "device-lost")
    assert {node.name: node.state for node in fold(view, [fetched(at=NOW + 2.0)]).nodes}["node-2"] == "active"

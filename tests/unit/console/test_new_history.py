"""Another cluster behind the same socket: job ids are a name and a number, so a fresh state folder repeats
them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from oobleckd.client import Client
from oobleckd.console.asked import ConsoleQueries
from oobleckd.console.facts import AnyFact, Away, ChangesHeard, Fetched, PastHistory, Wants
from oobleckd.console.feed import Feed
from oobleckd.console.model import View, fold
from oobleckd.protocol.changes import Change
from tests.helpers.api_server import serving
from tests.unit.console import build, watching
from tests.unit.console.build import NOW, change, fetched, heard, step_change
from tests.unit.console.test_asked import Daemon
from tests.unit.console.test_feed import api, running

LIVE = fold(View(), watching.facts())
AWAY = Away(NOW + 1, "no daemon listens")
NEW = build.job(step=2, submitted_at=NOW + 5)


def test_a_job_of_the_same_name_in_a_new_cluster_is_another_job() -> None:
    view = fold(LIVE, [AWAY, fetched(at=NOW + 9, jobs=(NEW,), incidents=())])
    assert view.job == NEW
    assert (view.points, view.events, view.impacts, view.layers) == ((), (), (), ())
    assert (view.schedules, view.schedule, view.modelled, view.goodput) == (None, None, None, None)
    told = [step_change(1, 3), change(2, "node", "node-1 is here")]
    after = fold(view, map(heard, told))
    assert [point.step for point in after.points] == [3]
    assert after.events == (told[1],), "the numbers begin anew"


def test_the_same_job_after_a_restart_of_the_daemon_stays_what_it_was() -> None:
    view = fold(LIVE, [AWAY, fetched(at=NOW + 9)])
    assert (view.points, view.events, view.schedule) == (LIVE.points, LIVE.events, LIVE.schedule)


def test_the_next_job_of_the_same_cluster_leaves_its_events() -> None:
    view = fold(LIVE, [fetched(jobs=(build.job(state="done"), build.job(id="job-2", submitted_at=NOW)))])
    assert (view.points, view.schedule) == ((), None)
    assert view.events == LIVE.events


def test_a_cluster_without_a_job_that_was_there_is_a_new_one() -> None:
    assert fold(LIVE, [AWAY, fetched(at=NOW + 9, jobs=(), incidents=())]).events == ()


def test_numbers_that_begin_anew_are_another_history() -> None:
    gap = change(1, "gap", "changes were missed", level="warn")
    assert fold(LIVE, [heard(gap)]).events == (gap,)
    missed = change(30, "gap", "changes were missed", level="warn")
    assert fold(LIVE, [heard(missed)]).events == (*LIVE.events, missed)


def test_what_was_asked_of_the_job_before_is_asked_anew() -> None:
    daemon = Daemon()
    asked = ConsoleQueries(daemon)
    asked.want(Wants(schedule=True, impacts=(("node-1",),)))
    list(asked.answers(build.job(), NOW))
    list(asked.answers(NEW, NOW + 200.0))
    assert daemon.asked.count("/v1/schedule") == 2
    assert daemon.asked.count("/v1/impact") == 2


def test_the_history_of_a_job_in_a_new_cluster_is_fetched(tmp_path: Path) -> None:
    known = api(tmp_path)
    with serving(tmp_path / "s", known):
        told: list[AnyFact] = []
        feed = Feed(Client(tmp_path / "s"), told.append, lambda: NOW)
        feed._fetch()
        known.jobs = [NEW]
        feed._hasten({"jobs"})
        feed._fetch()
    assert len([fact for fact in told if isinstance(fact, PastHistory)]) == 2
    feed.close()


def test_the_stream_of_a_new_cluster_is_told_from_its_beginning(tmp_path: Path) -> None:
    """Its numbers may have passed those that were heard of the old one, and then no gap says so."""
    known = api(tmp_path)
    known.changes = [change(number, "node", f"node-{number} is here") for number in (1, 2)]
    quiet = threading.Event()

    def no_more() -> Iterator[Change]:
        quiet.wait(20.0)
        yield from ()

    known.follow = no_more
    with serving(tmp_path / "s", known), running(tmp_path / "s") as facts:
        view = View()
        while len(view.events) < 2 or view.job is None:
            view = fold(view, [facts.queue.get(timeout=20.0)])
        known.changes = [change(number, "node", f"new {number}") for number in (1, 2, 3)]
        known.jobs = [NEW]
        while [told.text for told in view.events if told.kind == "node"] != ["new 1", "new 2", "new 3"]:
            view = fold(view, [facts.queue.get(timeout=20.0)])
        quiet.set()
    assert view.job == NEW


def test_what_is_told_of_the_stream_is_told_by_its_thread(tmp_path: Path) -> None:
    known = api(tmp_path)
    with serving(tmp_path / "s", known):
        told: list[AnyFact] = []
        feed = Feed(Client(tmp_path / "s"), told.append, lambda: NOW)
        feed._fetch()
        known.jobs = []
        feed._hasten({"jobs"})
        feed._fetch()
    assert isinstance(told[-1], Fetched)
    assert not [fact for fact in told if isinstance(fact, ChangesHeard)]
    feed.close()

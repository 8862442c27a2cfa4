"""Questions without an answer: each is one question's trouble, is said where the answer would be, and is
asked again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oobleckd.client import Client
from oobleckd.console.asked import PERIODS_S, REFUSED_S, ConsoleQueries
from oobleckd.console.facts import AnyFact, Fetched, PastHistory, QueryRefused, Wants, Watched
from oobleckd.console.feed import ALL, OPEN_INCIDENT_S, TOUCHES, Feed
from oobleckd.console.feed import PERIODS_S as LISTED_S
from oobleckd.console.model import View, fold
from oobleckd.console.widgets import grid, incidents, nodes, nodetable, pipelines, recovery, training, verdict
from oobleckd.console.widgets.panel import Painter
from oobleckd.unixhttp import BadAnswer, ClientError, Unreachable
from tests.helpers.api_server import serving
from tests.unit.console import build
from tests.unit.console.build import NOW, fetched
from tests.unit.console.test_asked import ALL as EVERYTHING
from tests.unit.console.test_asked import Daemon
from tests.unit.console.test_feed import api
from tests.unit.console.test_painters import LIVE, said

UNREAD = BadAnswer("the daemon's answer cannot be read: Invalid enum value 'resting'")


class Odd(Client):
    """Of another version: what is in ``trouble`` raises. What was asked is in ``asked``."""

    def __init__(self, socket: Path, **trouble: ClientError) -> None:
        super().__init__(socket)
        self.trouble = trouble
        self.asked: list[str] = []

    def _get(self, path: str, kind: Any, **query: Any) -> Any:
        name = path.rpartition("/")[2]
        self.asked.append(name)
        if name in self.trouble:
            raise self.trouble[name]
        return super()._get(path, kind, **query)


def told_by(client: Client, now: float = NOW) -> tuple[Feed, list[AnyFact]]:
    told: list[AnyFact] = []
    return Feed(client, told.append, lambda: now), told


# --------------------------------------------------------------------------- lists


def test_one_list_that_cannot_be_read_hides_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path / "s", api(tmp_path)):
        client = Odd(tmp_path / "s", nodes=UNREAD)
        feed, told = told_by(client)
        feed._fetch()
        view = fold(View(), told)
        assert (view.link, view.job, view.nodes, view.refusal("nodes")) == (
            "live", build.job(), (), UNREAD.problem,
        )  # fmt: skip
        client.trouble.clear()
        feed._hasten(ALL, at_once=True)
        feed._fetch()
        assert fold(view, told).refusal("nodes") == ""
    feed.close()


def test_where_nothing_can_be_read_the_daemon_is_another_one(tmp_path: Path) -> None:
    feed, told = told_by(Odd(tmp_path / "s", **dict.fromkeys(ALL, UNREAD)))
    with pytest.raises(BadAnswer):
        feed._fetch()
    assert told == []
    feed.close()


def test_a_list_alone_that_is_due_and_refused_is_no_absence(tmp_path: Path) -> None:
    with serving(tmp_path / "s", api(tmp_path)):
        client = Odd(tmp_path / "s")
        feed, told = told_by(client)
        feed._fetch()
        client.trouble["status"] = UNREAD
        feed._hasten({"status"}, at_once=True)
        feed._fetch()
    assert told[-1] == QueryRefused(NOW, "status", UNREAD.problem)
    feed.close()


def test_another_plan_leaves_what_is_known_of_lists() -> None:
    view = fold(LIVE, [QueryRefused(NOW, "nodes", "x"), QueryRefused(NOW, "layers", "y"), fetched(nodes=None,
        jobs=(build.job(epoch=9),))])  # fmt: skip
    assert view.refused == (("nodes", "x"),)


@pytest.mark.parametrize(
    ("what", "paint"),
    [
        ("nodes", nodes.paint), ("nodes", grid.paint), ("nodes", nodetable.paint),
        ("incidents", incidents.paint),
        ("incidents", recovery.paint), ("pipelines", pipelines.paint), ("steps", training.paint),
    ],
)  # fmt: skip
def test_it_is_said_in_the_panel_that_asked(what: str, paint: Painter) -> None:
    bare = fold(View(), [fetched(nodes=(), pipelines=(), incidents=())])
    assert "cannot be read" not in said(paint(bare, NOW, 90, 5))
    assert UNREAD.problem in said(paint(fold(bare, [QueryRefused(NOW, what, UNREAD.problem)]), NOW, 90, 5))


def test_the_verdict_says_it_and_claims_nothing() -> None:
    view = fold(View(), [fetched(jobs=None), QueryRefused(NOW, "jobs", UNREAD.problem)])
    text = said(verdict.paint(view, NOW, 160))
    assert f"jobs not known  {UNREAD.problem}" in text
    assert "no job" not in text
    plan = fold(LIVE, [QueryRefused(NOW, "layers", "no such route")])
    assert "not known" not in said(verdict.paint(plan, NOW, 160)), "of what one screen asks its panel tells"


# --------------------------------------------------------------------------- the curves of a job


def test_a_history_that_did_not_come_is_fetched_again(tmp_path: Path) -> None:
    with serving(tmp_path / "s", api(tmp_path)):
        client = Odd(tmp_path / "s", steps=Unreachable("the connection broke"))
        feed, told = told_by(client)
        with pytest.raises(Unreachable):
            feed._fetch()
        client.trouble["steps"] = UNREAD
        feed._hasten({"jobs"}, at_once=True)
        feed._fetch()
        assert told[-1] == QueryRefused(NOW, "steps", UNREAD.problem)
        client.trouble.clear()
        feed._hasten({"jobs"}, at_once=True)
        feed._fetch()
        assert isinstance(told[-1], PastHistory)
        assert fold(View(), told).refusal("steps") == ""
        feed._hasten({"jobs"}, at_once=True)
        feed._fetch()
    assert client.asked.count("steps") == 3
    feed.close()


# --------------------------------------------------------------------------- what one screen asks


class Slow(Daemon):
    """Breaks, or does not answer in time, over what is in ``trouble``."""

    def __init__(self, **trouble: Exception) -> None:
        super().__init__()
        self.trouble = trouble

    def _get(self, path: str, kind: Any, **query: Any) -> Any:
        if error := self.trouble.get(path.rpartition("/")[2]):
            self.asked.append(path)
            raise Unreachable(f"nothing of {path}") from error
        return super()._get(path, kind, **query)


def test_what_an_absence_interrupted_is_asked_as_soon_as_the_daemon_is_back() -> None:
    daemon = Slow(modelled=ConnectionResetError())
    daemon.trouble = {"layers": ConnectionResetError()}
    asked = ConsoleQueries(daemon)
    asked.want(EVERYTHING)
    with pytest.raises(Unreachable):
        list(asked.answers(build.job(), NOW))
    assert asked.due_at() <= NOW
    before, daemon.trouble = len(daemon.asked), {}
    list(asked.answers(build.job(), NOW + 1.0))
    assert [path.rpartition("/")[2] for path in daemon.asked[before:]] == [
        "layers",
        "goodput",
        "impact",
        "impact",
    ]
    assert asked.due_at() == NOW + PERIODS_S["schedules"]


def test_a_slow_answer_is_one_questions_trouble() -> None:
    daemon = Slow(layers=TimeoutError())
    asked = ConsoleQueries(daemon)
    asked.want(EVERYTHING)
    *others, last = asked.answers(build.job(), NOW)
    assert all(isinstance(fact, Watched) for fact in others)
    assert last == QueryRefused(NOW, "layers", "nothing of /v1/layers")
    assert asked.due_at() <= NOW, "the others come next, after the lists: is the daemon there at all?"
    rest = [fact for fact in asked.answers(build.job(), NOW + 1.0) if isinstance(fact, Watched)]
    assert ([fact.goodput is not None for fact in rest], len(rest)) == ([True, False, False], 3)
    assert asked._due["layers"] == NOW + REFUSED_S


def test_a_slow_answer_leaves_the_picture_live(tmp_path: Path) -> None:
    with serving(tmp_path / "s", api(tmp_path)):
        late = Unreachable("the daemon does not answer in time")
        late.__cause__ = TimeoutError()
        feed, told = told_by(Odd(tmp_path / "s", impact=late))
        feed.want(Wants(impacts=(("node-1",),)))
        feed._fetch()
        feed._fetch_asked()
    view = fold(View(), told)
    assert (view.link, view.refusal("impact")) == ("live", late.problem)
    feed.close()


# --------------------------------------------------------------------------- incidents


def test_a_long_list_of_incidents_is_fetched_when_there_is_news_of_one(tmp_path: Path) -> None:
    known = api(tmp_path)
    with serving(tmp_path / "s", known):
        now = NOW
        told: list[AnyFact] = []
        feed = Feed(Client(tmp_path / "s"), told.append, lambda: now)
        feed._fetch()
        for second in range(1, 20):
            now = NOW + second
            feed._touch(build.change(second, "plan", "a node is back"))
            feed._fetch()
        assert [fact.at for fact in told if isinstance(fact, Fetched) and fact.incidents is not None] == [NOW]
        known.incidents = [build.incident(open=True)]
        feed._touch(build.change(30, "incident", "inc-1: node-4: signal 9"))
        feed._fetch()
        assert isinstance(told[-1], Fetched)
        assert told[-1].incidents == (build.incident(open=True),)
        assert feed._due["incidents"] == now + OPEN_INCIDENT_S
    assert LISTED_S["incidents"] >= 20
    assert [kind for kind, touched in TOUCHES.items() if "incidents" in touched] == ["incident", "gap"]
    feed.close()


def test_what_is_usual_is_computed_once_for_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    many = tuple(build.incident(id=f"inc-{number}", at=NOW - 5000.0 + number) for number in range(1000))
    view = fold(LIVE, [fetched(incidents=many)])
    first = recovery.medians(view.incidents, many[-1])
    calls: list[object] = []
    monkeypatch.setattr(recovery, "median", lambda times: calls.append(times) or 1.0)
    assert recovery.medians(view.incidents, many[-1]) == first
    recovery.paint(view, NOW, 100, 12)
    assert calls == []
    recovery.medians(view.incidents, many[500])
    assert len(calls) == len(recovery.PHASES)

"""The feed, over a real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import pytest

from oobleckd.client import Client
from oobleckd.console.facts import AnyFact, Away, ChangesHeard, Fetched, PastHistory
from oobleckd.console.feed import (
    ALL,
    NODES_AT_FULL_RATE,
    OPEN_INCIDENT_S,
    PERIODS_S,
    TOUCHES,
    Feed,
    fetch_once,
)
from oobleckd.console.model import View, fold
from oobleckd.protocol.changes import Change
from tests.helpers.api_server import Api, node_view, serving, status_view
from tests.unit.console import build

WAIT_S = 20.0
Kind = TypeVar("Kind", bound=AnyFact)


def api(tmp_path: Path) -> Api:
    return Api(
        status_view(tmp_path), [build.job()], list(build.nodes()), [build.incident()], list(build.PIPELINES),
        list(build.templates()), {"job-1": [build.step(number) for number in range(1, 21)]},
        [build.change(1, "node", "node-1 is here"), build.change(2, "plan", "start")],
    )  # fmt: skip


class Facts:
    def __init__(self) -> None:
        self.queue: SimpleQueue[AnyFact] = SimpleQueue()

    def first(self, kind: type[Kind]) -> Kind:
        deadline = time.monotonic() + WAIT_S
        while not isinstance(fact := self.queue.get(timeout=max(0.0, deadline - time.monotonic())), kind):
            pass
        return fact


@contextmanager
def running(socket: Path) -> Iterator[Facts]:
    facts = Facts()
    feed = Feed(Client(socket, timeout_s=WAIT_S), facts.queue.put)
    threads = [threading.Thread(target=thread) for thread in feed.threads]
    for thread in threads:
        thread.start()
    try:
        yield facts
    finally:
        feed.close()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_first_everything_is_fetched_and_the_stream_told_from_its_beginning(tmp_path: Path) -> None:
    with serving(tmp_path / "s", api(tmp_path)), running(tmp_path / "s") as facts:
        told = facts.first(Fetched)
        assert (told.jobs, told.nodes) == ((build.job(),), build.nodes())
        assert None not in (told.status, told.pipelines, told.templates, told.incidents)
        assert len(facts.first(PastHistory).steps) == 20
    with serving(tmp_path / "t", api(tmp_path)), running(tmp_path / "t") as facts:
        assert [facts.first(ChangesHeard).change.seq for _ in range(2)] == [1, 2]


def test_without_a_daemon_it_waits_and_finds_it_when_it_comes_and_comes_back(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    with running(socket) as facts, ExitStack() as daemon:
        assert "does not exist" in facts.first(Away).problem
        daemon.enter_context(serving(socket, api(tmp_path)))
        facts.first(Fetched)
        daemon.close()
        facts.first(Away)
        socket.unlink()
        daemon.enter_context(serving(socket, api(tmp_path)))
        facts.first(Fetched)


def test_every_part_is_fetched_now_and_then_and_every_kind_touches_known_parts() -> None:
    assert set(PERIODS_S) <= set(Fetched.__struct_fields__)
    assert all(touched <= ALL for touched in TOUCHES.values())
    assert TOUCHES["step"] == frozenset()


def test_once_is_the_same_picture_without_threads(tmp_path: Path) -> None:
    with serving(tmp_path / "s", api(tmp_path)):
        view = fold(View(), fetch_once(Client(tmp_path / "s"), build.NOW))
    assert (view.link, view.job, len(view.points), len(view.events)) == ("live", build.job(), 20, 2)


def test_a_large_cluster_is_fetched_less_often_but_its_daemon_watched_as_closely(tmp_path: Path) -> None:
    many = api(tmp_path)
    many.nodes = [node_view(f"node-{number}") for number in range(4 * NODES_AT_FULL_RATE)]
    with serving(tmp_path / "s", many):
        told: list[AnyFact] = []
        feed = Feed(Client(tmp_path / "s"), told.append, lambda: build.NOW)
        feed._fetch()
        feed._hasten(ALL, at_once=True)
        feed._fetch()
    due = {name: at - build.NOW for name, at in feed._due.items()}
    assert (due["status"], due["nodes"]) == (PERIODS_S["status"], 4 * PERIODS_S["nodes"])


def test_a_large_list_is_not_fetched_again_at_every_change(tmp_path: Path) -> None:
    many, now = api(tmp_path), build.NOW
    many.nodes = [node_view(f"node-{number}") for number in range(4 * NODES_AT_FULL_RATE)]
    with serving(tmp_path / "s", many):
        told: list[AnyFact] = []
        feed = Feed(Client(tmp_path / "s"), told.append, lambda: now)
        feed._fetch()
        for passed_s in (0.0, 1.1, 2.1):
            now = build.NOW + passed_s
            feed._hasten({"nodes", "incidents"})
            feed._fetch()
    fetched = [fact for fact in told if isinstance(fact, Fetched)]
    assert [fact.at - build.NOW for fact in fetched if fact.nodes is not None] == [0.0, pytest.approx(2.1)]
    assert len([fact for fact in fetched if fact.incidents is not None]) == 4


def test_an_open_incident_is_fetched_while_it_lasts(tmp_path: Path) -> None:
    at_work = api(tmp_path)
    at_work.incidents = [build.incident(open=True)]
    with serving(tmp_path / "s", at_work):
        feed = Feed(Client(tmp_path / "s"), lambda _fact: None, lambda: build.NOW)
        feed._fetch()
    assert feed._due["incidents"] == build.NOW + OPEN_INCIDENT_S


def test_a_stream_that_is_closed_while_its_reader_comes_back_ends(tmp_path: Path) -> None:
    """Seen once: the reader was between two changes, and came back to the generator that ``close`` was in."""
    with serving(tmp_path / "s", api(tmp_path)):
        events = Client(tmp_path / "s", timeout_s=WAIT_S).events(0)
        closing, read = threading.Event(), threading.Event()

        def changes() -> Iterator[Change]:
            try:
                yield build.change(1, "node", "node-1 is here")
            finally:
                closing.set()
                read.wait(0.2)  # for the reader to come: it cannot say that it waits

        events._changes = changes()  # type: ignore[assignment]
        assert next(events).seq == 1
        closer = threading.Thread(target=events.close)
        closer.start()
        assert closing.wait(WAIT_S)
        assert list(events) == []
        closer.join(WAIT_S)
        assert not closer.is_alive()

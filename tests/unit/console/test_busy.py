"""The daemon that the console's benchmark looks at: it answers what a console asks, and tells as much as it
should.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.client import Client
from oobleckd.console.facts import Wants
from oobleckd.console.feed import Feed, fetch_once
from oobleckd.console.model import View, fold
from tests.helpers.api_server import serving
from tests.helpers.busy import BusyApi
from tests.helpers.fleet import LAYERS, Fleet, of_nodes, thousand

RATE = 500.0


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(tmp_path / "s", BusyApi(of_nodes(40), RATE)):
        yield Client(tmp_path / "s")


def test_a_console_finds_all_that_it_asks_for(client: Client) -> None:
    told: list[object] = []
    feed = Feed(client, told.append)
    feed.want(Wants(schedule=True, layers=True, goodput=True, impacts=(("n001",),)))
    feed._fetch()
    feed._fetch_asked()
    view = fold(View(), told)  # type: ignore[arg-type]
    assert (len(view.nodes), len(view.pipelines), len(view.layers)) == (40, 10, LAYERS)
    assert view.schedule is not None
    assert len(view.schedule.lanes) == 40
    assert (view.refused, view.goodput is None, len(view.impacts)) == ((), False, 1)


def test_it_tells_as_many_changes_as_it_should(client: Client) -> None:
    began = time.monotonic()
    with client.events(0) as events:
        told = list(itertools.islice(events, 100))
    took_s = time.monotonic() - began
    assert [change.seq for change in told] == list(range(1, 101))
    assert sum(change.kind == "step" for change in told) == 10
    assert took_s >= 99 / RATE


def test_a_fleet_is_whole(tmp_path: Path) -> None:
    large = thousand()
    assert (large.num_nodes, len(large.names), len(set(large.names))) == (1000, 1000, 1000)
    for fleet in (large, Fleet((4, 4, 3), standby=1)):
        assert all(layer.copies == len(fleet.sizes) for layer in fleet.layers())
        assert {node.state for node in fleet.nodes()} == {"active", "standby"}
        step = fleet.schedule(7, 0.0)
        assert all(0.0 <= lane.bubble < 1.0 for lane in step.lanes)
        for lane in step.lanes:
            done = {(op.kind, op.micro_batch) for op in lane.ops if op.kind != "U"}
            mine = fleet.pipelines[lane.pipeline].micro_batches
            assert done == {(kind, number) for kind in "FIW" for number in mine}
            assert all(one.stop_s <= two.start_s + 1e-9 for one, two in itertools.pairwise(lane.ops))


def test_what_the_dead_do_not_do_others_do() -> None:
    fleet = Fleet((4, 4, 3))
    step = fleet.schedule(7, 0.0, dead=("n006",))
    (dead,) = [lane for lane in step.lanes if lane.dead]
    (helped,) = [lane for lane in step.lanes if any(op.origin for op in lane.ops)]
    assert (dead.device, helped.device) == ("n006/0", "n002/0")
    done = [op for op in dead.ops if op.kind != "U"] + [op for op in helped.ops if op.origin == "n006/0"]
    assert sorted((op.kind, op.micro_batch) for op in done) == sorted(
        (kind, number) for kind in "FIW" for number in fleet.pipelines[1].micro_batches
    )
    assert all(one.stop_s <= two.start_s + 1e-9 for one, two in itertools.pairwise(helped.ops))


def test_the_picture_of_a_moment(client: Client) -> None:
    class Few(Client):
        def events(self, *_args: object, **_more: object) -> list[object]:  # type: ignore[override]
            return []

    view = fold(View(), fetch_once(Few(client.socket_path), 0.0))
    assert view.job is not None
    assert view.job.step >= 12_480

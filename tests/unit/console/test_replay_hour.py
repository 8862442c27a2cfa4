"""An hour of a large cluster on disk: every second of it is there at once, and it is what was live.

Times are of the processor: other programs on the machine are none of the console's.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator

import msgspec
import pytest

from oobleckd.console.facts import ChangesHeard, Fetched, Watched
from oobleckd.console.model import View, fold
from oobleckd.console.past import Walk
from oobleckd.console.replay import SPAN_S
from oobleckd.console.widgets import events, grid, incidents, log, nodetable, pipelines, templatetable
from oobleckd.daemon.past import PastBatch, PastStore
from oobleckd.protocol.changes import Change, StepCommitted
from oobleckd.protocol.watch import Past, Snapshot
from tests.helpers.fleet import JOB, thousand
from tests.unit.console.scenery import NOW, status

HOUR_S = 3600
SEEK_S = 0.2
_A_SECOND = 10
_EVERY_S = 30


def happened(second: int) -> Iterator[Change]:
    """Of one second: a step, and what nodes say."""
    step = second + 1
    for number in range(_A_SECOND):
        seq, at = second * _A_SECOND + number + 1, NOW + second + number / _A_SECOND
        if number == 0:
            data = StepCommitted(JOB, step, FLEET.loss(step), "applied", 3)
            yield Change(seq, at, "step", "info", f"{JOB}: step {step} applied", (), data)
        else:
            name = FLEET.names[seq * 7 % FLEET.num_nodes]
            yield Change(seq, at, "node", "info", f"{name} is back", (f"node:{name}",))


FLEET = thousand()


def snapshot(second: int) -> Snapshot:
    job = FLEET.job(step=max(second, 0), loss=FLEET.loss(second), pipelines=FLEET.pipelines)
    return Snapshot(
        NOW + second, second * _A_SECOND, status(FLEET), (job,), FLEET.nodes(), FLEET.pipelines,
        FLEET.templates(), (),
        FLEET.layers(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PastStore]:
    made = PastStore(tmp_path_factory.mktemp("past"), 256 << 20, 86_400.0, lambda _trouble: None)
    made.start()
    for second in range(HOUR_S):
        shot = snapshot(second) if second % _EVERY_S == 0 else None
        made.put(PastBatch(snapshot=shot, changes=tuple(happened(second))))
        if shot is not None:
            made.reached().result()
    made.reached().result()
    yield made
    made.close()


def sought(store: PastStore, at: float) -> View:
    """As the daemon answers and the console shows it."""
    answer = msgspec.json.encode(store.read(at, SPAN_S))
    past = msgspec.json.decode(answer, type=Past)
    return fold(View(), [Walk(past, past.snapshot.at).begin(at, playing=False)])


@pytest.fixture
def _no_old_heap() -> Iterator[None]:
    """What other tests left in this process is not searched for garbage while the clock runs."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_no_old_heap")
def test_any_second_is_there_at_once(store: PastStore) -> None:
    seconds = random.Random(7).sample(range(1, HOUR_S), 40)
    took = []
    for second in seconds:
        began = time.process_time()
        view = sought(store, NOW + second)
        for paint in (grid.paint, pipelines.paint, events.paint):
            paint(view, NOW + second, 100, 30)
        took.append(time.process_time() - began)
        assert view.job is not None
        assert view.job.step == second + 1
    assert max(took) <= SEEK_S, f"{max(took):.3f} s"


@pytest.mark.parametrize("second", [1, 29, 30, 31, 1799, 3599])
def test_what_is_shown_of_a_second_was_shown_then(store: PastStore, second: int) -> None:
    shot, at = snapshot(second // _EVERY_S * _EVERY_S), NOW + second + 0.95
    fetched = Fetched(
        shot.at, shot.status, shot.jobs, shot.nodes, shot.pipelines, shot.templates, shot.incidents
    )
    asked = Watched(shot.at, layers=shot.layers)
    told = [
        ChangesHeard(at, change)
        for each in range(shot.seq // _A_SECOND, second + 1)
        for change in happened(each)
    ]
    live = fold(View(), [fetched, asked, *told])
    past = sought(store, at)
    assert past.job == live.job
    for paint in (
        grid.paint,
        nodetable.paint,
        pipelines.paint,
        templatetable.paint,
        incidents.paint,
        events.paint,
        log.paint,
    ):
        assert paint(past, at, 120, 40) == paint(live, at, 120, 40), paint

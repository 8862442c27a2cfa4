"""Steps in memory and in the journal are one list, whatever becomes of them meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from msgspec.structs import replace

from oobleckd.core import state
from oobleckd.core.apply import apply
from oobleckd.core.entries import Evaluated, JobSubmitted, RolledBack, StepEntry, note
from oobleckd.core.evaluations import result_of
from oobleckd.core.state import State
from oobleckd.daemon import http, stepstore
from oobleckd.daemon.curves import CurveQuestion
from oobleckd.daemon.refusal import Refusal
from oobleckd.protocol.api import Items
from oobleckd.protocol.changes import Change, JobWentBack
from oobleckd.protocol.incidentviews import IncidentView, ReasonView, RollbackView
from oobleckd.protocol.jobviews import CurveBin, StepView
from oobleckd.protocol.parts import Counters, EvalSum
from oobleckd.protocol.watch import CurveMark, CurveView
from tests.helpers.evaluations import with_eval
from tests.helpers.simjobs import make_job

JOB = "job-1"


class Store:
    """A journal and the state that it makes. ``meanwhile``: what happens while it is read."""

    def __init__(self) -> None:
        self.state, self.rows = State(), dict[int, StepEntry]()
        self.asked: list[tuple[int, int, int]] = []
        self.questions: list[CurveQuestion] = []
        self.bins: list[CurveBin] = []
        self.evaluated: dict[int, Evaluated] = {}
        self.meanwhile = lambda: None
        self.round = 0
        self.add(JobSubmitted(JOB, make_job(steps=10**6), "init", Counters(), 0.0, knows_on_nan=True))

    def add(self, entry: Any) -> None:
        apply(self.state, entry)
        if isinstance(entry, StepEntry):
            self.rows[entry.counters.step] = entry

    def train(self, num_steps: int, loss: float = 1.0) -> None:
        job = self.state.jobs[JOB]
        for _ in range(num_steps):
            counters = job.counters
            self.add(StepEntry(JOB, counters, "applied", job.epoch, loss, 1.0, 0.1, 8, "x", 0.5, 9.0, 1))

    def steps(self, job: str, first: int, last: int, limit: int) -> list[bytes]:
        assert job == JOB
        self.asked.append((first, last, limit))
        wanted = [self.rows[step] for step in sorted(self.rows) if first <= step <= last][:limit]
        found = list(map(msgspec.msgpack.encode, wanted))
        self.meanwhile()
        return found

    def evaluations(self, job: str, steps: Sequence[int]) -> list[bytes]:
        assert job == JOB
        return [msgspec.msgpack.encode(self.evaluated[step]) for step in steps]

    def curve(self, question: CurveQuestion) -> list[CurveBin]:
        self.questions.append(question)
        until = question.until
        self.meanwhile()
        if self.bins:
            return self.bins
        return [CurveBin(1, until, until, 0, 1.0, None, 3.0, 0.5, 0.5, 0.5, 0.1, 1.0)] * min(
            question.num_bins, 3
        )


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(state, "KEPT_STEPS", 64)
    return Store()


def read(store: Store, first: int, count: int) -> list[int]:
    found = asyncio.run(stepstore.read(store, store.state.jobs[JOB], first, count))
    return [step.step for step in found]


@pytest.mark.parametrize("first", [0, 1, 500, 930, 940, 960, 999, 1000, 2000])
@pytest.mark.parametrize("count", [1, 10, 100, 5000])
def test_they_are_one_list(store: Store, first: int, count: int) -> None:
    store.train(1000)
    assert read(store, first, count) == list(range(1000))[first : first + count]


def test_what_is_in_memory_is_not_looked_for(store: Store) -> None:
    store.train(1000)
    read(store, 960, 100)
    assert store.asked == []
    read(store, 100, 100)
    assert store.asked == [(100, stepstore.before_memory(store.state.jobs[JOB]), 100)]


def test_a_job_that_has_not_begun_has_none(store: Store) -> None:
    assert read(store, 0, 10) == []
    assert store.asked == []


def test_steps_that_move_on_meanwhile_leave_no_gap(store: Store) -> None:
    store.train(1000)
    store.meanwhile = lambda: store.train(100)
    assert read(store, 900, 200) == list(range(900, 1000))


def test_steps_that_are_given_up_meanwhile_are_read_again(store: Store) -> None:
    store.train(1000)

    def back() -> None:
        store.meanwhile = lambda: None
        store.add(RolledBack(JOB, "init", Counters(1001, 10, 10), 990, 9.0))
        store.train(20, loss=2.0)

    store.meanwhile = back
    found = asyncio.run(stepstore.read(store, store.state.jobs[JOB], 0, 2000))
    assert [step.step for step in found] == list(range(30))
    assert [step.loss for step in found] == [1.0] * 10 + [2.0] * 20


# ---------------------------------------------------------------------- over HTTP


def api(store: Store) -> http.Api:
    core = SimpleNamespace(state=store.state, run=None)
    service: Any = SimpleNamespace(core=core, journal=store)
    return http.Api(service)


def asked(store: Store, path: str, shape: Any) -> Any:
    what = path.partition("?")[0]
    request = make_mocked_request("GET", f"/v1/jobs/{JOB}/{path}", match_info={"job": JOB})
    answer = asyncio.run(getattr(api(store), what)(request))
    assert isinstance(answer, web.Response)
    assert isinstance(answer.body, bytes)
    return msgspec.json.decode(answer.body, type=shape)


def numbers(store: Store, query: str) -> list[int]:
    """Of all pages."""
    found, cursor = [], ""
    while True:
        page = asked(store, f"steps?{query}&cursor={cursor}", Items[StepView])
        found += [step.step for step in page.items]
        cursor = page.cursor
        if not cursor:
            return found


def test_pages_go_on_from_the_journal_to_memory(store: Store) -> None:
    store.train(1000)
    assert numbers(store, "") == list(range(1, 1001))
    assert numbers(store, "limit=7&since=900") == list(range(900, 1001))
    assert numbers(store, "limit=1000&since=1001") == []


def test_the_last_ones(store: Store) -> None:
    store.train(1000)
    assert numbers(store, "last=3") == [998, 999, 1000]
    assert numbers(store, "last=200&limit=30") == list(range(801, 1001))
    assert numbers(store, "last=5&since=999") == [999, 1000]
    assert numbers(store, "last=0") == []
    assert numbers(store, "last=5000&limit=500") == list(range(1, 1001))


def test_a_curve_is_of_all_steps(store: Store) -> None:
    store.train(1000)
    found = asked(store, "curve?bins=2", CurveView)
    question = store.questions[-1]
    assert (question.first, question.until, question.num_bins, question.log) == (0, 1000, 2, False)
    assert question.sequence == store.state.jobs[JOB].spec.train.sequence
    assert (found.job, found.step, len(found.bins)) == (JOB, 1000, 2)
    assert (found.bins[0].last, found.bins[0].loss_mean) == (1000, None)
    assert len(asked(store, "curve", CurveView).bins) == 3


@pytest.mark.parametrize("query", ["bins=0", "bins=2001", "bins=x", "bins=-1", "scale=loud", "scale="])
def test_that_is_no_curve(store: Store, query: str) -> None:
    with pytest.raises(Refusal):
        asked(store, f"curve?{query}", CurveView)


def test_a_curve_may_have_bins_that_grow(store: Store) -> None:
    store.train(10)
    assert asked(store, "curve?scale=log", CurveView).log
    assert store.questions[-1].log


def evaluated(store: Store, step: int, loss: float) -> Evaluated:
    total = EvalSum("validation", 4 * loss, 4)
    counters = Counters(store.state.jobs[JOB].counters.round, step, step)
    return Evaluated(JOB, counters, 1, (total,), 0.1, 5.0, (total,), 0.1)


def test_a_curve_has_the_newest_evaluation_of_each_bin(store: Store) -> None:
    job = store.state.jobs[JOB]
    job.spec = with_eval(job.spec, every=10, sequences=4, at_start=True, held_out=0.1)
    store.bins = [CurveBin(at + 1, at + 100, 100, 0, *[1.0] * 6, 0.1, 1.0) for at in range(0, 500, 100)]
    job.counters = Counters(1000, 500, 500)
    kept = {step: evaluated(store, step, 1 + step) for step in range(0, 500, 10)}
    store.evaluated = {step: entry for step, entry in kept.items() if step < 300}
    job.evaluations.results = [result_of(entry) for step, entry in kept.items() if step >= 300]
    found = asked(store, "curve?bins=5", CurveView).evaluations
    assert [(each.step, each.loss) for each in found] == [(at, 1.0 + at) for at in (100, 200, 300, 400, 490)]
    job.spec = with_eval(job.spec, every=0, sequences=4, at_start=True, held_out=0.1)
    assert [each.step for each in asked(store, "curve?bins=5", CurveView).evaluations] == [0]


def test_a_curve_that_is_given_up_meanwhile_is_read_again(store: Store) -> None:
    store.train(1000)

    def back() -> None:
        store.meanwhile = lambda: None
        store.add(RolledBack(JOB, "init", Counters(1001, 10, 10), 990, 9.0))

    store.meanwhile = back
    assert asked(store, "curve?bins=5", CurveView).step == 10
    assert [each.until for each in store.questions] == [1000, 10]


INCIDENT = IncidentView("inc-1", JOB, "node-2 is lost", ("node-2",), 3.0, 2, 401, False, (), 0.5, "because")


def test_incidents_and_rollbacks_are_marked_where_they_were(store: Store) -> None:
    store.train(500)
    back = RollbackView(300, 150, "init", "last-copy-lost")
    parts = ReasonView(rollback=back)
    store.state.incidents = {
        "inc-1": INCIDENT,
        "inc-2": replace(INCIDENT, id="inc-2", at=5.0, step=451, parts=parts, steps_lost=150),
        "inc-3": replace(INCIDENT, id="inc-3", at=6.0, step=900),  # of a history that was given up
        "inc-4": replace(INCIDENT, id="inc-4", job="job-2"),
    }
    went = JobWentBack(JOB, 40, 200, "corrupted", "corruption", "init")
    store.state.history.append(note(Change(7, 4.0, "job", "warn", "back", (f"job:{JOB}",), went)))
    assert asked(store, "curve", CurveView).marks == (
        CurveMark(400, 3.0, "incident", "inc-1", ("node-2",), 0.5),
        CurveMark(200, 4.0, "rollback", "", steps_lost=40),
        CurveMark(450, 5.0, "incident", "inc-2", ("node-2",), 0.5, 150),
        CurveMark(300, 5.0, "rollback", "inc-2", ("node-2",), steps_lost=150),
    )

"""What screens ask for beyond the lists, acts and commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from oobleckd.client import Client
from oobleckd.console import commands
from oobleckd.console.acts import ConsoleAct, perform, refusal
from oobleckd.console.asked import CURVE_BINS, PERIODS_S, REFUSED_S, TOUCHES, ConsoleQueries
from oobleckd.console.facts import QueryRefused, Wants, Watched
from oobleckd.console.feed import Feed
from oobleckd.console.marks import Marks
from oobleckd.console.model import View, fold
from oobleckd.console.past import Walk
from oobleckd.console.screens.prompt import word
from oobleckd.console.screens.steps import StepCursor
from oobleckd.protocol.api import Items
from oobleckd.protocol.jobeval import Eval
from oobleckd.protocol.requests import Accepted
from oobleckd.protocol.watch import SampledSteps
from oobleckd.unixhttp import ApiProblem, Unreachable
from tests.unit.console import build, watching
from tests.unit.console.build import NOW

ALL = Wants(schedule=True, modelled=True, layers=True, goodput=True, impacts=(("node-1",), ("node-2",)))
LIVE = fold(View(), watching.facts())


class Daemon(Client):
    """Answers from ``watching``; what it was asked is in ``asked``."""

    def __init__(self) -> None:
        super().__init__("none")
        self.asked: list[str] = []
        self.steps_known: tuple[int, ...] = (10, 20)
        self.knows = True

    def _get(self, path: str, kind: Any, **query: Any) -> Any:
        self.asked.append(path)
        if not self.knows:
            raise ApiProblem(404, "not found", f"nothing is at {path}")
        told = {
            "/v1/schedules": lambda: SampledSteps("job-1", self.steps_known),
            "/v1/schedule": lambda: (
                watching.modelled() if query["modelled"] else watching.schedule(query["step"])
            ),
            "/v1/layers": lambda: Items(watching.layers()),
            "/v1/impact": lambda: watching.impact(*query["nodes"].split(",")),
            "/v1/jobs/job-1/evaluations": lambda: Items(watching.EVALUATIONS),
            "/v1/jobs/job-1/curve": lambda: watching.curve(query["bins"]),
        }
        return told.get(path, watching.goodput)()

    def _post(self, path: str, body: dict[str, Any]) -> Accepted:
        self.asked.append(f"{path} {body.get('how', '')}".strip())
        return Accepted("", f"done: {path}")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    return Daemon()


def test_nothing_is_asked_that_no_screen_wants(daemon: Daemon) -> None:
    asked = ConsoleQueries(daemon)
    assert list(asked.answers(build.job(), NOW)) == []
    assert asked.due_at() == float("inf")
    assert asked.want(Wants(goodput=True))
    assert not asked.want(Wants(goodput=True))
    assert [fact.goodput for fact in asked.answers(build.job(), NOW) if isinstance(fact, Watched)] == [
        watching.goodput()
    ]
    assert asked.due_at() == NOW + PERIODS_S["goodput"]
    assert list(asked.answers(build.job(), NOW + 1)) == []


def test_everything_that_is_wanted_ends_in_the_view(daemon: Daemon) -> None:
    asked = ConsoleQueries(daemon)
    asked.want(ALL)
    view = fold(fold(View(), build.facts()), asked.answers(build.job(), NOW))
    assert view.schedule is not None
    assert view.schedule.step == 20
    assert (view.modelled, view.layers, view.goodput) == (
        watching.modelled(),
        watching.layers(),
        watching.goodput(),
    )
    assert [impact.nodes for impact in view.impacts] == [("node-1",), ("node-2",)]


def test_the_whole_run_is_asked_for_from_its_first_step_on(daemon: Daemon) -> None:
    asked = ConsoleQueries(daemon)
    asked.want(Wants(curve=True))
    assert list(asked.answers(build.job(step=0), NOW)) == []
    assert daemon.asked == []
    later = NOW + PERIODS_S["curve"]
    (fact,) = asked.answers(build.job(step=1), later)
    view = fold(fold(View(), build.facts()), [fact])
    assert view.curve == watching.curve(CURVE_BINS)


def test_evaluations_are_asked_for_where_the_job_has_any(daemon: Daemon) -> None:
    asked = ConsoleQueries(daemon)
    asked.want(Wants(curve=True))
    plain = build.job(step=1)
    spec = msgspec.structs.replace(plain.spec, eval=Eval(held_out=0.1, every=10))
    job = msgspec.structs.replace(plain, spec=spec)
    view = fold(fold(View(), build.facts()), asked.answers(job, NOW))
    assert view.evaluations == watching.EVALUATIONS
    asked.touch("evaluation")
    assert asked.due_at() <= NOW + PERIODS_S["curve"]


def test_a_step_is_fetched_once_and_another_when_it_is_looked_at(daemon: Daemon) -> None:
    asked = ConsoleQueries(daemon)
    asked.want(Wants(schedule=True))
    list(asked.answers(build.job(), NOW))
    list(asked.answers(build.job(), NOW + 100))
    assert daemon.asked.count("/v1/schedule") == 1
    asked.want(Wants(schedule=True, step=10))
    (_, fact) = asked.answers(build.job(), NOW + 101)
    assert isinstance(fact, Watched)
    assert fact.schedule is not None
    assert fact.schedule.step == 10


def test_what_would_follow_is_asked_once_until_the_plan_changes(daemon: Daemon) -> None:
    asked = ConsoleQueries(daemon)
    asked.want(Wants(impacts=(("node-1",),)))
    list(asked.answers(build.job(), NOW))
    list(asked.answers(build.job(), NOW + 1000))
    assert daemon.asked.count("/v1/impact") == 1
    asked.touch("plan")
    list(asked.answers(build.job(), NOW + 1001))
    assert daemon.asked.count("/v1/impact") == 2
    assert all(names <= PERIODS_S.keys() for names in TOUCHES.values())


def test_an_older_daemon_is_there_all_the_same(daemon: Daemon) -> None:
    daemon.knows = False
    asked = ConsoleQueries(daemon)
    asked.want(Wants(layers=True))
    (fact,) = asked.answers(build.job(), NOW)
    assert fact == QueryRefused(NOW, "layers", "nothing is at /v1/layers")
    assert asked.due_at() == NOW + REFUSED_S
    view = fold(LIVE, [fact])
    assert (view.link, view.refusal("layers")) == ("live", "nothing is at /v1/layers")
    assert fold(view, [Watched(NOW, layers=watching.layers())]).refusal("layers") == ""


def test_another_plan_makes_the_answers_about_the_old_one_void() -> None:
    assert LIVE.impacts
    view = fold(LIVE, [build.fetched(pipelines=build.PIPELINES[:1])])
    assert (view.impacts, view.modelled) == ((), None)
    assert view.goodput is not None
    other = fold(LIVE, [build.fetched(jobs=(build.job(id="job-2"),))])
    assert (other.goodput, other.schedule, other.layers) == (None, None, ())


# --------------------------------------------------------------------------- acts


def test_acts_and_their_commands(daemon: Daemon) -> None:
    kill = ConsoleAct("kill", ("node-1", "node 2"), "sigstop")
    assert kill.command == "oobleckctl kill-node node-1 'node 2' --how sigstop"
    assert ConsoleAct("drain", ("node-1",)).command == "oobleckctl drain node-1"
    assert perform(daemon, kill).said == "done: /v1/nodes/node-1/kill; done: /v1/nodes/node%202/kill"
    for verb in ("drain", "undrain", "pause", "resume", "checkpoint", "cancel"):
        assert perform(daemon, ConsoleAct(verb, ("x",))).said.endswith(f"x/{verb}")  # type: ignore[arg-type]
    assert daemon.asked[:2] == ["/v1/nodes/node-1/kill sigstop", "/v1/nodes/node%202/kill sigstop"]


def test_what_is_refused_and_why() -> None:
    act = ConsoleAct("kill", ("node-1",))
    assert refusal(act, LIVE, read_only=False) == ""
    assert "--read-only" in refusal(act, LIVE, read_only=True)
    assert "nothing is chosen" in refusal(ConsoleAct("drain", ()), LIVE, read_only=False)
    assert "does not answer" in refusal(act, View(), read_only=False)
    past = fold(View(), [Walk(watching.past(), NOW - 60).begin(NOW - 40, playing=False)])
    assert "this is the past" in refusal(act, past, read_only=False)


def test_the_jobs_name_is_wanted_where_the_job_may_stop() -> None:
    assert word(ConsoleAct("kill", ("node-2",)), LIVE) == ""
    assert word(ConsoleAct("kill", ("node-1",)), LIVE) == "small"
    assert word(ConsoleAct("cancel", ("job-1",)), LIVE) == "small"
    assert word(ConsoleAct("pause", ("job-1",)), LIVE) == ""
    stops = fold(LIVE, [Watched(NOW, impact=watching.impact("node-2", stops=True))])
    assert word(ConsoleAct("kill", ("node-2",)), stops) == "small"


def test_an_unreachable_daemon_is_an_error_of_the_poll_and_no_refusal(daemon: Daemon) -> None:
    asked = ConsoleQueries(Client("nowhere", timeout_s=0.1))
    asked.want(Wants(layers=True))
    with pytest.raises(Unreachable):
        list(asked.answers(build.job(), NOW))


# --------------------------------------------------------------------------- commands, marks, steps


def test_what_may_be_said() -> None:
    assert commands.parse("nodes") == commands.Goto("nodes")
    assert commands.parse(" What-if ") == commands.Goto("whatif")
    assert commands.parse("pi") == commands.Goto("pipelines")
    assert commands.parse("5") == commands.Goto("incidents")
    assert commands.parse("at -5m") == commands.Say("at", "-5m")
    assert commands.parse("q") == commands.Say("q", "")
    with pytest.raises(ValueError, match="there is no :nodse; did you mean :nodes"):
        commands.parse("nodse")
    with pytest.raises(ValueError, match="there are :overview"):
        commands.parse("!!!")


def test_marks_are_in_order_and_each_once() -> None:
    marks = Marks()
    for name in ("b", "a", "b", "c"):
        marks.toggle(name)
    assert marks.names == ("a", "c")
    marks.clear()
    assert marks.names == ()


def test_scrubbing_through_known_steps() -> None:
    steps, known = StepCursor(), SampledSteps("job-1", (10, 15, 20))
    steps.move(known, -1)
    assert steps.step == 15
    steps.move(known, -5)
    assert steps.step == 10
    steps.move(known, 1)
    assert steps.step == 15
    steps.move(known, 1)
    assert steps.step == 0
    steps.move(None, 1)
    assert steps.step == 0


def test_what_is_out_of_sight_is_asked_anew_when_it_comes_back(daemon: Daemon) -> None:
    asked = ConsoleQueries(daemon)
    for impacts in ((("node-1",),), (("node-2",),), (("node-1",),)):
        asked.want(Wants(impacts=impacts))
        list(asked.answers(build.job(), NOW))
    assert daemon.asked.count("/v1/impact") == 3


def test_a_plan_that_no_event_told_of_is_asked_about_anew(daemon: Daemon) -> None:
    feed = Feed(daemon, lambda _fact: None, lambda: NOW)
    feed.want(Wants(impacts=(("node-1",),)))
    for epoch, pipelines in (
        (3, build.PIPELINES),
        (3, build.PIPELINES),
        (4, build.PIPELINES),
        (4, build.PIPELINES[:1]),
    ):
        feed._notice_plan({"jobs": (build.job(epoch=epoch),), "pipelines": pipelines})
        list(feed._asked.answers(build.job(), NOW))
    assert daemon.asked.count("/v1/impact") == 3
    feed._notice_plan({})
    feed.close()


def test_a_shaken_cluster_does_not_make_the_daemon_plan_again_and_again(daemon: Daemon) -> None:
    asked = ConsoleQueries(daemon)
    asked.want(Wants(layers=True, impacts=(("node-1",),)))
    for tenth in range(100):
        asked.touch("node")
        list(asked.answers(build.job(), NOW + tenth / 10))
    assert (daemon.asked.count("/v1/impact"), daemon.asked.count("/v1/layers")) == (4, 10)
    asked.touch("node")
    list(asked.answers(build.job(), NOW + 11.5))
    assert daemon.asked.count("/v1/impact") == 4
    asked.touch("plan")
    list(asked.answers(build.job(), NOW + 11.6))
    assert daemon.asked.count("/v1/impact") == 5

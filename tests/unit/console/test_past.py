"""The past: from a snapshot and changes to the same view, from the daemon's history and from a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from oobleckd.console import bundle
from oobleckd.console.bundle import BundleError
from oobleckd.console.facts import AnyFact, Away, Rewound, Unshown
from oobleckd.console.model import View, fold
from oobleckd.console.past import Walk
from oobleckd.console.replay import Replay, of_file
from oobleckd.console.screens.steps import ASIDE_S, moment_of
from oobleckd.console.times import moment
from oobleckd.console.widgets import verdict
from oobleckd.draw.times import dated
from oobleckd.protocol.watch import Past
from oobleckd.unixhttp import ApiProblem, Unreachable
from tests.unit.console import build, watching
from tests.unit.console.build import NOW
from tests.unit.console.test_painters import said

START = NOW - 60.0
LIVE = fold(View(), watching.facts())


def at(seconds: float) -> View:
    return fold(View(), [Walk(watching.past(), START).begin(START + seconds, playing=False)])


def test_each_moment_has_what_was_by_then() -> None:
    assert (at(0).job or 0) != 0
    steps = [view.job.step for view in map(at, (5, 15, 29, 40)) if view.job is not None]
    assert steps == [20, 21, 21, 22]
    assert [view.schedule.step if view.schedule else 0 for view in map(at, (0, 5, 40))] == [0, 20, 22]
    assert at(40).layers == watching.layers()
    assert (at(40).link, at(40).heard_at) == ("replay", START + 40)


def test_an_incident_opens_and_closes_and_its_node_is_dead() -> None:
    before, during, after = at(19), at(21), at(25)
    assert before.incident is not None
    assert not before.incident.open
    assert during.incident is not None
    assert (during.incident.id, during.incident.open, during.incident.nodes) == ("inc-2", True, ("node-5",))
    assert after.incident is not None
    assert (after.incident.id, after.incident.open) == ("inc-2", False)
    states = {node.name: node.state for node in during.nodes}
    assert (states["node-5"], states["node-1"]) == ("lost", "active")
    assert {node.name: node.state for node in before.nodes}["node-5"] == "active"


def test_walking_on_is_the_same_as_beginning_there() -> None:
    walk = Walk(watching.past(), START)
    view = fold(View(), [walk.begin(START + 3, playing=True)])
    for second in range(4, 30):
        view = fold(view, [walk.onward(START + second, playing=True)])
    there = fold(View(), [Walk(watching.past(), START).begin(START + 29, playing=True)])
    assert view == there


def test_walking_back_begins_anew() -> None:
    walk = Walk(watching.past(), START)
    walk.begin(START + 40, playing=False)
    back = walk.onward(START + 5, playing=False)
    assert back.start
    assert fold(at(40), [back]) == at(5)


# --------------------------------------------------------------------------- replay


class Told:
    def __init__(self, load: Callable[[float], Past], seconds: float = 5.0, *, playing: bool = True) -> None:
        self.facts: list[AnyFact] = []
        self.replay = Replay(load, self.facts.append, START + seconds, playing=playing)

    @property
    def view(self) -> View:
        return fold(View(), self.facts)


def test_it_plays_stops_and_seeks() -> None:
    told = Told(lambda _at: watching.past())
    told.replay.tick(0.0)
    assert told.view.heard_at == START + 5
    told.replay.tick(10.0)
    assert told.view.heard_at == START + 15
    told.replay.play()
    told.replay.tick(0.0)
    told.replay.tick(10.0)
    assert told.view.heard_at == START + 15
    assert told.view.tape is not None
    assert not told.view.tape.playing
    told.replay.move(-1.0)
    told.replay.tick(0.0)
    told.replay.seek(START + 50)
    told.replay.move(1.0)
    told.replay.tick(0.0)
    assert told.view.heard_at == START + 51


def test_at_the_end_it_stands_still() -> None:
    told = Told(lambda _at: watching.past(), 58.0)
    for _ in range(4):
        told.replay.tick(1.5)
    assert told.view.heard_at == NOW
    assert told.view.tape is not None
    assert not told.view.tape.playing


def test_a_moment_that_is_not_kept_is_the_nearest_one() -> None:
    told = Told(lambda _at: watching.past(), -500.0)
    told.replay.tick(0.0)
    assert told.view.heard_at == START


def test_a_daemon_that_cannot_say_is_a_fact() -> None:
    def gone(_at: float) -> Past:
        raise Unreachable("no daemon", "start it")

    told = Told(gone)
    told.replay.tick(0.0)
    (fact,) = told.facts
    assert isinstance(fact, Away)
    assert "the past cannot be shown: no daemon" in fact.problem


def test_a_past_that_waits_for_the_daemon_is_shown_when_it_is_there() -> None:
    there = False

    def load(_at: float) -> Past:
        if not there:
            raise Unreachable("no daemon", "start it")
        return watching.past()

    told = Told(load)
    told.replay.tick(0.0)
    told.replay.move(1.0)
    told.replay.tick(0.5)
    there = True
    told.replay.tick(0.5)
    assert (told.view.link, told.view.heard_at, told.view.problem) == ("replay", START + 6, "")


def test_a_thread_that_waits_for_the_daemon_looks_again_by_itself() -> None:
    shown, tries = threading.Event(), []

    def load(at: float) -> Past:
        tries.append(at)
        if len(tries) < 3:
            raise Unreachable("no daemon", "start it")
        return watching.past()

    replay = Replay(
        load, lambda fact: shown.set() if isinstance(fact, Rewound) else None, START, playing=False
    )
    thread = threading.Thread(target=replay.run)
    thread.start()
    assert shown.wait(20.0)
    replay.close()
    thread.join(20.0)
    assert not thread.is_alive()


def test_a_past_that_is_not_kept_is_no_absence_of_the_daemon() -> None:
    def refused(_at: float) -> Past:
        raise ApiProblem(404, "not found", "nothing is kept of that time", "ask for a later one")

    told = Told(refused)
    told.replay.tick(0.0)
    problem = "the past cannot be shown: nothing is kept of that time"
    assert told.facts == [Unshown(START + 5, problem, "ask for a later one")]
    text = said(verdict.paint(told.view, NOW, 160))
    assert told.view.link == "replay"
    assert f" PAST  {problem}; ask for a later one" in text
    assert "no daemon" not in text
    assert "1970" not in said(verdict.paint(told.view, time.time(), 160)), "no moment is shown"
    told.replay.tick(0.5)
    assert len(told.facts) == 1, "it is not asked for again"


def test_what_cannot_be_shown_leaves_the_moment_that_is() -> None:
    for fact in (
        Unshown(NOW, "nothing is kept of that time"),
        Away(NOW, "the past cannot be shown: no daemon"),
    ):
        view = fold(at(20), [fact])
        assert (view.link, view.nodes, view.heard_at) == ("replay", at(20).nodes, START + 20)
        text = said(verdict.paint(view, NOW, 160))
        assert "◀ PAST" in text
        assert fact.problem in text
        assert fold(view, [Walk(watching.past(), START).begin(START + 21, playing=False)]) == at(21)


def test_its_thread_ends_when_it_is_closed() -> None:
    told = Told(lambda _at: watching.past(), playing=False)
    threads = [threading.Thread(target=thread) for thread in told.replay.threads]
    for thread in threads:
        thread.start()
    told.replay.close()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()


# --------------------------------------------------------------------------- files


def test_a_file_shows_what_the_daemon_showed(tmp_path: Path) -> None:
    path = tmp_path / "inc-2.json"
    bundle.write(path, watching.bundle())
    load, began = of_file(path)
    assert began == START + 20
    view = fold(View(), [Walk(load(began), began).begin(began + 1, playing=False)])
    assert view == at(21)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is no incident of oobleckd"),
        (b"\xff\xfe\x00", "is no incident of oobleckd"),
        (b"[1, 2]", "is no incident of oobleckd"),
        (b'{"some": "json"}', "is no incident of oobleckd"),
        (msgspec.json.encode(watching.bundle())[:2000], "is cut off"),
        (b'{"version": 2, "made_by": "oobleckd 9.0", "new": {}}', ("is of format 2, by oobleckd 9.0; this "
                                                                  "console reads format 1")),
        (b'{"version": 0}', "open it with the oobleck-console of that time"),
        (b'{"version": 1, "made_by": "oobleckd 0.0.9", "past": {}}', ("by oobleckd 0.0.9, cannot be shown by "
                                                                     "this version")),
    ],
)  # fmt: skip
def test_files_that_cannot_be_shown_are_one_line(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(BundleError) as error:
        bundle.read(path)
    assert said in f"{error.value.problem}; {error.value.hint}"
    assert "\n" not in error.value.problem
    assert error.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read: No such file"):
        bundle.read(tmp_path / "none")


def test_a_rewound_view_knows_how_far_it_may_go() -> None:
    fact = Walk(watching.past(), START).begin(START, playing=True)
    assert isinstance(fact, Rewound)
    assert (fact.begins, fact.until) == (NOW - 3600.0, NOW)


# --------------------------------------------------------------------------- times


def test_times_as_people_say_them() -> None:
    noon = moment("2026-03-04T12:00:00", 0.0)
    assert moment("now", noon) == noon
    assert moment("-90s", noon) == noon - 90
    assert moment("-5m", noon) == noon - 300
    assert moment("-2h", noon) == noon - 7200
    assert moment("+10s", noon, shown=5.0) == 15.0
    assert moment("11:59", noon) == noon - 60
    assert moment("11:59:30.5", noon) == noon - 29.5
    assert moment("12:01", noon) == noon + 60 - 86400
    for wrong in ("yesterday", "25:00", "12:61", "-5", "5m"):
        with pytest.raises(ValueError, match="no time"):
            moment(wrong, noon)


def test_a_time_of_day_is_the_one_nearest_to_what_is_shown() -> None:
    noon = moment("2026-03-04T12:00:00", 0.0)
    today = noon + 9 * 86400.0
    assert moment("12:04", today, noon) == noon + 240
    assert moment("11:30", today, noon) == noon - 1800
    assert moment("00:30", today, noon + 11 * 3600) == noon + 12.5 * 3600
    assert moment("23:30", today, noon - 11 * 3600) == noon - 12.5 * 3600
    assert moment("12:04", noon, noon - 60) == noon + 240 - 86400, "nothing is known of what is to come"
    assert moment("12:04", today, 0.0) == today + 240 - 86400, "nothing is shown yet"


def test_the_date_is_said_where_it_is_another() -> None:
    noon = moment("2026-03-04T12:00:00", 0.0)
    assert dated(noon, noon + 3600) == "12:00:00"
    assert dated(noon, noon + 86400, digits=1) == "2026-03-04 12:00:00.0"
    later = said(verdict.paint(at(20), NOW + 9 * 86400, 160))
    date = dated(START, NOW + 9 * 86400)[:10]
    assert f"◀ PAST {date} " in later
    assert f" PAST {date} " in later.split("\n")[-1]
    assert date not in said(verdict.paint(at(20), NOW, 160))


# --------------------------------------------------------------------------- what came before


def test_what_was_before_the_moment_is_in_the_picture() -> None:
    known = watching.past()
    before = build.change(3, "node", "node-1 is here")
    full = msgspec.structs.replace(
        known,
        steps=tuple(build.step(number, at=START - 20 + number) for number in range(1, 21)),
        before=(before,),
    )
    view = fold(View(), [Walk(full, START).begin(START + 12, playing=False)])
    assert [point.step for point in view.points] == list(range(1, 22))
    assert [change.text for change in view.events] == ["node-1 is here"]
    assert view.link == "replay"
    assert {node.name: node.state for node in view.nodes}["node-5"] == "active"


def test_arrows_go_to_the_moments_of_known_steps() -> None:
    view = at(20)
    assert moment_of(LIVE, 1) is None
    assert (moment_of(view, 1), moment_of(view, -1)) == (START + 31, START + 20 - ASIDE_S)
    later = at(40)
    assert (moment_of(later, 1), moment_of(later, -1)) == (START + 40 + ASIDE_S, START + 1)

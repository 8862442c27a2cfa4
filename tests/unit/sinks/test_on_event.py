"""Rules of events: commands that run, webhooks that are tried again, and none left out over a restart."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.client import Client
from oobleckd.protocol.changes import Change, JobMoved, NodeLost, StepCommitted
from oobleckd.protocol.sinks import EVENTS, EventRule, event_of, problem_of_rule
from oobleckd.sinks import delivery
from oobleckd.sinks.delivery import deliver
from oobleckd.sinks.onevent import RuleFollower
from tests.helpers.api_server import Api, serving, status_view
from tests.helpers.webhook import Receiver, receiving

LOST = Change(7, 1000.5, "node", "warn", "node-2 lost", ("node:node-2",), NodeLost("node-2", "silent"))
DONE = Change(9, 1001.5, "job", "info", "tiny-1 is done", ("job:tiny-1",), JobMoved("tiny-1", "done"))
STEP = Change(6, 1000.0, "step", "info", "step 1", (), StepCommitted("tiny-1", 1, 0.5, "applied", 1))
PATIENCE_S = 60.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_FIRST_S", 0.01)


def post(receiver: Receiver, **keys: object) -> bool:
    rule = EventRule(events=("node-lost",), url=receiver.url, **keys)
    return deliver(rule, "node-lost", LOST, threading.Event())


def test_a_webhook_is_tried_again_until_it_takes_it(receiver: Receiver) -> None:
    receiver.codes = [500, 503, 429]
    assert post(receiver)
    told = receiver.got.get_nowait()
    assert told == {
        "event": "node-lost", "seq": 7, "at": 1000.5, "kind": "node", "level": "warn", "text": "node-2 lost",
        "story": ["node:node-2"], "data": {"type": "node-lost", "node": "node-2", "cause": "silent"},
    }  # fmt: skip
    assert receiver.got.empty()


def test_slack_takes_a_text(receiver: Receiver) -> None:
    assert post(receiver, body="text")
    assert receiver.got.get_nowait() == {"text": "node-2 lost"}


@pytest.mark.parametrize("code", [400, 404, 302])
def test_what_will_not_be_taken_is_given_up(
    receiver: Receiver, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.codes = [code]
    assert not post(receiver)
    key = receiver.url.rpartition("/")[2]
    assert str(code) in caplog.text
    assert key not in caplog.text, "the path of a webhook is its key"


def test_nobody_listens_and_the_time_is_over() -> None:
    rule = EventRule(events=("node-lost",), url="http://127.0.0.1:1/", retry_s=0.05)
    assert not deliver(rule, "node-lost", LOST, threading.Event())


def test_a_command_gets_the_event(tmp_path: Path) -> None:
    code = (
        "import json, os, pathlib, sys; e = json.load(sys.stdin); "
        "pathlib.Path(sys.argv[1]).write_text(' '.join([e['event'], e['data']['node'], "
        "*(os.environ['OOBLECK_' + k] for k in ('EVENT', 'SEQ', 'LEVEL', 'NODE'))]))"
    )
    rule = EventRule(events=("node-lost",), command=(sys.executable, "-c", code, str(tmp_path / "out")))
    assert deliver(rule, "node-lost", LOST, threading.Event())
    assert (tmp_path / "out").read_text() == "node-lost node-2 node-lost 7 warn node-2"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("sh", "-c", "echo no space >&2; exit 3"), "sh ended with 3: no space"),
        (("sh", "-c", "sleep 1000 & sleep 1000"), "sh did not end in 0 s"),
        (("/nowhere/at/all",), "/nowhere/at/all cannot be run: No such file or directory"),
    ],
)
def test_a_command_that_fails_is_said(
    command: tuple[str, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    rule = EventRule(events=("node-lost",), command=command, timeout_s=0.3)
    assert not deliver(rule, "node-lost", LOST, threading.Event())
    assert said in caplog.text


def test_after_a_restart_it_goes_on_behind_the_last(receiver: Receiver, tmp_path: Path) -> None:
    """A rule that is new begins with what happens from then on; one that was delivered is not again."""
    rule = EventRule(events=("node-lost", "job-done"), url=receiver.url)
    seen = tmp_path / "on_event"
    api, more = Api(status_view(tmp_path)), threading.Event()

    def follow() -> Iterator[Change]:
        yield from (STEP, LOST)
        more.wait(PATIENCE_S)

    api.follow = follow
    with serving(tmp_path / "sock", api):
        follower = RuleFollower(Client(tmp_path / "sock"), rule, seen)
        follower.start()
        assert receiver.got.get(timeout=PATIENCE_S)["event"] == "node-lost"
        follower.stop()
        more.set()
        follower.join(PATIENCE_S)
    api.follow = lambda: iter((DONE,))
    (position,) = seen.iterdir()
    assert position.read_text() == "7\n"
    with serving(tmp_path / "sock2", api):
        follower = RuleFollower(Client(tmp_path / "sock2"), rule, seen)
        follower.start()
        assert receiver.got.get(timeout=PATIENCE_S)["event"] == "job-done"
        follower.stop()
        follower.join(PATIENCE_S)


def test_events_and_what_is_wrong_with_a_rule() -> None:
    assert event_of(LOST) == "node-lost"
    assert event_of(DONE) == "job-done"
    assert event_of(Change(1, 0.0, "gap", "warn", "", ())) == ""
    assert {"node-lost", "job-done", "job-failed", "incident-began", "incident-over"} <= set(EVENTS)
    for keys, said in (
        ({"events": ("node-lots",), "command": ("x",)}, "no event"),
        ({"events": ("node-lost",)}, "a command or a url"),
        ({"events": ("node-lost",), "command": ("x",), "url": "http://x"}, "a command or a url"),
        ({"events": ("node-lost",), "url": "file:///etc/passwd"}, "neither http:// nor https://"),
    ):
        found = problem_of_rule(EventRule(**keys))
        assert found is not None
        assert said in found[0]

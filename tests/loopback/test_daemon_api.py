"""The HTTP API over its real socket, through the real client and with bare bytes."""

from __future__ import annotations

import http.client
import os
import pwd
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleckd.client import Client
from oobleckd.daemon import keys
from oobleckd.protocol.changes import Audited, LinkClosed, NodeHere
from oobleckd.protocol.job import Checkpoint, Job, parse_job
from oobleckd.unixhttp import ApiProblem, BadAnswer, Unreachable
from tests.helpers.agents import Agent, hello
from tests.helpers.daemons import Daemon, daemon


def job(name: str = "small") -> Job:
    return parse_job(
        {"name": name, "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 8}}
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("api")
    keys.make_node_keys(folder / "keys", "node-1")
    # The tests' agent sends no heartbeats: its lease must outlast them.
    with daemon(folder, "--lease-s", "3600") as made:
        yield made


@pytest.fixture(scope="module")
def agent(running: Daemon) -> Iterator[Agent]:
    made = running.agent("node-1")
    made.say(hello("node-1"))
    made.listen()
    yield made
    made.close()


def raw(running: Daemon, method: str, path: str, body: bytes | None = None) -> tuple[int, str, Any]:
    """(status, content type, decoded body) of a request that our client would not send."""
    connection = http.client.HTTPConnection("localhost", timeout=120)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(running.client.socket_path))
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], msgspec.json.decode(response.read())
    finally:
        connection.close()


def told(client: Client, key: str) -> list[object]:
    """A story, in fields."""
    return [change.data for change in client.story(key)]


def test_views(running: Daemon, agent: Agent) -> None:
    client = running.client
    assert client.healthy()
    status = client.status()
    assert (status.nodes, status.allow_injection) == (1, False)
    assert status.endpoint == running.endpoint
    (node,) = client.nodes()
    assert (node.name, node.state, node.pids) == ("node-1", "standby", (1,))
    assert 0 <= node.heartbeat_age_s < status.up_s + 1
    assert client.pipelines() == client.templates() == client.incidents() == ()


def test_a_jobs_life_by_requests(running: Daemon, agent: Agent) -> None:
    client = running.client
    accepted = client.submit(job("life"))
    view = client.job(accepted.id)
    assert view.spec == job("life")
    assert client.job("life") == view, "found by name as well"
    assert view in client.jobs()
    assert client.steps(accepted.id) == ()
    assert (client.curve(accepted.id).step, client.curve(accepted.id).bins) == (0, ())
    assert client.pipelines(accepted.id) == ()
    client.control("life", "cancel")
    assert client.job(accepted.id).state == "cancelled"
    acts = [data.act for data in told(client, f"job:{accepted.id}") if isinstance(data, Audited)]
    assert acts == ["submit", "cancel"]
    with pytest.raises(ApiProblem) as caught:
        client.control("life", "pause")
    assert (caught.value.status, caught.value.title) == (409, "conflict")


@pytest.mark.parametrize("act", ["cancel", "pause", "resume", "checkpoint", "look"])
def test_a_name_that_two_jobs_share_is_no_name_to_act_on(running: Daemon, agent: Agent, act: Any) -> None:
    client, name = running.client, f"twice-{act}"
    first, second = (client.submit(job(name)).id for _ in range(2))
    for state in ("both wait", "one is over"):
        with pytest.raises(ApiProblem) as caught:
            client.job(name, unique=True) if act == "look" else client.control(name, act)
        assert (caught.value.status, caught.value.title) == (409, "conflict"), state
        assert first in caught.value.problem
        assert second in caught.value.problem
        assert client.job(name).id == second, "who only looks gets the newest"
        assert client.job(first, unique=True).id == first
        if state == "both wait":
            client.control(first, "cancel")
    client.control(second, "cancel", discard=True)
    assert {client.job(each).state for each in (first, second)} == {"cancelled"}


def test_a_job_has_a_folder_that_nobody_else_has(running: Daemon, agent: Agent, tmp_path: Path) -> None:
    number = len(running.client.jobs()) + 1
    (tmp_path / "ck" / f"small-{number}" / "step-00000001").mkdir(parents=True)
    spec = msgspec.structs.replace(job(), checkpoint=Checkpoint(dir=str(tmp_path / "ck")))
    accepted = running.client.submit(spec)
    assert accepted.id == f"small-{number + 1}"
    running.client.control(accepted.id, "cancel")
    with pytest.raises(ApiProblem, match="manifest"):
        running.client.submit(spec, resume=str(tmp_path))
    (tmp_path / "file").touch()
    bad = msgspec.structs.replace(job(), checkpoint=Checkpoint(dir=str(tmp_path / "file")))
    with pytest.raises(ApiProblem, match=r"checkpoint\.dir: .*/file cannot be written: Not a") as caught:
        running.client.submit(bad)
    assert caught.value.hint
    assert sorted(path.name for path in (tmp_path / "ck").iterdir()) == [f"small-{number}", accepted.id]


def test_a_job_that_has_no_checkpoint_is_nothing_to_go_on_from(running: Daemon, agent: Agent) -> None:
    first = running.client.submit(job("bare")).id
    for named in ("bare", first, f"{first}@3"):
        with pytest.raises(ApiProblem, match=f"{first} .* has no checkpoint") as caught:
            running.client.submit(job(), resume=named)
        assert caught.value.status == 422
        assert f"checkpoint {first} --wait" in caught.value.hint
    running.client.control(first, "cancel", discard=True)


def test_drain_and_undrain(running: Daemon, agent: Agent) -> None:
    client = running.client
    client.drain("node-1", "repair")
    (node,) = client.nodes()
    assert (node.state, node.cause, node.reason) == ("drained", "operator", "repair")
    client.undrain("node-1")
    assert client.nodes()[0].state == "standby"
    audited = told(client, "node:node-1")[-1]
    who = pwd.getpwuid(os.getuid()).pw_name  # the kernel's word on who asked
    assert audited == Audited(who, "undrain", nodes=("node-1",))


def test_refusals_are_problems_with_hints(running: Daemon, agent: Agent) -> None:
    client = running.client
    for status, ask in (
        (404, lambda: client.job("nonesuch")),
        (404, lambda: client.drain("nonesuch")),
        (403, lambda: client.kill("node-1")),
        (422, lambda: client.submit(job(), resume="/nonesuch")),
        (404, lambda: client.submit(job(), resume="nonesuch@3")),
    ):
        with pytest.raises(ApiProblem) as caught:
            ask()
        assert caught.value.status == status
        assert caught.value.hint


SHARED = {
    "name": "x",
    "train": {"steps": 1, "global_batch": 2, "micro_batch": 1, "sequence": 8, "compile": True},
    "resources": {"devices_per_stage": "auto"},
}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "detail"),
    [
        ("POST", "/v1/jobs", {"job": {"name": "x", "trian": {}}}, 422, "trian: unknown key"),
        ("POST", "/v1/jobs", {"job": {"name": "x"}, "extra": 1}, 422, "extra: unknown key"),
        ("POST", "/v1/jobs", {}, 422, "job: is missing"),
        ("POST", "/v1/jobs", {"job": SHARED}, 422, "resources.devices_per_stage: 'auto' beside"),
        ("POST", "/v1/nodes/node-1/kill", {"how": "kindly"}, 422, "kindly"),
        ("GET", "/v1/story", None, 422, "key is missing"),
        ("GET", "/v1/events?since=x", None, 422, "no number"),
        ("GET", "/v1/events?since=", None, 422, "no number"),
        ("GET", "/v1/events?follow=", None, 422, "neither 0 nor 1"),
        ("GET", "/v1/past?at=", None, 422, "no time"),
        ("GET", "/nowhere", None, 404, "Not Found"),
        ("DELETE", "/v1/jobs", None, 405, "Method Not Allowed"),
    ],
)
def test_what_a_client_may_get_wrong(
    running: Daemon, method: str, path: str, body: Any, status: int, detail: str
) -> None:
    data = None if body is None else msgspec.json.encode(body)
    found, kind, answer = raw(running, method, path, data)
    assert (found, answer["status"], kind) == (status, status, "application/problem+json")
    assert detail in answer["detail"]


def test_answers_name_their_version(running: Daemon) -> None:
    for path in ("/v1/status", "/v1/jobs", "/v1/nodes", "/v1/story?key=x"):
        assert raw(running, "GET", path)[2]["apiVersion"] == "oobleck/v1"


def test_events_are_resumed_by_number(running: Daemon, agent: Agent) -> None:
    client = running.client
    client.drain("node-1")
    client.undrain("node-1")
    all_of_it = list(client.events(0, follow=False))
    assert [change.seq for change in all_of_it] == list(range(1, len(all_of_it) + 1))
    assert list(client.events(all_of_it[2].seq, follow=False)) == all_of_it[3:]
    assert list(client.events(None, follow=False)) == []
    (gap,) = client.events(10**6, follow=False)
    assert gap.kind == "gap"


def test_last_event_id_resumes_like_a_browser(running: Daemon, agent: Agent) -> None:
    running.client.drain("node-1")
    running.client.undrain("node-1")
    newest = list(running.client.events(0, follow=False))[-1].seq
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(120)
        sock.connect(str(running.client.socket_path))
        sock.sendall(b"GET /v1/events?follow=0 HTTP/1.0\r\nLast-Event-ID: %d\r\n\r\n" % (newest - 1))
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    assert re.findall(rb"^id: (\d+)", data, re.MULTILINE) == [b"%d" % newest]
    assert b"Content-Type: text/event-stream" in data


def test_a_stream_is_followed_and_ends_when_closed(running: Daemon, agent: Agent) -> None:
    links: list[bool] = []
    connected = threading.Event()

    def on_link(up: bool) -> None:
        links.append(up)
        connected.set()

    stream = running.client.events(on_link=on_link)
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.extend(change.kind for change in stream))
    reader.start()
    assert connected.wait(120)
    running.client.drain("node-1")
    running.client.undrain("node-1")
    seen = list(running.client.events(0, follow=False))[-1].seq
    with running.client.events(seen - 2) as other:
        assert [next(other).kind, next(other).kind] == ["audit", "audit"]
    stream.close()
    reader.join(120)
    assert not reader.is_alive()
    assert links[0] is True


def test_a_client_that_hangs_up_leaves_no_traceback(tmp_path: Path) -> None:
    keys.make_node_keys(tmp_path / "keys", "node-1")
    with daemon(tmp_path) as made:
        for _ in range(3):
            made.client.submit(job())
            with made.client.events(0) as stream:
                next(stream)
        assert made.stop() == 0
        assert made.log_until("Traceback") == ""


def test_a_closed_stream_leaves_no_socket(running: Daemon, agent: Agent) -> None:
    def num_sockets() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = num_sockets()
    unread, half_read = running.client.events(), running.client.events(0)
    next(half_read)
    assert num_sockets() > before
    unread.close()
    half_read.close()
    assert num_sockets() == before
    assert list(half_read) == []


def test_a_stream_outlives_the_daemon(tmp_path: Path) -> None:
    keys.make_node_keys(tmp_path / "keys", "node-1")
    links: list[bool] = []
    with daemon(tmp_path, "--lease-s", "3600") as first:
        stream = first.client.events(0, on_link=links.append)
        agent = first.agent("node-1")
        agent.say(hello("node-1"))
        here = next(stream).data
        assert isinstance(here, NodeHere)
        assert (here.node, here.back) == ("node-1", False)
        agent.close()
        assert next(stream).data == LinkClosed("node-1")
        assert first.stop() == 0
    with daemon(tmp_path, "--lease-s", "3600") as second:
        agent = second.agent("node-1")
        agent.say(hello("node-1"))
        change = next(stream)
        assert isinstance(change.data, NodeHere)
        assert change.seq == 3, "nothing missed, nothing twice"
        stream.close()
        agent.close()
    assert links[0] is True
    assert False in links
    assert links[-1] is True


SAMPLE = re.compile(
    r'(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?P<labels>([a-z_]+="([^"\\\n]|\\["\\n])*",?)+)\})? (?P<value>\S+)'
)


def test_metrics_are_prometheus_text(running: Daemon, agent: Agent) -> None:
    families: dict[str, str] = {}
    samples: dict[str, float] = {}
    text = running.client.metrics()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in families
            assert kind in {"gauge", "counter", "histogram"}
            families[name] = kind
        elif not line.startswith("# HELP "):
            found = SAMPLE.fullmatch(line)
            assert found, line
            family = re.sub(r"_(bucket|sum|count)$", "", found["name"])
            assert family in families or found["name"] in families, "every sample follows its TYPE"
            key = f"{found['name']}{{{found['labels'] or ''}}}"
            assert key not in samples
            samples[key] = float(found["value"])
    assert samples['oobleck_nodes{state="standby"}'] == 1
    assert samples["oobleck_journal_errors_total{}"] == 0
    assert samples["oobleck_unknown_messages_total{}"] == 0
    assert (
        samples['oobleck_recovery_seconds_bucket{le="+Inf"}'] == samples["oobleck_recovery_seconds_count{}"]
    )
    assert all(kind != "counter" or name.endswith("_total") for name, kind in families.items())


def test_an_absent_daemon_and_a_strange_one(tmp_path: Path) -> None:
    client = Client(tmp_path / "none.sock")
    with pytest.raises(Unreachable, match="does not exist") as caught:
        client.nodes()
    assert "oobleckctl up" in caught.value.hint
    with pytest.raises(Unreachable):
        next(client.events(0, follow=False))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
        with pytest.raises(Unreachable, match="no daemon listens"):
            Client(tmp_path / "dead.sock").status()
        dead.listen()
        with pytest.raises(Unreachable, match="does not answer in time"):
            Client(tmp_path / "dead.sock", timeout_s=0.05).status()

    def answer_strangely() -> None:
        for _ in range(2):  # the one that gave up is still in the queue
            connection, _ = dead2.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n[]")

    with socket.socket(socket.AF_UNIX) as dead2:
        dead2.bind(str(tmp_path / "strange.sock"))
        dead2.listen()
        server = threading.Thread(target=answer_strangely)
        server.start()
        for _ in range(2):
            with pytest.raises(BadAnswer, match="cannot be read"):
                Client(tmp_path / "strange.sock").status()
        server.join(120)


def test_a_socket_that_was_removed_is_there_again(running: Daemon, agent: Agent) -> None:
    path = running.client.socket_path
    path.unlink()
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        select.select([], [], [], 0.05)
    assert path.stat().st_mode & 0o777 == 0o666
    assert running.client.healthy()

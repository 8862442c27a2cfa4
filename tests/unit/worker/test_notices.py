"""Notices of the end: what the metadata services of clouds say, who asks them, and when the agent goes."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint, EntryPoints
from threading import Thread

import pytest

from oobleckd.worker.agent import notices
from oobleckd.worker.agent.clouds import Aws, Azure, End, GoogleCloud
from oobleckd.worker.agent.departure import Departure
from oobleckd.worker.agent.notices import Poller, UnknownSource, find_source

SOON = 1_900_000_000.0  # 2030-03-17T17:46:40Z


@dataclass
class Metadata:
    """A metadata service: ``answers``: path -> status and body. ``asked``: method, path and headers of every
    request.
    """

    address: str = ""
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    token: str = ""

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        self.asked.append((method, path, headers))
        if path == "/latest/api/token":
            assert method == "PUT"
            assert headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
            return 200, self.token
        if self.token and headers.get("X-aws-ec2-metadata-token") != self.token:
            return 401, ""
        return self.answers.get(path, (404, "no such thing"))


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    service = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            status, body = service.answer(self.command, self.path, dict(self.headers))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = _serve  # noqa: N815 - the base class's names

        def log_message(self, *_args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service.address = f"127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield service
        server.shutdown()
        thread.join()


# --------------------------------------------------------------------------- what clouds say


def test_aws(metadata: Metadata) -> None:
    metadata.token = "first"
    source = Aws(metadata.address)
    assert source.poll() is None
    metadata.token = "second"  # it has expired
    metadata.answers["/latest/meta-data/spot/instance-action"] = (
        200,
        '{"action": "terminate", "time": "2030-03-17T17:46:40Z"}',
    )
    assert source.poll() == End("AWS announced: spot instance terminate", SOON)
    assert [path for _, path, _ in metadata.asked].count("/latest/api/token") == 2


def test_google_cloud(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: SOON)
    path = "/computeMetadata/v1/instance/"
    metadata.answers = {f"{path}preempted": (200, "FALSE"), f"{path}maintenance-event": (200, "NONE")}
    source = GoogleCloud(metadata.address)
    assert source.poll() is None
    assert {headers["Metadata-Flavor"] for _, _, headers in metadata.asked} == {"Google"}
    metadata.answers[f"{path}maintenance-event"] = (200, "TERMINATE_ON_HOST_MAINTENANCE")
    assert source.poll() == End("Google Cloud announced: host maintenance", SOON + 3600)
    metadata.answers[f"{path}preempted"] = (200, "TRUE")
    assert source.poll() == End("Google Cloud announced: preempted", SOON + 30)


AZURE = (
    '{{"DocumentIncarnation": 2, "Events": [{{"EventId": "602d9444", "EventStatus": "{status}", "EventType": '
    '"{kind}", '
    '"ResourceType": "VirtualMachine", "Resources": ["{name}", "pool_7"], "NotBefore": "{when}", '
    '"Description": "", '
    '"EventSource": "Platform", "DurationInSeconds": -1}}]}}'
)


@pytest.mark.parametrize(
    ("event", "end"),
    [
        ({"kind": "Preempt"}, End("Azure announced: Preempt", SOON)),
        (
            {"kind": "Preempt", "when": "", "status": "Started"},
            End("Azure announced: Preempt", SOON - 100),
        ),
        ({"kind": "Freeze"}, None),
        ({"kind": "Preempt", "name": "pool_4"}, None),
        ({"kind": "Terminate", "status": "Canceled"}, None),
    ],
)
def test_azure(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch, event: dict[str, str], end: End | None
) -> None:
    monkeypatch.setattr(time, "time", lambda: SOON - 100)
    fields = {"status": "Scheduled", "name": "pool_3", "when": "Sun, 17 Mar 2030 17:46:40 GMT", **event}
    metadata.answers = {
        "/metadata/instance/compute/name?api-version=2021-02-01&format=text": (200, "pool_3"),
        "/metadata/scheduledevents?api-version=2020-07-01": (200, AZURE.format(**fields)),
    }
    assert Azure(metadata.address).poll() == end
    assert {headers["Metadata"] for _, _, headers in metadata.asked} == {"true"}


@pytest.mark.parametrize("make", [GoogleCloud, Azure])
def test_no_answer_is_an_error(metadata: Metadata, make: Callable[[str], notices.NoticeSource]) -> None:
    with pytest.raises(ValueError, match="the metadata service answers 404"):
        make(metadata.address).poll()


def test_an_answer_that_nobody_understands_is_an_error(metadata: Metadata) -> None:
    metadata.answers["/latest/meta-data/spot/instance-action"] = (200, '{"action": 3}')
    with pytest.raises(ValueError, match="says what nobody understands"):
        Aws(metadata.address).poll()


# --------------------------------------------------------------------------- who asks


@dataclass
class Scripted:
    """Says what it was given, one after the other."""

    said: list[End | Exception | None]
    poll_s: float = 0.001

    def poll(self) -> End | None:
        one = self.said.pop(0)
        if isinstance(one, Exception):
            raise one
        return one


def test_the_poller_asks_until_it_is_told_and_survives_an_outage() -> None:
    heard: queue.Queue[tuple[str, float]] = queue.Queue()
    source = Scripted([None, OSError("no route"), ValueError("?"), None, End("gone", time.time() + 60), None])
    poller = Poller(source, lambda *said: heard.put(said))
    reason, left_s = heard.get(timeout=60)
    poller.close()
    assert reason == "gone"
    assert 0 < left_s <= 60
    assert source.said == [None], "one notice is enough"


def test_sources_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_source("none") is None
    assert isinstance(find_source("azure"), Azure)
    ours = EntryPoint("own", f"{__name__}:own_source", notices.GROUP)
    monkeypatch.setattr(notices, "entry_points", lambda group: EntryPoints([ours]).select(group=group))
    assert isinstance(find_source("own"), Scripted)
    with pytest.raises(UnknownSource) as raised:
        find_source("ours")
    assert raised.value.known == ["aws", "azure", "gcp", "none", "own"]


def own_source() -> Scripted:
    return Scripted([])


# --------------------------------------------------------------------------- when the agent goes


def test_the_earliest_end_counts() -> None:
    async def depart() -> list[str]:
        expired: asyncio.Queue[str] = asyncio.Queue()
        told: list[str] = []
        departure = Departure(
            on_notice=lambda: told.append("notice"), leave=told.append, expire=expired.put_nowait
        )
        departure.dismissed()
        assert departure.notice is None
        departure.noticed("maintenance", 3600.0)
        departure.noticed("later", 7200.0)
        departure.noticed("SIGTERM", 0.02)
        assert departure.notice is not None
        assert departure.notice.reason == "SIGTERM"
        told.append(await asyncio.wait_for(expired.get(), 60))
        departure.close()
        return told

    assert asyncio.run(depart()) == ["notice", "notice", "SIGTERM"]

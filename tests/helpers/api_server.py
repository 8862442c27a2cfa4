"""The daemon's HTTP API as far as the command line uses it, over a real unix socket, from prepared views.

For tests of ``oobleckd.ctl``: requests go the whole way through the real client. It owns no behaviour: what
it answers is what the test put in, what it was asked is in ``asked``.
"""

from __future__ import annotations

import contextlib
import itertools
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from oobleckd.protocol.api import Problem, Status
from oobleckd.protocol.changes import Change
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobviews import JobView, PipelineView, StepView, TemplateView
from oobleckd.protocol.nodeviews import NodeView
from oobleckd.protocol.requests import Accepted
from oobleckd.protocol.watch import LayerView


@dataclass(slots=True)
class Api:
    """What the daemon would say. ``on_act`` may change it, or refuse, when something is asked. ``watched``:
    schedule, goodput, log, impact, bundle, debug; ``queries``: what was asked of these; ``follow``: what the
    event stream goes on with, for ever.
    """

    status: Status
    jobs: list[JobView] = field(default_factory=list)
    nodes: list[NodeView] = field(default_factory=list)
    incidents: list[IncidentView] = field(default_factory=list)
    pipelines: list[PipelineView] = field(default_factory=list)
    templates: list[TemplateView] = field(default_factory=list)
    steps: dict[str, list[StepView]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    evaluations: dict[str, list[EvaluationView]] = field(default_factory=dict)
    layers: list[LayerView] = field(default_factory=list)
    watched: dict[str, msgspec.Struct] = field(default_factory=dict)
    queries: list[tuple[str, dict[str, list[str]]]] = field(default_factory=list)
    follow: Callable[[], Iterable[Change]] = tuple
    problem: Problem | None = None
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    on_act: Callable[[str, dict[str, Any]], Accepted | Problem] = lambda _path, _body: Accepted(
        "job-1", "queued"
    )

    def read(self, path: str, query: dict[str, list[str]]) -> Any:
        """The answer to a GET: a struct, or a list of them."""
        parts = path.strip("/").split("/")[1:]
        match parts:
            case ["status" | "jobs" | "nodes" | "incidents" | "pipelines" | "templates" | "layers" as name]:
                if query:
                    self.queries.append((path, query))
                return getattr(self, name)
            case ["jobs", job]:
                return next((view for view in reversed(self.jobs) if job in {view.id, view.name}), None)
            case ["jobs", job, "evaluations" | "steps" as name]:
                return self._steps_of(job, query) if name == "steps" else self.evaluations.get(job, [])
            case ["schedule" | "schedules" | "impact" | "past" | "debug" as name] | [
                "jobs" | "incidents" | "nodes",
                _,
                "goodput" | "bundle" | "curve" | "log" as name,
            ]:
                self.queries.append((path, query))
                return self.watched.get(name)
            case ["story"]:
                return [change for change in self.changes if query["key"][0] in change.story]
        return None

    def _steps_of(self, job: str, query: dict[str, list[str]]) -> list[StepView]:
        since, last = int(query.get("since", ["0"])[0]), int(query.get("last", [str(2**60)])[0])
        return [step for step in self.steps.get(job, []) if step.step >= since][-last:]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if self.server.api.problem:
            self._answer(self.server.api.problem, self.server.api.problem.status)
        elif url.path == "/healthz":
            self._answer("ok", 200)
        elif url.path == "/v1/events":
            self._stream()
        else:
            found = self.server.api.read(url.path, parse_qs(url.query))
            if found is None:
                self._answer(Problem("not found", 404, f"nothing is at {url.path}", "look elsewhere"), 404)
            else:
                self._answer({"items": found} if isinstance(found, list) else found, 200)

    def do_DELETE(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = msgspec.json.decode(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.server.api.asked.append((self.path, body))
        if self.server.api.problem:
            self._answer(self.server.api.problem, self.server.api.problem.status)
        else:
            answer = self.server.api.on_act(self.path, body)
            self._answer(answer, answer.status if isinstance(answer, Problem) else 200)

    def _answer(self, body: Any, status: int) -> None:
        data = msgspec.json.encode(body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        api = self.server.api
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who listens may hang up
            for change in itertools.chain(api.changes, api.follow()):
                self.wfile.write(b"id: %d\ndata: %s\n\n" % (change.seq, msgspec.json.encode(change)))

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_args: Any) -> None:
        """A test's output is not the place."""


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, api: Api) -> None:
        super().__init__(str(path), _Handler)
        self.api = api


@contextmanager
def serving(path: Path, api: Api) -> Iterator[Api]:
    """Serve ``api`` on the socket ``path``."""
    with _Server(path, api) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


# --------------------------------------------------------------------------- views with usual contents


def job_spec(**changes: Any) -> Job:
    """A small valid job."""
    raw = {
        "name": "small",
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 8},
        **changes,
    }
    return parse_job(raw)


def job_view(**changes: Any) -> JobView:
    """A job that is done."""
    spec = changes.pop("spec", job_spec())
    usual: dict[str, Any] = {
        "id": "job-1", "name": spec.name, "state": "done", "reason": "", "step": 3, "steps": 3, "epoch": 1,
        "loss": 5.5, "tolerance": 1, "f": 1, "policy": "oobleck", "nodes": ("node-1", "node-2"),
        "pipelines": (), "samples_per_s": 10.0, "step_s": 0.4, "submitted_at": 0.0, "finished_at": 9.0,
        "incidents": 0, "steps_lost": 0, "checkpoint": "", "digest": "d1", "spec": spec,
    }  # fmt: skip
    return JobView(**(usual | changes))


def node_view(name: str, **changes: Any) -> NodeView:
    """A node at work."""
    usual: dict[str, Any] = {
        "name": name, "state": "active", "incarnation": "i.0", "host": "h", "devices": (f"{name}/0",),
        "kinds": ("cpu",), "pids": (1,), "heartbeat_age_s": 0.25, "layers": (),
    }  # fmt: skip
    return NodeView(**(usual | changes))


def status_view(state_dir: Path) -> Status:
    """A daemon's headline."""
    return Status(
        version="0.1.0", daemon="d", state_dir=str(state_dir), up_s=5.0, nodes=2, jobs=1, line="idle",
        endpoint="tcp://127.0.0.1:1", allow_injection=True,
    )  # fmt: skip

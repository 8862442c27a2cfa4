"""Client of the daemon's HTTP API on its unix socket: synchronous, typed, cheap to import.

Owns where the socket is looked for, requests, and the event stream with its reconnects.
Owns no printing and no waiting for conditions (``ctl``), and knows neither aiohttp nor zmq.
"""

from __future__ import annotations

import http.client
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote, urlencode

import msgspec

from oobleckd.protocol.api import Items, Status
from oobleckd.protocol.canonical import canonical
from oobleckd.protocol.changes import Change
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobviews import JobView, PipelineView, RouterView, StepView, TemplateView
from oobleckd.protocol.nodeviews import NodeLogView, NodeView
from oobleckd.protocol.parts import How
from oobleckd.protocol.requests import Accepted
from oobleckd.protocol.watch import (
    Bundle,
    CurveView,
    DebugView,
    GoodputView,
    ImpactView,
    LayerView,
    Past,
    SampledSteps,
    Scale,
    ScheduleView,
)
from oobleckd.unixhttp import (
    Answer,
    ApiProblem,
    UnixConnection,
    Unreachable,
    close,
    decode,
    problem_of,
    unreachable,
)

Act = Literal["pause", "resume", "cancel", "checkpoint"]

SERVICE_STATE = Path("/var/lib/oobleck")
SERVICE_SOCKET = Path("/run/oobleck/oobleckd.sock")
TIMEOUT_S = 10.0
# The daemon sends a comment every ten seconds; three missed ones are a dead stream.
STREAM_TIMEOUT_S = 30.0
_RETRY_FIRST_S = 0.1
_MAX_RETRY_S = 2.0
_MAX_WAITS = 20


def state_dir() -> Path:
    """Where ``up`` keeps a local cluster: OOBLECK_STATE, or below XDG_STATE_HOME or ~/.local/state."""
    if named := os.environ.get("OOBLECK_STATE"):
        return Path(named).absolute()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "oobleck"


def socket_of(state: Path) -> Path:
    """The daemon's socket of the local cluster under ``state``."""
    return state / "run" / "oobleckd.sock"


def find_socket(flag: str | None) -> Path:
    """--socket, OOBLECK_SOCKET, the local cluster's socket, or the service's where only that exists."""
    if named := flag or os.environ.get("OOBLECK_SOCKET"):
        return Path(named)
    local = socket_of(state_dir())
    if not local.exists() and "OOBLECK_STATE" not in os.environ and SERVICE_SOCKET.exists():
        return SERVICE_SOCKET
    return local


class Client:
    """One daemon, by the path of its socket. Every call is one connection, so it may be shared by threads.

    All calls raise Unreachable, ApiProblem or BadAnswer.
    """

    def __init__(self, socket_path: Path | str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.socket_path = Path(socket_path)
        self._timeout_s = timeout_s

    # ------------------------------------------------------------------- reading

    def healthy(self) -> bool:
        """Whether the daemon answers and can write its journal."""
        try:
            self._request("GET", "/healthz")
        except ApiProblem as problem:
            if problem.status == http.client.SERVICE_UNAVAILABLE:
                return False
            raise
        return True

    def status(self) -> Status:
        """Headline of the daemon."""
        return self._get("/v1/status", Status)

    def jobs(self) -> tuple[JobView, ...]:
        """All jobs, oldest first."""
        return self._list("/v1/jobs", JobView)

    def job(self, job: str, *, unique: bool = False) -> JobView:
        """The job with this id, or the newest one with this name. ApiProblem 404 when there is none, and
        with ``unique`` 409 when there are several of that name.
        """
        return self._get(f"/v1/jobs/{quote(job, safe='')}", JobView, unique=int(unique) or "")

    def steps(self, job: str, since: int = 0, *, last: int | None = None) -> tuple[StepView, ...]:
        """Committed steps of a job from step number ``since`` on, in order; of the ``last`` ones alone where
        that is said.
        """
        query: dict[str, int] = {"since": since} | ({"last": last} if last is not None else {})
        rows = self._list(f"/v1/jobs/{quote(job, safe='')}/steps", _StepRow, **query)
        return tuple(row.view() for row in rows)

    def evaluations(self, job: str, since: int = 0, *, last: int | None = None) -> tuple[EvaluationView, ...]:
        """Evaluations of a job from that after ``since`` steps on, in order; the ``last`` ones alone where
        that is said.
        """
        query: dict[str, int] = {"since": since} | ({"last": last} if last is not None else {})
        return self._list(f"/v1/jobs/{quote(job, safe='')}/evaluations", EvaluationView, **query)

    def some_steps(self, job: str, since: int, most: int) -> tuple[StepView, ...]:
        """Of ``steps``, from ``since`` on, ``most`` or fewer, by one question."""
        asked = f"/v1/jobs/{quote(job, safe='')}/steps"
        page = self._get(asked, Items[_StepRow], since=since, limit=most)
        return tuple(row.view() for row in page.items)

    def some_evaluations(self, job: str, since: int, most: int) -> tuple[EvaluationView, ...]:
        """Of ``evaluations``, from ``since`` on, ``most`` or fewer, by one question."""
        asked = f"/v1/jobs/{quote(job, safe='')}/evaluations"
        return self._get(asked, Items[EvaluationView], since=since, limit=most).items

    def curve(self, job: str, bins: int = 200, scale: Scale = "linear") -> CurveView:
        """All steps of a job in so many parts at most, however long it has run: of equal width, or with the
        scale "log" of widths that grow from its first step on.
        """
        return self._get(f"/v1/jobs/{quote(job, safe='')}/curve", CurveView, bins=bins, scale=scale)

    def nodes(self) -> tuple[NodeView, ...]:
        """All nodes the daemon has ever heard of, by name."""
        return self._list("/v1/nodes", NodeView)

    def node_log(self, node: str, lines: int = 200) -> NodeLogView:
        """The newest lines of a node's log. ApiProblem 404 for a node that nobody knows, 503 where its agent
        does not answer.
        """
        return self._get(f"/v1/nodes/{quote(node, safe='')}/log", NodeLogView, lines=lines)

    def incidents(self) -> tuple[IncidentView, ...]:
        """All incidents, oldest first."""
        return self._list("/v1/incidents", IncidentView)

    def pipelines(self, job: str = "") -> tuple[PipelineView, ...]:
        """Pipelines of ``job``, or of the job that is deployed."""
        return self._list("/v1/pipelines", PipelineView, job=job)

    def templates(self, job: str = "") -> tuple[TemplateView, ...]:
        """Templates of ``job``, or of the job that is deployed."""
        return self._list("/v1/templates", TemplateView, job=job)

    def layers(self, job: str = "") -> tuple[LayerView, ...]:
        """Who holds each layer of ``job``, or of the job that is deployed."""
        return self._list("/v1/layers", LayerView, job=job)

    def routers(self, job: str) -> tuple[RouterView, ...]:
        """By layer what the routers of ``job`` came to in its newest step, with the tokens of each expert.
        None of a model without routers.
        """
        return self._list(f"/v1/jobs/{quote(job, safe='')}/routers", RouterView)

    def schedules(self, job: str = "") -> SampledSteps:
        """The steps whose op times the daemon has."""
        return self._get("/v1/schedules", SampledSteps, job=job)

    def schedule(self, job: str = "", step: int = 0, *, modelled: bool = False) -> ScheduleView:
        """Step ``step`` (0: the newest) as it was, or as modelled. ApiProblem 404 where nobody told of it,
        409 where nothing is deployed.
        """
        return self._get("/v1/schedule", ScheduleView, job=job, step=step or "", modelled=int(modelled) or "")

    def goodput(self, job: str) -> GoodputView:
        """Where the time of the job's devices went."""
        return self._get(f"/v1/jobs/{quote(job, safe='')}/goodput", GoodputView)

    def impact(self, job: str, nodes: Iterable[str]) -> ImpactView:
        """What would follow for ``job`` ("": the active one) if ``nodes`` died now, all at once. ApiProblem
        404 for a node that nobody knows, 409 where nothing is deployed.
        """
        return self._get("/v1/impact", ImpactView, job=job, nodes=",".join(nodes))

    def past(self, at: float, span_s: float = 60.0) -> Past:
        """The state at ``at`` (POSIX seconds) and what came within ``span_s`` seconds after it. ApiProblem
        404 where nothing is kept.
        """
        return self._get("/v1/past", Past, at=repr(at), span=repr(span_s))

    def bundle(self, incident: str) -> Bundle:
        """An incident with the past around it. ApiProblem 404 where that is no longer kept."""
        return self._get(f"/v1/incidents/{quote(incident, safe='')}/bundle", Bundle)

    def story(self, key: str) -> tuple[Change, ...]:
        """The causal chain of ``node:NAME``, ``incident:ID`` or ``job:ID``, as far back as is kept."""
        return self._list("/v1/story", Change, key=key)

    def debug(self) -> DebugView:
        """The daemon itself, as it stands. ApiProblem 403 for who may not act."""
        return self._get("/v1/debug", DebugView)

    def metrics(self) -> str:
        """Metrics in the Prometheus text format."""
        return self._request("GET", "/metrics").decode()

    def events(
        self,
        since: int | None = None,
        *,
        follow: bool = True,
        on_link: Callable[[bool], None] | None = None,
    ) -> Events:
        """Changes after number ``since`` (None: from now on; 0: all that is kept). See ``Events``."""
        return Events(self.socket_path, since, follow=follow, on_link=on_link)

    # ------------------------------------------------------------------- acting

    def submit(self, job: Job, *, resume: str = "") -> Accepted:
        """Queue ``job``; ``resume`` is a checkpoint folder, "latest", JOB or JOB@STEP. ApiProblem 422 for a
        bad job, or where there is no such checkpoint.
        """
        # A daemon of before knows nothing of keys that came later, and need not where they are not used.
        return self._post("/v1/jobs", {"job": msgspec.Raw(canonical(job)), "resume": resume})

    def control(self, job: str, act: Act, *, discard: bool = False) -> Accepted:
        """Pause, resume, cancel or checkpoint a job; a cancel writes a checkpoint before, unless
        ``discard``. ApiProblem 409 for a name that several jobs have.
        """
        how = "?discard=1" if discard else ""
        return self._post(f"/v1/jobs/{quote(job, safe='')}/{act}{how}", {})

    def delete(self, job: str) -> Accepted:
        """Have a job that is over in no list any more; its files stay. ApiProblem 409 while it is not over,
        or for a name that several jobs have.
        """
        return decode(self._request("DELETE", f"/v1/jobs/{quote(job, safe='')}"), Accepted)

    def drain(self, node: str, reason: str = "") -> Accepted:
        """Take a node out of the plan at a step's boundary."""
        return self._post(f"/v1/nodes/{quote(node, safe='')}/drain", {"reason": reason})

    def forget(self, node: str) -> Accepted:
        """Expect a node that is gone no more. ApiProblem 409 while it is here."""
        return decode(self._request("DELETE", f"/v1/nodes/{quote(node, safe='')}"), Accepted)

    def undrain(self, node: str, reason: str = "") -> Accepted:
        """Let a drained node be used again."""
        return self._post(f"/v1/nodes/{quote(node, safe='')}/undrain", {"reason": reason})

    def kill(
        self,
        node: str,
        how: How = "sigkill",
        *,
        at: str = "",
        round: int = -1,  # noqa: A002 - the API's word
        seconds: float = 0.0,
        times: float = 1.0,
        device: int = 0,
    ) -> Accepted:
        """Inject a failure; ApiProblem 403 unless the daemon allows injection. ``device``: the number of the
        node's device whose it is, where it is one's.
        """
        body = {"how": how, "at": at, "round": round, "seconds": seconds, "times": times}
        body |= {"device": device} if device else {}
        return self._post(f"/v1/nodes/{quote(node, safe='')}/kill", body)

    # ------------------------------------------------------------------- below

    def _get(self, path: str, kind: type[Answer], **query: str | int) -> Answer:
        asked = {key: value for key, value in query.items() if value != ""}
        target = f"{path}?{urlencode(asked)}" if asked else path
        return decode(self._request("GET", target), kind)

    def _list(self, path: str, kind: type[Answer], **query: str | int) -> tuple[Answer, ...]:
        """All pages of a list. Who has asked for many is told to wait now and then, and does."""
        found: list[Answer] = []
        cursor, tries = "", 0
        while True:
            try:
                page = self._get(path, Items[kind], **query, cursor=cursor)  # type: ignore[valid-type]
            except ApiProblem as problem:
                tries += 1
                if not cursor or not problem.retry_s or tries > _MAX_WAITS:
                    raise
                time.sleep(problem.retry_s)
                continue
            found += page.items
            if not page.cursor:
                return tuple(found)
            cursor, tries = page.cursor, 0

    def _post(self, path: str, body: dict[str, Any]) -> Accepted:
        return decode(self._request("POST", path, msgspec.json.encode(body)), Accepted)

    def _request(self, method: str, target: str, body: bytes | None = None) -> bytes:
        """The answer's body. Who only reads asks once more where a daemon ended over the question."""
        try:
            status, reason, data = self._exchange(method, target, body)
        except (ConnectionResetError, BrokenPipeError) as error:
            if method != "GET":
                raise unreachable(self.socket_path, error) from error
            # Between accepting and reading a daemon may end. A read has no effect, so asking twice is none
            # either; an act may have been taken. (D-service-010)
            status, reason, data = self._again(target)
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self.socket_path, error) from error
        if status >= http.client.BAD_REQUEST:
            raise problem_of(status, reason, data)
        return data

    def _again(self, target: str) -> tuple[int, str, bytes]:
        try:
            return self._exchange("GET", target, None)
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self.socket_path, error) from error

    def _exchange(self, method: str, target: str, body: bytes | None) -> tuple[int, str, bytes]:
        """Status, reason and body. Raises OSError or HTTPException."""
        connection = UnixConnection(self.socket_path, self._timeout_s)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            return response.status, response.reason, response.read()
        finally:
            connection.close()


class Events(Iterator[Change]):
    """The event stream: iterate over it; it reconnects for ever and goes on after the last number seen.

    A ``Change`` with ``kind == "gap"`` says that changes were missed (its ``seq`` is the last one that
    is gone): fetch a snapshot, then go on reading. ``on_link`` hears True and False as the daemon comes
    and goes. ``close`` may be called from another thread and ends the iteration. With ``follow=False``
    the iteration ends with the newest change, and an absent daemon raises Unreachable. Without ``since``
    the daemon is called at once, so nothing that happens after the constructor is missed.
    """

    def __init__(
        self,
        socket_path: Path,
        since: int | None,
        *,
        follow: bool = True,
        on_link: Callable[[bool], None] | None = None,
    ) -> None:
        self.last = since
        self._socket_path = socket_path
        self._follow = follow
        self._on_link = on_link
        self._closed = threading.Event()
        self._inside = threading.Lock()  # the generator: two threads in it at once are an error
        self._connection: UnixConnection | None = None
        # "From now on" means from this call, not from the first ``next``.
        self._opened = self._open_now() if since is None else None
        self._changes = self._run()

    def __next__(self) -> Change:
        with self._inside:
            if self._closed.is_set():
                self._changes.close()
            return next(self._changes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the stream: a blocked ``next`` raises StopIteration soon."""
        self._closed.set()
        connection = self._connection
        if connection is not None:
            connection.hang_up()
        if self._opened is not None:  # never iterated: nobody else closes it
            close(*self._opened)
            self._opened = None
        if self._inside.acquire(blocking=False):  # else another thread is inside, and is being woken up
            try:
                self._changes.close()
            finally:
                self._inside.release()

    def _run(self) -> Generator[Change, None, None]:
        retry_s = _RETRY_FIRST_S
        while not self._closed.is_set():
            try:
                for change in self._stream():
                    retry_s = _RETRY_FIRST_S
                    self.last = change.seq
                    yield change
                if not self._follow:
                    return
            except Unreachable:
                if not self._follow:
                    raise
            self._tell(up=False)
            self._closed.wait(retry_s)
            retry_s = min(2 * retry_s, _MAX_RETRY_S)

    def _open_now(self) -> tuple[UnixConnection, http.client.HTTPResponse] | None:
        try:
            return self._open()
        except Unreachable:
            if not self._follow:
                raise
            return None

    def _stream(self) -> Iterator[Change]:
        connection, response = self._opened or self._open()
        self._opened = None
        self._tell(up=True)
        try:
            yield from _parse(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: http.client's word for a socket that another thread has closed.
            raise unreachable(self._socket_path, error) from error
        finally:
            self._connection = None
            close(connection, response)

    def _open(self) -> tuple[UnixConnection, http.client.HTTPResponse]:
        """Connect, and know the newest number before the first change, so that a reconnect misses nothing."""
        connection = UnixConnection(self._socket_path, STREAM_TIMEOUT_S)
        self._connection = connection
        query: dict[str, str | int] = {} if self._follow else {"follow": 0}
        if self.last is not None:
            query["since"] = self.last
        try:
            connection.request("GET", f"/v1/events?{urlencode(query)}")
            if self._closed.is_set():
                raise ConnectionAbortedError("the stream was closed")
            response = connection.getresponse()
            if response.status >= http.client.BAD_REQUEST:
                raise problem_of(response.status, response.reason, response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            raise unreachable(self._socket_path, error) from error
        except ApiProblem:
            connection.close()
            raise
        if self.last is None:
            self.last = int(response.headers.get("Oobleck-Seq", "0"))
        return connection, response

    def _tell(self, *, up: bool) -> None:
        if self._on_link is not None and not self._closed.is_set():
            self._on_link(up)


class _StepRow(StepView, frozen=True):
    """JSON has no NaN and no infinity: they arrive as null."""

    loss: float | None  # type: ignore[assignment]
    grad_norm: float | None  # type: ignore[assignment]

    def view(self) -> StepView:
        fields = msgspec.structs.asdict(self)
        if self.loss is None:
            fields["loss"] = float.fromhex(self.loss_hex)
        if self.grad_norm is None:
            fields["grad_norm"] = math.nan
        return StepView(**fields)


def _parse(response: http.client.HTTPResponse) -> Iterator[Change]:
    data: list[bytes] = []
    while line := response.readline():
        field, _, value = line.rstrip(b"\r\n").partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif not field and not value and data:
            yield decode(b"\n".join(data), Change)
            data = []

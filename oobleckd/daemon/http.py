"""The HTTP API on the unix socket: views out, requests in, and the stream of changes.

Owns routes, rights, and the shape of answers (JSON with ``apiVersion``, problem+json with ``hint``). Owns no
view and no decision: views are ``core.view``'s, requests go to the core and are answered when durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import web

from oobleckd.core import view
from oobleckd.core.state import JobRecord
from oobleckd.daemon import metrics
from oobleckd.daemon.loop import Stopped
from oobleckd.daemon.peers import may_act, peer_of
from oobleckd.daemon.service import Service
from oobleckd.protocol.api import (
    API_VERSION,
    Accepted,
    AnyRequest,
    Change,
    Control,
    Denied,
    Drain,
    Items,
    Kill,
    Problem,
    Status,
    Submit,
)
from oobleckd.protocol.checkpoint import MANIFEST, Manifest
from oobleckd.protocol.job import JobError, parse_job

HEARTBEAT_S = 10.0
# Shorter than the client's patience, so that it hears why an act is not durable yet.
ANSWER_S = 8.0
_MAX_BODY_BYTES = 2**20
_STATUS_OF = {"not-found": 404, "conflict": 409, "forbidden": 403, "invalid": 422}
_log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, title: str, detail: str, hint: str = "") -> None:
        super().__init__(detail)
        self.problem = Problem(title, status, detail, hint)


class _SubmitBody(msgspec.Struct, forbid_unknown_fields=True):
    job: dict[str, Any]
    resume: str = ""


class _DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    reason: str = ""


class _KillBody(msgspec.Struct, forbid_unknown_fields=True):
    how: str = "sigkill"
    at: str = ""
    round: int = -1
    seconds: float = 0.0


class Api:
    """Handlers over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[_problems, self._rights], client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/healthz", self.healthz),
                web.get("/metrics", self.metrics),
                web.get("/v1/status", self.status),
                web.get("/v1/jobs", self.jobs),
                web.post("/v1/jobs", self.submit),
                web.get("/v1/jobs/{job}", self.job),
                web.get("/v1/jobs/{job}/steps", self.steps),
                web.post("/v1/jobs/{job}/{act:pause|resume|cancel|checkpoint}", self.control),
                web.get("/v1/nodes", self.nodes),
                web.post("/v1/nodes/{node}/{act:drain|undrain}", self.drain),
                web.post("/v1/nodes/{node}/kill", self.kill),
                web.get("/v1/incidents", self.incidents),
                web.get("/v1/pipelines", self.pipelines),
                web.get("/v1/templates", self.templates),
                web.get("/v1/story", self.story),
                web.get("/v1/events", self.events),
            ]
        )
        return app

    # ------------------------------------------------------------------- reading

    async def healthz(self, _request: web.Request) -> web.StreamResponse:
        """200 while the daemon can do its work, 503 while its journal cannot be written."""
        trouble = self._service.journal.trouble
        return web.Response(status=503 if trouble else 200, text=f"{trouble or 'ok'}\n")

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        """Prometheus text."""
        text = metrics.render(self._service).encode()
        return web.Response(body=text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def status(self, _request: web.Request) -> web.StreamResponse:
        """Headline."""
        return _json(status_of(self._service))

    async def jobs(self, _request: web.Request) -> web.StreamResponse:
        """All jobs."""
        return _items(view.job_views(self._service.core))

    async def job(self, request: web.Request) -> web.StreamResponse:
        """One job, by id or by name."""
        return _json(view.job_view(self._service.core, self._find(request.match_info["job"])))

    async def steps(self, request: web.Request) -> web.StreamResponse:
        """Committed steps from ``since`` on."""
        job = self._find(request.match_info["job"])
        return _items(view.step_views(job, _number(request, "since") or 0))

    async def nodes(self, _request: web.Request) -> web.StreamResponse:
        """All nodes, with ages as of now."""
        core, now = self._service.core, self._service.clock.now()
        return _items(
            msgspec.structs.replace(node, beat_age_s=node.beat_age_s + now - core.now)
            for node in view.node_views(core)
        )

    async def incidents(self, _request: web.Request) -> web.StreamResponse:
        """All incidents."""
        return _items(view.incident_views(self._service.core))

    async def pipelines(self, request: web.Request) -> web.StreamResponse:
        """Pipelines of ``job``, or of the active one."""
        job = self._asked_or_active(request)
        return _items(view.pipeline_views(job) if job is not None else ())

    async def templates(self, request: web.Request) -> web.StreamResponse:
        """Templates of ``job``, or of the active one."""
        job = self._asked_or_active(request)
        return _items(view.template_views(job) if job is not None else ())

    async def story(self, request: web.Request) -> web.StreamResponse:
        """Changes that concern ``key``."""
        key = request.query.get("key", "")
        if not key:
            raise Refusal(422, "invalid", "key is missing", "ask for ?key=node:NAME, incident:ID or job:ID")
        return _items(view.story(self._service.core, key))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Changes as server-sent events, after ``since`` or Last-Event-ID; ``follow=0`` ends with the newest."""
        since = _number(request, "since")
        if since is None:
            since = _header_number(request, "Last-Event-ID")
        history = self._service.history
        cursor = history.cursor(since)
        headers = {"Cache-Control": "no-store", "Oobleck-Seq": str(history.last)}
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the client has gone, which is how a stream ends
            while not history.closed:
                await response.write(b"".join(map(_sse, cursor.take())))
                if request.query.get("follow") == "0":
                    break
                if not await cursor.wait(HEARTBEAT_S) and not history.closed:
                    await response.write(b": beat\n\n")
        return response

    # ------------------------------------------------------------------- acting

    async def submit(self, request: web.Request) -> web.StreamResponse:
        """Queue a job."""
        body = await _body(request, _SubmitBody)
        job = parse_job(body.job)
        counters = await asyncio.to_thread(_counters_of, body.resume)
        return await self._ask(Submit(job, body.resume, _who(request), counters))

    async def control(self, request: web.Request) -> web.StreamResponse:
        """Pause, resume, cancel, checkpoint."""
        job = self._find(request.match_info["job"])
        act = cast("Any", request.match_info["act"])
        return await self._ask(Control(job.id, act, _who(request)))

    async def drain(self, request: web.Request) -> web.StreamResponse:
        """Drain and undrain."""
        body = await _body(request, _DrainBody)
        undo = request.match_info["act"] == "undrain"
        return await self._ask(Drain(request.match_info["node"], body.reason, undo, _who(request)))

    async def kill(self, request: web.Request) -> web.StreamResponse:
        """Failure injection."""
        body = await _body(request, _KillBody)
        fields = {"node": request.match_info["node"], "who": _who(request), **msgspec.structs.asdict(body)}
        return await self._ask(msgspec.convert({"type": "Kill", **fields}, Kill))

    # ------------------------------------------------------------------- below

    @web.middleware
    async def _rights(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in {"GET", "HEAD"}:
            assert request.transport is not None
            peer = peer_of(request.transport.get_extra_info("socket"))
            group = self._service.config.group
            if not may_act(peer, group):
                raise Refusal(
                    403,
                    "forbidden",
                    f"{peer} may read, but not act",
                    f"ask to be added to the group {group}, or use sudo",
                )
            request["who"] = str(peer)
        return await handler(request)

    async def _ask(self, asked: AnyRequest) -> web.StreamResponse:
        # Shielded: the act was taken, and happens even when the answer comes too late for this client.
        question = asyncio.ensure_future(self._service.loop.ask(asked))
        question.add_done_callback(_forget)
        try:
            answer = await asyncio.wait_for(asyncio.shield(question), ANSWER_S)
        except TimeoutError as error:
            trouble = self._service.journal.trouble or "the daemon is busy"
            hint = "it was taken and takes effect once it is durable: look with `oobleckctl status`"
            raise Refusal(503, "not durable yet", trouble, hint) from error
        if isinstance(answer, Denied):
            raise Refusal(_STATUS_OF[answer.kind], answer.kind, answer.problem, answer.hint)
        return _json(answer)

    def _find(self, name: str) -> JobRecord:
        jobs = self._service.core.state.jobs
        named = [job for job in jobs.values() if job.spec.name == name]
        found = jobs.get(name) or (named[-1] if named else None)
        if found is None:
            raise Refusal(404, "not-found", f"no job {name}", "`oobleckctl get jobs` lists them")
        return found

    def _asked_or_active(self, request: web.Request) -> JobRecord | None:
        if name := request.query.get("job", ""):
            return self._find(name)
        run = self._service.core.run
        return run.job if run is not None else None


def status_of(service: Service) -> Status:
    """The headline as of now, with the shell's own troubles in its line."""
    status = view.status(service.core)
    trouble = service.journal.trouble
    return msgspec.structs.replace(
        status,
        up_s=service.clock.now() - service.started_at,
        line=f"{status.line}; {trouble}" if trouble else status.line,
    )


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as problem+json."""
    try:
        return await handler(request)
    except Refusal as refusal:
        problem = refusal.problem
    except JobError as error:
        problem = Problem("invalid", 422, str(error), error.hint)
    except msgspec.DecodeError as error:
        problem = Problem(
            "invalid",
            422,
            f"the request cannot be read: {error}",
            "its fields are those of oobleckd.protocol.api",
        )
    except Stopped:
        problem = Problem("stopping", 503, "the daemon stops", "ask again when it is back")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        detail = f"{request.method} {request.path}: {error.reason}"
        problem = Problem(error.reason, error.status, detail, "is the client of this daemon's version?")
    except Exception:  # noqa: BLE001 - a request's boundary, logged with the request
        _log.exception("%s %s", request.method, request.path)
        problem = Problem("fault", 500, "a fault of oobleckd", "its log has more: please report it")
    return web.Response(
        body=msgspec.json.encode(problem), status=problem.status, content_type="application/problem+json"
    )


def _json(answer: Accepted | msgspec.Struct) -> web.Response:
    data = msgspec.to_builtins(answer) | {"apiVersion": API_VERSION}
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")


def _items(items: Iterable[msgspec.Struct]) -> web.Response:
    body = msgspec.json.encode(Items(tuple(items)))
    return web.Response(body=body, content_type="application/json")


def _sse(change: Change) -> bytes:
    data = msgspec.json.encode(change)
    # A notice has no number of its own: it must not become what a reader resumes from.
    number = b"" if change.kind == "daemon" else b"id: %d\n" % change.seq
    return b"%sevent: %s\ndata: %s\n\n" % (number, change.kind.encode(), data)


async def _body(request: web.Request, kind: type[Body]) -> Body:
    data = await request.read()
    return msgspec.json.decode(data or b"{}", type=kind)


def _who(request: web.Request) -> str:
    return str(request["who"])


def _number(request: web.Request, name: str) -> int | None:
    text = request.query.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise Refusal(422, "invalid", f"{name} = {text!r} is no number", "write digits alone")
    return int(text)


def _header_number(request: web.Request, name: str) -> int | None:
    text = request.headers.get(name, "")
    return int(text) if text.isdigit() else None


def _counters_of(resume: str) -> tuple[int, int] | None:
    """(step, applied) of the checkpoint in folder ``resume``; None when it is none."""
    if resume in {"", "latest"}:
        return None
    try:
        manifest = msgspec.json.decode((Path(resume) / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None
    return manifest.counters.step, manifest.counters.applied


def _forget(question: asyncio.Future[Any]) -> None:
    if not question.cancelled():
        question.exception()

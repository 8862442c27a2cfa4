"""The HTTP API on the unix socket: views out, requests in, and the stream of changes.

Owns routes, rights, and errors (problem+json with ``hint``); what somebody who watches asks for is
``watchapi``'s. Owns no view and no decision: views are ``core.view``'s, requests go to the core and are
answered when durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import msgspec
from aiohttp import web

from oobleckd.core import view
from oobleckd.core.entries import noted
from oobleckd.core.marks import curve_marks
from oobleckd.core.requests import latest
from oobleckd.core.state import JobRecord
from oobleckd.daemon import answers, nodelogs, openapi, paging, sending, stepstore
from oobleckd.daemon.bodies import DrainBody, KillBody, SubmitBody
from oobleckd.daemon.callers import READING
from oobleckd.daemon.debugapi import DebugApi
from oobleckd.daemon.loop import Stopped
from oobleckd.daemon.refusal import Refusal
from oobleckd.daemon.resuming import checkpoint_folder, manifest_of
from oobleckd.daemon.seldom import Seldom
from oobleckd.daemon.service import Service, status_of
from oobleckd.daemon.sinking import check_allowed
from oobleckd.daemon.turns import Took, Turns, leave, metered
from oobleckd.daemon.watchapi import WatchApi
from oobleckd.host.folder import disclaim
from oobleckd.host.hold import held
from oobleckd.protocol.api import Problem
from oobleckd.protocol.changes import Change
from oobleckd.protocol.job import Job, parse_job, reads_the_same
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.nodeviews import NodeLogView, NodeView
from oobleckd.protocol.requests import (
    AnyRequest,
    Control,
    Delete,
    Denied,
    Drain,
    Forget,
    Kill,
    Submit,
)
from oobleckd.protocol.text import all_visible, shown_json, visible
from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.protocol.watch import Scale
from oobleckd.words import seconds

if TYPE_CHECKING:
    from oobleckd.daemon.metrics import Scrapes

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
HEARTBEAT_S = 10.0
# Shorter than the client's patience, so that it hears why an act is not durable yet.
ANSWER_S = 8.0
BODY_S = 10.0
_MAX_BODY_BYTES = 2**20
_CHANGES_AT_ONCE = 256
_STEPS_AT_ONCE = 2000  # no page has room for more
_FOLDER_S = 4.0
# Who asks too often does not ask again at once, whatever their program does with the answer.
_REFUSED_LATE_S = 0.25
_TAKEN = 503  # or it may have been
_STATUS_OF = {"not-found": 404, "conflict": 409, "forbidden": 403, "invalid": 422}
_log = logging.getLogger(__name__)
_faults = Seldom(_log)

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """Handlers over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._submitting = asyncio.Lock()
        self._turns = Turns()
        self._scrapes: Scrapes | None = None
        self._document = b""

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[_problems, self._rights], client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/healthz", self.healthz),
                web.get("/openapi.json", self.openapi),
                web.get("/metrics", self.metrics),
                web.get("/v1/status", self.status),
                web.get("/v1/jobs", self.jobs),
                web.post("/v1/jobs", self.submit),
                web.get("/v1/jobs/{job}", self.job),
                web.delete("/v1/jobs/{job}", self.delete),
                web.get("/v1/jobs/{job}/steps", self.steps),
                web.get("/v1/jobs/{job}/evaluations", self.evaluations),
                web.get("/v1/jobs/{job}/curve", self.curve),
                web.post("/v1/jobs/{job}/{act:pause|resume|cancel|checkpoint}", self.control),
                web.get("/v1/nodes", self.nodes),
                web.get("/v1/nodes/{node}/log", self.node_log),
                web.post("/v1/nodes/{node}/{act:drain|undrain}", self.drain),
                web.post("/v1/nodes/{node}/kill", self.kill),
                web.delete("/v1/nodes/{node}", self.forget),
                web.get("/v1/incidents", self.incidents),
                web.get("/v1/pipelines", self.pipelines),
                web.get("/v1/templates", self.templates),
                web.get("/v1/story", self.story),
                web.get("/v1/events", self.events),
                *WatchApi(self._service).routes(),
                *DebugApi(self._service).routes(),
            ]
        )
        return app

    def scraped(self) -> web.Application:
        """What a Prometheus gets over TCP: metrics and health, and nothing besides."""
        app = web.Application(middlewares=[_problems])
        app.add_routes([web.get("/healthz", self.healthz), web.get("/metrics", self.metrics)])
        return app

    # ------------------------------------------------------------------- reading

    async def healthz(self, _request: web.Request) -> web.StreamResponse:
        """200 while the daemon can do its work, 503 while its journal cannot be written."""
        trouble = self._service.journal.trouble
        return web.Response(status=503 if trouble else 200, text=f"{visible(trouble) or 'ok'}\n")

    async def openapi(self, _request: web.Request) -> web.StreamResponse:
        """What this API is, for programs."""
        if not self._document:
            self._document = await asyncio.to_thread(openapi.document)
        return web.Response(body=self._document, content_type="application/json")

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        """Prometheus text."""
        if self._scrapes is None:
            # A daemon that restarts need not wait for its library, and the loop need not at all.
            await asyncio.to_thread(import_module, "oobleckd.daemon.metrics")
            from oobleckd.daemon.metrics import Scrapes

            self._scrapes = self._scrapes or Scrapes(self._service)
        return web.Response(body=await self._scrapes.text(), headers={"Content-Type": PROMETHEUS})

    async def status(self, _request: web.Request) -> web.StreamResponse:
        """Headline."""
        return answers.one(status_of(self._service))

    async def jobs(self, request: web.Request) -> web.StreamResponse:
        """All jobs."""
        core = self._service.core
        return paging.page(request, core.state.shown, lambda job: view.job_view(core, job))

    async def job(self, request: web.Request) -> web.StreamResponse:
        """One job, by id or by name."""
        unique = answers.flag(request, "unique")
        job = answers.find_job(self._service, request.match_info["job"], unique=unique)
        return answers.one(view.job_view(self._service.core, job))

    async def evaluations(self, request: web.Request) -> web.StreamResponse:
        """Evaluations, from that after ``since`` steps on, of the ``last`` ones if that is said."""
        job = self._find(request.match_info["job"])
        after = int(paging.after(request) or 0)
        first, last = answers.number(request, "since") or 0, answers.number(request, "last")
        if last is not None and not after:
            done = [*job.spec.eval_rounds.due_steps(job.start.step, job.counters.step)][-last:]
            first = max(first, done[0]) if done else first
        first = max(first, after + 1) if after else first
        count = min(paging.limit_of(request), _STEPS_AT_ONCE) + 1
        rows = await stepstore.read_evaluations(self._service.journal, job, first, count)
        return paging.page(request, rows, view.evaluation_view, lambda row: row.step)

    async def steps(self, request: web.Request) -> web.StreamResponse:
        """Committed steps from ``since`` on, of the ``last`` ones if that is said."""
        job = self._find(request.match_info["job"])
        since, last = answers.number(request, "since") or 0, answers.number(request, "last")
        after = int(paging.after(request) or 0)
        if last is not None and not after:
            since = max(since, job.counters.step - last + 1)
        first = max(since, after + 1) - 1  # by their numbers, which begin with 1
        count = min(paging.limit_of(request), _STEPS_AT_ONCE) + 1
        rows = await stepstore.read(self._service.journal, job, first, count)
        return paging.page(request, rows, view.step_view, lambda step: step.step + 1)

    async def curve(self, request: web.Request) -> web.StreamResponse:
        """All of its steps in ``bins`` at most, with ``scale=log`` of widths that grow, and what happened."""
        job = self._find(request.match_info["job"])
        bins = answers.number(request, "bins")
        bins = stepstore.DEFAULT_BINS if bins is None else bins
        if not 1 <= bins <= stepstore.MAX_BINS:
            hint = f"write 1 to {stepstore.MAX_BINS}"
            raise Refusal(422, "invalid", f"bins = {bins} is no number of parts of a curve", hint)
        scale = request.query.get("scale", "linear")
        if scale not in (scales := get_args(Scale)):
            raise Refusal(422, "invalid", f"scale = {scale!r} is no scale", f"write {' or '.join(scales)}")
        core = self._service.core
        found = await stepstore.curve(
            self._service.journal, job, bins, lambda: curve_marks(core, job.id), log=scale == "log"
        )
        return answers.whole(found)

    async def nodes(self, request: web.Request) -> web.StreamResponse:
        """All nodes, with ages as of now."""
        core, now = self._service.core, self._service.clock.now()
        made, names = view.node_viewer(core), view.node_names(core)
        begin = bisect_right(names, paging.after(request, names=True))

        def aged(name: str) -> NodeView:
            node = made(name)
            return msgspec.structs.replace(node, heartbeat_age_s=node.heartbeat_age_s + now - core.now)

        return paging.page(request, names[begin:], aged, str)

    async def node_log(self, request: web.Request) -> web.StreamResponse:
        """The newest lines of a node's log, which its agent is asked for."""
        name, lines = request.match_info["node"], answers.number(request, "lines")
        lines = nodelogs.DEFAULT_LINES if lines is None else lines
        if lines > nodelogs.MAX_LINES:
            hint = f"write up to {nodelogs.MAX_LINES}"
            raise Refusal(422, "invalid", f"lines = {lines} is more than is kept", hint)
        node = self._service.core.members.nodes.get(name)
        if node is None:
            raise Refusal(404, "not-found", f"no node {name}", "`oobleckctl get nodes` lists them")
        if not (node.alive and node.connected):
            detail, hint = f"{name} is not here", f"`oobleckctl describe node {name}` says why"
            raise Refusal(503, "no answer", detail, hint)
        try:
            told = await self._service.node_logs.newest(name, lines)
        except TimeoutError as error:
            detail = f"the agent of {name} does not answer within {seconds(nodelogs.WAIT_S)}"
            hint = "it may be busy, or of a version that does not tell its log: look on its machine"
            raise Refusal(503, "no answer", detail, hint) from error
        except nodelogs.TooManyQuestions as error:
            hint = "ask again in a second"
            raise Refusal(503, "busy", "too many ask for logs of nodes at once", hint) from error
        return answers.one(NodeLogView(name, told.lines[-lines:] if lines else (), told.complete))

    async def incidents(self, request: web.Request) -> web.StreamResponse:
        """All incidents."""
        return paging.page(request, view.incident_views(self._service.core), _as_is)

    async def pipelines(self, request: web.Request) -> web.StreamResponse:
        """Pipelines of ``job``, or of the active one."""
        job = self._asked_or_active(request)
        return paging.page(request, view.pipeline_views(job) if job is not None else [], _as_is)

    async def templates(self, request: web.Request) -> web.StreamResponse:
        """Templates of ``job``, or of the active one."""
        job = self._asked_or_active(request)
        return paging.page(request, view.template_views(job) if job is not None else [], _as_is)

    async def story(self, request: web.Request) -> web.StreamResponse:
        """Changes that concern ``key``."""
        key = request.query.get("key", "")
        if not key:
            raise Refusal(422, "invalid", "key is missing", "a key is node:NAME, incident:ID or job:ID")
        since = int(paging.after(request) or -1)
        found = [entry for entry in view.story(self._service.core, key) if entry.seq > since]
        return paging.page(request, found, noted, lambda entry: entry.seq)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Changes as server-sent events, after ``since`` or Last-Event-ID; ``follow=0`` ends with
        the newest.
        """
        since = answers.number(request, "since")
        if since is None:
            since = _header_number(request, "Last-Event-ID")
        follow = answers.flag(request, "follow", default=True)
        history = self._service.history
        cursor = history.cursor(since)
        headers = {"Cache-Control": "no-store", "Oobleck-Seq": str(history.last)}
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the client has gone, which is how a stream ends
            while not history.closed:
                await sending.within(
                    request, response.write(b"".join(map(_sse, cursor.take(_CHANGES_AT_ONCE))))
                )
                if cursor.behind:
                    continue
                if not follow:
                    break
                if not await cursor.wait(HEARTBEAT_S) and not history.closed:
                    await sending.within(request, response.write(b": beat\n\n"))
        return response

    # ------------------------------------------------------------------- acting

    async def submit(self, request: web.Request) -> web.StreamResponse:
        """Queue a job."""
        body = await _body(request, SubmitBody)
        job = parse_job(body.job)
        await asyncio.to_thread(check_allowed, job, self._service.config.sinks)
        if body.resume == "latest":
            return await self._queue(request, job, body.resume, latest(self._service.core, job.name))
        resume = checkpoint_folder(self._service, body.resume)
        with contextlib.ExitStack() as stack:
            if resume != body.resume:  # it stays till a job is there that begins from it, which keeps it, too
                await asyncio.to_thread(stack.enter_context, held(Path(resume)))
            return await self._queue(request, job, resume, resume)

    async def _queue(self, request: web.Request, job: Job, resume: str, source: str) -> web.StreamResponse:
        """``source``: the folder that ``resume`` means."""
        manifest = await asyncio.to_thread(manifest_of, source)
        counters = manifest.counters if manifest is not None else None
        same = manifest is not None and reads_the_same(manifest.spec, job)
        inputs = manifest.read if manifest is not None and same else ()
        async with self._submitting:  # whose folder has a number is to be the job with it
            root = Path(self._service.core.checkpoint_dir(job))
            folder = await self._new_folder(root, job.name)
            try:
                asked = Submit(job, resume, _who(request), counters, folder, inputs)
                answer = await self._ask(asked)
            except Refusal as refusal:
                if refusal.problem.status != _TAKEN:
                    await asyncio.to_thread(disclaim, root / folder)
                raise
        self._service.sinking.look([job])
        return answer

    async def control(self, request: web.Request) -> web.StreamResponse:
        """Pause, resume, cancel, checkpoint."""
        job = answers.find_job(self._service, request.match_info["job"], unique=True)
        act = cast("Any", request.match_info["act"])
        discard = answers.flag(request, "discard")
        if discard and act != "cancel":
            raise Refusal(422, "invalid", f"discard is not for {act}", "it is for cancel")
        return await self._ask(Control(job.id, act, _who(request), discard))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """A job that is over, out of all lists."""
        job = answers.find_job(self._service, request.match_info["job"], unique=True)
        return await self._ask(Delete(job.id, _who(request)))

    async def drain(self, request: web.Request) -> web.StreamResponse:
        """Drain and undrain."""
        body = await _body(request, DrainBody)
        undo = request.match_info["act"] == "undrain"
        return await self._ask(Drain(request.match_info["node"], body.reason, undo, _who(request)))

    async def forget(self, request: web.Request) -> web.StreamResponse:
        """A node that will not come back."""
        return await self._ask(Forget(request.match_info["node"], _who(request)))

    async def kill(self, request: web.Request) -> web.StreamResponse:
        """Failure injection."""
        body = await _body(request, KillBody)
        fields = {"node": request.match_info["node"], "who": _who(request), **msgspec.structs.asdict(body)}
        return await self._ask(msgspec.convert({"type": "Kill", **fields}, Kill))

    async def _new_folder(self, root: Path, name: str) -> str:
        """The folder that a job called ``name`` is to write checkpoints into, by its name; made. Raises
        Refusal.
        """
        service = self._service
        number = service.core.state.next_number
        made = asyncio.to_thread(service.folders.new, root, name, number)
        hint = "name a folder with checkpoint.dir that the daemon and every node can write"
        try:
            return await asyncio.wait_for(made, _FOLDER_S)
        except TimeoutError as error:
            raise Refusal(_TAKEN, "no answer", f"checkpoint.dir: {root} does not answer", hint) from error
        except OSError as error:
            text = f"checkpoint.dir: {root} cannot be written: {error.strerror or error}"
            raise Refusal(422, "invalid", text, hint) from error

    # ------------------------------------------------------------------- below

    @web.middleware
    async def _rights(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        service, callers = self._service, self._service.callers
        try:
            caller = callers.admit(request, service.clock.now(), time.monotonic())
        except Refusal as refusal:
            if refusal.problem.retry_s:
                await asyncio.sleep(_REFUSED_LATE_S)
            raise
        request["who"] = caller.name
        if not caller.ours and request.method in READING:
            await self._turns.wait()
        took = Took()
        try:
            response = await metered(_called(handler, request), took)
        finally:
            callers.spent(caller, took.seconds, 0, time.monotonic())
        callers.spent(caller, 0.0, sending.size(response), time.monotonic())
        return response

    async def _ask(self, asked: AnyRequest) -> web.StreamResponse:
        # Shielded: the act was taken, and happens even when the answer comes too late for this client.
        question = asyncio.ensure_future(self._service.loop.ask(asked))
        question.add_done_callback(_forget)
        try:
            answer = await asyncio.wait_for(asyncio.shield(question), ANSWER_S)
        except TimeoutError as error:
            trouble = self._service.journal.trouble or "the daemon is busy"
            hint = "it was taken and takes effect once it is durable: look with `oobleckctl status`"
            raise Refusal(_TAKEN, "not durable yet", trouble, hint) from error
        if isinstance(answer, Denied):
            raise Refusal(_STATUS_OF[answer.kind], answer.kind, answer.problem, answer.hint)
        return answers.one(answer)

    def _find(self, name: str) -> JobRecord:
        return answers.find_job(self._service, name)

    def _asked_or_active(self, request: web.Request) -> JobRecord | None:
        return answers.asked_or_active(self._service, request)


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as problem+json."""
    headers: dict[str, str] = {}
    try:
        return await sending.sent(request, await handler(request))
    except Refusal as refusal:
        problem, headers = refusal.problem, refusal.headers
    except JobError as error:
        problem = Problem("invalid", 422, str(error), error.hint)
    except (*UNREADABLE, RecursionError) as error:
        problem = Problem(
            "invalid",
            422,
            f"the request cannot be read: {problem_of(error)}",
            "docs/api.md lists its fields",
        )
    except ConnectionError:
        problem = Problem("gone", 400, "who asked has gone", "nobody reads this")
    except Stopped:
        problem = Problem("stopping", 503, "the daemon stops", "ask again when it is back")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        detail = f"{request.method} {request.path}: {error.reason}"
        problem = Problem(error.reason, error.status, detail, "is the client of this daemon's version?")
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    except Exception:  # noqa: BLE001 - a request's boundary, logged with the request
        _faults.exception("%s %s", request.method, request.raw_path)
        problem = Problem("fault", 500, "a fault of oobleckd", "its log has more: please report it")
    finally:
        leave(request)
    return web.Response(
        body=msgspec.json.encode(_readable(problem)),
        status=problem.status,
        content_type="application/problem+json",
        headers=headers,
    )


def _readable(problem: Problem) -> Problem:
    """What a request had in its path may be no text at all, or do something to a terminal."""
    return all_visible(problem)


async def _called(handler: Handler, request: web.Request) -> web.StreamResponse:
    return await handler(request)


def _as_is(made: Body) -> Body:
    return made


def _sse(change: Change) -> bytes:
    data = shown_json(msgspec.json.encode(change))
    # A notice has no number of its own: it must not become what a reader resumes from.
    number = b"" if change.kind == "daemon" else b"id: %d\n" % change.seq
    return b"%sevent: %s\ndata: %s\n\n" % (number, change.kind.encode(), data)


async def _body(request: web.Request, kind: type[Body]) -> Body:
    try:
        data = await asyncio.wait_for(request.read(), BODY_S)
    except TimeoutError as error:
        hint = "send head and body at once"
        raise Refusal(408, "too slow", f"the body did not come within {seconds(BODY_S)}", hint) from error
    return msgspec.json.decode(data or b"{}", type=kind)


def _who(request: web.Request) -> str:
    return str(request["who"])


def _header_number(request: web.Request, name: str) -> int | None:
    text = request.headers.get(name, "")
    return int(text) if answers.is_number(text) else None


def _forget(question: asyncio.Future[Any]) -> None:
    if not question.cancelled():
        question.exception()

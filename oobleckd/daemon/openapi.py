"""The API as an OpenAPI 3.1 document, made from the structs that it answers with.

Owns the list of operations: paths, what may be asked of them, and what they answer. That it is complete is a
test, which compares it with the routes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from oobleckd import __version__
from oobleckd.daemon.bodies import DrainBody, KillBody, SubmitBody
from oobleckd.daemon.nodelogs import MAX_LINES
from oobleckd.daemon.paging import MAX_ROWS
from oobleckd.daemon.stepstore import MAX_BINS
from oobleckd.daemon.watchapi import MAX_SPAN_S
from oobleckd.protocol import changes, watch
from oobleckd.protocol.api import API_VERSION, Problem, Status
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobviews import JobView, PipelineView, RouterView, StepView, TemplateView
from oobleckd.protocol.nodeviews import NodeLogView, NodeView
from oobleckd.protocol.requests import Accepted

Struct = type[msgspec.Struct]
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
_TIME = {"type": "number"}
_SPAN = {"type": "number", "minimum": 0, "maximum": MAX_SPAN_S}
_FLAG = {"type": "string", "enum": ["0", "1"]}
_BINS = {"type": "integer", "minimum": 1, "maximum": MAX_BINS}
_SCALE = {"type": "string", "enum": [*get_args(watch.Scale)]}
_LINES = {"type": "integer", "minimum": 0, "maximum": MAX_LINES}
_TEXT = {"type": "string"}
_SOME_TEXT = {"type": "string", "minLength": 1}
_JOB = {"job": _TEXT}
_PAGE: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ROWS},
    "cursor": _TEXT,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """``answer``: a struct, a list of them (``many``), or a media type. ``query``: name -> schema; ``needs``:
    those that must be there. ``deprecated``: an older name, which goes on working.
    """

    method: str
    path: str
    summary: str
    answer: Struct | str
    many: bool = False
    query: dict[str, dict[str, Any]] | None = None
    needs: tuple[str, ...] = ()
    body: Struct | None = None
    deprecated: bool = False

    @property
    def asks(self) -> dict[str, dict[str, Any]]:
        """All that its query may have: lists come in pages."""
        return {**(self.query or {}), **(_PAGE if self.many else {})}


_OTHER: dict[str, dict[str, Any]] = {
    "application/json": {},
    # Of one event; what its data is, as text, is a ``Change``.
    "text/event-stream": {"type": "object", "properties": {"id": _TEXT, "event": _TEXT, "data": _TEXT}},
}
_ACTS = ("pause", "resume", "cancel", "checkpoint")
OPERATIONS = (
    Operation("get", "/healthz", "Whether the daemon can do its work.", "text/plain"),
    Operation("get", "/metrics", "Metrics for Prometheus.", "text/plain"),
    Operation("get", "/openapi.json", "This document.", "application/json"),
    Operation("get", "/v1/status", "The headline.", Status),
    Operation("get", "/v1/jobs", "All jobs.", JobView, many=True),
    Operation("post", "/v1/jobs", "Queue a job.", Accepted, body=SubmitBody),
    Operation("get", "/v1/jobs/{job}", "A job, by id or by name.", JobView, query={"unique": _FLAG}),
    Operation("delete", "/v1/jobs/{job}", "Take a job that is over out of all lists.", Accepted),
    Operation(
        "get", "/v1/jobs/{job}/steps", "Committed steps.", StepView, many=True,
        query={"since": _NUMBER, "last": _NUMBER},
    ),
    Operation(
        "get", "/v1/jobs/{job}/evaluations", "Evaluations.", EvaluationView, many=True,
        query={"since": _NUMBER, "last": _NUMBER},
    ),
    Operation(
        "get", "/v1/jobs/{job}/curve", "All of its steps, in bins.", watch.CurveView,
        query={"bins": _BINS, "scale": _SCALE},
    ),
    Operation("get", "/v1/jobs/{job}/goodput", "Where the time of its devices went.", watch.GoodputView),
    Operation("get", "/v1/jobs/{job}/routers", "What its routers came to, by layer.", RouterView, many=True),
    *(
        Operation("post", f"/v1/jobs/{{job}}/{act}", f"{act.capitalize()} a job.", Accepted,
                  query={"discard": _FLAG} if act == "cancel" else None)
        for act in _ACTS
    ),
    Operation("get", "/v1/nodes", "All nodes.", NodeView, many=True),
    Operation("get", "/v1/nodes/{node}/log", "The newest lines of its log.", NodeLogView, query={"lines": _LINES}),
    Operation("post", "/v1/nodes/{node}/drain", "Take a node out of plans.", Accepted, body=DrainBody),
    Operation("post", "/v1/nodes/{node}/undrain", "Let a node take part again.", Accepted, body=DrainBody),
    Operation("post", "/v1/nodes/{node}/kill", "Inject a failure.", Accepted, body=KillBody),
    Operation("delete", "/v1/nodes/{node}", "Expect a node that is gone no more.", Accepted),
    Operation("get", "/v1/incidents", "All recoveries.", IncidentView, many=True),
    Operation("get", "/v1/incidents/{incident}/bundle", "A recovery with the past around it.", watch.Bundle),
    Operation("get", "/v1/pipelines", "Pipelines of a job.", PipelineView, many=True, query=_JOB),
    Operation("get", "/v1/templates", "Templates of a job.", TemplateView, many=True, query=_JOB),
    Operation("get", "/v1/layers", "Who holds each layer.", watch.LayerView, many=True, query=_JOB),
    Operation("get", "/v1/story", "What concerns a key.", changes.Change, many=True, query={"key": _SOME_TEXT}, needs=("key",)),
    Operation("get", "/v1/events", "Changes as server-sent events.", "text/event-stream", query={"since": _NUMBER, "follow": _FLAG}),
    Operation("get", "/v1/schedules", "Steps whose ops are known.", watch.SampledSteps, query=_JOB),
    Operation(
        "get", "/v1/schedule", "A step, op by op.", watch.ScheduleView,
        query={**_JOB, "step": _NUMBER, "modelled": _FLAG},
    ),
    Operation("get", "/v1/impact", "What would follow a loss.", watch.ImpactView, query={**_JOB, "nodes": _SOME_TEXT}, needs=("nodes",)),
    Operation(
        "get", "/v1/blast", "The first name of `/v1/impact`.", watch.ImpactView,
        query={**_JOB, "nodes": _SOME_TEXT}, needs=("nodes",), deprecated=True,
    ),
    Operation("get", "/v1/debug", "What the daemon is made of now, for a report of a fault.", watch.DebugView),
    Operation("get", "/v1/past", "The state at a time, and what came after.", watch.Past, query={"at": _TIME, "span": _SPAN}),
)  # fmt: skip


@functools.cache
def document() -> bytes:
    """The document, as JSON."""
    structs = {each for op in OPERATIONS for each in (op.answer, op.body) if isinstance(each, type)}
    types = [Problem, Job, *sorted({*structs, *changes.PAYLOADS}, key=lambda each: each.__name__)]
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas["SubmitBody"]["properties"]["job"] = _ref(
        Job
    )  # read by ``protocol.job``, which says what is wrong in a person's words
    schemas["Change"]["properties"]["data"] = _payload()
    paths: dict[str, dict[str, Any]] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method] = _described(op)
    whole = {
        "openapi": "3.1.0",
        "info": {
            "title": "oobleckd",
            "version": __version__,
            "description": "docs/api.md; errors are RFC 9457 problems with a hint.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }
    return msgspec.json.encode(whole)


def _payload() -> dict[str, Any]:
    """One of those that are known, or anything: of a newer version, or nothing."""
    return {"type": "object", "anyOf": [*map(_ref, changes.PAYLOADS), {"type": "object"}], "default": {}}


def _described(op: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": op.summary,
        "operationId": f"{op.method}_{op.path.strip('/').replace('/', '_').replace('{', '').replace('}', '').replace('.', '_')}",
        "parameters": [*_path_parameters(op), *_query_parameters(op)],
        "responses": {
            "200": {"description": op.summary, "content": _content(op)},
            "default": {
                "description": "It was not done; why, and what to do.",
                "content": {"application/problem+json": {"schema": _ref(Problem)}},
            },
        },
    }
    if op.deprecated:
        described["deprecated"] = True
    if op.answer == "text/plain" and op.path == "/healthz":
        described["responses"]["503"] = {
            "description": "It cannot.",
            "content": {"text/plain": {"schema": _TEXT}},
        }
    if op.body is not None:
        required = op.body is SubmitBody
        described["requestBody"] = {
            "required": required,
            "content": {"application/json": {"schema": _ref(op.body)}},
        }
    return described


def _content(op: Operation) -> dict[str, Any]:
    if isinstance(op.answer, str):
        return {op.answer: {"schema": _OTHER.get(op.answer, _TEXT)}}
    one = _ref(op.answer)
    if not op.many:
        return {"application/json": {"schema": one}}
    version = {"const": API_VERSION}
    listed = {
        "type": "object",
        "properties": {"apiVersion": version, "items": {"type": "array", "items": one}, "cursor": _TEXT},
        "required": ["items"],
    }
    return {"application/json": {"schema": listed}}


def _path_parameters(op: Operation) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in op.path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": _SOME_TEXT} for name in names]


def _query_parameters(op: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "required": name in op.needs, "schema": schema}
        for name, schema in op.asks.items()
    ]


def _ref(struct: Struct) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}

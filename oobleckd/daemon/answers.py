"""How handlers of the HTTP API answer: JSON with ``apiVersion``, refusals, and what they read of a query.

Owns no route and no right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from aiohttp import web

from oobleckd.core.state import JobRecord
from oobleckd.daemon.refusal import Refusal
from oobleckd.daemon.service import Service
from oobleckd.protocol.api import API_VERSION
from oobleckd.protocol.text import shown_json
from oobleckd.protocol.units import parse_seconds
from oobleckd.words import count

_MAX_DIGITS = 18
_VERSION = b"," + msgspec.json.encode({"apiVersion": API_VERSION})[1:]
_NAMED = 8  # jobs, in a sentence


def one(answer: msgspec.Struct) -> web.Response:
    """A document of one thing."""
    # Not by way of a dict: of a job with thousands of nodes that would take several times as long.
    return written(msgspec.json.encode(answer)[:-1] + _VERSION)


def whole(answer: msgspec.Struct) -> web.Response:
    """The same, of a struct that bears its ``apiVersion``, or has raw parts."""
    return written(msgspec.json.encode(answer))


def written(data: bytes) -> web.Response:
    """JSON as it is, but that what others wrote and nobody may change, such as a path, does nothing to a
    terminal.
    """
    return web.Response(body=shown_json(data), content_type="application/json")


def number(request: web.Request, name: str) -> int | None:
    """``name`` of the query, None where it is not there."""
    text = request.query.get(name)
    if text is None:
        return None
    if not is_number(text):
        raise Refusal(422, "invalid", f"{name} = {text!r} is no number", "write digits alone")
    return int(text)


def is_number(text: str) -> bool:
    """Whether ``text`` is a whole number of 18 digits at most, and nothing else that somebody may call a
    digit.
    """
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def seconds(request: web.Request, name: str, default: float) -> float:
    """``name`` of the query in seconds."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = parse_seconds(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Refusal(422, "invalid", f"{name} = {text!r} is no time", "write seconds, such as 12.5")
    return value


def flag(request: web.Request, name: str, *, default: bool = False) -> bool:
    """``name`` of the query, which is 0 or 1."""
    text = request.query.get(name)
    if text is None:
        return default
    if text not in {"0", "1"}:
        raise Refusal(422, "invalid", f"{name} = {text!r} is neither 0 nor 1", "write 0 or 1")
    return text == "1"


def find_job(service: Service, name: str, *, unique: bool = False) -> JobRecord:
    """The job with this id, or the newest one with this name; with ``unique`` the only one."""
    jobs = {job.id: job for job in service.core.state.shown}
    named = [job for job in jobs.values() if job.spec.name == name]
    # Who looks wants the newest; who acts on the newest where another was meant cannot take it back.
    # (D-service-019)
    if unique and name not in jobs and len(named) > 1:
        raise _shared(name, named)
    found = jobs.get(name) or (named[-1] if named else None)
    if found is None:
        raise Refusal(404, "not-found", f"no job {name}", "`oobleckctl get jobs` lists them")
    return found


def _shared(name: str, named: Sequence[JobRecord]) -> Refusal:
    newest = [f"{job.id} ({job.state})" for job in named[-_NAMED:]]
    others = len(named) - len(newest)
    ids = f"{', '.join(newest)}{f' and {others} older' if others else ''}"
    return Refusal(
        409, "conflict", f"{name} is the name of {count(len(named), 'job')}: {ids}", "name one by its id"
    )


def asked_or_active(service: Service, request: web.Request) -> JobRecord | None:
    """The job that the query names, or the active one."""
    if name := request.query.get("job", ""):
        return find_job(service, name)
    run = service.core.run
    return run.job if run is not None else None

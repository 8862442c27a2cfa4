"""Lists in pages: no answer grows with what a cluster has lived through.

Owns where a page ends: after ``limit`` rows, so many bytes, or so long a time, whatever comes first. Each row
is made and written by itself, so a page that is full costs nothing for the rows behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

import msgspec
from aiohttp import web

from oobleckd.daemon import answers
from oobleckd.daemon.refusal import Refusal
from oobleckd.protocol.api import API_VERSION
from oobleckd.protocol.text import shown_json

DEFAULT_ROWS, MAX_ROWS = 1000, 10_000
# Who waits for a recovery waits for the page that is just being made: some milliseconds of the loop, and as
# many bytes as a socket takes in a few writes. (D-service-020)
MAX_BYTES, MAX_S = 2**18, 0.01

Row = TypeVar("Row")


def page(
    request: web.Request,
    rows: Sequence[Row],
    made: Callable[[Row], msgspec.Struct],
    place: Callable[[Row], int | str] | None = None,
) -> web.Response:
    """As many of ``rows`` as the request wants and a page takes. ``place``: what the cursor says of the last
    row that was given, where ``rows`` begin behind that (``after``); without it the cursor counts rows.
    Raises Refusal.
    """
    limit = limit_of(request)
    begin = 0 if place is not None else int(after(request) or 0)
    parts: list[bytes] = []
    num_bytes, until, last = 0, time.monotonic() + MAX_S, None
    for row in islice(rows, begin, begin + limit):
        if parts and (num_bytes >= MAX_BYTES or time.monotonic() > until):
            break
        part = shown_json(msgspec.json.encode(made(row)))
        if parts and num_bytes + len(part) > MAX_BYTES:
            break
        parts.append(part)
        num_bytes += len(part)
        last = row
    more = begin + len(parts) < len(rows)
    cursor = ""
    if more:
        cursor = str(place(last) if place is not None and last is not None else begin + len(parts))
    tail = shown_json(msgspec.json.encode({"apiVersion": API_VERSION, "cursor": cursor}))
    body = b'{"items":[' + b",".join(parts) + b"]," + tail[1:]
    return web.Response(body=body, content_type="application/json")


def after(request: web.Request, *, names: bool = False) -> str:
    """What the cursor of the query says: a number, or with ``names`` a name; "" at the beginning."""
    cursor = request.query.get("cursor", "")
    if cursor and not names and not answers.is_number(cursor):
        hint = "take it from the answer before, or leave it out to begin anew"
        raise Refusal(422, "invalid", f"cursor = {cursor!r} is none of this list", hint)
    return cursor


def limit_of(request: web.Request) -> int:
    """How many rows are asked for. Raises Refusal."""
    limit = answers.number(request, "limit")
    if limit is None:
        return DEFAULT_ROWS
    if not 1 <= limit <= MAX_ROWS:
        raise Refusal(422, "invalid", f"limit = {limit} is no size of a page", f"write 1 to {MAX_ROWS}")
    return limit

"""How answers leave: in pieces, within a time, to somebody who reads.

Owns that nobody who does not read keeps anything of the daemon: an answer waits in memory for a while, and
then the connection is dropped. Owns no limit of how much anybody may ask for (``callers``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable

from aiohttp import web

from oobleckd.host import heap

WRITE_S = 30.0
PIECE_BYTES = 2**16
LEAST_BYTES_PER_S = 2**18
"""Of a long answer as a whole: who reads more slowly would keep it in memory."""
_UNSENT = ("Content-Length", "Transfer-Encoding")


async def sent(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """``response`` after it was written, in pieces where it is long."""
    body = _body(response)
    heap.used(len(body))
    if len(body) <= PIECE_BYTES or request.method == "HEAD" or response.prepared:
        return response
    streamed = web.StreamResponse(status=response.status, headers=_headers(response))
    with contextlib.suppress(ConnectionError):  # who asked has gone
        await within(request, _written(request, streamed, body), WRITE_S + len(body) / LEAST_BYTES_PER_S)
    return streamed


async def _written(request: web.Request, streamed: web.StreamResponse, body: bytes) -> None:
    await streamed.prepare(request)
    for begin in range(0, len(body), PIECE_BYTES):
        await within(request, streamed.write(body[begin : begin + PIECE_BYTES]))
    await streamed.write_eof()


def size(response: web.StreamResponse) -> int:
    """Bytes of the answer."""
    return len(_body(response)) or response.body_length


async def within(request: web.Request, writing: Awaitable[object], seconds: float = WRITE_S) -> None:
    """Write, as long as the other end reads. Raises ConnectionError."""
    try:
        await asyncio.wait_for(asyncio.ensure_future(writing), seconds)
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("nobody reads") from error


def _body(response: web.StreamResponse) -> bytes:
    body = response.body if isinstance(response, web.Response) else None
    return body if isinstance(body, bytes) else b""


def _headers(response: web.StreamResponse) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name not in _UNSENT}

"""Long work in turns of the loop, long answers by few at once and in pieces, and few lines of the log."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from oobleckd.daemon import sending, turns
from oobleckd.daemon.refusal import Refusal
from oobleckd.daemon.seldom import AT_ONCE, Seldom
from oobleckd.daemon.turns import Few, Slice, leave


@pytest.mark.asyncio
async def test_long_work_lets_others_have_turns_between() -> None:
    now, others = 0.0, 0

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    beside, part, longest, since = asyncio.create_task(other()), Slice(lambda: now), 0.0, 0.0
    for _ in range(100):
        now += turns.TURN_S / 4
        before = others
        longest = max(longest, now - since)
        await part.over()
        since = now if others > before else since
    assert others >= 100 // 4 - 1
    assert longest == pytest.approx(turns.TURN_S)
    beside.cancel()


def test_others_ask_for_what_is_long_by_few_at_once_and_we_as_we_like(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, whose = Few(most_each=2, most=3), dict[int, str]()
    monkeypatch.setattr(turns, "_owner_of", lambda request: whose.get(id(request)))

    def request(owner: str = "") -> web.Request:
        made = make_mocked_request("GET", "/")
        if owner:
            whose[id(made)] = owner
        return made

    ann, bob, late = [request("ann") for _ in range(3)], [request("bob") for _ in range(2)], request("cid")
    few.enter(ann[0])
    few.enter(ann[1])
    with pytest.raises(Refusal) as caught:
        few.enter(ann[2])
    assert caught.value.problem.status == 429
    assert caught.value.problem.retry_s
    few.enter(bob[0])
    with pytest.raises(Refusal):
        few.enter(late)
    ours = [request() for _ in range(5)]
    for each in ours:
        few.enter(each)
    leave(ann[2])
    leave(ours[0])
    assert few.now == ["ann", "ann", "bob"]
    leave(ann[0])
    leave(ann[0])
    few.enter(late)
    assert few.now == ["ann", "bob", "cid"]
    for each in (ann[1], bob[0], late):
        leave(each)


@pytest.mark.asyncio
async def test_a_long_answer_leaves_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    body, pieces = bytes(range(256)) * 2**13, []
    write = web.StreamResponse.write

    async def counted(response: web.StreamResponse, data: bytes) -> None:
        pieces.append(len(data))
        await write(response, data)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await sending.sent(request, web.Response(body=body))

    monkeypatch.setattr(web.StreamResponse, "write", counted)
    app = web.Application()
    app.router.add_get("/", answer)
    async with TestClient(TestServer(app)) as client:
        assert await (await client.get("/")).read() == body
    assert sum(pieces) == len(body)
    assert max(pieces) <= sending.PIECE_BYTES <= 2**20


@pytest.mark.asyncio
async def test_who_reads_a_little_now_and_then_keeps_no_long_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece may take its time, all of them together may not."""
    monkeypatch.setattr(sending, "WRITE_S", 0.2)
    monkeypatch.setattr(sending, "LEAST_BYTES_PER_S", 2**30)
    dropped = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        transport.set_write_buffer_limits(high=2**10)
        response = await sending.sent(request, web.Response(body=bytes(2**24)))
        if transport.is_closing():
            dropped.set()
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server:
        assert server.port is not None
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: d\r\n\r\n")
        while not dropped.is_set():
            await asyncio.wait({asyncio.ensure_future(dropped.wait())}, timeout=0.05)
            if not dropped.is_set():
                await reader.read(2**12)
        writer.close()


def test_what_anybody_brings_about_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    seldom = Seldom(logging.getLogger("test"))
    for number in range(1000):
        seldom.warn("refused %d of 100%%", number)
    assert [record.getMessage() for record in caplog.records] == [
        f"refused {number} of 100%" for number in range(AT_ONCE)
    ]
    assert seldom.num_unsaid == 1000 - AT_ONCE


def test_a_fault_that_anybody_may_repeat_is_logged_with_its_traceback_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seldom = Seldom(logging.getLogger("test"))
    for _ in range(100):
        try:
            int("no number")
        except ValueError:
            seldom.exception("GET %s", "/100%")
    assert len(caplog.records) == AT_ONCE
    assert all(record.exc_info and record.levelname == "ERROR" for record in caplog.records)

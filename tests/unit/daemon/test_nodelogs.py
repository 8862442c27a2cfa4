"""Logs of nodes, by way of their agents: what the API answers, and what becomes of agents that do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from oobleckd.core.events import Heard, LinkLost
from oobleckd.daemon import http, nodelogs
from oobleckd.daemon.config import Config
from oobleckd.daemon.nodelogs import NodeLogs, TooManyQuestions
from oobleckd.daemon.service import Service, open_service
from oobleckd.protocol.agentmessages import LogTold, TellLog
from tests.helpers.agents import hello

Answer = Callable[[TellLog], LogTold | None]


@asynccontextmanager
async def asked_of(folder: Path, answer: Answer) -> AsyncIterator[tuple[Service, Any]]:
    """A daemon whose node-1 answers, and what gets a path of its API: status and document."""
    service = open_service(
        Config(state_dir=str(folder), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=0)
    )
    for name in ("node-1", "node-2"):
        service.machine.handle(Heard(name, hello(name)), service.clock.now())
    service.machine.handle(LinkLost("node-2"), service.clock.now())

    def tell(node: str, message: TellLog) -> None:
        assert node == "node-1"
        if (said := answer(message)) is not None:
            asyncio.get_running_loop().call_soon(service._heard, node, said)

    service.node_logs = NodeLogs(tell)
    app = web.Application(middlewares=[http._problems])
    app.add_routes([web.get("/v1/nodes/{node}/log", http.Api(service).node_log)])
    async with TestClient(TestServer(app)) as client:

        async def get(path: str) -> tuple[int, dict[str, Any]]:
            response = await client.get(path)
            return response.status, msgspec.json.decode(await response.read())

        yield service, get
    await service.close()


def three_lines(message: TellLog) -> LogTold:
    lines = ("one", "two\x1b[2J", "three")
    return LogTold(message.ticket, lines[-message.num_lines :] if message.num_lines else (), complete=True)


@pytest.mark.asyncio
async def test_the_newest_lines_of_a_node(tmp_path: Path) -> None:
    async with asked_of(tmp_path, three_lines) as (_, get):
        status, found = await get("/v1/nodes/node-1/log?lines=2")
        assert (status, found["node"], found["complete"]) == (200, "node-1", True)
        assert found["lines"] == ["two\x1b[2J", "three"]
        assert (await get("/v1/nodes/node-1/log"))[1]["lines"][0] == "one"
        assert (await get("/v1/nodes/node-1/log?lines=0"))[1]["lines"] == []


@pytest.mark.asyncio
async def test_an_agent_that_says_more_than_it_was_asked_is_cut(tmp_path: Path) -> None:
    async with asked_of(tmp_path, lambda asked: LogTold(asked.ticket, ("x",) * 5000)) as (_, get):
        assert (await get("/v1/nodes/node-1/log?lines=3"))[1]["lines"] == ["x"] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "status", "detail"),
    [
        ("node-9/log", 404, "no node node-9"),
        ("node-2/log", 503, "node-2 is not here"),
        ("node-1/log?lines=1001", 422, "more than is kept"),
        ("node-1/log?lines=x", 422, "no number"),
    ],
)
async def test_refusals_say_why(tmp_path: Path, path: str, status: int, detail: str) -> None:
    async with asked_of(tmp_path, three_lines) as (_, get):
        code, problem = await get(f"/v1/nodes/{path}")
        assert code == status
        assert detail in problem["detail"]
        assert problem["hint"]


@pytest.mark.asyncio
async def test_an_agent_that_does_not_answer_is_not_waited_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nodelogs.WAIT_S == 2.0
    monkeypatch.setattr(nodelogs, "WAIT_S", 0.05)
    async with asked_of(tmp_path, lambda _: None) as (service, get):
        status, problem = await get("/v1/nodes/node-1/log")
        assert (status, problem["detail"]) == (503, "the agent of node-1 does not answer within 50 ms")
        assert not service.node_logs._open


@pytest.mark.asyncio
async def test_answers_count_only_from_who_was_asked() -> None:
    asked: list[TellLog] = []
    logs = NodeLogs(lambda _node, message: asked.append(message))
    waiting = asyncio.create_task(logs.newest("node-1", 5))
    await asyncio.sleep(0)
    logs.heard("node-2", LogTold(asked[0].ticket, ("of another",)))
    logs.heard("node-1", LogTold("no such ticket", ("old",)))
    logs.heard("node-1", LogTold(asked[0].ticket, ("mine",)))
    logs.heard("node-1", LogTold(asked[0].ticket, ("again",)))
    assert (await waiting).lines == ("mine",)
    logs.heard("node-1", LogTold(asked[0].ticket, ("late",)))


@pytest.mark.asyncio
async def test_only_so_many_questions_are_open_at_once() -> None:
    logs = NodeLogs(lambda _node, _message: None)
    open_ones = [asyncio.create_task(logs.newest("node-1", 5)) for _ in range(nodelogs.MAX_OPEN)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyQuestions):
        await logs.newest("node-1", 5)
    for each in open_ones:
        each.cancel()
    await asyncio.gather(*open_ones, return_exceptions=True)
    assert not logs._open

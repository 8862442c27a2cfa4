"""Pages: as many rows as were asked for, as many bytes as a page takes, and all of them in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from oobleckd.daemon import paging
from oobleckd.daemon.busy import MeasuredLoop, forget, longest_s
from oobleckd.daemon.limits import Limit
from oobleckd.daemon.refusal import Refusal
from oobleckd.daemon.turns import Took, metered
from oobleckd.protocol.api import Items


class Row(msgspec.Struct, frozen=True):
    """A row of a list."""

    number: int
    text: str = ""


def asked(query: str, rows: list[Row], made: Callable[[Row], Row] = lambda row: row) -> Items[Row]:
    answer = paging.page(make_mocked_request("GET", f"/?{query}"), rows, made)
    assert isinstance(answer, web.Response)
    assert isinstance(answer.body, bytes)
    return msgspec.json.decode(answer.body, type=Items[Row])


def all_of(query: str, rows: list[Row]) -> tuple[list[Row], int]:
    found, pages, cursor = [], 0, ""
    while pages == 0 or cursor:
        page = asked(f"{query}&cursor={cursor}", rows)
        found, pages, cursor = [*found, *page.items], pages + 1, page.cursor
    return found, pages


@pytest.mark.parametrize("query", ["limit=1", "limit=7", "limit=10000", ""])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 50])
def test_pages_together_are_the_list(query: str, num_rows: int) -> None:
    rows = [Row(number) for number in range(num_rows)]
    assert all_of(query, rows)[0] == rows


def test_a_page_is_never_larger_than_it_may_be() -> None:
    rows = [Row(number, "x" * 20_000) for number in range(40)]
    assert sum(len(msgspec.json.encode(row)) for row in asked("limit=40", rows).items) <= paging.MAX_BYTES
    assert all_of("limit=40", rows)[0] == rows
    huge = [Row(number, "x" * 2 * paging.MAX_BYTES) for number in range(2)]
    assert all_of("", huge) == (huge, 2)


def test_a_page_without_a_limit_has_one() -> None:
    rows = [Row(number) for number in range(20 * paging.DEFAULT_ROWS)]
    page = asked("", rows)
    assert 1 <= len(page.items) <= paging.DEFAULT_ROWS
    assert page.cursor


def test_a_page_ends_when_it_takes_too_long() -> None:
    def slow(row: Row) -> Row:
        until = time.monotonic() + paging.MAX_S
        while time.monotonic() < until:
            pass
        return row

    page = asked("", [Row(number) for number in range(100)], slow)
    assert 1 <= len(page.items) < 10
    assert page.cursor == str(len(page.items))


@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "limit=x", "cursor=x", "limit=-1"])
def test_a_page_that_there_is_not_is_refused(query: str) -> None:
    with pytest.raises(Refusal) as caught:
        asked(query, [Row(1)])
    assert caught.value.problem.status == 422


def test_what_was_given_is_paid_for_afterwards() -> None:
    limit = Limit(per_s=10.0, burst=100.0)
    assert limit.owes_s("a", 0.0) == 0.0
    limit.charge("a", 150.0, 0.0)
    assert limit.owes_s("a", 0.0) == 5.0
    assert limit.owes_s("b", 0.0) == 0.0
    assert limit.owes_s("a", 5.0) == 0.0


@pytest.mark.asyncio
async def test_only_time_on_the_loop_counts() -> None:
    async def work() -> str:
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0.2)
        return "done"

    took = Took()
    assert await metered(work(), took) == "done"
    assert 0.02 <= took.seconds < 0.2


@pytest.mark.asyncio
async def test_what_fails_is_counted_and_fails() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("as it does")

    took = Took()
    with pytest.raises(ValueError, match="as it does"):
        await metered(fails(), took)
    assert took.seconds > 0


def test_a_loop_that_was_not_free_knows_it() -> None:
    async def work() -> float:
        await asyncio.sleep(0)
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
        await asyncio.sleep(0)
        return longest_s()

    async def forgotten() -> float:
        forget()
        return longest_s()

    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        assert runner.run(work()) >= 0.05
        assert runner.run(forgotten()) < 0.05

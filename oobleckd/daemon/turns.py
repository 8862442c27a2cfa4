"""Who only asks waits for a turn, and what they cost the loop is counted.

Owns that one answer at most is made in a turn of the loop, so that nodes are heard between two of them
however many ask at once; that what takes longer is made in several turns (``Slice``), and what is long by few
at once (``Few``); and how long each kept the loop. Who is refused for it is ``callers``' to say.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import web

from oobleckd.daemon.peers import owner_of
from oobleckd.daemon.refusal import Refusal

Answer = TypeVar("Answer")
TURN_S = 0.002
"""Of long work at once."""
_AGAIN_S = 0.5


class Turns:
    """One at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Until it is this one's turn."""
        async with self._lock:
            await asyncio.sleep(0)


class Slice:
    """A part of long work on the loop: ask whether it is ``over`` after each little step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._until = clock() + TURN_S

    async def over(self) -> None:
        """Let everybody else have a turn, if this one has lasted."""
        if self._clock() >= self._until:
            await asyncio.sleep(0)
            self._until = self._clock() + TURN_S


@dataclass(slots=True)
class Few:
    """What is long: ``most_each`` of one user or address are made or sent at once, ``most`` of all but ours,
    so that memory has a bound and ours wait behind few. ``now``: whose there are.
    """

    most_each: int = 2
    most: int = 4
    now: list[str] = field(default_factory=list)

    def enter(self, request: web.Request) -> None:
        """For as long as the request lasts. Raises Refusal."""
        owner = _owner_of(request)
        if owner is None:
            return
        if len(self.now) >= self.most or self.now.count(owner) >= self.most_each:
            detail = "as many long answers are being made as may be at once"
            refusal = Refusal(429, "too many requests", detail, "ask again soon")
            refusal.problem = msgspec.structs.replace(refusal.problem, retry_s=_AGAIN_S)
            raise refusal
        self.now.append(owner)
        _inside[id(request)] = (self, owner)


def leave(request: web.Request) -> None:
    """It was answered."""
    if (inside := _inside.pop(id(request), None)) is not None:
        few, owner = inside
        few.now.remove(owner)


def _owner_of(request: web.Request) -> str | None:
    sock = request.transport.get_extra_info("socket") if request.transport is not None else None
    return owner_of(sock) if sock is not None else "somebody who has gone"


_inside: dict[int, tuple[Few, str]] = {}  # requests by their identity, each until ``leave``


@dataclass(slots=True)
class Took:
    """Seconds that something had the loop for itself, without those that it waited."""

    seconds: float = 0.0


async def metered(work: Coroutine[Any, Any, Answer], took: Took) -> Answer:
    """``work``, whose time on the loop is added to ``took``."""
    return cast("Answer", await _steps(work, took))


@types.coroutine
def _steps(work: Coroutine[Any, Any, Any], took: Took) -> Generator[Any, Any, Any]:
    given: Any = None
    thrown: BaseException | None = None
    while True:
        began = time.perf_counter()
        try:
            waits_for = work.send(given) if thrown is None else work.throw(thrown)
        except StopIteration as end:
            return end.value
        finally:
            took.seconds += time.perf_counter() - began
        given = thrown = None
        try:
            given = yield waits_for
        except BaseException as error:  # noqa: BLE001 - it is the work's, not ours
            thrown = error

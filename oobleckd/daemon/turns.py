"""Who only asks waits for a turn, and what they cost the loop is counted.

Owns that one answer at most is made in a turn of the loop, so that nodes are heard between two of them
however many ask at once, and how long each kept the loop. Who is refused for it is ``callers``' to say.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

Answer = TypeVar("Answer")


class Turns:
    """One at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Until it is this one's turn."""
        async with self._lock:
            await asyncio.sleep(0)


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

"""Planning in processes of their own, so that a long plan never delays a heartbeat.

Owns the pool: warmed at start, rebuilt when a process of it dies (and the request repeated once), gone
with the daemon however that ends. Owns no plan: requests and answers are the core's, the work is
``planner.policies``. Templates that were prepared are kept, so that ``adapt`` after a loss starts at once.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from oobleckd.core.events import MakePlan, Planned
from planner import policies
from planner.plan import Template
from planner.policy import PlanError, Setup

# One plan for a recovery must not wait behind the templates of a queued job.
NUM_PROCESSES = 2
_MOST_PREPARED = 16
_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Planning:
    """The pool. ``warm`` starts its processes; ``plan`` may be called any number of times at once."""

    def __init__(self, num_processes: int = NUM_PROCESSES) -> None:
        self.num_rebuilt = 0
        self._num_processes = num_processes
        self._pool = self._new_pool()
        self._prepared: dict[tuple[str, Setup], tuple[Template, ...]] = {}

    def warm(self) -> None:
        """Have every process started and the planner imported there, without waiting for it."""
        for _ in range(self._num_processes):
            self._pool.submit(os.getpid)

    async def plan(self, request: MakePlan) -> Planned:
        """The answer to ``request``. Never raises: what goes wrong is a sentence in the answer."""
        try:
            templates = await self._templates(request.policy, request.setup)
            if request.situation is None:
                return Planned(request.ticket, templates=templates)
            proposal = await self._run(
                policies.adapt, request.policy, request.setup, templates, request.situation
            )
        except PlanError as error:
            return Planned(request.ticket, error=error.problem, hint=error.hint)
        except BrokenProcessPool as error:
            return _failed(request, f"the planner's process died twice: {error}")
        except Exception as error:  # noqa: BLE001 - a task's boundary: a fault of the planner must not stop the daemon
            _log.exception("planner: %s", request)
            return _failed(request, f"the planner failed: {type(error).__name__}: {error}")
        return Planned(request.ticket, templates=templates, proposal=proposal)

    def close(self) -> None:
        """End the processes; plans under way are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def pids(self) -> tuple[int, ...]:
        """Process numbers of the pool."""
        return tuple(
            sorted(child.pid for child in multiprocessing.active_children() if child.pid is not None)
        )

    async def _templates(self, policy: str, setup: Setup) -> tuple[Template, ...]:
        key = (policy, setup)
        if key not in self._prepared:
            templates = await self._run(policies.prepare, policy, setup)
            while len(self._prepared) >= _MOST_PREPARED:
                self._prepared.pop(next(iter(self._prepared)))
            self._prepared[key] = templates
        return self._prepared[key]

    async def _run(self, function: Callable[..., Result], *arguments: object) -> Result:
        pool = self._pool
        try:
            return await asyncio.wrap_future(pool.submit(function, *arguments))
        except BrokenProcessPool:
            self._rebuild(pool)
        return await asyncio.wrap_future(self._pool.submit(function, *arguments))

    def _rebuild(self, broken: ProcessPoolExecutor) -> None:
        # Several requests may meet the same broken pool; one of them replaces it.
        if self._pool is broken:
            _log.warning("a process of the planner died; the pool is made anew")
            self.num_rebuilt += 1
            broken.shutdown(wait=False)
            self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        # spawn: the daemon has threads, and a fork of those may hang.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._num_processes, mp_context=context, initializer=_begin)


def _failed(request: MakePlan, problem: str) -> Planned:
    return Planned(request.ticket, error=problem, hint="this is a fault of oobleckd; the log has more")


def _begin() -> None:
    """In each process: leave Ctrl-C to the daemon, and end with it even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()

"""Threads for what would hold the event loop: files, answers that take long.

Owns that all of them are there before the loop serves anybody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def started(number: int, name: str, begin: Callable[[], object] | None = None) -> ThreadPoolExecutor:
    """A pool of so many threads that run already; each calls ``begin`` first."""
    # Whoever starts a thread waits until that runs, and a new thread is an ordinary one: beside a flood that
    # takes all cores the loop stood still for 0.1 s. (D-service-026)
    pool = ThreadPoolExecutor(number, name, begin)
    together = threading.Barrier(number)
    for waiting in [pool.submit(together.wait) for _ in range(number)]:
        waiting.result()
    return pool

"""Threads for what would hold the daemon's loop."""

from __future__ import annotations

import threading

from oobleckd.daemon.aside import started


def test_all_threads_run_before_there_is_anything_to_do() -> None:
    """Who hands something to them starts none, and waits for none to run."""
    began: list[str] = []
    with started(3, "aside-of-test", lambda: began.append(threading.current_thread().name)) as pool:
        there = {each for each in threading.enumerate() if each.name.startswith("aside-of-test")}
        assert sorted(began) == sorted(each.name for each in there)
        assert len(there) == 3
        used = {each.result() for each in [pool.submit(threading.current_thread) for _ in range(8)]}
    assert used <= there

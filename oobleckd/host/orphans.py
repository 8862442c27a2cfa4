"""Ends the processes of a pool with the one that started them, also if that was killed: a pool by itself has
them finish what they are at.
"""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Called in a process that multiprocessing started: from now on it ends when its parent does."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by multiprocessing"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()

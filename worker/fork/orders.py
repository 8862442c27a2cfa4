"""What an agent and its forker say to each other. Both import it; it imports neither, and no torch.

Owns the messages, and what a fork is told of the process that it belongs to.
"""

from __future__ import annotations

import os
import resource

import msgspec

READY = b"ready"
"""The forker's first word: it has loaded all."""
ORDER_BYTES = 64 * 1024
"""What an order or an answer is at most."""
_LIMITS = tuple(name for name in dir(resource) if name.startswith("RLIMIT_"))


class Order(msgspec.Struct, frozen=True):
    """A device of ``agent`` to fork: the words of its command line but for the program and its ties, whose
    descriptors come along; and the agent's ``limits``.
    """

    words: tuple[str, ...]
    agent: int
    limits: dict[str, tuple[int, int]]


class Answer(msgspec.Struct, frozen=True):
    """The process that came of it, or why there is none."""

    pid: int = 0
    problem: str = ""


def limits() -> dict[str, tuple[int, int]]:
    """The resource limits of this process (``ulimit -a``)."""
    return {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS}


def num_threads() -> int:
    """How many threads this process has, whoever made them. With more than one, a fork may find locks held
    for ever.
    """
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - names are all that is wanted

"""Threads that others wait for after a failure, on cores that compute: they run before ordinary ones.

The control path does little, but it does it where training takes all cores, and a kernel lets a thread that computes go on
for up to a tick of 4 ms before one that woke up has its turn. Every message from a loss to the decision meets that several
times. So these threads ask for round-robin real-time scheduling, as corosync does for the same reason (its
``system.sched_rr``). What they start is ordinary again. Where the system does not allow it, all works as it does
without (CAP_SYS_NICE or RLIMIT_RTPRIO; the units have ``LimitRTPRIO=1``).
"""

from __future__ import annotations

import os
from collections.abc import Callable

PRIORITY = 1  # the lowest one: above all ordinary programs, below everything else that is urgent
POLICY = os.SCHED_RR


def hurry() -> bool:
    """Make the calling thread urgent; whether the system allows it. Threads and processes that it starts are not."""
    try:
        os.sched_setscheduler(0, POLICY | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
    except OSError:  # not allowed, or in a control group that has no real-time share
        return False
    return True


def hurries() -> bool:
    """Whether the calling thread is urgent."""
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == POLICY


def as_urgent(target: Callable[[], None]) -> Callable[[], None]:
    """``target`` for a new thread, which is to be as urgent as the thread that calls this."""

    def run() -> None:
        hurry()
        target()

    return run if hurries() else target

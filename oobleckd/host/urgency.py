"""Lets threads that others wait for after a failure run before ordinary ones, on cores that compute.

The control path does little, but it does it where training takes all cores, and a kernel lets a thread that
computes go on for up to a tick of 4 ms before one that woke up has its turn. Every message from a loss to the
decision meets that several times. So these threads ask for round-robin real-time scheduling, as corosync does
for the same reason (its ``system.sched_rr``). What they start is ordinary again. Where they wait for what a
thread that computes holds, it is lent some of their haste (``lend``), or it would go on when its turn among
all that compute comes: priority inheritance, by hand since Python's locks have none. Where the system does
not allow it, all works as it does without (CAP_SYS_NICE or RLIMIT_RTPRIO; the units have ``LimitRTPRIO=2``,
with 1 nothing is lent).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Nice values and shorter slices did not help: a kernel without preemption, or with a lazy one, lets
# ordinary threads wait either way. Lent is less than the lender has. (D-recovery-016, D-recovery-017,
# D-recovery-021)
LENT = 1  # the lowest one: above all ordinary programs, below everything else that is urgent
PRIORITY = 2  # of who lends it
POLICY = os.SCHED_RR


def hurry(thread: int = 0) -> bool:
    """Make the calling thread urgent, or that of this number; whether the system allows it. Threads and
    processes that it starts are not.
    """
    return _set(thread, PRIORITY) or _set(thread, LENT)


def _set(thread: int, priority: int) -> bool:
    try:
        os.sched_setscheduler(thread, POLICY | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except OSError:  # not allowed, or in a control group that has no real-time share
        return False
    return True


def hurry_behind(thread: int = 0) -> bool:
    """Make the calling thread urgent, or that of this number, but less than those that ``hurry``: it holds
    now and then what they wait for, as the interpreter's lock is.
    """
    return _set(thread, LENT)


def priority() -> int:
    """The real-time priority of the calling thread; 0 if it is ordinary."""
    return os.sched_getparam(0).sched_priority


def lend(thread: int) -> None:
    """Let the ordinary thread of this number, of any process of this user, go before others until
    ``take_back``.

    Not before the calling thread, if that is urgent enough; else nothing is lent.
    """
    if priority() > LENT:
        _set(thread, LENT)


def take_back(thread: int) -> None:
    """Take back what was lent to the thread of this number; nothing if nothing was."""
    if os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK == POLICY:
        os.sched_setscheduler(thread, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))


@contextmanager
def hurried_for(seconds: float) -> Iterator[None]:
    """For the main thread of an urgent process whose work may turn out to be long: once the process has
    computed for ``seconds`` it goes on as an ordinary one, until the end of the block.
    """
    if not hurries():
        yield
        return
    signal.signal(signal.SIGPROF, lambda *_: take_back(0))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        hurry()


def hurries() -> bool:
    """Whether the calling thread is urgent."""
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == POLICY


def as_urgent(target: Callable[[], None]) -> Callable[[], None]:
    """``target`` for a new thread, which is to be as urgent as the thread that calls this."""

    def run() -> None:
        hurry()
        target()

    return run if hurries() else target


def behind(target: Callable[[], None]) -> Callable[[], None]:
    """``target`` for a new thread, which is to be urgent behind the thread that calls this, if that is."""

    def run() -> None:
        hurry_behind()
        target()

    return run if hurries() else target

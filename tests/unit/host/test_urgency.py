"""Urgent where the system allows it, ordinary where it does not; what an urgent thread starts is ordinary
again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from oobleckd.host import urgency

T = TypeVar("T")


def in_thread(act: Callable[[], T]) -> T:
    """Not in the tests' own thread, which is to stay as it is."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(act).result()


def test_a_thread_becomes_urgent_if_that_is_allowed() -> None:
    allowed, is_urgent = in_thread(lambda: (urgency.hurry(), urgency.hurries()))
    assert is_urgent is allowed
    assert not urgency.hurries()


def test_what_it_starts_is_ordinary() -> None:
    def start() -> tuple[bool, str]:
        urgency.hurry()
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        return in_thread(urgency.hurries), child.stdout.strip()

    assert in_thread(start) == (False, str(os.SCHED_OTHER))


def test_a_thread_may_be_made_as_urgent_as_its_maker() -> None:
    def start() -> tuple[bool, bool]:
        allowed = urgency.hurry()
        found: list[bool] = []
        thread = threading.Thread(target=urgency.as_urgent(lambda: found.append(urgency.hurries())))
        thread.start()
        thread.join()
        return allowed, found[0]

    allowed, as_urgent = in_thread(start)
    assert as_urgent is allowed


def test_an_ordinary_thread_makes_ordinary_ones() -> None:
    def target() -> None: ...

    assert urgency.as_urgent(target) is target


def test_who_waits_lends_its_haste_to_whom_it_waits_for() -> None:
    """As long as it waits, and less than it has: else who computes could keep a core that it needs itself."""

    def wait() -> tuple[int, list[int]]:
        urgency.hurry()
        begin, end = threading.Event(), threading.Event()
        other = threading.Thread(target=lambda: (begin.set(), end.wait()))
        other.start()
        begin.wait()
        number = other.native_id or 0
        seen = []
        urgency.take_back(number)
        urgency.lend(number)
        seen.append(os.sched_getparam(number).sched_priority)
        urgency.take_back(number)
        seen.append(os.sched_getparam(number).sched_priority)
        end.set()
        other.join()
        return urgency.priority(), seen

    own, seen = in_thread(wait)
    assert seen == [urgency.LENT if own > urgency.LENT else 0, 0]


def test_the_lowest_haste_is_kept_where_no_more_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def allow_one(thread: int, policy: int, param: os.sched_param) -> None:
        if param.sched_priority > 1:
            raise PermissionError(1, "Operation not permitted")
        asked.append((thread, param.sched_priority))

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "sched_setscheduler", allow_one)
    assert urgency.hurry()
    assert asked == [(0, urgency.LENT)]
    monkeypatch.setattr(os, "sched_getparam", lambda _: os.sched_param(urgency.LENT))
    urgency.lend(7)
    assert asked == [(0, urgency.LENT)], "nothing to lend"


def test_an_ordinary_thread_lends_nothing() -> None:
    urgency.lend(threading.get_native_id())
    assert urgency.priority() == 0


LONG = """
import time
from oobleckd.host import urgency

def busy(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return urgency.hurries()

print(urgency.hurry())
for _ in range(3):
    with urgency.hurried_for(0.05):
        print(busy(0.005), busy(0.3))
    print(urgency.hurries())
    with urgency.hurried_for(0.05):
        print(busy(0.005))
    print(busy(0.1))
"""


def test_long_work_is_ordinary_again() -> None:
    allowed = in_thread(urgency.hurry)
    ran = subprocess.run([sys.executable, "-c", LONG], stdout=subprocess.PIPE, text=True, check=True)
    each = [allowed, False, allowed, allowed, allowed]
    assert ran.stdout.split() == [str(word) for word in [allowed, *each * 3]]


def test_an_ordinary_process_has_no_haste_to_lose() -> None:
    before = signal.getsignal(signal.SIGPROF)
    with urgency.hurried_for(0.05):
        assert not urgency.hurries()
    assert signal.getsignal(signal.SIGPROF) is before
    assert not urgency.hurries()


def test_where_it_is_not_allowed_all_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert not urgency.hurry()
    assert not urgency.hurries()

"""Hung, long, starved, stopped, held by a debugger: what a watchdog says of each."""

import os
import signal
import subprocess
import sys
import time

import pytest

from oobleckd.worker.processes.watchdog import LOOK_EVERY_S, ProcessAccount, Suspicion, Watchdog, is_frozen
from oobleckd.worker.runtime.activity import LOOK_UP_S, ActivityPage, ActivityReader, ActivityReading


@pytest.fixture
def page():
    reader = ActivityReader()
    yield reader
    reader.close()


def looks(reading, seconds, *, state="S", delay_of=lambda _took: 0.0, every=LOOK_EVERY_S):
    """Look at an unchanging reading, begun at 100 s if at all, for ``seconds``; the first verdict and when it
    came.
    """
    suspicion, now = Suspicion(), 100.0
    while now - 100.0 <= seconds:
        verdict = suspicion.look(now, reading, state, delay_of(now - 100.0))
        if verdict:
            return verdict, now - 100.0
        now += every
    return "", seconds


def forward(longest_s=0.05, limit_s=2.0):
    return ActivityReading("2F0", 100.0, longest_s, limit_s)


def test_work_that_takes_far_longer_than_ever_is_a_hang():
    verdict, after_s = looks(forward(), 10.0)
    assert verdict.startswith("hung in 2F0 for 2.")
    assert verdict.endswith("s (measured: 50 ms at most)")
    assert 1.9 < after_s < 2.4


def test_a_device_that_waits_and_shows_nothing_hangs_too():
    verdict, _ = looks(ActivityReading("", 100.0, LOOK_UP_S, 2.5), 10.0)
    assert verdict.startswith("hung: gave no sign for 2.")


def test_progress_is_none_of_it():
    suspicion = Suspicion()
    for look in range(1000):
        reading = ActivityReading("", 100.0 + LOOK_UP_S * (look // 3), LOOK_UP_S, 2.5)
        assert not suspicion.look(100.0 + look * LOOK_EVERY_S, reading, "S", 0.0)


def test_no_processor_time_is_no_hang():
    assert looks(forward(), 60.0, state="R", delay_of=lambda took: 0.98 * took) == ("", 60.0)


def test_what_the_agent_slept_through_does_not_count():
    verdict, after_s = looks(forward(), 200.0, every=10.0)
    assert verdict
    assert after_s >= 80.0


def test_a_debugger_may_take_its_time():
    assert looks(forward(), 60.0, state="t") == ("", 60.0)


def test_a_stopped_process_is_told_by_the_kernel():
    verdict, after_s = looks(forward(longest_s=60.0, limit_s=600.0), 10.0, state="T")
    assert verdict.startswith("hung in 2F0: stopped by a signal for 1.")
    assert after_s < 1.3


def test_time_in_which_it_was_stopped_is_not_counted_as_work():
    """It goes on in the middle of a task that has taken far longer than ever by the clock."""
    suspicion, now = Suspicion(), 100.0
    for state, looks_ in (("S", 5), ("T", 300), ("S", 10)):
        verdicts = []
        for _ in range(looks_):
            verdicts.append(suspicion.look(now, forward(), state, 0.0))
            now += LOOK_EVERY_S
        assert suspicion.stopped == (state == "T")
        assert bool(verdicts[-1]) == (state == "T")


def test_a_frozen_cgroup_is_a_stop_and_no_hang():
    suspicion, now = Suspicion(), 100.0
    while not suspicion.look(now, forward(), "S", 0.0):
        now += LOOK_EVERY_S
    assert not suspicion.stopped
    suspicion.freezes()
    for _ in range(100):
        now += LOOK_EVERY_S
        assert "its cgroup, which is frozen" in suspicion.look(now, forward(), "S", 0.0)
    assert suspicion.stopped
    assert suspicion.stopped_s > 10.0
    suspicion.thaws()
    assert not suspicion.look(now + LOOK_EVERY_S, forward(), "S", 0.0)


@pytest.mark.parametrize(
    ("cgroup", "file", "text", "frozen"),
    [
        ("0::/a/b", "a/b/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/a/b", "a/b/cgroup.events", "populated 1\nfrozen 0\n", False),
        ("4:memory:/m\n3:freezer:/a", "freezer/a/freezer.state", "FROZEN\n", True),
        ("4:memory:/m\n3:freezer:/a", "freezer/a/freezer.state", "FREEZING\n", True),
        ("4:memory:/m\n3:freezer:/a", "freezer/a/freezer.state", "THAWED\n", False),
        ("0::/", "other", "", False),
    ],
)
def test_the_kernel_says_that_a_cgroup_is_frozen(tmp_path, cgroup, file, text, frozen):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroups"
    (proc / "17").mkdir(parents=True)
    (proc / "17" / "cgroup").write_text(cgroup)
    (cgroups / file).parent.mkdir(parents=True)
    (cgroups / file).write_text(text)
    assert is_frozen(17, proc, cgroups) == frozen
    assert not is_frozen(18, proc, cgroups)


def test_a_process_that_stops_before_its_first_word_or_within_one_is_seen_too():
    assert looks(None, 60.0) == ("", 60.0)
    verdict, after_s = looks(None, 10.0, state="T")
    assert verdict.startswith("hung: stopped by a signal for 1.")
    assert after_s < 1.3


def test_the_page_tells_what_is_done_and_how_long_it_took_before(page):
    assert page.read() is None
    activity = ActivityPage(page.fd)
    activity.wait()
    assert page.read().what == ""
    with activity.doing("F", "2F0", units=2):
        first = page.read()
        assert (first.what, first.longest_s, first.limit_s) == ("2F0", 0.0, 600.0)
    assert page.read().what == ""
    with activity.doing("F", "2F1", units=4):
        second = page.read()
        assert second.what == "2F1"
        assert 0.0 < second.longest_s < 1.0
        assert second.limit_s == pytest.approx(max(2.0, 10 * second.longest_s))
        with activity.doing("load", units=0):
            assert page.read().limit_s == 600.0
        outer = page.read()
        assert outer.what == "2F1"
        assert outer.since_s > second.since_s  # it begins anew: the inner work was not its own
    with activity.doing("load", units=0):
        assert page.read().limit_s == 60.0


def test_to_compile_takes_as_long_as_it_takes(page):
    """A second where all is kept, and minutes for what comes next."""
    activity = ActivityPage(page.fd)
    for _ in range(3):
        with activity.doing("compile", units=0):
            assert (page.read().what, page.read().limit_s) == ("compile", 3600.0)


def test_the_first_of_a_kind_prepares_much_and_does_not_count_for_long(page, monkeypatch):
    now_ns = 0
    monkeypatch.setattr("oobleckd.worker.runtime.activity.time.monotonic_ns", lambda: now_ns)
    activity = ActivityPage(page.fd)
    for took_s in (4.0, 0.5, 0.25):
        with activity.doing("B"):
            now_ns += int(took_s * 1e9)
    with activity.doing("B", units=2):
        reading = page.read()
    assert (reading.longest_s, reading.limit_s) == (1.0, 10.0)


def test_a_name_that_is_too_long_is_cut(page):
    activity = ActivityPage(page.fd)
    with activity.doing("x" * 100):
        assert page.read().what == "x" * 48


def test_the_kernel_s_account_of_a_process():
    account = ProcessAccount(os.getpid())
    try:
        assert account.state() == "R"
        assert account.delay_s() >= 0.0
    finally:
        account.close()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    gone = ProcessAccount(child.pid)
    child.wait()
    assert (gone.state(), gone.delay_s()) == ("", 0.0)
    gone.close()


def test_a_process_that_has_not_said_a_word_is_not_judged(page):
    dog = Watchdog(os.getpid(), page)
    assert dog.look(time.monotonic()) == ""
    ActivityPage(page.fd).wait()
    assert dog.look(time.monotonic()) == ""


def test_a_stopped_process_is_seen_whatever_its_page_says(page):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    dog = Watchdog(child.pid, page)
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        verdicts = [dog.look(100.0 + number * LOOK_EVERY_S) for number in range(15)]
    finally:
        child.kill()
        child.wait()
    assert verdicts[0] == ""
    assert verdicts[-1].startswith("hung: stopped by a signal for 1.")

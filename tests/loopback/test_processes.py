"""Pid files and real processes: exactly ours are ended, whatever a pid file says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.ctl import processes
from oobleckd.ctl.processes import ClusterProcess

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    "time.sleep(60)"
)
WILLING = "import time; print('up', flush=True); time.sleep(60)"


def await_word(log: Path, word: str, pid: int) -> None:
    """Wait until ``word`` is in the log or its writer has ended: tail knows how."""
    with subprocess.Popen(["tail", f"--pid={pid}", "-n", "+1", "-F", log], stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True) as tail:  # fmt: skip
        assert tail.stdout
        for line in tail.stdout:
            if word in line:
                break
        tail.kill()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    processes.end(processes.recall(tmp_path / "run").values(), 0.0)


def begin(home: Path, name: str, program: str) -> ClusterProcess:
    process = processes.start(name, [sys.executable, "-c", program], home / "run", home / "log", {})
    await_word(home / "log" / f"{name}.log", "up", process.pid)
    return process


def test_started_recalled_ended(home: Path) -> None:
    process = begin(home, "node-1", WILLING)
    assert processes.recall(home / "run") == {"node-1": process}
    assert processes.is_alive(process)
    assert os.getsid(process.pid) == process.pid
    assert processes.end([process], 10.0) == 0
    assert not processes.is_alive(process)
    assert processes.end([process], 10.0) == 0


def test_who_ignores_sigterm_is_killed(home: Path) -> None:
    stubborn, willing = begin(home, "a", STUBBORN), begin(home, "b", WILLING)
    assert processes.end([stubborn, willing], 0.2) == 1
    assert not processes.is_alive(stubborn)
    assert not processes.is_alive(willing)


def test_who_was_stopped_is_woken_to_end(home: Path) -> None:
    process = begin(home, "a", WILLING)
    os.kill(process.pid, signal.SIGSTOP)
    assert processes.end([process], 10.0) == 0
    assert not processes.is_alive(process)


def test_ctrl_c_waits_until_the_pid_file_is_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(pid: int) -> ClusterProcess | None:
        signal.raise_signal(signal.SIGINT)
        return identify(pid)

    identify = processes.identify
    # What a shell starts in the background ignores the signal, and so would this test.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "identify", late)
        with pytest.raises(KeyboardInterrupt):
            processes.start("a", [sys.executable, "-c", WILLING], home / "run", home / "log", {})
    signal.signal(signal.SIGINT, before)
    (process,) = processes.recall(home / "run").values()
    assert processes.is_alive(process)


def test_a_recycled_pid_is_left_alone(home: Path) -> None:
    stranger = begin(home, "stranger", WILLING)
    for forged in (
        ClusterProcess(stranger.pid, stranger.start_ticks - 1, stranger.boot),
        ClusterProcess(stranger.pid, stranger.start_ticks, "another boot"),
    ):
        assert not processes.is_alive(forged)
        assert processes.end([forged], 0.1) == 0
    assert processes.is_alive(stranger)


def test_who_was_killed_meanwhile_is_no_error(home: Path) -> None:
    process = begin(home, "node-1", WILLING)
    handle = os.pidfd_open(process.pid)
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)
    assert processes.end([process], 10.0) == 0


def test_names_with_spaces_and_parentheses(tmp_path: Path) -> None:
    odd = tmp_path / "a) S (b c"
    odd.symlink_to(sys.executable)
    with subprocess.Popen([odd, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = processes.identify(child.pid)
        assert found
        assert found.pid == child.pid
        assert found.start_ticks > 0
        child.kill()


def test_a_damaged_pid_file_names_nobody(tmp_path: Path) -> None:
    (tmp_path / "node-1.pid").write_text("soup")
    assert processes.recall(tmp_path) == {}
    processes.forget("node-1", tmp_path)
    processes.forget("node-1", tmp_path)
    assert not list(tmp_path.iterdir())

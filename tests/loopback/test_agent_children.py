"""Seeing a process end, and ending with one's parent."""

from __future__ import annotations

import os
import queue
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from worker.children import PF_EXITING, Child, Setting, Watch, start, task_flags

TIMEOUT_S = 30.0
NAMED = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, b") S 1 (x y", 0, 0, 0)
print("named", flush=True)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
code = "import os, sys, time; from worker.children import die_with_parent; "
code += "die_with_parent(int(sys.argv[1])); print('here', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def run_python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def line_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    with process.stdout as stdout:
        return stdout.readline()


@pytest.mark.parametrize("name", [b"python3", b") R 1 (", b"a b) (c", b""])
def test_flags_are_found_behind_any_name(name: bytes) -> None:
    assert task_flags(b"12 (" + name + b") S 1 12 12 0 -1 4194308 345 0") == 4194308


@pytest.mark.parametrize("stat", [b"", b"12 (python3) S 1"])
def test_no_stat_line(stat: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        task_flags(stat)


def test_flags_of_a_real_process_with_a_bad_name() -> None:
    process = run_python(NAMED)
    assert line_of(process) == b"named\n"
    ours, theirs = socket.socketpair()
    child = Child("n/0", process, ours)
    assert b") S 1 (x y)" in Path(f"/proc/{process.pid}/stat").read_bytes()
    assert not child.is_exiting()
    assert child.ending() == "running"
    child.kill()
    process.wait()
    assert child.is_exiting()
    assert child.ending() == "signal 9"
    child.close()
    theirs.close()


def test_the_watch_tells_of_each_end_once(tmp_path: Path) -> None:
    ended: queue.Queue[tuple[Child, str]] = queue.Queue()
    watch = Watch(lambda child, evidence: ended.put((child, evidence)))
    program = (sys.executable, "-c", "raise SystemExit(1)")
    sleeper = (sys.executable, "-c", "import time; time.sleep(600)")
    quick = start("n/0", Setting("cpu", tmp_path, "127.0.0.1", "h", program))
    others = [start(f"n/{i}", Setting("cpu", tmp_path, "127.0.0.1", "h", sleeper)) for i in (1, 2, 3)]
    for child in (quick, *others):
        watch.add(child)
    child, evidence = ended.get(timeout=TIMEOUT_S)
    assert child is quick
    assert evidence in {"PF_EXITING", "exit code 1"}
    others[1].kill()
    child, evidence = ended.get(timeout=TIMEOUT_S)
    assert child is others[1]
    assert evidence in {"PF_EXITING", "signal 9"}
    watch.discard([others[0]])
    for other in others:
        other.kill()
    assert ended.get(timeout=TIMEOUT_S)[0] is others[2]
    watch.close()
    assert ended.empty()
    for child in (quick, *others):
        child.close()


def test_flag_is_the_kernel_s() -> None:
    assert PF_EXITING == 4


def test_a_device_dies_with_its_parent() -> None:
    parent = run_python(PARENT)
    pidfd = os.pidfd_open(int(line_of(parent)))
    parent.kill()
    parent.wait()
    assert select.select([pidfd], [], [], TIMEOUT_S)[0], "the child is still there"
    os.close(pidfd)


def test_a_device_whose_parent_is_gone_already_ends() -> None:
    code = "from worker.children import die_with_parent; die_with_parent(1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -9
    assert done.stdout == b""

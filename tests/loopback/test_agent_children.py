"""Seeing a process end, and ending with one's parent."""

from __future__ import annotations

import os
import queue
import select
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from oobleckd.worker.processes.children import EXITING, Child, ChildSetting, Watch, start
from oobleckd.worker.runtime.lifeline import Lifeline

TIMEOUT_S = 30.0
HOLDER = """
import socket, sys, time
from oobleckd.worker.runtime.lifeline import hold
arguments = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:] if "=" in a)
at = sys.argv.index("--lifeline")
hold(int(sys.argv[at + 1]), int(sys.argv[at + 2]))
socket.socket(fileno=int(arguments["fd"])).send(b"h")
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
code = "import os, sys, time; from oobleckd.host.orphans import die_with_parent; "
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


def started(tmp_path: Path, code: str, device: str = "n/0") -> Child:
    return start(device, ChildSetting("cpu", tmp_path, "127.0.0.1", "h", (sys.executable, "-c", code)))


def test_a_life_line_tells_before_the_process_is_reaped(tmp_path: Path) -> None:
    child = started(tmp_path, HOLDER)
    select.select([child.lifeline.held_fd], [], [], TIMEOUT_S)
    assert child.lifeline.is_held()
    assert not child.lifeline.is_held(), "told twice"
    waiter = threading.Thread(target=child.lifeline.wait)
    waiter.start()
    assert child.ending() == "running"
    child.kill()
    waiter.join(TIMEOUT_S)
    assert not waiter.is_alive()
    child.process.wait()
    assert child.ending() == "signal 9"
    child.close()


def test_a_life_line_let_go_by_a_living_process_is_an_error() -> None:
    lifeline = Lifeline()
    with pytest.raises(OSError, match="let go"):
        lifeline.wait()
    lifeline.close()


BIG = """
import mmap
memory = mmap.mmap(-1, 500 << 20, mmap.MAP_PRIVATE)
memory.madvise(mmap.MADV_NOHUGEPAGE)  # large ones are freed at once
for page in range(0, len(memory), mmap.PAGESIZE):
    memory[page] = 1
"""


def test_a_big_process_is_known_to_die_long_before_its_memory_is_freed(tmp_path: Path) -> None:
    ended: queue.Queue[str] = queue.Queue()
    watch = Watch(lambda _, evidence: ended.put(evidence))
    child = started(tmp_path, BIG + HOLDER)
    watch.add(child)
    select.select([child.link], [], [], TIMEOUT_S)
    assert child.link.recv(1) == b"h"
    child.kill()
    assert ended.get(timeout=TIMEOUT_S) == EXITING
    watch.close()
    child.close()


def test_the_watch_does_not_look_again_and_again(tmp_path: Path) -> None:
    watch = Watch(lambda *_: None)
    child = started(tmp_path, HOLDER)
    watch.add(child)
    assert child.link.recv(1) == b"h"
    with mock.patch.object(Child, "ending", return_value="running") as look:
        assert not select.select([child.pidfd], [], [], 0.3)[0]
    assert look.call_count <= 1  # it may not have seen yet that the line is held
    watch.discard([child])
    child.kill()
    watch.close()
    child.close()


def test_the_watch_tells_of_each_end_once(tmp_path: Path) -> None:
    ended: queue.Queue[tuple[Child, str]] = queue.Queue()
    watch = Watch(lambda child, evidence: ended.put((child, evidence)))
    quick = started(tmp_path, "raise SystemExit(1)")
    others = [started(tmp_path, "import time; time.sleep(600)", f"n/{i}") for i in (1, 2, 3)]
    for child in (quick, *others):
        watch.add(child)
    child, evidence = ended.get(timeout=TIMEOUT_S)
    assert child is quick
    assert evidence in {EXITING, "exit code 1"}
    others[1].kill()
    child, evidence = ended.get(timeout=TIMEOUT_S)
    assert child is others[1]
    assert evidence in {EXITING, "signal 9"}
    watch.discard([others[0]])
    for other in others:
        other.kill()
    assert ended.get(timeout=TIMEOUT_S)[0] is others[2]
    watch.close()
    assert ended.empty()
    for child in (quick, *others):
        child.close()


def test_a_device_dies_with_its_parent() -> None:
    parent = run_python(PARENT)
    pidfd = os.pidfd_open(int(line_of(parent)))
    parent.kill()
    parent.wait()
    assert select.select([pidfd], [], [], TIMEOUT_S)[0], "the child is still there"
    os.close(pidfd)


def test_a_device_whose_parent_is_gone_already_ends() -> None:
    code = "from oobleckd.host.orphans import die_with_parent; die_with_parent(1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -9
    assert done.stdout == b""

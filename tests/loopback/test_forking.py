"""Devices by fork: that a fork is what a process is that has imported the same, and whose child it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.probed import FILES

MAX_BYTES, MAX_S = 40 * 2**20, 0.3


STRANGER = """
import os, subprocess
from pathlib import Path
from oobleckd.worker.processes.orphans import Orphans

orphans = Orphans()
assert orphans.adopt()
ours = subprocess.Popen(["true"])
orphans.own.add(ours.pid)
said = subprocess.run(["sh", "-c", "sleep 600 >&2 & echo $!"], stdout=subprocess.PIPE)
stranger = int(said.stdout)
remains = Path(f"/proc/{stranger}")
assert int((remains / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
os.kill(stranger, 9)
for pid in (stranger, ours.pid):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
orphans.busy = True
orphans.reap()
assert remains.exists()
orphans.busy = False
orphans.reap()
assert not remains.exists()
assert ours.wait() == 0
"""


@dataclass(frozen=True, slots=True)
class Told:
    """What an agent told of itself, and each of its devices."""

    agent: dict[str, Any]
    devices: list[dict[str, Any]]


def told(how: str, number: int) -> Told:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.probed", how, str(number)],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    agent, *devices = map(json.loads, done.stdout.splitlines())
    return Told(agent, devices)


@pytest.fixture(scope="module")
def forked() -> Told:
    """Two devices of an agent whose environment wants two threads."""
    return told("agent", 2)


@pytest.fixture(scope="module")
def by_exec() -> Told:
    return told("exec", 1)


def test_the_forker_has_no_socket_but_its_agent_s(forked: Told) -> None:
    assert forked.agent["sockets"] == 1


def test_a_fork_is_the_agent_s_child_in_a_session_of_its_own(forked: Told) -> None:
    for device in forked.devices:
        assert device["parent"] == forked.agent["agent"]
        assert device["session"] == device["pid"]
        assert device["ending"] == "signal 9"


def test_a_fork_has_one_thread_and_makes_as_many_as_its_agent_wants(forked: Told) -> None:
    assert {(device["threads"], device["omp"], device["threads_after"]) for device in forked.devices} == {
        (1, "2", 2)
    }


def test_a_fork_has_no_context_of_cuda(forked: Told) -> None:
    assert not any(device["bad_fork"] for device in forked.devices)


def test_each_fork_has_chances_of_its_own(forked: Told) -> None:
    one, other = (device["chance"] for device in forked.devices)
    assert all(mine != yours for mine, yours in zip(one, other, strict=True))


def test_a_fork_has_its_agent_s_limits_of_now(forked: Told) -> None:
    assert {device["files"] for device in forked.devices} == {FILES}


def test_a_fork_is_small_and_soon_there(forked: Told) -> None:
    for device in forked.devices:
        assert device["own_bytes"] <= MAX_BYTES
        assert device["used_s"] <= MAX_S


def test_a_fork_is_what_exec_would_have_made_of_it(forked: Told, by_exec: Told) -> None:
    """The same bits from two threads; the same descriptors, handlers and, for ``ps``, words."""
    wanted = by_exec.devices[0]
    for device in forked.devices:
        assert kinds(device["fds"]) == kinds(wanted["fds"])
        for what in ("digest", "signals", "threads", "threads_after"):
            assert device[what] == wanted[what], what
    words = forked.devices[0]["words"]
    fixed = [
        word
        for word in wanted["words"]
        if not word.startswith(("--fd=", "--activity=", "--parent=")) and not word.isdecimal()
    ]
    assert [word for word in words if word in fixed] == fixed
    assert "--device=n/0" in words


def kinds(found: list[str]) -> list[str]:
    """Without the numbers of sockets and pipes."""
    return [each.partition(":")[0] for each in found]


def test_what_strangers_leave_behind_is_reaped() -> None:
    done = subprocess.run([sys.executable, "-c", STRANGER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

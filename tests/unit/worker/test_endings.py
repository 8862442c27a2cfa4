"""How an agent makes out how its devices ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.protocol.deaths import OUT_OF_MEMORY, TO_MEND, Death
from oobleckd.protocol.parts import DeviceInfo
from oobleckd.worker.agent.endings import Endings
from oobleckd.worker.processes.children import EXITING, Child
from oobleckd.worker.runtime.activity import ActivityPage, ActivityReader
from oobleckd.worker.runtime.host_memory import OomKills
from oobleckd.worker.runtime.lifeline import Lifeline

INFO = DeviceInfo("a/0", "cpu", "cpu", 0, "", "", 1, job="job-1", epoch=4)


@pytest.fixture
def child() -> Iterator[Child]:
    """A process in the middle of a backward pass."""
    import socket

    activity = ActivityReader()
    ActivityPage(activity.fd).begin("B", "0B3", 1)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ours, theirs = socket.socketpair()
    found = Child("a/0", process, ours, Lifeline(), activity)
    yield found
    found.kill()
    found.close()
    theirs.close()
    assert process.stdin is not None
    process.stdin.close()


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    file = tmp_path / "memory.events"
    file.write_text("oom_kill 0\n")
    return file


def test_killed_by_the_kernel_for_want_of_memory(child: Child, counter: Path) -> None:
    endings = Endings(OomKills((counter,)))
    endings.look([child], 10.0)
    assert endings.of(child, INFO, "signal 9", None, 11.0) is None
    counter.write_text("oom_kill 1\n")
    for evidence in ("signal 9", EXITING):
        death = endings.of(child, INFO, evidence, None, 12.0)
        assert death is not None
        assert (death.kind, death.phase, death.job, death.epoch) == (OUT_OF_MEMORY, "backward", "job-1", 4)
        assert death.memory is not None
        assert death.memory.used > 0
    for evidence in ("signal 11", "exit code 1", "hung in backward"):
        assert endings.of(child, INFO, evidence, None, 12.0) is None
    own = Death("ValueError", "update", "odd")
    assert endings.of(child, INFO, "signal 9", own, 12.0) is own
    endings.close()


def test_no_use_in_starting_once_more(counter: Path) -> None:
    endings = Endings(OomKills((counter,)))
    user, bug = Death(TO_MEND, "start", "no CUDA device"), Death("ImportError", "start", "no module named x")
    assert endings.hopeless(user, others_up=False)
    assert not endings.hopeless(bug, others_up=False)
    assert endings.hopeless(bug, others_up=False)
    endings.all_up()
    assert not endings.hopeless(user, others_up=True)
    assert endings.hopeless(user, others_up=True)
    endings.all_up()
    one, other = (Death("OSError", "start", f"port {port} is taken") for port in (4001, 977))
    assert not endings.hopeless(one, others_up=False)
    assert not endings.hopeless(bug, others_up=False)
    assert endings.hopeless(other, others_up=False)  # numbers aside it is the same, whatever was between
    endings.all_up()
    assert not endings.hopeless(bug, others_up=False)
    assert not endings.hopeless(None, others_up=False)  # killed: whoever did that may stop
    assert not endings.hopeless(bug, others_up=False)
    endings.close()

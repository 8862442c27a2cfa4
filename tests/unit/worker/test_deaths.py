"""What a process says of its own end, and what of it the agent makes out."""

from __future__ import annotations

import errno
import gc
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import SafetensorError

from oobleckd.protocol.deaths import OUT_OF_MEMORY, TO_MEND, Death
from oobleckd.protocol.nodemessages import LastWords
from oobleckd.worker.device import measure
from oobleckd.worker.models import load_spec
from oobleckd.worker.runtime.activity import ActivityPage, phase_of
from oobleckd.worker.runtime.deaths import death_in_full, death_of, is_out_of_memory, memory_of
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.runtime.framing import read_frame
from oobleckd.worker.runtime.host_memory import OomKills, memory_of_host, most_of
from oobleckd.worker.transport import wire
from tests.helpers.models import small_job

CPU = torch.device("cpu")
CARD_SAYS = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 18.55 GiB is free."
)


class CardError(RuntimeError):
    """As torch.AcceleratorError: what CUDA calls the error is in ``error_code``."""

    def __init__(self, code: int) -> None:
        super().__init__("CUDA error: something")
        self.error_code = code


def met(error: Exception) -> Exception:
    """``error``, raised and caught."""
    try:
        raise error
    except type(error) as caught:
        return caught


def unaffordable() -> Exception:
    """What torch really raises."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CARD_SAYS),
        torch.cuda.OutOfMemoryError(CARD_SAYS),
        MemoryError(),
        MemoryError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        SafetensorError("Error while deserializing header: I/O error: Cannot allocate memory (os error 12)"),
        CardError(2),
        unaffordable(),
    ],
)
def test_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
    death = death_of(met(error), "backward", "job-1", 7)
    assert death is not None
    assert (death.kind, death.phase, death.job, death.epoch) == (OUT_OF_MEMORY, "backward", "job-1", 7)
    assert "\n" not in death.error


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes do not fit"), OSError(errno.ENOSPC, "full"), ValueError("memory"), CardError(700)],
)
def test_something_else(error: Exception) -> None:
    assert not is_out_of_memory(error)
    death = death_of(met(error), "forward")
    assert death is not None
    assert death.kind == type(error).__name__
    assert death.where.startswith("test_deaths.py:")
    assert str(death) == f"{death.error} (in forward)"


def test_a_broken_card_is_no_kind_of_death() -> None:
    for code in (214, 719, 999):  # ECC, a launch that failed, unknown
        assert death_of(met(CardError(code)), "forward") is None


def test_what_a_user_must_mend() -> None:
    death = death_of(met(UserError("no CUDA device", "mend that")), "start")
    assert death == Death(TO_MEND, "start", "no CUDA device", where=death.where, hint="mend that")
    assert str(death) == "no CUDA device"


def test_how_much_memory() -> None:
    memory = memory_of(CPU, RuntimeError(CARD_SAYS))
    assert memory.wanted == 20 * 2**30
    assert 0 < memory.used <= memory.capacity
    assert 0 < memory_of(CPU, MemoryError(), memory.used // 2).used < memory.used
    assert memory_of(CPU, unaffordable()).wanted == 10**15
    assert memory_of(CPU, MemoryError()).wanted == 0
    assert memory_of_host(123).used == 123
    assert most_of("self") > most_of(2**22 + 1) == 0


def test_what_the_failed_work_had_is_let_go_of(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        tensor = torch.zeros(8)
        kept.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(CARD_SAYS)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        work()
    gc.collect()
    assert kept[0]() is not None
    death = death_in_full(caught.value, "update", "job-1", 3, CPU, 0)
    assert kept[0]() is None
    assert death is not None
    assert death.memory is not None
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory in update: used ")
    assert "asked for 20 GiB more" in said
    assert said.count("\n") == 1


def test_phases() -> None:
    activity = ActivityPage()
    error = RuntimeError()
    with pytest.raises(RuntimeError), activity.doing("R"), activity.doing("B", "0B3"):
        raise error
    assert activity.failed_in(error) == "B"
    assert activity.failed_in(ValueError()) == ""
    assert [phase_of(work) for work in ("F", "2B14", "W", "U", "R", "checkpoint", "Measure", "")] == [
        "forward", "backward", "backward", "update", "reduce", "checkpoint", "measure", "waiting",
    ]  # fmt: skip


def test_no_memory_for_a_measurement_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job("gpt2")

    def starve(*_args: object) -> None:
        raise torch.OutOfMemoryError(CARD_SAYS)

    monkeypatch.setattr(measure, "_measure_layer", starve)
    with pytest.raises(UserError) as caught:
        measure.measure(load_spec(job), job, CPU)
    assert caught.value.cause == OUT_OF_MEMORY
    assert caught.value.problem.startswith("out of memory while layers were measured, one at a time: used ")
    assert "train.micro_batch" in caught.value.hint


def test_a_message_for_which_there_is_no_room_is_no_fault_of_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full:
        def take(self, _num_bytes: int) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(wire, "MESSAGE_PAGES", Full())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.message_frame(("F", 1), [torch.zeros(1 << 19)], b"").write_now(theirs)
        reader = wire.MessageReader(ours, "b/0")
        head = reader.head()
        assert head is not None
        with pytest.raises(OSError, match="Cannot allocate memory"):
            reader.message(head)


def test_the_kernel_has_killed(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom 1\noom_kill 4\noom_group_kill 0\n")
    kills = OomKills((tmp_path / "none", counter))
    assert not kills.look(100.0)
    counter.write_text("oom 2\noom_kill 5\noom_group_kill 0\n")
    assert kills.look(101.0)
    assert kills.look(101.0 + kills.RECENT_S - 0.1)
    assert not kills.look(101.0 + kills.RECENT_S)
    kills.close()
    assert not OomKills((tmp_path / "none",)).look(1.0)


ENDS = """
import functools, sys
from oobleckd.worker.runtime.errors import at_the_end, ends_the_process
from oobleckd.worker.device.process import tell_agent
at_the_end(functools.partial(tell_agent, int(sys.argv[1])))
with ends_the_process("start"):
    raise {error}
"""


@pytest.mark.parametrize(
    ("error", "kind", "printed"),
    [("ValueError('odd')", "ValueError", "Traceback"), ("MemoryError()", OUT_OF_MEMORY, "MemoryError")],
)
def test_the_agent_hears_why(error: str, kind: str, printed: str) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-c", ENDS.format(error=error), str(theirs.fileno())]
            ended = subprocess.run(
                command, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=False
            )
        said = msgspec.msgpack.decode(read_frame(ours), type=LastWords).death
    assert (ended.returncode, said.kind, said.phase) == (1, kind, "start")
    assert printed in ended.stderr


THREADLESS = """
import re, resource, threading
from oobleckd.worker.runtime.deaths import is_out_of_memory
assert not is_out_of_memory(RuntimeError("can't start new thread"))  # for want of a place among the tasks
status = open("/proc/self/status").read()
(kib,) = map(int, re.findall(r"^VmData:\\s+(\\d+) kB$", status, re.MULTILINE))
resource.setrlimit(resource.RLIMIT_DATA, (1024 * kib + (2 << 20), resource.RLIM_INFINITY))
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    assert is_out_of_memory(error), error
else:
    raise SystemExit("there is room for a thread")
"""


def test_no_room_for_the_stack_of_a_thread_is_no_memory() -> None:
    subprocess.run([sys.executable, "-c", THREADLESS], check=True)

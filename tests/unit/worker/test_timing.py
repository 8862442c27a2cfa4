"""Times of work on a GPU, from events in its stream. The GPU is a clock here: tests/gpu has a real one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from oobleckd.worker.runtime.timing import DeviceTimer, GpuTimer


@dataclass
class Stream:
    """A GPU that is ``behind_s`` behind whoever tells it what to do; waiting for it takes that long."""

    host_s: float = 100.0
    behind_s: float = 0.0
    waits: int = 0

    def record(self) -> Recorded:
        return Recorded(self, self.host_s + self.behind_s)


@dataclass
class Recorded:
    stream: Stream
    at_s: float
    waited: bool = field(default=False)

    def synchronize(self) -> None:
        self.stream.waits += 1
        self.stream.host_s = max(self.stream.host_s, self.at_s)
        self.stream.behind_s = 0.0
        self.waited = True

    def elapsed_time(self, end_event: Recorded) -> float:
        assert self.stream.host_s >= max(self.at_s, end_event.at_s), "cudaErrorNotReady"
        assert end_event.at_s >= self.at_s, "the other way round"
        return (end_event.at_s - self.at_s) * 1e3


def test_a_mark_has_the_time_at_which_the_gpu_got_there() -> None:
    stream = Stream()
    timer = GpuTimer(lambda: stream.host_s, stream.record)
    began = timer.now()
    stream.behind_s = 0.5  # told in no time what takes it half a second
    stopped = timer.now()
    stream.host_s += 0.1
    stream.behind_s -= 0.1
    assert timer.settle() == pytest.approx(100.5)
    assert timer.seconds(began) == pytest.approx(100.0)
    assert timer.seconds(stopped) == pytest.approx(100.5)


def test_a_mark_from_after_the_last_wait_is_waited_for() -> None:
    stream = Stream()
    timer = GpuTimer(lambda: stream.host_s, stream.record)
    before = timer.now()
    timer.settle()
    stream.behind_s = 0.25
    late = timer.now()
    waits = stream.waits
    assert timer.seconds(before) == pytest.approx(100.0)
    assert stream.waits == waits
    assert timer.seconds(late) == pytest.approx(100.25)
    assert stream.waits == waits + 1


def test_on_a_cpu_a_mark_is_a_time() -> None:
    timer = DeviceTimer(lambda: 7.0)
    assert timer.seconds(timer.now()) == timer.settle() == 7.0

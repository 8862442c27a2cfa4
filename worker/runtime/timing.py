"""Times a device's work in seconds of its host's monotonic clock, also on a GPU, which gets to its work after
it was told.

Owns marks and what they come to. On a CPU work is done when the call is back, and a mark is a time. A GPU is
told what to do ahead, and nobody waits for it: a mark is an event in its stream, and becomes a time by its
distance from one that was waited for (``settle``), where everything is waited for anyway.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that is used."""

    def synchronize(self) -> None:
        """Wait until the GPU has got there."""

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds from here to ``end_event``, which lies behind."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The ``number``-th event in a stream."""

    number: int
    event: Event


Moment = float | Mark


class DeviceTimer:
    """Of a device whose work is done when the call is back. ``clock``: monotonic (s)."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def now(self) -> Moment:
        """A mark behind everything that the device was told to do."""
        return self._clock()

    def settle(self) -> float:
        """Wait until the device has got to here. Returns the time now (s)."""
        return self._clock()

    def seconds(self, moment: Moment) -> float:
        """The time (s) of a mark. Waits for one that was made since ``settle`` was last called."""
        assert isinstance(moment, float)
        return moment


class GpuTimer(DeviceTimer):
    """Of the GPU that is this thread's current one, as its current stream gets to them. ``record`` puts an
    event there.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, record: Callable[[], Event] | None = None
    ) -> None:
        super().__init__(clock)
        self._record, self._numbers = record or _recorded, itertools.count()
        self._base, self._base_s = self._mark(), 0.0
        self.settle()

    def now(self) -> Moment:
        """An event in the stream."""
        return self._mark()

    def settle(self) -> float:
        """Waits for the GPU."""
        self._base = self._mark()
        self._base.event.synchronize()
        self._base_s = self._clock()
        return self._base_s

    def seconds(self, moment: Moment) -> float:
        """As the GPU measured it, from when it was last waited for."""
        assert isinstance(moment, Mark)
        if moment.number <= self._base.number:
            return self._base_s - moment.event.elapsed_time(self._base.event) / 1e3
        moment.event.synchronize()
        return self._base_s + self._base.event.elapsed_time(moment.event) / 1e3

    def _mark(self) -> Mark:
        return Mark(next(self._numbers), self._record())


def timer_of(device: torch.device) -> DeviceTimer:
    """The timer for work on ``device``."""
    # Nobody waits for a GPU any more, so the host's clock would tell how long it took to tell it what to
    # do: a slow GPU would not be found. (D-devices-011)
    return GpuTimer() if device.type == "cuda" else DeviceTimer()


def _recorded() -> Event:
    """Where the current stream is."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event

"""When a device did what, in seconds of its host's monotonic clock; also where that is a GPU, which gets to its work after it was told.

Owns marks and what they come to. On a CPU work is done when the call is back, and a mark is a time. A GPU is told what to do
ahead, and nobody waits for it: a mark is an event in its stream, and becomes a time once it has been waited for
(``settle``), which is done where everything is waited for anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Moment = float | torch.cuda.Event


class Moments:
    """Of a device whose work is done when the call is back. ``clock``: monotonic (s)."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def now(self) -> Moment:
        """A mark behind everything that the device was told to do."""
        return self._clock()

    def settle(self) -> float:
        """Wait until the device has got to here: marks from before have their time. Returns the time now (s)."""
        return self._clock()

    def seconds(self, moment: Moment) -> float:
        """The time (s) of a mark that was made before ``settle`` was last called."""
        assert isinstance(moment, float)
        return moment


class GpuMoments(Moments):
    """Of the GPU that is this thread's current one, as its current stream gets to them."""

    def __init__(self) -> None:
        super().__init__()
        self._base, self._base_s = _event(), 0.0
        self.settle()

    def now(self) -> Moment:
        """An event in the stream."""
        return _event()

    def settle(self) -> float:
        """Waits for the GPU."""
        self._base = _event()
        self._base.synchronize()
        self._base_s = self._clock()
        return self._base_s

    def seconds(self, moment: Moment) -> float:
        """As the GPU measured it back from when it was last waited for."""
        assert isinstance(moment, torch.cuda.Event)
        before_ms: float = moment.elapsed_time(self._base)
        return self._base_s - before_ms / 1e3


def moments_of(device: torch.device) -> Moments:
    """For work on ``device``."""
    return GpuMoments() if device.type == "cuda" else Moments()


def _event() -> torch.cuda.Event:
    """Where the current stream is."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event

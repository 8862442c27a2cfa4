"""Streams of a GPU, as torch has them: what is called goes to a stream, and is done later, in an order that
streams and events alone decide.

Memory is as torch's allocator gives it: what a stream has given back the same stream gets again, at once,
whoever still reads it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Event:
    """Behind everything that its stream was told. ``reached``: by now."""

    reached: bool = False


@dataclass(eq=False)
class Stream:
    """``told``: what is still to be done, in order; of each when it can be."""

    gpu: Gpu
    told: list[tuple[Callable[[], bool], Callable[[], object]]] = field(default_factory=list)

    def tell(self, act: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        """Do ``act`` behind what was told before, once it is ``ready``."""
        self.told.append((ready, act))

    def record_event(self) -> Event:
        event = Event()
        self.tell(lambda: setattr(event, "reached", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.tell(lambda: None, lambda: event.reached)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        while self.told:
            self.gpu.step()


class Gpu:
    """In the place of ``torch.cuda``. ``seed``: of the order in which streams get on."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.default = Stream(self)
        self.streams = [self.default]
        self._current = self.default
        self._free: defaultdict[Stream, list[list[Any]]] = defaultdict(list)

    def Stream(self, _device: torch.device) -> Stream:  # noqa: N802 - torch's name
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self, _device: torch.device) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    # ------------------------------------------------------------------ memory and work

    def take(self) -> tuple[Stream, list[Any]]:
        """Memory for one thing, of the current stream."""
        free = self._free[self._current]
        return self._current, free.pop() if free else [None]

    def drop(self, taken: tuple[Stream, list[Any]]) -> None:
        """Give it back."""
        self._free[taken[0]].append(taken[1])

    def tell(self, act: Callable[[], object]) -> None:
        """The current stream does ``act``."""
        self._current.tell(act)

    def step(self) -> None:
        """One stream gets on by one piece."""
        able = [stream for stream in self.streams if stream.told and stream.told[0][0]()]
        _, act = self._chance.choice(able).told.pop(0)
        act()

    def get_on(self) -> None:
        """Some streams get on, or none."""
        while self._chance.random() < 0.5 and any(s.told and s.told[0][0]() for s in self.streams):
            self.step()

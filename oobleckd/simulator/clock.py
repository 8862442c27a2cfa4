"""Virtual time: acts on a heap, in order of their times and, at one time, in the order in which they were put
there.

Owns the order alone. Nothing random is here: what is drawn is drawn before a run (``failures``), so that the
same question has the same answer to the byte.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

Act = Callable[[], None]


@dataclass(slots=True)
class VirtualClock:
    """``now`` is in virtual seconds since the beginning of the run."""

    now: float = 0.0
    _heap: list[tuple[float, int, Act]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)

    @property
    def next_at(self) -> float:
        """When the next act is due; inf where there is none."""
        return self._heap[0][0] if self._heap else inf

    def at(self, when: float, act: Act) -> None:
        """Do ``act`` at ``when``, or now where that has passed."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), act))

    def after(self, seconds: float, act: Act) -> None:
        """Do ``act`` so much later."""
        self.at(self.now + seconds, act)

    def pass_to(self, when: float) -> None:
        """It is ``when``: something is done that is not on the heap."""
        assert self.now <= when <= self.next_at, "nothing is left behind"
        self.now = when

    def step(self) -> None:
        """Do the next act at its time."""
        self.now, _, act = heapq.heappop(self._heap)
        act()

"""How long the silence of one node may last before its incarnation counts as over: learned from its own
heartbeats.

Owns the arithmetic of one lease. Pure; its times are those of the daemon's *waking* clock (``membership``),
which stands still while the daemon itself was asleep. Nobody has to choose the length, so there is one that
fits a quiet machine and one that fits an overloaded one.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST = 4
"""Heartbeats of the usual distance that may be missing of any lease."""
# What the longest gap had on top of the usual one may come this many times over: TCP doubles its wait when it
# sends
# again in vain, so that the next longest gap is a multiple of the longest seen
# (tests/unit/core/test_lease.py).
_EXCESS = 8
_ENOUGH = 8  # gaps that make a lease; before it nothing is known and the longest lease holds
_GAIN, _FADE = 1 / 8, 1 / 1024


@dataclass(slots=True)
class Lease:
    """The lease of one incarnation. ``heard``: its last word. ``witnessed``: the last proof by others that it
    is alive.

    ``max_s`` bounds every silence: of an agent whose devices are proven to be alive as well. ``heartbeat_s``
    is the distance that agents are told to keep: heartbeats that come closer have waited for each other, on
    their way or for a daemon that slept, and say nothing of it.
    """

    max_s: float
    heard: float
    heartbeat_s: float = 0.0
    witnessed: float = float("-inf")
    heartbeat: float | None = None
    num_gaps: int = 0
    mean_s: float = 0.0
    worst_s: float = 0.0

    def heartbeats(self, at: float) -> None:
        """Take in a heartbeat: a word that comes at regular times, so that the gap before it teaches
        something.
        """
        if self.heartbeat is not None:
            gap_s = at - self.heartbeat
            self.mean_s += (gap_s - self.mean_s) * (_GAIN if self.num_gaps else 1.0)
            faded_s = self.worst_s - _FADE * (self.worst_s - self.mean_s)
            self.worst_s = max(faded_s, gap_s)
            # Closer than agents send them, heartbeats have waited for each other: eight heard at once made
            # a lease of nothing. (D-detection-005)
            if gap_s >= self.heartbeat_s / 2:
                self.num_gaps += 1
        self.heartbeat = self.heard = at

    def reconnected(self, at: float) -> None:
        """A word on a new connection: the gap before it says nothing about the heartbeats."""
        self.heartbeat, self.heard = None, at

    @property
    def length_s(self) -> float:
        """The silence that is forgiven: a few heartbeats, and more where heartbeats were late before."""
        if self.num_gaps < _ENOUGH:
            return self.max_s
        usual_s = max(self.heartbeat_s, self.mean_s)
        length_s = SHORTEST * usual_s
        if self.worst_s > self.mean_s:
            length_s += _EXCESS * (self.worst_s - self.mean_s)
        return min(self.max_s, length_s)

    def ends(self) -> float:
        """When it runs out, unless something is heard before."""
        last = max(self.witnessed, self.heard)
        ends, most = last + self.length_s, self.heard + self.max_s
        return min(most, ends)

    def late(self, at: float) -> bool:
        """Whether the node is silent for longer than it should: suspect, not more."""
        return at - self.heard > self.length_s / 2

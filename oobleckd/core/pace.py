"""Which devices are slow: they take much longer for their work than their peers do for theirs.

Pure. Owns the comparison, not what follows from it (``slow``). Work is measured by the profile: what a device
computes in a round by its routes, in modelled seconds. Busy time over that is its pace; only paces in one
layout are compared, so that a slow host of all, or a model that errs for all, makes nobody slow.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from oobleckd.planner.costs.recompute import recomputed
from oobleckd.planner.plan import Layout, Range, Recompute
from oobleckd.planner.profile import Profile

_ROUNDS = 8  # whose median counts: one slow step is nothing
# Before it is said: rounds of some ms pass in the time slice that another program takes.
_LASTS_SLOW_S, _LASTS_WELL_S = 1.5, 5.0
_SLOW, _WELL = 2.0, 1.5  # times the peers' median: from here on slow, and down to here well again


@dataclass(slots=True)
class Paces:
    """Paces of the devices of the layout of epoch ``layout``, in steps of so many ``micro_batches``.

    ``rounds``: the last rounds of which every device has told: device -> busy over modelled seconds.
    ``telling``: rounds of which some have. ``slow``: device -> times slower than its peers. ``turning``:
    device -> since when it is no longer what it was said to be.
    """

    layout: int = 0
    micro_batches: int = 0
    work_s: dict[str, float] = field(default_factory=dict)
    rounds: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=_ROUNDS))
    telling: dict[int, dict[str, float]] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    turning: dict[str, float] = field(default_factory=dict)
    _slowest: tuple[dict[str, float] | None, str, float] = (None, "", 0.0)

    @classmethod
    def of(cls, layout: Layout, profile: Profile) -> Paces:
        """Paces for ``layout``, of which nothing is known yet."""
        work: dict[str, float] = {}
        takes_s: dict[tuple[Recompute, Range], float] = {}
        for route in layout.routes:
            for segment in route.segments:
                key = layout.recompute.get(segment.device, "none"), segment.layers
                if key not in takes_s:
                    costs = recomputed(profile, key[0]).profile.layers
                    takes_s[key] = sum(
                        costs[n].forward_s + costs[n].backward_s for n in segment.layers.layers()
                    )
                work[segment.device] = work.get(segment.device, 0.0) + takes_s[key]
        working = {device: seconds for device, seconds in work.items() if seconds > 0.0}
        return cls(layout.epoch, len(layout.routes), working)

    def after(self, was: Paces, *, same_layout: bool) -> Paces:
        """These, with what stays known of ``was``: who was said to be slow, and in the same layout, where the
        batch has grown, how fast each device was for its work.
        """
        self.slow = {device: factor for device, factor in was.slow.items() if device in self.work_s}
        if same_layout and self.work_s.keys() == was.work_s.keys():
            self.rounds, self.turning = was.rounds, was.turning
        return self

    def note(self, device: str, round_: int, busy_s: float, at: float) -> dict[str, str]:
        """A device was busy for ``busy_s`` in a round, told ``at``; what is new of which device's pace, for
        people.
        """
        if device not in self.work_s:
            return {}
        told = self.telling.setdefault(round_, {})
        told[device] = busy_s / self.work_s[device]
        if len(told) < len(self.work_s):
            return {}
        self.telling = {later: paces for later, paces in self.telling.items() if later > round_}
        self.rounds.append(told)
        if len(self.rounds) < _ROUNDS:
            return {}
        typical = {d: statistics.median(paces[d] for paces in self.rounds) for d in sorted(self.work_s)}
        return {d: news for d in typical if (news := self._judge(d, typical, at))}

    def slowest(self) -> tuple[str, float]:
        """The device that took longest for its work in the newest round that all told of, and for how many
        times the median of its peers; ("", 0) where it has none. Found once a round, for all who ask.
        """
        newest = self.rounds[-1] if self.rounds else None
        if newest is not None and newest is not self._slowest[0]:
            self._slowest = (newest, *_slowest_in(newest))
        return self._slowest[1:]

    def _judge(self, device: str, typical: dict[str, float], at: float) -> str:
        peers = [pace for other, pace in typical.items() if other != device]
        if not peers or statistics.median(peers) <= 0.0:
            return ""
        factor, was_slow = typical[device] / statistics.median(peers), device in self.slow
        is_slow = factor >= (_WELL if was_slow else _SLOW)
        # A count of rounds is no time: on tiny steps slow and well alternated five times in 6 s, and each
        # would have drained a healthy node. (D-corruption-009)
        lasts_s = _LASTS_SLOW_S if is_slow else _LASTS_WELL_S
        if is_slow != was_slow and at - self.turning.setdefault(device, at) < lasts_s:
            return ""
        self.turning.pop(device, None)
        if is_slow:
            self.slow[device] = factor
            return "" if was_slow else f"is slow: {factor:.1f} times its peers"
        self.slow.pop(device, None)
        return "is as fast as its peers again" if was_slow else ""


def _slowest_in(paces: dict[str, float]) -> tuple[str, float]:
    slowest = min(paces, key=lambda device: (-paces[device], device))
    typical = statistics.median([pace for device, pace in paces.items() if device != slowest] or [0.0])
    return (slowest, paces[slowest] / typical) if typical > 0 else ("", 0.0)

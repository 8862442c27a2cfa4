"""Copies of gradient sums in a simulated cluster: what of a dead device's work its peers have, and what
copies take of links.

Owns when copies are under way, and by how much they make a step longer. When one is due and who keeps it says
the round machine (``SumCopies``); when a device has what of its gradients is ``progress``'s estimate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from oobleckd.planner.plan import Layout, Route
from oobleckd.planner.profile import Profile
from oobleckd.protocol.job import Job
from oobleckd.simulator.progress import SimulatedEnd, ends, forward_share
from oobleckd.worker.round_machine.copies import SumCopies

EXACT_TIMES = 2
"""Sums that are exact are of 64 bits, twice as wide as weights; others are as wide."""
NO_PROFILE = Profile("", "", ())
Inherited = Mapping[str, Mapping[int, Sequence[int]]]
"""Device -> layer -> micro-batches that count as its own."""


def sums_bytes(job: Job, profile: Profile) -> tuple[int, ...]:
    """The bytes of every layer's gradient sums, as they travel."""
    times = EXACT_TIMES if job.train.exact else 1
    return tuple(times * layer.param_bytes for layer in profile.layers)


class SimulatedSumCopy(msgspec.Struct, frozen=True):
    """Of a device's sums after the first ``hops`` of its hops, with ``keeper`` at ``here_s`` of the step."""

    keeper: str
    hops: int
    here_s: float


class SentCopy(msgspec.Struct, frozen=True):
    """By one device in a step: all copies by time, seconds that they are on its link, and when the last has
    left it.
    """

    copies: tuple[SimulatedSumCopy, ...] = ()
    link_s: float = 0.0
    until_s: float = 0.0


@dataclass(slots=True)
class Sums:
    """Of a job that copies them up to ``per_step`` times (0: never). ``layer_s``: seconds that a layer's are
    on a link, ``output_s`` its output. ``profile``: asked where something is computed again.
    """

    per_step: int
    layer_s: tuple[float, ...]
    output_s: tuple[float, ...]
    latency_s: float
    profile: Profile = NO_PROFILE
    _longer: tuple[tuple[int, int, float], float] = ((-1, -1, 0.0), 0.0)

    @classmethod
    def of(cls, job: Job, profile: Profile, *, kept: bool) -> Sums:
        """As ``job`` has it; ``kept``: the engine keeps what was done of a step at all."""
        rate = profile.link_bytes_per_s
        return cls(
            job.schedule.sum_copies if kept else 0,
            tuple(num_bytes / rate for num_bytes in sums_bytes(job, profile)),
            tuple(layer.output_bytes / rate for layer in profile.layers),
            profile.link_latency_s,
            profile,
        )

    def inherited(
        self,
        layout: Layout,
        standing: Sequence[Route],
        dead: Collection[str],
        survivors: Collection[str],
        share: float,
        step_s: float,
    ) -> Inherited:
        """What survivors have of the sums of the dead, who died when a ``share`` of the step was done."""
        if not self.per_step or layout.devices_per_stage > 1:  # shards are not copied
            return {}
        routes = [route for route in standing if route.touches(frozenset(dead))]
        ended = ends(layout.routes, routes, step_s, forward_share(layout, self.profile))
        work = {device: hops for device, hops in ended.items() if device in dead}
        holders = _holders(layout, {*survivors, *work})
        found: defaultdict[str, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for device, hops in sorted(work.items()):
            plan = self._plan(device, layout, holders)
            arrived = (copy for copy in self._sent(hops, plan).copies if copy.here_s <= share * step_s)
            for copy in {copy.keeper: copy for copy in arrived}.values():
                if copy.keeper in dead:
                    continue
                for hop in hops[: copy.hops]:
                    for layer in hop.layers.layers():
                        if plan.keepers.get(layer) == copy.keeper:
                            found[copy.keeper][layer].append(hop.micro_batch)
        return found

    def longer_s(
        self, layout: Layout, epoch: int, standing: Callable[[], Sequence[Route]], step_s: float
    ) -> float:
        """By how much copies make a step of ``step_s`` longer, for the device that suffers most.

        A copy shares its sender's link with activations and gradients of boundaries, the time of which a step
        has already: for as long as it is under way these take twice as long. What has not left the link when
        the step would end holds up the sums that are then exchanged. ``standing``: who computes which
        micro-batch, asked for under another ``epoch`` alone.
        """
        if not self.per_step or layout.devices_per_stage > 1:
            return 0.0
        key = layout.epoch, epoch, step_s
        if self._longer[0] != key:
            routes = standing()
            work = ends(layout.routes, routes, step_s, forward_share(layout, self.profile))
            holders = _holders(layout, work)
            busy = self._boundaries_s(routes)
            found = 0.0
            for device, hops in work.items():
                sent = self._sent(hops, self._plan(device, layout, holders))
                # The modelled step has the time of boundaries and none for the exchange of sums, which
                # hides behind the backward. A copy hides there too, but where the link is in use, and at
                # the end. (D-simulator-010)
                shared_s = sent.link_s * min(1.0, busy[device] / step_s)
                found = max(found, shared_s + max(0.0, sent.until_s - step_s))
            self._longer = key, found
        return self._longer[1]

    def _plan(self, device: str, layout: Layout, holders: Mapping[int, Sequence[str]]) -> SumCopies:
        plan = SumCopies(device, self.per_step)
        plan.choose({layer: holders[layer] for layer in layout.holdings[device].layers()})
        return plan

    def _sent(self, hops: Sequence[SimulatedEnd], plan: SumCopies) -> SentCopy:
        """What leaves when ``plan`` says so, and when it arrives."""
        owed = sum(len(hop.layers.layers()) for hop in hops)
        added: set[int] = set()
        copies: list[SimulatedSumCopy] = []
        heard: dict[str, float] = {}
        done = 0
        link_s = until_s = 0.0
        for count, hop in enumerate(hops, 1):
            here = hop.layers.layers()
            added.update(here)
            done += len(here)
            if not plan.passed(done, owed):
                continue
            for keeper in [keeper for keeper in plan.awaited if heard[keeper] <= hop.at_s]:
                plan.arrived(keeper, plan.layout)
            for keeper, layers in plan.to_send():
                if added.isdisjoint(layers):
                    continue
                takes_s = sum(self.layer_s[layer] for layer in added if layer in layers)
                link_s, until_s = link_s + takes_s, max(until_s, hop.at_s) + takes_s
                copies.append(SimulatedSumCopy(keeper, count, until_s + self.latency_s))
                plan.awaited.add(keeper)
                heard[keeper] = until_s + 2 * self.latency_s
        return SentCopy(tuple(copies), link_s, until_s)

    def _boundaries_s(self, standing: Sequence[Route]) -> Mapping[str, float]:
        """Device -> seconds in a step that it sends activations and their gradients."""
        busy: defaultdict[str, float] = defaultdict(float)
        for route in standing:
            for position, segment in enumerate(route.segments):
                if position + 1 < len(route.segments):
                    busy[segment.device] += self.output_s[segment.layers.stop - 1]
                if position:
                    busy[segment.device] += self.output_s[segment.layers.start - 1]
        return busy


def _holders(layout: Layout, live: Collection[str]) -> Mapping[int, Sequence[str]]:
    """Layer -> its holders among ``live``, by name."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for device in sorted(layout.holdings.keys() & set(live)):
        for layer in layout.holdings[device].layers():
            found[layer].append(device)
    return found

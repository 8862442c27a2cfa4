"""Redundant layers: those that a device holds besides those that it computes, so that it can take over at
once.

Owns who takes over a dead device's hop, which forward passes a device can run ahead for that case, and the
bytes that those hold (Bamboo, NSDI'23, sections 4 and 5). For whom a device holds layers in a pipeline its
template says (``Template.redundant_layers``). Does not own the splits that leave room for it (``redundant``),
nor the routes (``reroute``, ``splice``).

What it holds besides is kept current by the reduce itself: who holds a layer gets the sums of all who
computed for it. It is in the layout's ``holdings`` like any other layer; that no route asks for it makes it
redundant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import inf

from oobleckd.planner.costs.recompute import recomputed
from oobleckd.planner.plan import Layers, Layout, Range, Recompute, Route
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import Profile

NOTHING = Layers()


def heir(route: Route, layers: Range, redundant: Mapping[str, Layers], lost: Collection[str]) -> str | None:
    """The device of ``route`` that holds ``layers`` redundantly and is alive; None where there is none."""
    # A holder like any other, without routes: who holds a layer gets all sums, votes and updates, so
    # nothing new keeps it current. The price is the traffic of one more holder. (D-policies-006)
    named = (segment.device for segment in route.segments)
    return next((d for d in named if d not in lost and redundant.get(d, NOTHING).spans(layers)), None)


def ahead(route: Route, device: str, redundant: Layers) -> Iterator[int]:
    """Hops of ``route`` whose forward pass ``device`` can run beside the one who is to: it holds their layers
    redundantly and has what goes in, since it computes the hop before. The first hop takes the micro-batch
    alone, and is the last one's device's.
    """
    hops = route.segments
    for position, hop in enumerate(hops):
        if hop.device != device and redundant.spans(hop.layers) and hops[position - 1].device == device:
            yield position


def takes_over(layout: Layout, dead: Collection[str]) -> bool:
    """Whether every hop of a dead device of ``layout`` has a live redundant holder in its own route."""
    return bool(layout.redundant) and all(
        segment.device not in dead or heir(route, segment.layers, layout.redundant, dead) is not None
        for route in layout.routes
        for segment in route.segments
    )


def pass_bytes(profile: Profile, layer: int, recompute: Recompute = "none") -> int:
    """What a forward pass through ``layer``, run ahead, holds of a device's memory, besides what all layers
    of its hop share. Of a device that computes anything again it holds inputs alone.

    Beside a GPU what autograd saves lies in the host's memory, and the output of the layer alone stays.
    """
    # Of inputs alone where anything is computed again. (D-recompute-003)
    mode: Recompute = "none" if recompute == "none" else "blocks"
    cost = recomputed(profile, mode).profile.layers[layer]
    return cost.activation_bytes if on_host(profile) else cost.output_bytes


def max_bytes(setup: Setup) -> float:
    """The most that all of them may hold there: the job's bound is on what is saved."""
    return setup.held.redundant_bytes if on_host(setup.profile) or not setup.held.redundant_bytes else inf


def graphs_of(layout: Layout, setup: Setup) -> dict[str, int]:
    """Device -> the most that its forward passes ahead hold in a step of ``layout``."""
    held = dict.fromkeys(layout.redundant, 0)
    for route in layout.routes:
        for device in sorted({segment.device for segment in route.segments} & held.keys()):
            mode = layout.recompute.get(device, "none")
            for position in ahead(route, device, layout.redundant[device]):
                layers = route.segments[position].layers.layers()
                held[device] += sum(pass_bytes(setup.profile, layer, mode) for layer in layers)
                held[device] += setup.profile.shared_bytes
    limit = max_bytes(setup)
    return {device: int(min(limit, num_bytes)) for device, num_bytes in held.items()}


def on_host(profile: Profile) -> bool:
    """Whether devices compute in the host's memory."""
    return profile.device.startswith("cpu")

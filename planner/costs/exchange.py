"""What the exchange of gradients costs: the bytes that a device sends in a step, and the seconds that show.

Owns the formula and what of the exchange hides under the backward. Does not know templates, nor choose plans.

**Bytes.** The parameters of a bucket are cut into slices, and each slice has an owner among its ``r`` live
holders. The exchange is an all-reduce in its two halves (Rabenseifner 2004; Patarasuk and Yuan 2009), with an
owner in the place of a step of the ring: a *reduce-scatter*, in which each holder sends its sums of a slice
to its owner, and an *all-gather*, in which each owner gives its means to all others. Each half sends
``(r - 1) / r`` of the data, the least that there can be; the first is of 8 bytes a parameter (4 where sums
are floats), the second of 4: 12 (r - 1) / r. In a step in which replicas are compared a second holder makes
each mean as well: sums go to both makers, and means to the r - 2 others: (20 r - 24) / r.

**Time.** The exchange of a layer begins when its backward of the last micro-batch is complete, and a node
sends one thing after the other, in the order in which it is complete, at the rate of its link: only what has
not left when the last backward ends shows in the step, at least that of the lowest layer. The backward of the
last micro-batch goes through the stages from the last to the first, so what later stages send hides under the
earlier ones. Where weight gradients fill the bubbles (a decoupled backward), or each device updates when it
can (staggered), all devices end at the same time, and a layer hides under the rest of its own device. Simple
on purpose: as many bytes come in as go out, which is so on average over owners; sends of boundaries, and what
is computed again in the backward, hide nothing; and of pipelines that are not alike each waits for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from oobleckd.planner.costs.apart import weight_s
from oobleckd.planner.costs.model import Floats
from oobleckd.planner.plan import Layers, node_of
from oobleckd.planner.policy import GradientExchange, Setup
from oobleckd.planner.profile import FLOAT_BYTES, Profile

NOTHING: Mapping[str, Layers] = {}
NO_LAYERS = Layers()
ONCE = np.ones(1)


def sums_sent(exchange: GradientExchange, holders: Floats) -> Floats:
    """Bytes a parameter that a device with sums of it sends in a step, on average over steps. ``holders``:
    how many have it, at least 1; any shape.
    """
    return (1 + exchange.checked) * exchange.sum_bytes * (holders - 1) / holders


def means_sent(exchange: GradientExchange, holders: Floats) -> Floats:
    """Bytes a parameter that each holder sends as an owner, on average over slices and steps."""
    found: Floats = FLOAT_BYTES * np.maximum(0.0, holders - 1 - exchange.checked) / holders
    return found


def sent_bytes(exchange: GradientExchange, holders: int) -> float:
    """Bytes a parameter that a device sends in a step to ``holders`` - 1 others that have it, too."""
    each = np.array(float(holders))
    return float(sums_sent(exchange, each) + means_sent(exchange, each))


def waiting_bytes(exchange: GradientExchange, holders: int) -> float:
    """Bytes a parameter in which sums of others wait for a device's own, at most: those of the slices of
    which it makes the means, which are twice as many in a step that is compared.
    """
    makers = min(holders, 1 + bool(exchange.check_every))
    return exchange.sum_bytes * makers / holders if holders > 1 else 0.0


@dataclass(frozen=True, slots=True)
class GradientBuckets:
    """Parameters of a model by who exchanges them: ``own`` of each layer, and the ``shared`` ones of a tied
    weight, which the layers ``uses`` have together.
    """

    own: tuple[float, ...]
    shared: float = 0.0
    uses: tuple[int, ...] = ()


@lru_cache(maxsize=16)
def buckets_of(profile: Profile) -> GradientBuckets:
    """Those of ``profile``. Where it does not say how many parameters the model has, or several weights are
    tied, each use counts as a bucket of its own.
    """
    own = [layer.param_bytes / FLOAT_BYTES for layer in profile.layers]
    tied = [uses for uses in profile.buckets if len(uses) > 1]
    if len(tied) != 1 or not profile.params:
        return GradientBuckets(tuple(own))
    (uses,) = tied
    shared = (sum(own) - profile.params) / (len(uses) - 1)
    if not 0 < shared <= min(own[layer] for layer in uses):
        return GradientBuckets(tuple(own))
    for layer in uses:
        own[layer] -= shared
    return GradientBuckets(tuple(own), shared, tuple(uses))


class SentPart(NamedTuple):
    """Parameters of a device that are exchanged together, with ``holders`` of them, of which ``inside`` are
    others of its node. They are complete at ``ready_s``, counted from the end of the step's passes (0 or
    less). ``sums``: whether it has any, and does not only hold the layer for another.
    """

    ready_s: float
    params: float
    holders: int
    inside: int = 0
    sums: bool = True


def sent_parts(
    setup: Setup, holdings: Mapping[str, Layers], redundant: Mapping[str, Layers] = NOTHING
) -> dict[str, tuple[SentPart, ...]]:
    """Device -> what it exchanges in a step. ``holdings``: device -> all that it holds, ``redundant``: of
    that what it holds for others.
    """
    buckets = buckets_of(setup.profile)
    holders, in_node = _holders(buckets, holdings)
    found = {}
    for device, held in holdings.items():
        for_others, node = redundant.get(device, NO_LAYERS), node_of(device)
        ready_s = _ready_s(setup, [layer for layer in held.layers() if layer not in for_others])
        parts = []
        for bucket, params in _of_device(buckets, held):
            uses = buckets.uses if bucket < 0 else (bucket,)
            ready = [ready_s[layer] for layer in uses if layer in ready_s]
            inside = in_node[node, bucket] - 1
            parts.append(SentPart(max(ready, default=0.0), params, holders[bucket], inside, sums=bool(ready)))
        found[device] = tuple(sorted(parts))
    return found


_SHARED = -1
"""The bucket of a tied weight; others have the number of their layer."""


def _of_device(buckets: GradientBuckets, held: Layers) -> list[tuple[int, float]]:
    """(bucket, parameters) of a device."""
    found = [(layer, buckets.own[layer]) for layer in held.layers()]
    if any(layer in held for layer in buckets.uses):
        found.append((_SHARED, buckets.shared))
    return [(bucket, params) for bucket, params in found if params]


def _holders(
    buckets: GradientBuckets, holdings: Mapping[str, Layers]
) -> tuple[Mapping[int, int], Mapping[tuple[str, int], int]]:
    """Bucket -> its holders; (node, bucket) -> those on that node."""
    everywhere: defaultdict[int, int] = defaultdict(int)
    in_node: defaultdict[tuple[str, int], int] = defaultdict(int)
    for device, held in holdings.items():
        for bucket, _ in _of_device(buckets, held):
            everywhere[bucket] += 1
            in_node[node_of(device), bucket] += 1
    return everywhere, in_node


def _ready_s(setup: Setup, computed: Sequence[int]) -> dict[int, float]:
    """Layer -> when its backward of the last micro-batch is complete, counted from the end of the passes."""
    layers = setup.profile.layers
    if not (setup.decoupled or setup.staggered):
        until = _backward_s(setup.profile)
        return {layer: -until[layer] for layer in computed}
    found, below_s = {}, 0.0
    for layer in sorted(computed):
        found[layer] = -below_s
        below_s += weight_s(layers[layer]) if setup.decoupled else layers[layer].backward_s
    return found


@lru_cache(maxsize=16)
def _backward_s(profile: Profile) -> tuple[float, ...]:
    """Entry i: seconds of the backward through layers [0, i)."""
    return (0.0, *np.cumsum([layer.backward_s for layer in profile.layers]).tolist())


def device_bytes(exchange: GradientExchange, parts: Iterable[SentPart], pipelines: int = 1) -> float:
    """Bytes that a device sends of ``parts`` in a step, on average over steps, in one of so many pipelines
    that are alike.
    """
    return float(sum(_bytes(exchange, part, pipelines * ONCE)[0] for part in parts))


def waiting_of(exchange: GradientExchange, parts: Iterable[SentPart], pipelines: int = 1) -> float:
    """Bytes of a device in which sums of others wait at most (``waiting_bytes``)."""
    return sum(part.params * waiting_bytes(exchange, pipelines * part.holders) for part in parts)


def shown_s(setup: Setup, sent: Mapping[str, Collection[SentPart]], pipelines: Floats = ONCE) -> Floats:
    """Seconds of a step that the exchange shows. ``sent``: device -> its parts, of one pipeline of so many
    that are alike (entry by entry of ``pipelines``: an answer for each). 0 where no link is known.
    """
    if not setup.exchange.is_known:
        return np.zeros(len(pipelines))
    nodes: defaultdict[str, list[SentPart]] = defaultdict(list)
    for device, parts in sent.items():
        nodes[node_of(device)].extend(parts)
    # Thousands of nodes have a handful of queues.
    queues = {tuple(sorted(parts)) for parts in nodes.values() if parts}
    found = np.zeros(len(pipelines))
    for queue in queues:
        # What is sent from some layer on, less the backward that is left then: the most of it does not fit.
        # Messages are not simulated, so that all numbers of pipelines are asked at once. (D-planner-015)
        takes_s = np.array([_takes_s(setup, part, pipelines) for part in queue])
        until_s = np.cumsum(takes_s[::-1], axis=0)[::-1]
        ready_s = np.array([part.ready_s for part in queue])[:, None]
        found = np.maximum(found, (until_s + ready_s).max(axis=0))
    # A slice's sums go one way, and its mean comes back.
    return np.where(found > 0.0, found + 2 * setup.profile.link_latency_s, 0.0)


def layout_shown_s(
    setup: Setup, holdings: Mapping[str, Layers], redundant: Mapping[str, Layers] = NOTHING
) -> float:
    """Seconds of a step that the exchange shows among devices that hold ``holdings``, all of them alive."""
    if not setup.exchange.is_known:
        return 0.0
    return float(shown_s(setup, sent_parts(setup, holdings, redundant))[0])


def _bytes(exchange: GradientExchange, part: SentPart, pipelines: Floats) -> Floats:
    holders = part.holders * pipelines
    sums = sums_sent(exchange, holders) if part.sums else 0.0
    found: Floats = part.params * (sums + means_sent(exchange, holders))
    return found


def _takes_s(setup: Setup, part: SentPart, pipelines: Floats) -> Floats:
    """How long it keeps the node's link busy, or what joins the devices of the node: where no rate of that is
    known nobody waits for it, as nobody does for copies.
    """
    num_bytes = _bytes(setup.exchange, part, pipelines)
    inside = num_bytes * part.inside / np.maximum(1, part.holders * pipelines - 1)
    rate = setup.profile.node_bytes_per_s
    found: Floats = (num_bytes - inside) / setup.exchange.bytes_per_s + (inside / rate if rate else 0.0)
    return found

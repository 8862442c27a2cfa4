"""What the exchange of gradients adds to the time of pipelines, by template and number of pipelines.

Owns those numbers as ``instantiate`` takes them, and templates that are so much longer. Bytes, and what of
them hides, are ``costs.exchange``'s. A template counts as all pipelines would be like it: with pipelines of
several sizes a layer's holders are still as many, and each size waits for its own devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from oobleckd.planner.costs.exchange import SentPart, sent_parts, shown_s
from oobleckd.planner.costs.model import Floats
from oobleckd.planner.plan import Layers, Template, device_name
from oobleckd.planner.policy import Setup
from oobleckd.planner.sizing.instantiate import longer
from oobleckd.planner.templates.template import node_stages


def reduce_s_of(
    setup: Setup, templates: Sequence[Template], num_nodes: int, others: int = 0
) -> Floats | None:
    """Entry [c, k]: by how many seconds a pipeline of size n0 + k is longer among c on ``num_nodes`` nodes
    and ``others`` elsewhere; None where no link is known, so that nothing is counted.
    """
    if not setup.exchange.is_known:
        return None
    by_size = sorted(templates, key=lambda template: template.num_nodes)
    counts = np.maximum(1.0, np.arange(num_nodes // by_size[0].num_nodes + 1) + others)
    return np.stack([exchanges_s(setup, template, counts) for template in by_size], axis=1)


def exchanging(setup: Setup, members: Sequence[Template]) -> Sequence[Template]:
    """``members``, all pipelines of a plan, each as much longer as its exchange shows."""
    if not setup.exchange.is_known:
        return members
    count = len(members)
    kinds = {template.num_nodes: template for template in members}
    made = {size: longer(each, exchange_s(setup, each, count)) for size, each in kinds.items()}
    return [made[template.num_nodes] for template in members]


def exchange_s(setup: Setup, template: Template, count: int) -> float:
    """Seconds of a step that the exchange shows in pipelines like ``template``, ``count`` of them."""
    return float(exchanges_s(setup, template, (count,))[0])


def exchanges_s(setup: Setup, template: Template, counts: Sequence[int] | Floats) -> Floats:
    """As ``exchange_s``, for each of ``counts``."""
    if not setup.exchange.is_known:
        return np.zeros(len(counts))
    return shown_s(setup, sent_of_pipeline(setup, template), np.asarray(counts, dtype=np.float64))


# A plan on thousands of nodes asks for each template many times.
@lru_cache(maxsize=256)
def sent_of_pipeline(setup: Setup, template: Template) -> Mapping[str, tuple[SentPart, ...]]:
    """Device -> what it exchanges in a step, of one pipeline like ``template`` by itself."""
    held, for_others = dict[str, Layers](), dict[str, Layers]()
    places = zip(template.held, template.redundant_layers, strict=True)
    for node, num_stages in enumerate(node_stages(template)):
        for index in range(num_stages):
            own, besides = next(places)
            name = device_name(str(node), index)
            held[name] = own.and_those(besides)
            if besides.ranges:
                for_others[name] = besides
    return sent_parts(setup, held, for_others)

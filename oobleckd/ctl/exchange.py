"""What the exchange of gradients costs in a plan, for ``oobleckctl plan``.

Owns which figures those are; the formula is ``planner.costs.exchange``'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import numpy as np

from oobleckd.planner.costs.exchange import SentPart, device_bytes, sent_parts, shown_s, waiting_of
from oobleckd.planner.plan import Plan, Template
from oobleckd.planner.policy import Setup
from oobleckd.planner.sizing.exchanged import sent_of_pipeline
from oobleckd.protocol.forecast import ExchangeForecast

Sent = Mapping[str, Collection[SentPart]]


def exchange_forecast(setup: Setup, plan: Plan, by_size: Mapping[int, Template]) -> ExchangeForecast:
    """Of ``plan``, whose pipelines are of the templates ``by_size``. Where the job says no link, what would
    show at the one that copies are planned with.
    """
    counted = setup.exchange.is_known
    rate = setup.exchange.bytes_per_s if counted else setup.profile.link_bytes_per_s
    exchange = msgspec.structs.replace(setup.exchange, bytes_per_s=rate)
    setup = msgspec.structs.replace(setup, exchange=exchange)
    checked = msgspec.structs.replace(exchange, check_every=min(1, exchange.check_every))
    sent_by_kind, times = _sent(setup, plan, by_size)
    devices = [parts for sent in sent_by_kind for parts in sent.values()]
    each = setup.profile.devices_per_stage  # of a stage's devices each has its part of the sums
    return ExchangeForecast(
        sent_bytes=round(max(device_bytes(exchange, parts, times) for parts in devices) / each),
        checked_bytes=round(max(device_bytes(checked, parts, times) for parts in devices) / each),
        waiting_bytes=round(max(waiting_of(exchange, parts, times) for parts in devices) / each),
        shown_s=max(float(shown_s(setup, sent, np.array([float(times)]))[0]) for sent in sent_by_kind),
        link_bytes_per_s=rate,
        counted=counted,
    )


def _sent(setup: Setup, plan: Plan, by_size: Mapping[int, Template]) -> tuple[list[Sent], int]:
    """What devices send; where no place is vacant, of one pipeline of each size, of so many."""
    if plan.vacant:
        return [sent_parts(setup, plan.holdings(), plan.living_redundant())], 1
    sizes = sorted({len(pipeline.nodes) for pipeline in plan.pipelines})
    return [sent_of_pipeline(setup, by_size[size]) for size in sizes], len(plan.pipelines)

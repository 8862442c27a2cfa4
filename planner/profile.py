"""Measured costs of a model's layers on a device: the planner's input. Owns the data, not the measuring."""

from __future__ import annotations

import msgspec


class LayerCost(msgspec.Struct, frozen=True):
    """One layer and one micro-batch on one device.

    ``forward_s`` and ``backward_s`` in seconds. ``param_bytes``: weights; ``state_bytes``: everything
    that lives as long as the layer (weights, optimizer moments, gradient sums, reduced sums).
    ``activation_bytes``: held between forward and backward; ``output_bytes``: the tensor handed to
    the next layer.
    """

    name: str
    forward_s: float
    backward_s: float
    param_bytes: int
    state_bytes: int
    activation_bytes: int
    output_bytes: int


class Profile(msgspec.Struct, frozen=True):
    """All layers of a model in order, the device they were measured on, and the link between nodes.

    ``key`` identifies (model, shapes, precision, device kind), so that a profile is measured once.
    ``reserve_bytes`` is what the runtime itself takes on a device. ``buckets[b]``: the layers that use
    bucket ``b`` of the parameters (several for a tied weight).
    """

    key: str
    device: str
    layers: tuple[LayerCost, ...]
    link_latency_s: float = 100e-6
    link_bytes_per_s: float = 1e9
    reserve_bytes: int = 0
    buckets: tuple[tuple[int, ...], ...] = ()

"""What layers cost where the devices of a stage hold its state between them: sharded data parallelism within
a node.

Owns that arithmetic, and which number of devices a stage is given. Each of the ``g`` devices of a stage has
1/g of every layer's state. Before it computes a layer it gathers the weights, computes a micro-batch of its
own, and sends every other device that one's part of the gradients. So a stage takes as long as one device for
``g`` micro-batches at a time: with these costs it plans as a device does, whose node has so many times fewer
of them, and whose step has so many times fewer micro-batches ("turns").

Sharding state over data-parallel devices: Rajbhandari et al. 2020 (ZeRO); over those of a pipeline's stage,
within a node: Jang et al. 2023 (Oobleck, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

import msgspec

from oobleckd.planner.policy import PlanError, Setup
from oobleckd.planner.profile import FLOAT_BYTES, ROUNDED_BYTES, LayerCost, Profile, gradient_bytes
from oobleckd.words import count

DEVICES_PER_STAGE = (1, 2, 4, 8)
"""Numbers that a stage may have."""


class NodeLink(msgspec.Struct, frozen=True):
    """What lies between the devices of a node: what each of them receives a second while all send, and what
    it takes to begin.
    """

    bytes_per_s: float
    latency_s: float = 0.0


UNKNOWN = NodeLink(1e9)
"""As of a link between nodes that nobody knows."""


class Sharding(msgspec.Struct, frozen=True):
    """How many devices a stage has, their link, and whether gradient sums are integers (``train.exact``)."""

    devices_per_stage: int
    link: NodeLink
    exact: bool = True

    def turns(self, num_micro_batches: int) -> int:
        """How often all devices of one stage compute, for so many micro-batches."""
        return ceil(num_micro_batches / self.devices_per_stage)


def sharded(profile: Profile, sharding: Sharding) -> Profile:
    """``profile`` of stages that devices share so; of one device as it is.

    State stays whole in it (copies between nodes move all of it), and is divided where memory is counted.
    """
    g, link = sharding.devices_per_stage, sharding.link
    if g == 1:
        return profile
    gathered = [_gathered_bytes(layer, sharding.exact) for layer in profile.layers]
    gather_s = [link.latency_s + (g - 1) / g * num_bytes / link.bytes_per_s for num_bytes in gathered]
    # While a layer computes, its neighbour's weights come, and in the backward the gradients of the one
    # behind go. The first gather of a pass has nothing to hide behind. (D-planner-016)
    forward_s = [
        max(c.forward_s, comes_s) for c, comes_s in zip(profile.layers, [*gather_s[1:], 0.0], strict=True)
    ]
    forward_s[0] += gather_s[0]
    comes_s, goes_s = [0.0, *gather_s[:-1]], [*gather_s[1:], 0.0]
    backward_s = [max(c.backward_s, a + b) for c, a, b in zip(profile.layers, comes_s, goes_s, strict=True)]
    backward_s[-1] += gather_s[-1]
    layers = tuple(
        msgspec.structs.replace(
            cost,
            forward_s=forward_s[n],
            backward_s=backward_s[n],
            update_s=cost.update_s / g,
            gathered_bytes=gathered[n],
            gather_s=gather_s[n],
        )
        for n, cost in enumerate(profile.layers)
    )
    return msgspec.structs.replace(profile, layers=layers, devices_per_stage=g)


def sharded_setup(setup: Setup, sharding: Sharding) -> Setup:
    """``setup`` with stages that devices share so: its "devices" are the places of stages, and its
    micro-batches turns of theirs. Raises PlanError where a node's devices do not divide into such stages.
    """
    # Nothing in the planner need know of it: what is right for a device is for such a stage. (D-planner-018)
    g = sharding.devices_per_stage
    if g == 1:
        return setup
    if setup.devices_per_node % g:
        devices = count(setup.devices_per_node, "device")
        raise PlanError(
            f"{devices} of a node do not divide into stages of {g}",
            f"set resources.devices_per_stage to {_listed(possible(setup.devices_per_node))}",
        )
    return msgspec.structs.replace(
        setup,
        profile=sharded(setup.profile, sharding),
        num_micro_batches=sharding.turns(setup.num_micro_batches),
        devices_per_node=setup.devices_per_node // g,
        whole_batch=setup.num_micro_batches,
    )


def possible(devices_per_node: int) -> tuple[int, ...]:
    """The numbers of devices that stages of a node with so many may have."""
    return tuple(g for g in DEVICES_PER_STAGE if devices_per_node % g == 0)


class StageBytes(NamedTuple):
    """What a device of a stage has of the others in a step: bytes of weights that it ``gathered``, and of
    ``gradients`` that it sends them.
    """

    gathered: float
    gradients: float


def stage_bytes(profile: Profile, layers: Iterable[int], num_micro_batches: int) -> StageBytes:
    """Of a stage of ``layers`` of a ``sharded`` profile, through which so many micro-batches of a step go: on
    average over its devices.
    """
    g = profile.devices_per_stage
    of_layers = sum(profile.layers[layer].gathered_bytes for layer in layers)
    # Gradients are of the numbers that it is computed with. Each device computes 1/g of the micro-batches.
    each = of_layers * (g - 1) / g * num_micro_batches / g
    return StageBytes(2 * each, each)  # in the forward, and once more in the backward


WORTH = 0.1
"""So much shorter a step is to be that a job gives all of its devices other shards for it."""


class StageOption(msgspec.Struct, frozen=True):
    """A plan with so many devices a stage. ``n0``: nodes that hold the model (0: none do); ``step_s`` of the
    plan, ``memory_bytes`` of its fullest device, and nodes that it ``can_lose``; all 0 where there are fewer
    nodes than n0.
    """

    devices_per_stage: int
    n0: int
    step_s: float = 0.0
    memory_bytes: int = 0
    can_lose: int = 0


def best(options: Sequence[StageOption], f: int, present: StageOption | None = None) -> StageOption | None:
    """The fastest of the ``options`` that have a plan, of those that can lose ``f`` nodes, or else most; the
    fewest devices a stage among equals. None: none has a plan. ``present``: the one that a job trains with,
    which another one that can lose as many replaces where it is faster by ``WORTH``.
    """
    # A faster plan that could lose fewer would break the job's promise without its word. (D-planner-017)
    found = [option for option in options if option.step_s]
    chosen = min(
        found,
        key=lambda o: (-min(o.can_lose, f), round(o.step_s, 9), o.devices_per_stage),
        default=None,
    )
    if chosen is None or present is None or not present.step_s:
        return chosen
    # Nearly all of the state moves for it, and layer times are not measured better. (D-planner-021)
    as_safe = min(present.can_lose, f) == min(chosen.can_lose, f)
    return present if as_safe and chosen.step_s > (1 - WORTH) * present.step_s else chosen


def _gathered_bytes(layer: LayerCost, exact: bool) -> int:
    """Weights as they are computed with: those that are rounded in their copies, all others in float32."""
    params = layer.param_bytes // FLOAT_BYTES
    # A profile does not say what is rounded, but its state has a copy of that and of nothing else.
    rounded = layer.state_bytes - layer.copied_bytes - gradient_bytes(exact) * params
    return layer.param_bytes - min(max(rounded, 0), ROUNDED_BYTES * params)


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])

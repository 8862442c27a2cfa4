"""The cost model as arrays: what a stage ``[i, j)`` takes in time and memory, and what a copy weighs.

Owns the arithmetic of the 1F1B model; does not choose splits. Times in seconds, memory in bytes.
Matrices are indexed ``[first layer, layer after the last]``, shape (L+1, L+1); entries with i >= j
mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from oobleckd.planner.costs.recompute import RecomputedProfile, recomputed
from oobleckd.planner.plan import Recompute
from oobleckd.planner.profile import NOTHING, HeldBesides, LayerCost, Profile

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of every possible stage of a model on ``num_devices`` devices of one node each, all of whose
    blocks compute again what ``recompute`` says.

    ``time_s``: forward and backward of one micro-batch. ``cut_s[i]``: one way of the tensor between
    layers i-1 and i (0 at both ends). ``period_s``: time plus both cuts, what the stage takes of every
    micro-batch in the steady phase. ``state_bytes``, ``activation_bytes`` (one micro-batch in flight)
    and ``once_bytes`` (while a layer is computed) are those of the whole stage, of which each device
    has its share.
    """

    num_devices: int
    time_s: Floats
    cut_s: Floats
    period_s: Floats
    state_bytes: Floats
    activation_bytes: Floats
    once_bytes: Floats
    reserve_bytes: int
    recompute: Recompute = "none"

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.cut_s) - 1

    def memory_bytes(self, from_end: int, num_micro_batches: int) -> Floats:
        """Peak on a device of every stage in bytes when it is the ``from_end``-th from the end (1: the
        last).
        """
        in_flight = min(from_end, num_micro_batches)
        held = self.state_bytes + in_flight * self.activation_bytes + self.once_bytes
        return held / self.num_devices + self.reserve_bytes

    def deepest(self, num_micro_batches: int, limit_bytes: float) -> Floats:
        """The largest ``from_end`` at which every stage fits ``limit_bytes``: 0 where it fits nowhere,
        inf where it fits everywhere.
        """
        room = self.num_devices * (limit_bytes - self.reserve_bytes) - self.state_bytes - self.once_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            index = np.where(room < 0, 0, room // self.activation_bytes)
        return np.where(room >= num_micro_batches * self.activation_bytes, np.inf, index)


def stage_costs(
    profile: Profile,
    num_devices: int = 1,
    held: HeldBesides = NOTHING,
    recompute: Recompute = "none",
    *,
    apart: bool = False,
) -> StageCosts:
    """The cost model of ``profile`` with ``num_devices`` devices a stage and ``held`` besides; every cut
    is charged the profile's link, in a node too. ``apart``: its backward is decoupled.
    """
    layers = profile.layers
    again = recomputed(profile, recompute, apart=apart)
    costs = again.profile.layers
    cut_s = np.zeros(len(layers) + 1)
    cut_s[1:-1] = [_cut_s(profile, before, behind) for before, behind in pairwise(layers)]
    allreduce_s = [dict(c.allreduce_s)[num_devices] if num_devices > 1 else 0.0 for c in layers]
    compute_s = [(c.forward_s + c.backward_s) / num_devices for c in costs]
    passes = 2 + np.array([recompute == "blocks" and 0 < n < len(layers) - 1 for n in range(len(layers))])
    # To the picosecond: equal stages get equal times, whatever lies before them.
    time_s = np.round(_between(np.array(compute_s) + passes * np.array(allreduce_s)), 12)
    return StageCosts(
        num_devices=num_devices,
        time_s=time_s,
        cut_s=cut_s,
        period_s=np.round(time_s + cut_s[:, None] + cut_s[None, :], 12),
        state_bytes=_between(np.array([float((1 + held.state_copies) * c.state_bytes) for c in layers]))
        / profile.devices_per_stage,
        activation_bytes=_between(np.array([float(c.activation_bytes) for c in costs]))
        + profile.shared_bytes,
        once_bytes=_once_bytes(again),
        reserve_bytes=profile.reserve_bytes + held.device_bytes,
        recompute=recompute,
    )


def device_counts(profile: Profile, devices_per_node: int, max_count: int) -> tuple[int, ...]:
    """How many devices of a node of ``devices_per_node`` may share a stage, ascending.

    The largest divisor up to ``max_count`` that every layer can be shared by, and the divisors of that: so
    one stage on all devices of several never needs more memory on a device than they do.
    """

    def shared(num_devices: int) -> bool:
        return num_devices == 1 or all(num_devices in dict(c.allreduce_s) for c in profile.layers)

    divisors = [g for g in range(1, devices_per_node + 1) if devices_per_node % g == 0 and shared(g)]
    largest = max(g for g in divisors if g <= max(1, max_count))
    return tuple(g for g in divisors if largest % g == 0)


def copy_bytes(layer: LayerCost) -> int:
    """What copying the training state of ``layer`` moves, in bytes: gradient sums do not travel."""
    return min(layer.state_bytes, layer.copied_bytes)


def _cut_s(profile: Profile, before: LayerCost, behind: LayerCost) -> float:
    """One way of what crosses between two layers. The devices of a stage send theirs at once, over their
    node's link.
    """
    sent_s = profile.devices_per_stage * before.output_bytes / profile.link_bytes_per_s
    # The first gather of a pass shows, and every cut makes two layers the first of a pass: the one behind it
    # in the forward, the one before it in the backward. (D-planner-016)
    return profile.link_latency_s + sent_s + (before.gather_s + behind.gather_s) / 2


def _once_bytes(again: RecomputedProfile) -> Floats:
    """Entry [i, j]: the most that a device holds besides while it computes a layer of ``[i, j)``."""
    first = np.array([again.passing_bytes(layer) for layer in range(again.num_layers)], dtype=np.float64)
    inner = np.array([again.passing_bytes(layer, after=True) for layer in range(again.num_layers)])
    found = np.zeros((len(first) + 1, len(first) + 1))
    found[:-1, 1:] = np.maximum(first[:, None], _largest(inner.astype(np.float64))[1:, 1:])
    return found


def _largest(values: Floats) -> Floats:
    """Entry [i, j]: the largest of ``values[i:j]``."""
    found = np.zeros((len(values) + 1, len(values) + 1))
    if values.any():
        for first in range(len(values)):
            found[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return found


def _between(values: Floats) -> Floats:
    """Entry [i, j]: the sum of ``values[i:j]``, exact for whole numbers below 2^53."""
    before = np.concatenate(([0.0], np.cumsum(values)))
    return before[None, :] - before[:, None]

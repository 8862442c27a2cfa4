"""The cost model as arrays: what a stage ``[i, j)`` takes in time and memory, and what a copy weighs.

Owns the arithmetic of the 1F1B model; does not choose splits. Times in seconds, memory in bytes.
Matrices are indexed ``[first layer, layer after the last]``, shape (L+1, L+1); entries with i >= j
mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.profile import LayerCost, Profile

Floats = NDArray[np.float64]

STATE_COPIES = 3  # weights and the two AdamW moments travel; gradient sums do not


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of every possible stage of a model.

    ``time_s``: forward and backward of one micro-batch. ``cut_s[i]``: one way of the tensor between
    layers i-1 and i (0 at both ends). ``period_s``: time plus both cuts, what the stage takes of every
    micro-batch in the steady phase. ``state_bytes``, ``activation_bytes`` (one micro-batch in flight).
    """

    time_s: Floats
    cut_s: Floats
    period_s: Floats
    state_bytes: Floats
    activation_bytes: Floats
    reserve_bytes: int

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.cut_s) - 1

    def memory_bytes(self, from_end: int, num_micro_batches: int) -> Floats:
        """Peak of every stage in bytes when it is the ``from_end``-th from the end (1: the last)."""
        in_flight = min(from_end, num_micro_batches)
        return self.state_bytes + in_flight * self.activation_bytes + self.reserve_bytes


def stage_costs(profile: Profile) -> StageCosts:
    """The cost model of ``profile``; every cut is charged the profile's link, in a node too."""
    layers = profile.layers
    cut_s = np.zeros(len(layers) + 1)
    cut_s[1:-1] = [profile.link_latency_s + c.output_bytes / profile.link_bytes_per_s for c in layers[:-1]]
    time_s = _between(np.array([c.forward_s + c.backward_s for c in layers]))
    return StageCosts(
        time_s=time_s,
        cut_s=cut_s,
        period_s=np.round(time_s + cut_s[:, None] + cut_s[None, :], 12),
        state_bytes=_between(np.array([float(c.state_bytes) for c in layers])),
        activation_bytes=_between(np.array([float(c.activation_bytes) for c in layers])),
        reserve_bytes=profile.reserve_bytes,
    )


def copy_bytes(layer: LayerCost) -> int:
    """What copying the training state of ``layer`` moves, in bytes."""
    return min(layer.state_bytes, STATE_COPIES * layer.param_bytes)


def _between(values: Floats) -> Floats:
    """Entry [i, j]: the sum of ``values[i:j]``, exact for whole numbers below 2^53.

    Rounded to picoseconds: equal stages get equal costs, whatever lies before them.
    """
    before = np.concatenate(([0.0], np.cumsum(values)))
    return np.round(before[None, :] - before[:, None], 12)

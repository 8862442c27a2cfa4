"""What layers cost whose activations are in part computed again in the backward, and not held until then
(``schedule.recompute``).

Owns that arithmetic and the order of the modes; who computes again is chosen elsewhere (``choice``). Holding
a block's input alone is due to Chen et al. 2016 (Training Deep Nets with Sublinear Memory Cost), holding all
but what is cheap to compute to Korthikanti et al. 2022 (Reducing Activation Recomputation in Large
Transformer Models). The embedding and the head are never computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from oobleckd.planner.costs.apart import kept_bytes, weight_s
from oobleckd.planner.plan import Recompute, RecomputeWanted
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import LayerCost, Profile

MODES: tuple[Recompute, ...] = ("none", "selective", "blocks")
"""Those that hold more, and take less time, first."""


class RecomputedProfile(msgspec.Struct, frozen=True):
    """A ``profile`` with the costs that layers have in a mode: ``activation_bytes`` are those held from the
    forward to the backward, and the backward takes what computing again does.

    ``again_bytes``: layer by layer what is held besides while it is computed again (none: nothing is).
    """

    profile: Profile
    again_bytes: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.profile.layers)

    def once_bytes(self, layers: Iterable[int]) -> int:
        """What a device holds besides while one of ``layers`` is computed, or computed again: one at a time
        is.
        """
        if not self.again_bytes and self.profile.devices_per_stage == 1:
            return 0
        held = frozenset(layers)
        return max((self.passing_bytes(layer, after=layer - 1 in held) for layer in held), default=0)

    def passing_bytes(self, layer: int, *, after: bool = False) -> int:
        """What a device holds while ``layer`` is in its backward, and no longer: what is computed again, and
        where its weights were gathered, these and the gradients; ``after``: and the weights of the one
        before it, which come meanwhile.
        """
        of = self.profile.layers
        gathered = 2 * of[layer].gathered_bytes + (of[layer - 1].gathered_bytes if after and layer else 0)
        return gathered + (self.again_bytes[layer] if self.again_bytes else 0)


def recomputed(profile: Profile, mode: Recompute, *, apart: bool = False) -> RecomputedProfile:
    """``profile`` as its layers cost in ``mode``. ``apart``: its backward is decoupled."""
    return RecomputedProfile(profile) if mode == "none" else _recomputed(profile, mode, apart)


def in_mode(setup: Setup, mode: Recompute) -> RecomputedProfile:
    """What layers cost on devices of ``setup`` that compute so much again."""
    return recomputed(setup.profile, mode, apart=setup.decoupled)


def modes_for(profile: Profile, wanted: RecomputeWanted) -> tuple[Recompute, ...]:
    """The modes that a stage may have where ``wanted`` is, those of least time first: with "auto" all, the
    selective one where its costs are known and it takes less than computing all again.
    """
    if wanted != "auto":
        return (wanted,)
    blocks = profile.layers[1:-1]
    known = all(block.selective_bytes for block in blocks)
    less = sum(block.selective_s for block in blocks) < sum(block.forward_s for block in blocks)
    return MODES if known and less else ("none", "blocks")


# The same few profiles are asked for in every plan.
@lru_cache(maxsize=16)
def _recomputed(profile: Profile, mode: Recompute, apart: bool) -> RecomputedProfile:
    layers, again = list(profile.layers), [0] * len(profile.layers)
    for number in range(1, len(layers) - 1):
        block = layers[number]
        held, more_s = _of_block(block, profile.layers[number - 1], mode)
        # Its input is among what is saved of it, and there already. (D-planner-013)
        again[number] = max(0, block.activation_bytes - held)
        kept = kept_bytes(block)
        layers[number] = msgspec.structs.replace(
            block,
            # A device that does whatever is ready puts weight gradients off until it has no room left, so
            # each micro-batch in flight may hold what they need. (D-planner-011)
            activation_bytes=max(held, kept) if apart else held,
            backward_s=block.backward_s + more_s,
            weight_s=weight_s(block),
            kept_bytes=kept,
        )
    return RecomputedProfile(msgspec.structs.replace(profile, layers=tuple(layers)), tuple(again))


def _of_block(block: LayerCost, before: LayerCost, mode: Recompute) -> tuple[int, float]:
    """Bytes that ``block`` holds from the forward to the backward, and by how much its backward is longer."""
    if mode == "blocks":
        return before.output_bytes, block.forward_s
    if block.selective_bytes:
        return block.selective_bytes, block.selective_s
    # Not measured: no more is promised than that all of it is computed again and nothing is saved.
    return block.activation_bytes, block.forward_s

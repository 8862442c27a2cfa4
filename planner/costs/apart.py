"""What weight gradients take and hold where the backward of a layer is decoupled, and was measured whole.

Owns what is taken for them then.
"""

from __future__ import annotations

from oobleckd.planner.profile import LayerCost

# For profiles that measured the backward whole. In a prototype, weight gradients deferred in linear layers
# took four tenths of it over five families of models, and held 0.47 to 0.77 of the activations until they
# ran.
INPUT_SHARE = 0.6
# The most of five families: too much memory asked for costs some bubble, too little ends the device.
# (D-schedules-002)
KEPT_SHARE = 0.77


def weight_s(layer: LayerCost) -> float:
    """What W takes of the backward of ``layer``, measured or taken for it."""
    return layer.weight_s if layer.kept_bytes else (1 - INPUT_SHARE) * layer.backward_s


def kept_bytes(layer: LayerCost) -> int:
    """What is held between I and W of ``layer``, measured or taken for it."""
    return layer.kept_bytes or round(KEPT_SHARE * layer.activation_bytes)

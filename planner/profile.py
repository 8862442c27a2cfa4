"""Measured costs of a model's layers on a device: the planner's input. Owns the data, not the measuring."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


def sum_bytes(exact: bool) -> int:
    """Of a gradient sum, for each parameter: integers are kept in float64."""
    return 8 if exact else 4


FLOAT_BYTES = 4
ROUNDED_BYTES = 2
"""For each parameter that linear layers alone compute with, where precision is bf16: of its copy in it."""
MOMENT_BYTES = 8
"""For each parameter, of the slots of AdamW: two moments in float32."""


def gradient_bytes(exact: bool) -> int:
    """For each parameter, of its gradient in a layer that uses it: the mean, and the sums of this use."""
    # Not what is exchanged: sums of others that are here before this device's own wait, of the slices whose
    # means it makes, in 8 / r bytes more of each parameter with r holders (twice that in a step that is
    # compared), which are gone when the mean is there. (D-exactness-019)
    return FLOAT_BYTES + sum_bytes(exact)


def added_bytes(exact: bool) -> int:
    """For each parameter and micro-batch, what adding its gradient to the sum reads and writes."""
    return FLOAT_BYTES + 2 * sum_bytes(exact)


def state_bytes_per_param(exact: bool, slot_bytes: int = MOMENT_BYTES) -> int:
    """All that lives as long as a parameter does in a layer that uses it: itself, what the optimizer keeps of
    it (``slot_bytes``), and what there is of its gradient.
    """
    # From one function: the share was written down as 12/36 in one place while the worker measured 32 bytes
    # a parameter, so copies had an eighth less room than they take. (D-planner-010)
    return FLOAT_BYTES + slot_bytes + gradient_bytes(exact)


STATE_COPIES = 3.0
"""``Profile.state_copies`` of AdamW."""


class LayerCost(msgspec.Struct, frozen=True):
    """One layer and one micro-batch on one device.

    ``forward_s`` and ``backward_s`` in seconds, the backward with its gradients added up; ``update_s``: what
    follows once a step, from complete sums to new weights. ``param_bytes``: weights; ``state_bytes``:
    everything that lives as long as the layer (weights, their copies in bfloat16, optimizer moments, gradient
    sums, mean gradients).
    ``slot_bytes``: what the optimizer keeps of the weights, and what travels and is written with them (-1 in
    a profile of earlier versions: twice the weights, as of AdamW). ``activation_bytes``: held between
    forward and backward; ``output_bytes``: the tensor handed to the next layer. ``allreduce_s``: (devices of
    a node that share the layer, seconds of one all-reduce among them); each pass makes one. A number of
    devices that is not listed cannot share it. Where the backward was measured decoupled, ``weight_s`` of
    its seconds are the weight gradients', which hold ``kept_bytes`` until they run; both 0 where it was
    measured whole. A block that computes again what is cheap (``schedule.recompute`` "selective") holds
    ``selective_bytes`` in place of ``activation_bytes``, and its backward takes ``selective_s`` more; both 0
    where that was not measured, as in other layers. One that computes all again holds its input alone, and
    its backward takes ``forward_s`` more.
    """

    name: str
    forward_s: float
    backward_s: float
    param_bytes: int
    state_bytes: int
    activation_bytes: int
    output_bytes: int
    allreduce_s: tuple[tuple[int, float], ...] = ()
    update_s: float = 0.0
    weight_s: float = 0.0
    kept_bytes: int = 0
    slot_bytes: int = -1
    selective_bytes: int = 0
    selective_s: float = 0.0
    gathered_bytes: int = 0
    gather_s: float = 0.0

    @property
    def copied_bytes(self) -> int:
        """Weights and what the optimizer keeps of them: what a copy of the layer's state consists of."""
        slot_bytes = (
            self.slot_bytes if self.slot_bytes >= 0 else MOMENT_BYTES // FLOAT_BYTES * self.param_bytes
        )
        return self.param_bytes + slot_bytes


class Profile(msgspec.Struct, frozen=True):
    """All layers of a model in order, the device they were measured on, and the link between nodes.

    ``key`` identifies (model, shapes, precision, device kind), so that a profile is measured once.
    ``reserve_bytes`` is what the runtime itself takes on a device. ``buckets[b]``: the layers that use bucket
    ``b`` of the parameters (several for a tied weight). ``host_bytes_per_s``: from the host's memory to the
    device's (0: they are the same). ``shared_bytes``: what a micro-batch in flight holds besides on every
    device that computes layers of it, however many these are (the masks of separate documents).
    ``flops_per_token``: of the model, forward and backward, by formula (``costs.flops``). ``params``: of the
    model, a tied weight once; ``active_params`` of them a token goes through, which are fewer where there are
    experts. Of all three 0: whoever measured it did not say. ``node_bytes_per_s``: between two devices of a
    node, one way (0: not known, and nobody waits for it). ``devices_per_stage``: so many devices hold the
    state of a stage between them, and compute as many micro-batches at a time (``costs.sharded``).
    """

    key: str
    device: str
    layers: tuple[LayerCost, ...]
    link_latency_s: float = 100e-6
    link_bytes_per_s: float = 1e9
    reserve_bytes: int = 0
    buckets: tuple[tuple[int, ...], ...] = ()
    host_bytes_per_s: float = 0.0
    shared_bytes: int = 0
    flops_per_token: float = 0.0
    params: int = 0
    active_params: int = 0
    node_bytes_per_s: float = 0.0
    devices_per_stage: int = 1

    @property
    def copied_bytes(self) -> int:
        """What a copy of the whole state consists of; a tied weight as often as it is used."""
        return sum(layer.copied_bytes for layer in self.layers)

    @property
    def state_copies(self) -> float:
        """How often the weights go into a copy of the state: 3 for AdamW, which has two moments as large."""
        param_bytes = sum(layer.param_bytes for layer in self.layers)
        return self.copied_bytes / param_bytes if param_bytes else STATE_COPIES

    def activation_bytes(self, layers: Iterable[int]) -> int:
        """What a device that computes ``layers`` of a micro-batch holds between forward and backward."""
        return self.shared_bytes + sum(self.layers[layer].activation_bytes for layer in layers)

    def update_s(self, start: int, stop: int) -> float:
        """Seconds that the update of layers ``[start, stop)`` takes on one device."""
        return sum(layer.update_s for layer in self.layers[start:stop])

    def kept_bytes(self, num_micro_batches: int, limit_bytes: int) -> int:
        """What a device keeps at most, with such a limit, of all that it sends to its neighbours
        in a step.
        """
        largest = max((layer.output_bytes for layer in self.layers[:-1]), default=0)
        return min(limit_bytes, 2 * num_micro_batches * largest)  # activations one way, gradients the other


class HeldBesides(msgspec.Struct, frozen=True):
    """What a policy keeps on every device besides its stage (backups, redundant layers, spares).

    ``state_copies``: training states of further stages, each taken to be as large as its own, or a part of
    its own; ``device_bytes``: whatever does not depend on the stage. ``redundant_bytes``: what forward passes
    that are run ahead for another device may hold at most, where the policy has devices hold layers for
    others.
    """

    state_copies: float = 0.0
    device_bytes: int = 0
    redundant_bytes: int = msgspec.field(default=0, name="shadow_bytes")  # its name on disk and wire


NOTHING = HeldBesides()

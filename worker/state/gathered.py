"""The weights of one layer where a device has a shard of them: whole while the layer needs them, and nowhere
in between.

Owns their memory, which comes and goes, and the leaves, which stay: a graph keeps its leaves, and finds the
same numbers in them whenever it needs them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oobleckd.worker.models import ModelSpec
from oobleckd.worker.state.bucket_state import PARAM, ROUNDED, SlotShape


class GatheredLayer:
    """Of ``layer``. ``leaves``: by key, in the dtype that it computes with; without memory until ``take``."""

    def __init__(self, spec: ModelSpec, layer: int, device: torch.device) -> None:
        self.layer = layer
        rounded = spec.rounded(layer)
        self._keys = [
            (bucket, position, key, spec.buckets[bucket].shapes[position])
            for bucket in spec.buckets_of(layer)
            for position, key in enumerate(spec.buckets[bucket].keys)
        ]
        self.leaves: dict[str, Tensor] = {}
        self._numbers: dict[tuple[int, int], tuple[str, Tensor]] = {}
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        for name, dtype in ((PARAM, torch.float32), (ROUNDED, torch.bfloat16)):
            shapes = {
                at: shape
                for at, (_, _, key, shape) in enumerate(self._keys)
                if (key in rounded) == (name == ROUNDED)
            }
            self._add(name, SlotShape.of(name, dtype, shapes), device)
        self.drop()

    def _add(self, name: str, slot: SlotShape, device: torch.device) -> None:
        if not slot.length:
            return
        flat = torch.empty(slot.length, dtype=slot.dtype, device=device)
        # Not the leaves' own version: a graph that was made with these numbers finds the same ones again.
        beside = slot.cut(flat.data)
        for at, leaf in slot.cut(flat).items():
            bucket, position, key, _ = self._keys[at]
            self.leaves[key] = leaf.requires_grad_()
            self._numbers[bucket, position] = name, beside[at].view(-1)
        self._storages.append((flat.untyped_storage(), flat.nbytes))

    def take(self) -> None:
        """Have memory, with anything in it."""
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)

    def drop(self) -> None:
        """Give it back."""
        for storage, _ in self._storages:
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """While it has memory."""
        return sum(num_bytes for _, num_bytes in self._storages)

    @property
    def numbers(self) -> Mapping[tuple[int, int], tuple[str, Tensor]]:
        """By bucket and position of the key: the slot of the shards that its numbers come from, and where
        they go, flat.
        """
        return self._numbers

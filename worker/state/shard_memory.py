"""The memory of a device that holds shards: its buckets where the others of its group can read them, and room
for the layers that are gathered of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.gathered import GatheredLayer
from oobleckd.worker.state.shards import Shards
from oobleckd.worker.state.window import Handle, Window, WindowShape, window


@dataclass(slots=True)
class _Shown:
    """A ``state`` that lies in a window of ``shape``."""

    state: BucketState
    shape: WindowShape
    window: Window


@dataclass(slots=True)
class ShardMemory:
    """Of the device of ``rank``. ``layers``: those it holds."""

    shards: Shards
    rank: int
    layers: dict[int, GatheredLayer] = field(default_factory=dict)
    _shown: dict[int, _Shown] = field(default_factory=dict)

    def adopt(self, buckets: Mapping[int, BucketState], layers: Sequence[int]) -> None:
        """Have exactly ``buckets`` in windows, and room for ``layers``. States that come are moved."""
        before, self._shown = self._shown, {}
        for bucket, state in buckets.items():
            rounded = state.shape.rounded(self.shards.rounded(bucket, self.rank, layers))
            shape = WindowShape.of(state.shape, rounded)
            shown = before.pop(bucket, None)
            if shown is None or shown.state is not state or shown.shape != shape:
                made = window(shape.num_bytes, self.shards.device)
                state.move(shape.storages(made.memory), rounded)
                shown = _Shown(state, shape, made)
            self._shown[bucket] = shown
        self.layers = {
            layer: self.layers.get(layer) or GatheredLayer(self.shards.spec, layer, self.shards.device)
            for layer in layers
        }

    @property
    def handles(self) -> dict[int, Handle]:
        """By bucket, for the others of the group."""
        return {bucket: shown.window.handle for bucket, shown in self._shown.items()}

    def own(self, bucket: int) -> Tensor:
        """All of this device's window of ``bucket``, uint8."""
        return self._shown[bucket].window.memory

    def window_shape(self, bucket: int, rank: int) -> WindowShape:
        """Where what lies in the window that the device of ``rank``, with the same layers, has of
        ``bucket``.
        """
        if rank == self.rank:
            return self._shown[bucket].shape
        shape = self.shards.shape(bucket, rank)
        rounded = self.shards.rounded(bucket, rank, list(self.layers))
        return WindowShape.of(shape, shape.rounded(rounded))

"""The training state that a device holds, by bucket, and its layers.

Owns who keeps a tensor alive. A bucket is all parameters of one layer, or one tied parameter that
several layers use; layers hold no state of their own, so freeing a bucket frees everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from oobleckd.planner.plan import Layers
from oobleckd.worker import sums
from oobleckd.worker.models import Layer, ModelSpec
from oobleckd.worker.state import bucket_files
from oobleckd.worker.state.bucket_state import BucketState, StateShape
from oobleckd.worker.state.digest import digests
from oobleckd.worker.state.shard_memory import ShardMemory
from oobleckd.worker.state.shards import Shards


@dataclass(slots=True)
class Store:
    """Buckets and layers of one device. ``shards``: what of the model's buckets devices hold, and this one
    that of its ``rank``; ``memory``: where that lies, where it is not all of them.
    """

    spec: ModelSpec
    device: torch.device
    buckets: dict[int, BucketState] = field(default_factory=dict)
    layers: dict[int, Layer] = field(default_factory=dict)
    rank: int = 0
    shards: Shards = field(init=False)
    memory: ShardMemory | None = None
    _readers: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shards = Shards(self.spec, self.device)

    def read_by(self, settle: Callable[[], object]) -> None:
        """Another thread reads the state while training goes on: ``settle`` is called before it changes."""
        self._readers.append(settle)

    def settle(self) -> None:
        """The state is about to change in place: wait for those who read it, as each of them says."""
        readers, self._readers = self._readers, []
        for settle in readers:
            settle()

    def needed(self, layers: Layers) -> tuple[int, ...]:
        """Buckets that ``layers`` use, ascending."""
        return tuple(sorted({bucket for layer in layers.layers() for bucket in self.spec.buckets_of(layer)}))

    def fresh(self, bucket: int) -> BucketState:
        """Initial state of a bucket, on the store's device: a pure function of the job's seed and its
        parameters' names, so all holders begin with the same bits.
        """
        params = self.spec.init(bucket, self.device)
        mine = self.shard(bucket).of_keys(params)
        return BucketState.fresh(self.shape(bucket), mine, len(params))

    def shape(self, bucket: int) -> StateShape:
        """What the state of ``bucket`` here consists of."""
        return self.shards.shape(bucket, self.rank)

    def slicing(self, bucket: int) -> sums.Slicing:
        """How the parameters of ``bucket`` are cut into slices."""
        return self.shards.slicing(bucket)

    def shard(self, bucket: int) -> sums.Shard:
        """What of ``bucket`` is here."""
        return self.shards.shard(bucket, self.rank)

    def loaded(self, directory: Path, buckets: Iterable[int]) -> dict[int, BucketState]:
        """State of ``buckets`` from the checkpoint in ``directory``, on the store's device. Raises UserError,
        and DamagedCheckpoint where a file is not what the manifest says.
        """
        manifest = bucket_files.read_manifest(directory)
        return {bucket: self._loaded(directory, manifest, bucket) for bucket in buckets}

    def _loaded(self, directory: Path, manifest: bucket_files.Manifest, bucket: int) -> BucketState:
        whole = bucket_files.read_bucket(
            directory, manifest, self.spec.buckets[bucket], self.shards.whole_shape(bucket), self.device
        )
        return self.shards.cut(bucket, self.rank, whole)

    def digests(self, buckets: Collection[int]) -> dict[int, int]:
        """Bucket -> a 64-bit digest of its whole state, equal for all who hold the same bits (``digest``) and
        compute with copies of them that are right. On a GPU it waits once for all ``buckets``.
        """
        states = [self.buckets[bucket] for bucket in buckets]
        # Slots whole, and not key by key: calls of torch took longer than numbers. Gaps between keys are
        # zeros with everybody. (D-corruption-004)
        found = digests([(state.storages(), state.exponents, state.wrong_copies()) for state in states])
        return dict(zip(buckets, found, strict=True))

    def cut_for(self, num_shards: int) -> Shards:
        """What devices such as this one hold where so many have a stage."""
        return Shards(self.spec, self.device, num_shards)

    def divide(self, num_shards: int, rank: int) -> None:
        """From now on hold of every bucket the shard of ``rank``, of so many. Where that is another one than
        so far, nothing of what was here is.
        """
        if (num_shards, rank) != (self.shards.num_shards, self.rank):
            self.buckets, self.layers = {}, {}
            self.shards, self.rank = self.cut_for(num_shards), rank
            self.memory = ShardMemory(self.shards, rank) if num_shards > 1 else None

    def adopt(self, layers: Layers | None, incoming: dict[int, BucketState]) -> None:
        """Hold exactly ``layers``: take what came, free what is not needed, bind the layers."""
        self.buckets |= incoming
        needed = frozenset(self.needed(layers)) if layers else frozenset()
        self.buckets = {bucket: state for bucket, state in sorted(self.buckets.items()) if bucket in needed}
        kept = layers.layers() if layers else ()
        if self.memory is not None:
            self.memory.adopt(self.buckets, kept)
        else:
            for bucket, state in self.buckets.items():
                state.keep_rounded(self.shards.rounded(bucket, self.rank, kept))
        self.layers = {layer: self._bind(layer) for layer in kept}

    def _bind(self, layer: int) -> Layer:
        if self.memory is not None:
            return self.spec.layer(layer, self.memory.layers[layer].leaves, self.device)
        leaves, rounded = {}, self.spec.rounded(layer)
        for bucket in self.spec.buckets_of(layer):
            state = self.buckets[bucket]
            for position, key in enumerate(self.spec.buckets[bucket].keys):
                leaves[key] = state.rounded[position] if key in rounded else state.params[position]
        return self.spec.layer(layer, leaves, self.device)

    def uses(self, bucket: int) -> tuple[int, ...]:
        """The layers held here that use ``bucket``."""
        return tuple(layer for layer in self.spec.buckets[bucket].uses if layer in self.layers)

    def squeeze(self, buckets: Iterable[int]) -> None:
        """After an overflow: smaller scales for every key of ``buckets``."""
        for bucket in buckets:
            state = self.buckets[bucket]
            state.exponents = sums.smaller_exponents(state.exponents)

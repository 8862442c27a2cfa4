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
from oobleckd.worker.state.optimizer import parameters_of, state_shape


@dataclass(slots=True)
class Store:
    """Buckets and layers of one device."""

    spec: ModelSpec
    device: torch.device
    buckets: dict[int, BucketState] = field(default_factory=dict)
    layers: dict[int, Layer] = field(default_factory=dict)
    _readers: list[Callable[[], object]] = field(default_factory=list)
    _shapes: dict[int, StateShape] = field(default_factory=dict)
    _slicings: dict[int, sums.Slicing] = field(default_factory=dict)

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
        return BucketState.fresh(self.shape(bucket), self.spec.init(bucket, self.device))

    def shape(self, bucket: int) -> StateShape:
        """What the state of ``bucket`` consists of."""
        if bucket not in self._shapes:
            self._shapes[bucket] = state_shape(self.spec.job.optimizer, parameters_of(self.spec, [bucket]))
        return self._shapes[bucket]

    def slicing(self, bucket: int) -> sums.Slicing:
        """How the parameters of ``bucket`` are cut into slices."""
        if bucket not in self._slicings:
            self._slicings[bucket] = sums.slicing(self.spec.buckets[bucket].shapes, self.device)
        return self._slicings[bucket]

    def loaded(self, directory: Path, buckets: Iterable[int]) -> dict[int, BucketState]:
        """State of ``buckets`` from the checkpoint in ``directory``, on the store's device. Raises UserError,
        and DamagedCheckpoint where a file is not what the manifest says.
        """
        manifest = bucket_files.read_manifest(directory)
        return {
            bucket: bucket_files.read_bucket(
                directory, manifest, self.spec.buckets[bucket], self.shape(bucket), self.device
            )
            for bucket in buckets
        }

    def digests(self, buckets: Collection[int]) -> dict[int, int]:
        """Bucket -> a 64-bit digest of its whole state, equal for all who hold the same bits (``digest``) and
        compute with copies of them that are right. On a GPU it waits once for all ``buckets``.
        """
        states = [self.buckets[bucket] for bucket in buckets]
        # Slots whole, and not key by key: calls of torch took longer than numbers. Gaps between keys are
        # zeros with everybody. (D-corruption-004)
        found = digests([(state.storages(), state.exponents, state.wrong_copies()) for state in states])
        return dict(zip(buckets, found, strict=True))

    def adopt(self, layers: Layers | None, incoming: dict[int, BucketState]) -> None:
        """Hold exactly ``layers``: take what came, free what is not needed, bind the layers."""
        self.buckets |= incoming
        needed = frozenset(self.needed(layers)) if layers else frozenset()
        self.buckets = {bucket: state for bucket, state in sorted(self.buckets.items()) if bucket in needed}
        kept = layers.layers() if layers else ()
        for bucket, state in self.buckets.items():
            state.keep_rounded(self._rounded(bucket, kept))
        self.layers = {layer: self._bind(layer) for layer in kept}

    def _rounded(self, bucket: int, layers: Iterable[int]) -> list[int]:
        """Positions of the keys of ``bucket`` that one of ``layers`` computes with in bfloat16."""
        what = self.spec.buckets[bucket]
        rounded = {key for layer in set(layers) & set(what.uses) for key in self.spec.rounded(layer)}
        return [position for position, key in enumerate(what.keys) if key in rounded]

    def _bind(self, layer: int) -> Layer:
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

"""The training state that a device holds: weights, optimizer moments and scales, by bucket, and its layers.

Owns who keeps a tensor alive. A bucket is all parameters of one layer, or one tied parameter that
several layers use; layers hold no state of their own, so freeing a bucket frees everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from oobleckd.planner.plan import Layers
from oobleckd.worker import sums
from oobleckd.worker.models import Layer, ModelSpec
from oobleckd.worker.state import bucket_files
from oobleckd.worker.state.digest import digest

Saved = tuple[list[Tensor], tuple[int, ...]]
"""Copies of a bucket's tensors, and its exponents."""


@dataclass(slots=True)
class BucketState:
    """The training state of one bucket: by key its parameter, both AdamW moments and its fixed-point
    exponent.

    Parameters are leaves of autograd; they and the moments ``exp_avgs`` and ``exp_avg_sqs`` are float32, of
    the same shapes, on one device: 12 bytes a parameter. A sum of gradients holds
    ``g * 2**exponent`` (``sums``).
    """

    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    exponents: tuple[int, ...]

    @classmethod
    def fresh(cls, params: Sequence[Tensor]) -> BucketState:
        """State before the first update: ``params`` (float32) as leaves, moments of zeros, the first
        exponents.
        """
        leaves = [param.detach().requires_grad_() for param in params]
        return cls(
            leaves,
            [torch.zeros_like(param, requires_grad=False) for param in leaves],
            [torch.zeros_like(param, requires_grad=False) for param in leaves],
            (sums.START_EXPONENT,) * len(leaves),
        )

    def tensors(self) -> list[Tensor]:
        """What a copy of this bucket consists of, in wire order: all parameters, then all ``exp_avgs``, then
        all ``exp_avg_sqs``, detached and not copied.
        """
        return [param.detach() for param in self.params] + self.exp_avgs + self.exp_avg_sqs

    def on(self, device: torch.device) -> BucketState:
        """The state on ``device``: itself, where it is there."""
        if all(tensor.device == device for tensor in self.tensors()):
            return self
        return BucketState.received(
            [tensor.to(device, non_blocking=True) for tensor in self.tensors()], self.exponents
        )

    def save(self) -> Saved:
        """A copy of the state as it is, on its device: 12 bytes a parameter more."""
        return [tensor.clone() for tensor in self.tensors()], self.exponents

    @torch.no_grad()
    def restore(self, saved: Saved) -> None:
        """Be in the state ``saved`` again, in the same tensors."""
        for tensor, before in zip(self.tensors(), saved[0], strict=True):
            tensor.copy_(before)
        self.exponents = saved[1]

    @classmethod
    def received(cls, tensors: Sequence[Tensor], exponents: Sequence[int]) -> BucketState:
        """The inverse of ``tensors``: a state whose memory they are, three for each of ``exponents``."""
        count = len(tensors) // 3
        leaves = [tensor.requires_grad_() for tensor in tensors[:count]]
        return cls(leaves, list(tensors[count : 2 * count]), list(tensors[2 * count :]), tuple(exponents))


@dataclass(slots=True)
class Store:
    """Buckets and layers of one device."""

    spec: ModelSpec
    device: torch.device
    buckets: dict[int, BucketState] = field(default_factory=dict)
    layers: dict[int, Layer] = field(default_factory=dict)
    _readers: list[Callable[[], object]] = field(default_factory=list)

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
        return BucketState.fresh(self.spec.init(bucket, self.device))

    def loaded(self, directory: Path, buckets: Iterable[int]) -> dict[int, BucketState]:
        """State of ``buckets`` from the checkpoint in ``directory``, on the store's device. Raises UserError,
        and DamagedCheckpoint where a file is not what the manifest says.
        """
        manifest = bucket_files.read_manifest(directory)
        return {bucket: self._load(directory, manifest, bucket) for bucket in buckets}

    def _load(self, directory: Path, manifest: bucket_files.Manifest, bucket: int) -> BucketState:
        loaded = bucket_files.read_bucket(directory, manifest, self.spec.buckets[bucket], self.device)
        return BucketState.received([*loaded.params, *loaded.exp_avgs, *loaded.exp_avg_sqs], loaded.exponents)

    def digest(self, bucket: int) -> int:
        """A 64-bit digest of the bucket's whole state, equal for all who hold the same bits (``digest``)."""
        state = self.buckets[bucket]
        return digest(state.tensors(), state.exponents)

    def adopt(self, layers: Layers | None, incoming: dict[int, BucketState]) -> None:
        """Hold exactly ``layers``: take what came, free what is not needed, bind the layers."""
        self.buckets |= incoming
        needed = frozenset(self.needed(layers)) if layers else frozenset()
        self.buckets = {bucket: state for bucket, state in sorted(self.buckets.items()) if bucket in needed}
        kept = layers.layers() if layers else ()
        self.layers = {layer: self._bind(layer) for layer in kept}

    def _bind(self, layer: int) -> Layer:
        params = {
            key: param
            for bucket in self.spec.buckets_of(layer)
            for key, param in zip(self.spec.buckets[bucket].keys, self.buckets[bucket].params, strict=True)
        }
        return self.spec.layer(layer, params, self.device)

    def uses(self, bucket: int) -> tuple[int, ...]:
        """The layers held here that use ``bucket``."""
        return tuple(layer for layer in self.spec.buckets[bucket].uses if layer in self.layers)

    def squeeze(self, buckets: Iterable[int]) -> None:
        """After an overflow: smaller scales for every key of ``buckets``."""
        for bucket in buckets:
            state = self.buckets[bucket]
            state.exponents = sums.smaller_exponents(state.exponents)

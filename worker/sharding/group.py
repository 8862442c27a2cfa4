"""One device's part in its shard group: whose weights it may read, and what it sends them of gradients.

A device reads the windows of the others itself, so nobody has to take part: who computes another micro-batch,
or waits, keeps nobody waiting. What may be read when follows from rounds. Weights change where a round is
committed, for which the votes of all are needed, and who has voted computes nothing more in it; so nobody
reads what somebody updates. After it nobody computes before all of the group have said that they have updated
(``is_ready``), and where their windows are. Owns these messages ("W") and those with gradients ("D").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from oobleckd.planner.plan import Layout
from oobleckd.worker.messaging.messenger import Messenger
from oobleckd.worker.runtime.card_memory import is_refused
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.runtime.timing import DeviceTimer, Moment
from oobleckd.worker.sharding.copier import Copier, ThreadCopier, Wait
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.gathered import GatheredLayer
from oobleckd.worker.state.store import Store
from oobleckd.worker.state.window import Handle, OpenedWindow, opened
from oobleckd.worker.transport.mailbox import Key

UPDATED, GRADIENTS = "W", "D"
"""Kinds of tensor messages: a device has updated; its gradients of a layer and a micro-batch."""


class ShownBuckets(msgspec.Struct, frozen=True):
    """What travels with the word that a device has updated: bucket -> how its window is opened."""

    handles: dict[int, Handle]


class GroupCount(NamedTuple):
    """What a device got of its group, and gave: bytes of weights that it read of the others', and of
    gradients that it sent them; seconds in which it computed nothing, as weights were not here yet.
    """

    gathered_bytes: int = 0
    gradient_bytes: int = 0
    waited_s: float = 0.0


NOTHING_SHARED = GroupCount()


class Waited(NamedTuple):
    """A device had nothing to do but wait for the weights of ``layer``."""

    layer: int
    start: Moment
    stop: Moment


class Unopened(NamedTuple):
    """What a device of ``rank`` said after the update before ``round_``; ``meta``: its windows."""

    rank: int
    round_: int
    meta: bytes


class Sources(NamedTuple):
    """Of a layer's weights: where numbers go and where they come from, and bytes that others have of it."""

    pairs: Sequence[tuple[Tensor, Tensor]]
    num_bytes: int


@dataclass(slots=True)
class ShardGroup:
    """Of ``device``. ``others``: the rest of its group, by rank; nobody, where stages have one device.

    ``hear_gradients``: takes in what the others have computed of this one's shard. ``copier``, ``timer``: of
    the device. ``waits``: for weights, in this round. Since they were last counted: ``gathered_bytes``, that
    were read of the others', and ``gradient_bytes`` that were sent them.
    ``unopened``: who did not answer yet.
    """

    device: str
    store: Store
    messenger: Messenger
    others: dict[int, str] = field(default_factory=dict)
    epoch: int = 0
    hear_gradients: Callable[[], object] = lambda: None
    gathered_bytes: int = 0
    gradient_bytes: int = 0
    waits: list[Waited] = field(default_factory=list)
    unopened: dict[str, Unopened] = field(default_factory=dict)
    copier: Copier = field(default_factory=ThreadCopier)
    timer: DeviceTimer = field(default_factory=DeviceTimer)
    _ahead: tuple[GatheredLayer, Wait] | None = None
    _waited_s: float = 0.0
    _updated: dict[str, int] = field(default_factory=dict)
    _memory: dict[tuple[int, int], OpenedWindow] = field(default_factory=dict)
    _sources: dict[int, Sources] = field(default_factory=dict)

    def adopt(self, layout: Layout) -> None:
        """Be part of the group that ``layout`` has this device in."""
        group = layout.group(self.device)
        self.others = {rank: name for rank, name in enumerate(group) if name != self.device}
        self._forget_ahead()
        self.epoch = layout.epoch
        before, self._memory = self._memory, {}
        self._updated, self.unopened, self._sources = {}, {}, {}
        for window in before.values():
            window.close()
        self.messenger.purge(lambda key: key[0] == UPDATED and int(key[1]) < layout.epoch)

    # ------------------------------------------------------------------ who stands where

    def say(self, round_: int) -> None:
        """Say that this device has updated, and has the weights of ``round_``."""
        if not self.others:
            return
        # A hop that halted may have left a layer as it was before the update.
        self._forget_ahead()
        self.copier.settle()
        self._count_waits()
        assert self.store.memory is not None
        meta = msgspec.msgpack.encode(ShownBuckets(self.store.memory.handles))
        for peer in self.others.values():
            self.messenger.send(peer, (UPDATED, self.epoch, round_, self.device), [], meta)

    def hear(self, key: Key) -> bool:
        """A word of another one; False: it is of a layout to come."""
        epoch, round_, source = int(key[1]), int(key[2]), str(key[3])
        if epoch > self.epoch:
            return False
        message = self.messenger.take(key)
        assert message is not None
        if epoch < self.epoch or source not in self.others.values():
            return True
        rank = next(rank for rank, name in self.others.items() if name == source)
        if source in self._updated:
            self._updated[source] = max(round_, self._updated[source])
        else:
            self.unopened[source] = Unopened(rank, round_, message.meta)
            self._open(source)
        return True

    def open_late(self) -> bool:
        """Open the windows of those who did not answer when they were heard; whether there still are some.
        Waits a second for each.
        """
        for source in list(self.unopened):
            self._open(source)
        return bool(self.unopened)

    def _open(self, source: str) -> None:
        """Open the windows of ``source``, if it answers, or forget it, if it is dead, which this one will be
        told. Raises UserError where the system does not allow it.
        """
        rank, round_, meta = self.unopened[source]
        handles = msgspec.msgpack.decode(meta, type=ShownBuckets).handles
        try:
            found = {(rank, bucket): opened(handle, self.store.device) for bucket, handle in handles.items()}
        except TimeoutError:  # it is stopped, or slow
            return
        except FileNotFoundError:
            del self.unopened[source]
            return
        except OSError as error:
            if not is_refused(error):
                raise
            raise UserError(
                f"resources.devices_per_stage: {self.device} may not read the memory of {self.others[rank]}: "
                f"{error.strerror}",
                _to_mend(self.store.device),
            ) from error
        del self.unopened[source]
        self._memory |= found
        self._updated[source] = round_

    def is_ready(self, round_: int) -> bool:
        """Whether the weights of all are those of ``round_``."""
        return all(self._updated.get(name, -1) >= round_ for name in self.others.values())

    # ------------------------------------------------------------------ weights

    def weights(self, layer: int, following: int | None = None) -> AbstractContextManager[object]:
        """While it is entered ``layer`` has its weights. ``following``: the layer that will be asked for
        next, whose weights are gathered meanwhile.
        """
        memory = self.store.memory
        return nullcontext() if memory is None else self._with_weights(memory.layers, layer, following)

    @contextmanager
    def _with_weights(
        self, layers: Mapping[int, GatheredLayer], number: int, following: int | None
    ) -> Iterator[None]:
        layer, began = layers[number], self.timer.now()
        self._await(layer)
        self.waits.append(Waited(number, began, self.timer.now()))
        try:
            if following is not None:
                ahead = layers[following]
                self._ahead = ahead, self.copier.ahead(partial(self._gather, ahead))
            yield
        finally:
            self.copier.drop(layer.drop)

    def _await(self, layer: GatheredLayer) -> None:
        """Have the weights of ``layer``, whether they are under way or not."""
        under_way, self._ahead = self._ahead, None
        if under_way is not None:
            ahead, wait = under_way
            wait()
            self.gathered_bytes += self._of_layer(ahead.layer).num_bytes
            if ahead is layer:
                return
            self.copier.drop(ahead.drop)  # the hop that it was for has halted
        self.copier.now(partial(self._gather, layer))
        self.gathered_bytes += self._of_layer(layer.layer).num_bytes

    def _forget_ahead(self) -> None:
        """Whatever is under way, or here for who asks next, is not wanted any more."""
        under_way, self._ahead = self._ahead, None
        if under_way is not None:
            layer, wait = under_way
            wait()
            self.copier.drop(layer.drop)

    def _gather(self, layer: GatheredLayer) -> None:
        layer.take()
        with torch.no_grad():
            for into, numbers in self._of_layer(layer.layer).pairs:
                into.copy_(numbers)

    def _of_layer(self, layer: int) -> Sources:
        if layer not in self._sources:
            found = list(self._found(layer))
            others = sum(into.nbytes for rank, into, _ in found if rank != self.store.rank)
            self._sources[layer] = Sources([(into, place) for _, into, place in found], others)
        return self._sources[layer]

    def _found(self, layer: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        store, spec = self.store, self.store.spec
        assert store.memory is not None
        numbers = store.memory.layers[layer].numbers
        for bucket in spec.buckets_of(layer):
            for rank in range(store.shards.num_shards):
                storages = self._storages(bucket, rank)
                for part, (key, begin, end) in enumerate(store.shards.shard(bucket, rank).parts):
                    slot, into = numbers[bucket, key]
                    place = storages[slot][part]
                    yield rank, into[begin:end], place.view(-1)

    def _storages(self, bucket: int, rank: int) -> Mapping[str, Mapping[int, Tensor]]:
        """By slot and part the numbers of the device of ``rank``, detached."""
        memory = self.store.memory
        assert memory is not None
        shape = memory.window_shape(bucket, rank)
        storages = shape.storages(
            memory.own(bucket) if rank == self.store.rank else self._memory[rank, bucket].memory
        )
        return {name: slot.cut(storages[name]) for name, (_, slot) in shape.slots.items()}

    # ------------------------------------------------------------------ gradients

    def send(
        self,
        round_: int,
        layer: int,
        micro_batch: int,
        grads: Mapping[int, Sequence[Tensor]],
        told: Sequence[Tensor],
    ) -> None:
        """Send each of the others its part of the gradients of (micro-batch, layer): ``grads``, by bucket a
        tensor for each key, and what else is ``told`` of it.
        """
        key = (GRADIENTS, round_, layer, micro_batch, self.device)
        for rank, peer in self.others.items():
            mine = [
                part
                for bucket in grads
                for part in self.store.shards.shard(bucket, rank).of_keys(grads[bucket])
            ]
            tensors = [*(part.contiguous() for part in mine), *told]
            self.gradient_bytes += sum(tensor.nbytes for tensor in tensors)
            self.messenger.send(peer, key, tensors)

    def parts(self, grads: Mapping[int, Sequence[Tensor]]) -> dict[int, list[Tensor]]:
        """Of ``grads``, by bucket a tensor for each key, this device's part."""
        return {bucket: self.store.shard(bucket).of_keys(tensors) for bucket, tensors in grads.items()}

    def received(self, layer: int, tensors: Sequence[Tensor]) -> tuple[dict[int, list[Tensor]], list[Tensor]]:
        """The inverse of ``send``, for this device's part: by bucket, and what was told."""
        rest, found = iter(tensors), {}
        for bucket in self.store.spec.buckets_of(layer):
            found[bucket] = [next(rest) for _ in self.store.shard(bucket).parts]
        return found, list(rest)

    # ------------------------------------------------------------------ counts

    def take_count(self) -> GroupCount:
        """What there was since the last call. On a GPU it waits for what was waited for."""
        self._count_waits()
        count = GroupCount(self.gathered_bytes, self.gradient_bytes, self._waited_s)
        self.gathered_bytes, self.gradient_bytes, self._waited_s = 0, 0, 0.0
        return count

    def _count_waits(self) -> None:
        """Keep of ``waits`` how long they took."""
        waits, self.waits = self.waits, []
        self._waited_s += waited_s(waits, self.timer)

    # ------------------------------------------------------------------ whole states

    def whole(self, bucket: int) -> BucketState:
        """A copy of all of the state of ``bucket``, on the device."""
        store = self.store
        shape = store.shards.whole_shape(bucket)
        state = BucketState(shape, shape.zeros(store.device), store.buckets[bucket].exponents)
        for rank in range(store.shards.num_shards):
            store.shards.fill(bucket, rank, self._storages(bucket, rank), state)
        return state


def waited_s(waits: Iterable[Waited], timer: DeviceTimer) -> float:
    """How long all of ``waits`` took, by ``timer`` (s)."""
    return sum((timer.seconds(wait.stop) - timer.seconds(wait.start) for wait in waits), 0.0)


def _to_mend(device: torch.device) -> str:
    """What to do where ``device`` may not read the memory of another one of its node."""
    if device.type == "cuda":
        return "see in nvidia-smi topo -p2p r which GPUs can, or set resources.devices_per_stage to 1"
    return (
        "have all devices of a node run as one user who may open what his processes have in /proc, "
        "or set resources.devices_per_stage to 1"
    )

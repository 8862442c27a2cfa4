"""Training state of a simulated device: the worker's own store and sums over buckets that have no tensors.

The state of a bucket is three numbers in place of its exponents, which are saved, copied, restored and
written as those are: updates applied, times its scale was squeezed, and a *trail*, a digest of every update
since the beginning, so that two states that differ in one update, or in one that was applied twice, differ.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from oobleckd.planner.plan import Layers
from oobleckd.worker import sums
from oobleckd.worker.messaging.gather import Gathered
from oobleckd.worker.messaging.messenger import Messenger
from oobleckd.worker.round.reduce import ReadFigures, Reducer
from oobleckd.worker.round.weights import WeightsOf
from oobleckd.worker.round_machine.machine import RoundMachine
from oobleckd.worker.state.bucket_files import DamagedCheckpoint
from oobleckd.worker.state.bucket_state import BucketState, StateShape
from oobleckd.worker.state.optimizer import clip_scale
from oobleckd.worker.state.store import Store
from oobleckd.worker.sums.guard import SumsChanged

if TYPE_CHECKING:
    from tests.helpers.world import World

State = tuple[int, int, int]  # updates applied, squeezes, trail
FRESH: State = (0, 0, 0)
NOTHING = StateShape(())
CPU = torch.device("cpu")


def updated(state: State, step: int, scale: float) -> State:
    """After the update of ``step``, with gradients times ``scale``."""
    applied, squeezes, trail = state
    return applied + 1, squeezes, zlib.crc32(f"{trail} {step} {scale}".encode())


def trail_of(steps: int, world: World) -> int:
    """The trail of a run of ``steps`` without failures."""
    state = FRESH
    for step in range(steps):
        if step not in world.passed_over:
            norm = math.sqrt(sums.added(world.norm(bucket, step) for bucket in range(len(world.buckets))))
            state = updated(state, step, clip_scale(norm, world.clip_norm))
    return state[2]


class SimSlicing(NamedTuple):
    """Of a bucket that is cut into so many slices."""

    count: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (1 << 20,) * self.count

    def cut(self, _tensors: Sequence[Any], _slices: int) -> list[Any]:
        return []

    def chunks(self, slices: int) -> tuple[int, ...]:
        return tuple(sums.members(slices))


@dataclass(frozen=True)
class SimBucketSpec:
    index: int
    uses: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    keys: tuple[str, ...] = ()


class SimSpec:
    """What the engine asks of a model."""

    def __init__(self, world: World) -> None:
        self.num_layers = world.num_layers
        self.notes = world.folder_notes
        self.buckets = tuple(SimBucketSpec(index, uses) for index, uses in enumerate(world.buckets))
        self._of_layer = [
            tuple(b for b, uses in enumerate(world.buckets) if layer in uses)
            for layer in range(world.num_layers)
        ]

    def buckets_of(self, layer: int) -> tuple[int, ...]:
        return self._of_layer[layer]

    def rounded(self, layer: int) -> frozenset[str]:
        return frozenset()

    def num_experts(self, layer: int) -> int:
        return 0

    def num_told(self, layer: int) -> int:
        return int(layer == self.num_layers - 1)


class SimStore(Store):
    """Buckets without tensors; a layer is its number."""

    def __init__(self, world: World) -> None:
        super().__init__(SimSpec(world), CPU)  # type: ignore[arg-type]
        self.flipped: set[int] = set()  # buckets with a wrong bit
        self.misadded: set[int] = set()  # buckets whose next total comes out wrong here
        self.world = world
        self._needs: dict[Layers, tuple[int, ...]] = {}
        self.shards: Any = self.cut_for(1)

    def cut_for(self, num_shards: int) -> Any:
        from tests.helpers.simshards import SimShards

        return SimShards(num_shards, self.world.num_slices, len(self.world.buckets))

    def divide(self, num_shards: int, rank: int) -> None:
        from tests.helpers.simshards import SimMemory

        if (num_shards, rank) != (self.shards.num_shards, self.rank):
            self.buckets, self.layers = {}, {}
            self.shards, self.rank = self.cut_for(num_shards), rank
            memory: Any = SimMemory() if num_shards > 1 else None
            self.memory = memory

    def shard(self, bucket: int) -> Any:
        from tests.helpers.simshards import SimShard

        return SimShard(self.shards.of(bucket)[self.rank])

    def shape(self, bucket: int) -> StateShape:
        return NOTHING

    def slicing(self, bucket: int) -> Any:
        return SimSlicing(self.world.num_slices)

    def fresh(self, bucket: int) -> BucketState:
        return BucketState(NOTHING, {}, FRESH)

    def loaded(self, directory: Any, buckets: Sequence[int]) -> dict[int, BucketState]:
        whole = self.world.complete.get(str(directory))
        if whole is None or self.world.damaged.get(str(directory)) in buckets:
            raise DamagedCheckpoint(f"{directory} is damaged")
        return {bucket: BucketState(NOTHING, {}, whole[bucket]) for bucket in buckets}

    def digests(self, buckets: Collection[int]) -> dict[int, int]:
        found = super().digests(buckets)
        return {bucket: value ^ (bucket in self.flipped) for bucket, value in found.items()}

    def _bind(self, layer: int) -> Any:
        return layer

    def squeeze(self, buckets: Any) -> None:
        for bucket in buckets:
            applied, squeezes, trail = self.buckets[bucket].exponents
            self.buckets[bucket].exponents = (applied, squeezes + 1, trail)

    def weights(self, layers: Layers | None = None) -> tuple[int, int]:
        """(updates applied, trail): the same in every bucket, else some were updated and some not."""
        wanted = self._needed(layers) if layers is not None else self.buckets
        found = {self.buckets[bucket].exponents[::2] for bucket in wanted}
        assert len(found) == 1, f"some buckets were updated, others not: {found}"
        return found.pop()

    def _needed(self, layers: Layers) -> tuple[int, ...]:
        """Kept: asked with every layer that is computed."""
        found = self._needs.get(layers)
        if found is None:
            found = self._needs[layers] = self.needed(layers)
        return found


@dataclass(frozen=True)
class Gradient:
    """Of one micro-batch for one bucket: what may be wrong with it."""

    nan: bool
    overflow: bool


class SimSum:
    """In place of ``oobleckd.worker.sums.Sum``."""

    flipped = False
    flags = (False, False)

    @property
    def tensors(self) -> list[Any]:
        if self.flipped:
            raise SumsChanged
        return []

    def zero_(self) -> None:
        self.flags = (False, False)

    def copy(self) -> list[Any]:
        return []

    def merge(self, others: Sequence[Any]) -> None:
        pass

    def add(self, grads: Sequence[Gradient], _exponents: object, _count: int) -> None:
        nan, overflow = self.flags
        self.flags = nan or any(grad.nan for grad in grads), overflow or any(grad.overflow for grad in grads)


@dataclass(frozen=True)
class Carried:
    """In place of a small tensor: ``what`` it says."""

    what: Any
    device: torch.device = CPU
    nbytes: int = 1


class Said(NamedTuple):
    """What is told of all sums of a bucket together."""

    nan: bool
    overflow: bool
    losses: dict[int, float]

    def and_of(self, other: Said) -> Said:
        """This, and what is said of other shards."""
        return Said(self.nan or other.nan, self.overflow or other.overflow, self.losses | other.losses)


class SimMeans:
    """In place of ``Means``: ``norms``: of each slice that is here, a number that stands for it; ``here``: of
    which means are, and not their figures alone. ``sharded``: each shard has marks of its own.
    """

    marks = torch.zeros(sums.NUM_MARKS)
    broken = ()

    def __init__(self, slicing: SimSlicing, *, sharded: bool) -> None:
        self.slicing, self.grads, self.sharded = slicing, list[Any](), sharded
        self.norms: dict[int, float] = {}
        self.here = 0
        self.said = Said(nan=False, overflow=False, losses={})

    def note(self, slices: int, norm: float, said: Said) -> None:
        self.norms |= dict.fromkeys(sums.members(slices), norm)
        self.here |= slices
        self._say(said)

    def _say(self, said: Said) -> None:
        self.said = self.said.and_of(said) if self.sharded else said

    def seal(self, slices: int) -> None:
        pass

    def take(self, slices: int, tensors: Sequence[Any]) -> None:
        (carried,) = tensors
        norms, said, whole = carried.what
        self.norms |= norms
        self.here |= slices if whole else 0
        self._say(said)

    def given(self, slices: int) -> list[Any]:
        assert not slices & ~self.here, "means are given that are not here"
        return [Carried((self._of(slices), self.said, True))]

    def told(self, slices: int) -> list[Any]:
        return [Carried((self._of(slices), self.said, False))]

    def _of(self, slices: int) -> dict[int, float]:
        return {number: self.norms[number] for number in sums.members(slices)}

    def read(self, exponents: tuple[int, ...]) -> ReadFigures:
        """What is known of all slices; a wrong one shows in the norm."""
        nan, overflow, losses = self.said
        norms = (0.0,) if nan or overflow else (max(self.norms.values()),)
        figures = sums.BucketFigures(nan, overflow, changed=False, norms=norms, exponents=exponents)
        return ReadFigures(figures, losses, squares=[self.norms[number] for number in sorted(self.norms)])


class SimReducer(Reducer):
    """The worker's reducer; norms are the world's."""

    store: SimStore

    def __init__(
        self,
        world: World,
        machine: RoundMachine,
        store: SimStore,
        messenger: Messenger,
        weights_of: WeightsOf,
        *,
        exact: bool,
    ) -> None:
        super().__init__(machine.exchange, store, messenger, weights_of, exact=exact)
        self.world, self.machine = world, machine

    def _sum(self, bucket: int) -> Any:
        return SimSum()

    def _marks(self, bucket: int, uses: Sequence[int], losses: Sequence[Any]) -> Any:
        flags = [self.parts[bucket, use].flags for use in uses]
        nan = bucket in self.nan or any(nan for nan, _ in flags)
        overflow = bucket in self.overflow or any(overflow for _, overflow in flags)
        return Carried((nan, overflow, *losses))

    def _means_of(self, bucket: int) -> Any:
        sharded = self.store.shards.num_shards > 1
        made: Any = SimMeans(self.store.slicing(bucket), sharded=sharded)
        return self.means.setdefault(bucket, made)

    def _make(self, bucket: int, gathered: Gathered) -> None:
        carried: Mapping[str, Any] = gathered.beside
        beside = {source: each.what for source, each in carried.items()}
        apart = self.exchange.device in self.world.rounds_apart
        wrong = 1e-9 if bucket in self.store.misadded or apart else 0.0
        self.store.misadded.discard(bucket)
        norm = self.world.norm(bucket, self.machine.counters.step) + wrong
        self._means_of(bucket).note(self.exchange.made_here(bucket), norm, self._said(bucket, beside))

    def _said(self, bucket: int, beside: Mapping[str, Any]) -> Said:
        head, heard = self.store.spec.num_layers - 1, self.exchange.heard[bucket]
        nan, overflow = (any(marks[which] for marks in beside.values()) for which in (0, 1))
        losses: dict[int, float] = {}
        for source, (_, _, *of_source) in beside.items():
            losses |= zip(heard[source].ledger.get(head, ()), of_source, strict=True)
        return Said(nan, overflow, losses)

    def _settle(self, bucket: int) -> None:
        super()._settle(bucket)
        if bucket in self.reduced and not self.evaluates:
            means: Any = self.means[bucket]
            self.reduced[bucket].read = means.read(self.store.buckets[bucket].exponents)

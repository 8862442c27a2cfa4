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
from typing import TYPE_CHECKING, Any

import torch

from oobleckd.planner.plan import Layers
from oobleckd.worker import sums
from oobleckd.worker.round.gather import Gathered
from oobleckd.worker.round.messenger import Messenger
from oobleckd.worker.round.reduce import ReadFigures, Reduced, Reducer
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


@dataclass(frozen=True)
class SimBucketSpec:
    uses: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    keys: tuple[str, ...] = ()


class SimSpec:
    """What the engine asks of a model."""

    def __init__(self, world: World) -> None:
        self.num_layers = world.num_layers
        self.notes = world.folder_notes
        self.buckets = tuple(SimBucketSpec(uses) for uses in world.buckets)
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

    def shape(self, bucket: int) -> StateShape:
        return NOTHING

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

    def _finish(self, bucket: int, gathered: Gathered) -> Reduced:
        if self.evaluates:
            return super()._finish(bucket, gathered)
        carried: Mapping[str, Any] = gathered.beside
        beside = {source: each.what for source, each in carried.items()}
        if bucket in self.exchange.donors:
            (told,) = beside.values()
        else:
            told = self._joined(bucket, beside)
        figures: Any = Carried(told)
        return Reduced([], figures, told)

    def _joined(self, bucket: int, beside: Mapping[str, Any]) -> ReadFigures:
        head, heard = self.store.spec.num_layers - 1, self.exchange.heard[bucket]
        nan, overflow = (any(marks[which] for marks in beside.values()) for which in (0, 1))
        losses: dict[int, float] = {}
        for source, (_, _, *of_source) in beside.items():
            losses |= zip(heard[source].ledger.get(head, ()), of_source, strict=True)
        apart = self.exchange.device in self.world.rounds_apart
        wrong = 1e-9 if bucket in self.store.misadded or apart else 0.0
        self.store.misadded.discard(bucket)
        bad = nan or overflow
        norms = (0.0,) if bad else (self.world.norm(bucket, self.machine.counters.step) + wrong,)
        exponents = self.store.buckets[bucket].exponents
        return ReadFigures(
            sums.BucketFigures(nan, overflow, changed=False, norms=norms, exponents=exponents), losses
        )

"""The training state of one bucket: for each slot one flat storage, with views of it by key.

A *slot* is a kind of number that lives as long as a parameter does: ``param`` itself, and what the optimizer
keeps of it (``exp_avg`` and ``exp_avg_sq`` of AdamW). Owns where everything lies, and that nobody outside
need know which slots there are: copies, digests, files and messages go through all of them in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oobleckd.worker import sums
from oobleckd.worker.optimizers.plan import UpdateBatch

PARAM = "param"
ROUNDED = "rounded"
"""Copies of parameters in bfloat16, which are no part of the state."""
# At the next free number a key would be computed with by another kernel than in memory of its own: cuBLASLt
# looks at pointers up to 256 bytes. (D-training-007)
ALIGNED_BYTES = 256
"""Keys begin at multiples of it: so far libraries look at pointers when they choose a kernel, so a key in the
middle of a storage is computed with as one in memory of its own.
"""

_PIECE = 1 << 24
"""Numbers: what is compared at once, so that little memory is needed for it."""

Saved = tuple[list[Tensor], tuple[int, ...]]
"""Copies of a bucket's numbers by slot and key, and its exponents."""


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """Where a key lies in a slot: ``key`` is its position in the bucket, ``begin`` its first number."""

    key: int
    begin: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Behind its last number."""
        return self.begin + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SlotShape:
    """One slot of a bucket. ``length``: of its storage in numbers, with the gaps between keys, which are
    zero. A key that has no such slot has no place in it.
    """

    name: str
    dtype: torch.dtype
    places: tuple[KeyPlace, ...]
    length: int

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shapes: Mapping[int, tuple[int, ...]]) -> SlotShape:
        """Keys of these ``shapes``, by position, one behind the other."""
        step = ALIGNED_BYTES // dtype.itemsize
        places: list[KeyPlace] = []
        begin = 0
        for key, shape in shapes.items():
            places.append(KeyPlace(key, begin, shape))
            begin += -(-math.prod(shape) // step) * step
        return cls(name, dtype, tuple(places), begin)

    def cut(self, flat: Tensor) -> dict[int, Tensor]:
        """Views of ``flat``, a storage of this slot, by key. Detached: each can be a leaf of autograd."""
        return {place.key: flat[place.begin : place.end].view(place.shape).detach() for place in self.places}


@dataclass(frozen=True, slots=True)
class StateShape:
    """What the state of a bucket consists of, and how it is updated: a pure function of the job, the same on
    every device. Parameters come first. ``frozen``: keys that are not updated, by position.
    """

    slots: tuple[SlotShape, ...]
    batches: tuple[UpdateBatch, ...] = ()
    frozen: frozenset[int] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Of all numbers, without the gaps."""
        return sum(
            math.prod(place.shape) * slot.dtype.itemsize for slot in self.slots for place in slot.places
        )

    @property
    def num_params(self) -> int:
        """Numbers of the parameters."""
        return sum(math.prod(place.shape) for slot in self.slots[:1] for place in slot.places)

    def rounded(self, keys: Iterable[int]) -> SlotShape:
        """Of copies in bfloat16 of the parameters ``keys``, by position."""
        shapes = {place.key: place.shape for slot in self.slots[:1] for place in slot.places}
        return SlotShape.of(ROUNDED, torch.bfloat16, {key: shapes[key] for key in sorted(keys)})

    def zeros(self, device: torch.device) -> dict[str, Tensor]:
        """Storages by slot."""
        return {slot.name: torch.zeros(slot.length, dtype=slot.dtype, device=device) for slot in self.slots}


@dataclass(slots=True)
class BucketState:
    """The training state of one bucket: ``flats``, a storage for each slot of ``shape``, all on one device,
    and by key its fixed-point exponent: a sum of gradients holds ``g * 2**exponent`` (``sums``).

    Parameters are float32 and leaves of autograd; a view is changed with its storage, and the other way
    round.

    Some may have a copy in bfloat16 beside them, a leaf too: what linear layers compute with under autocast.
    It is no part of the state: no copy, message or file has it. It is made anew whenever the state changes
    (``update_``, ``restore``).
    """

    shape: StateShape
    flats: dict[str, Tensor]
    exponents: tuple[int, ...]
    _views: dict[str, dict[int, Tensor]] = field(init=False)
    _rounded: dict[int, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._views = {}
        for slot in self.shape.slots:
            flat = self.flats[slot.name]
            assert (flat.dtype, tuple(flat.shape)) == (slot.dtype, (slot.length,)), slot.name
            self._views[slot.name] = slot.cut(flat)
        for param in self.params:
            param.requires_grad_()

    @classmethod
    def fresh(cls, shape: StateShape, params: Sequence[Tensor], num_keys: int | None = None) -> BucketState:
        """State before the first update, where ``params`` (float32, in order) are, with copies of them; all
        else is zero. ``num_keys``: of the bucket, where this is a shard of it.
        """
        device = params[0].device if params else torch.device("cpu")
        exponents = (sums.START_EXPONENT,) * (len(params) if num_keys is None else num_keys)
        state = cls(shape, shape.zeros(device), exponents)
        with torch.no_grad():
            for mine, param in zip(state.params, params, strict=True):
                mine.copy_(param)
        return state

    @classmethod
    def received(cls, shape: StateShape, storages: Sequence[Tensor], exponents: Sequence[int]) -> BucketState:
        """The inverse of ``storages``: a state whose memory they are."""
        named = {slot.name: flat for slot, flat in zip(shape.slots, storages, strict=True)}
        return cls(shape, named, tuple(exponents))

    @property
    def params(self) -> list[Tensor]:
        """The leaves, in key order."""
        return list(self._views.get(PARAM, {}).values())

    def update_(self, grads: Sequence[Tensor], *, applied: int, lr: float, scale: float = 1.0) -> None:
        """Make one update with ``scale`` times ``grads``, in place: they are multiplied in place, too, but
        for those of frozen keys.

        ``grads``: float32, a tensor for each key, mean gradients; ``applied`` updates came before it, and
        ``lr`` is that of the step.
        """
        params = self.params
        for batch in self.shape.batches:
            batch.update_(params, grads, self._views, self._rounded, applied=applied, lr=lr, scale=scale)

    @property
    def rounded(self) -> Mapping[int, Tensor]:
        """By the key's position: the copy in bfloat16 of a parameter, of those that have one."""
        return self._rounded

    def keep_rounded(self, keys: Iterable[int]) -> None:
        """From now on have a copy in bfloat16 of the parameters ``keys``, by position, and of no others: two
        bytes a number more.
        """
        # A copy a step in place of one a micro-batch in flight, and no casts: autocast rounds each use alike,
        # and float32 of a bfloat16 gradient is exact. (D-models-010)
        wanted = dict.fromkeys(sorted(keys))
        if self._rounded.keys() != wanted.keys():
            slot = self.shape.rounded(wanted)
            device = self.flats[PARAM].device if wanted else None
            self._round_into(slot, torch.empty(slot.length, dtype=slot.dtype, device=device))
        self._round()

    def _round_into(self, slot: SlotShape, flat: Tensor) -> None:
        self._rounded = slot.cut(flat)
        for leaf in self._rounded.values():
            leaf.requires_grad_()

    @torch.no_grad()
    def move(self, storages: Mapping[str, Tensor], rounded: SlotShape) -> None:
        """From now on lie in ``storages``, by slot, and have the copies ``rounded`` in the one of that
        name.
        """
        for slot in self.shape.slots:
            self.flats[slot.name] = storages[slot.name].copy_(self.flats[slot.name])
            self._views[slot.name] = slot.cut(storages[slot.name])
        for param in self.params:
            param.requires_grad_()
        self._round_into(rounded, storages[rounded.name])
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        if self._rounded:
            params = self.params
            torch._foreach_copy_(list(self._rounded.values()), [params[key] for key in self._rounded])

    @torch.no_grad()
    def wrong_copies(self) -> Tensor | None:
        """In how many places the copies in bfloat16 are not what the parameters round to, an int64 scalar on
        their device; None where there are no copies.
        """
        params = self.params
        wrong = [
            piece.bfloat16().view(torch.int16).bitwise_xor_(copy.view(torch.int16)).count_nonzero()
            for key, leaf in self._rounded.items()
            for piece, copy in zip(_pieces(params[key]), _pieces(leaf), strict=True)
        ]
        return torch.stack(wrong).sum() if wrong else None

    def views(self, slot: str) -> Mapping[int, Tensor]:
        """Of ``slot``, by the key's position: those that have it."""
        return self._views.get(slot, {})

    def storages(self) -> list[Tensor]:
        """What a copy of this bucket consists of, in wire order: a flat tensor for each slot, not copied."""
        return [self.flats[slot.name] for slot in self.shape.slots]

    def tensors(self) -> list[Tensor]:
        """The same by slot and key, without the gaps, detached."""
        return [view.detach() for slot in self.shape.slots for view in self._views[slot.name].values()]

    def named(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """``slot/key`` -> its numbers, detached; ``keys``: names of the bucket's."""
        return {
            f"{slot.name}/{keys[key]}": view.detach()
            for slot in self.shape.slots
            for key, view in self._views[slot.name].items()
        }

    @property
    def num_bytes(self) -> int:
        """Of all numbers."""
        return self.shape.num_bytes

    def copied(self, copy: Callable[[Tensor], Tensor]) -> BucketState:
        """The state with a ``copy`` of each storage."""
        return BucketState(
            self.shape, {name: copy(flat) for name, flat in self.flats.items()}, self.exponents
        )

    def on(self, device: torch.device) -> BucketState:
        """The state on ``device``: itself, where it is there."""
        if all(flat.device == device for flat in self.storages()):
            return self
        return self.copied(lambda flat: flat.to(device, non_blocking=True))

    def save(self) -> Saved:
        """A copy of the state as it is, on its device: as many bytes more."""
        # By key, each step anew: the C library has pieces of that size from the step before, and would ask
        # the system for whole storages, which took 40 ms in place of 29 for 85 MB.
        return [tensor.clone() for tensor in self.tensors()], self.exponents

    @torch.no_grad()
    def restore(self, saved: Saved) -> None:
        """Be in the state ``saved`` again, in the same storages."""
        for tensor, before in zip(self.tensors(), saved[0], strict=True):
            tensor.copy_(before)
        self._round()
        self.exponents = saved[1]


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.view(-1), _PIECE)

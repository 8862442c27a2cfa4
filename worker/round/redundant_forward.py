"""Bounds and keeps what redundant forward passes hold (Bamboo, NSDI'23, section 5).

A device runs a redundant forward pass while it has nothing else to do, and keeps what autograd saves until
the round is committed: if the other device dies, the backward pass alone is left to do. Owns the memory: what
goes in until the pass runs, and the tensors saved, which on a GPU lie in pinned memory of the host. What does
not fit is not run ahead. Does not own which pass is next (``tasks``), nor the graphs themselves (``passes``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from oobleckd.planner.plan import Range
from oobleckd.worker.round_machine.tasks import Task

_Packed = Tensor | tuple[Tensor, torch.device]
"""A saved tensor, or its copy in the host's memory and where it is to be again."""


@dataclass(slots=True)
class RedundantForwards:
    """What redundant forward passes of one round hold. ``limit_bytes`` 0: nothing is run ahead.

    ``known``: layers -> bytes that one pass through them took, kept from round to round. ``held_bytes``: of
    saved tensors, and of what is set aside for passes whose input is here.
    """

    limit_bytes: int
    known: dict[Range, int] = field(default_factory=dict)
    held_bytes: int = 0
    _inputs: dict[Task, Tensor] = field(default_factory=dict)
    _aside: dict[Task, int] = field(default_factory=dict)
    _saved: dict[Task, int] = field(default_factory=dict)
    _counted: dict[Task, set[int]] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether what is held is within the bound."""
        return self.held_bytes <= self.limit_bytes

    def expect(self, task: Task, x: Tensor) -> bool:
        """``x`` (batch, sequence, hidden) goes into ``task``, which is to be run later: set bytes aside
        for it, as many as such a pass took before. False: there is no room.
        """
        needed = self.known.get(task.layers, x.nbytes)
        if self.held_bytes + needed > self.limit_bytes:
            return False
        self.held_bytes += needed
        self._aside[task], self._inputs[task] = needed, x
        return True

    def begins(self, task: Task) -> bool:
        """Whether there is room to run ``task`` now; if not it is forgotten."""
        self.held_bytes -= self._aside.pop(task, 0)
        # The plan counts so much for passes run ahead, or the successor's activations in flight if those
        # are more: that is what makes every single loss fit. (D-policies-009)
        if self.held_bytes + self.known.get(task.layers, 0) > self.limit_bytes:
            self.forget(task)
            return False
        self._saved[task], self._counted[task] = 0, set()
        return True

    def taken(self, task: Task) -> Tensor | None:
        """Take what goes into ``task``; None for the first hop, which needs the micro-batch alone."""
        return self._inputs.pop(task, None)

    def measured(self, task: Task) -> None:
        """Note the bytes that ``task`` took: such a pass is taken to need as many."""
        self.known[task.layers] = self._saved[task]
        self._counted.pop(task, None)

    def forget(self, task: Task) -> None:
        """Drop what is held of ``task``, which nobody wants any more."""
        self.held_bytes -= self._aside.pop(task, 0) + self._saved.pop(task, 0)
        self._inputs.pop(task, None)
        self._counted.pop(task, None)

    def freeze(self, micro_batches: Collection[int]) -> None:
        """What is wanted of ``micro_batches`` belongs to this device's own tasks from now on."""
        for task in [*self._aside, *self._saved]:
            if task.route.micro_batch in micro_batches:
                self.forget(task)

    def clear(self) -> None:
        """Drop everything: the round is over, or all is reduced."""
        self._inputs, self._aside, self._saved, self._counted = {}, {}, {}, {}
        self.held_bytes = 0

    def hold(self, task: Task, tensor: Tensor) -> None:
        """``tensor`` (batch, sequence, hidden) goes into a block of ``task`` that is computed again, and is
        held until then. On a GPU it stays there, where the plan counts it.
        """
        counted = self._counted.setdefault(task, set())
        if tensor.is_cuda or _address(tensor) in counted:
            return
        counted.add(_address(tensor))
        self._saved[task] = self._saved.get(task, 0) + tensor.nbytes
        self.held_bytes += tensor.nbytes

    @contextmanager
    def saving(
        self, task: Task, into: Tensor | None, params: Collection[Tensor], shared: Collection[Tensor] = ()
    ) -> Iterator[None]:
        """While a layer of ``task`` computes with ``params``, count the bytes that autograd saves; beside a
        GPU move them to pinned memory of the host. ``shared``: what other layers of the task save too, as
        long as it computes; that is counted once.

        What goes ``into`` the layer stays on a GPU: the layer's graph needs it there anyway. So does what is
        ``shared``, which every layer would have brought back for itself.
        """
        counted, of_all = self._counted.setdefault(task, set()), {_address(tensor) for tensor in shared}
        on_gpu = {_address(tensor) for tensor in (into, *shared) if tensor is not None and tensor.is_cuda}
        saved = _Saved({_address(tensor) for tensor in params} | on_gpu | counted)
        try:
            with saved_tensors_hooks(saved.pack, _unpacked):
                yield
        finally:
            self._saved[task] = self._saved.get(task, 0) + saved.num_bytes
            self.held_bytes += saved.num_bytes
            counted |= saved.addresses & of_all
            saved.forget()


class _Saved:
    """Counts, and beside a GPU moves, what autograd saves in one layer; storages of ``stays`` are not its
    own.
    """

    def __init__(self, stays: set[int]) -> None:
        self.num_bytes = 0
        self._stays = stays
        # Tensors are held on to until the layer is computed: an address means nothing once it is free.
        self._seen: dict[int, Tensor] = {}
        self._moved: dict[tuple[int, ...], Tensor] = {}

    def pack(self, tensor: Tensor) -> _Packed:
        """In place of ``tensor``."""
        where = _address(tensor)
        if where in self._stays:
            return tensor
        if not tensor.is_cuda:
            if where not in self._seen:
                self._seen[where] = tensor
                self.num_bytes += tensor.untyped_storage().nbytes()
            return tensor
        view = (where, tensor.storage_offset(), *tensor.shape, *tensor.stride())
        if view not in self._moved:
            self._seen[where], self._moved[view] = tensor, _to_host(tensor)
            self.num_bytes += tensor.nbytes
        return self._moved[view], tensor.device

    @property
    def addresses(self) -> set[int]:
        """Of all that was counted."""
        return set(self._seen)

    def forget(self) -> None:
        """Let go of the tensors: the layer is computed, and its graph holds on to this object."""
        self._seen.clear()
        self._moved.clear()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _to_host(tensor: Tensor) -> Tensor:
    # With the strides that it has: a kernel may add up in another order where they differ.
    there = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def _unpacked(packed: _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    there, device = packed
    return there.to(device, non_blocking=True)

"""The mean gradients of one bucket, as they come: slice by slice, made here or given by others.

They lie in one tensor a key, which the update reads, and beside them are what the host needs to know of them.
Owns the form in which means travel: a flat tensor for each range of the slices that are given, their figures
(``sums.finish``), and what is known of the sums that they were made of (``marks``). Does not own who makes or
gives which (``round_machine.exchange``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oobleckd.worker import sums
from oobleckd.worker.sums.guard import bits_of


class Means:
    """Of the ``shard`` of a bucket on ``device``; of what others hold of it the figures alone.

    ``grads``: by part, float32 in its shape; what is not here yet is anything. ``beside``: of all sums
    together, their marks and what was told of them (``marks.added``), float64, on the device; None before
    the first means are here.
    """

    def __init__(self, shard: sums.Shard, device: torch.device, *, exact: bool) -> None:
        self.shard, self.slicing = shard, shard.slicing
        self.grads = [torch.empty(shape, dtype=torch.float32, device=device) for shape in shard.shapes]
        self.beside: Tensor | None = None
        rows, chunks = sums.num_rows(exact=exact), len(self.slicing.chunks(self.slicing.all))
        self._sealed: dict[int, Tensor] = {}
        self._figures = torch.zeros((rows, chunks), dtype=torch.float64, device=device)

    def make(self, slices: int, finish: Callable[[Sequence[Tensor]], Tensor], beside: Tensor) -> None:
        """``finish`` puts the means of the ranges of ``slices`` into what it is given, and has their
        figures.
        """
        self._note(slices, finish(self.shard.cut(self.grads, slices)), beside)

    def take(self, slices: int, tensors: Sequence[Tensor]) -> None:
        """Means that were given, or of slices that are not of this shard what is told of them. Raises
        RuntimeError or ValueError where they are of other shapes.
        """
        *means, figures, beside = tensors
        for into, mean in zip(self.shard.cut(self.grads, slices), means, strict=True):
            into.copy_(mean)
        self._note(slices, figures, beside)

    def seal(self, slices: int) -> None:
        """What is here of ``slices`` is given to others: from now on it must not change."""
        self._sealed[slices] = self._bits(slices)

    @property
    def broken(self) -> list[Tensor]:
        """Of everything sealed whether it has changed since: bools on the device, for which nobody waits."""
        return [sealed != self._bits(slices) for slices, sealed in self._sealed.items()]

    def _bits(self, slices: int) -> Tensor:
        return torch.stack([bits_of(part) for part in self.shard.cut(self.grads, slices)]).sum()

    def given(self, slices: int) -> list[Tensor]:
        """What is sent of ``slices``, which are here: views, where they lie."""
        return [*self.shard.cut(self.grads, slices), *self.told(slices)]

    def told(self, slices: int) -> list[Tensor]:
        """What is sent of ``slices`` to those who hold others."""
        assert self.beside is not None, "means that are here came with what is told of them"
        return [self._of(slices), self.beside]

    @property
    def marks(self) -> Tensor:
        """Of all sums together (``Sum.marks``), on the device."""
        assert self.beside is not None
        return self.beside[: sums.NUM_MARKS]

    @property
    def num_told(self) -> int:
        """How many numbers are told beside the marks."""
        assert self.beside is not None
        return self.beside.numel() - sums.NUM_MARKS

    @property
    def figures(self) -> Tensor:
        """Float64, on the device: what is ``beside``, and behind it the figures of all chunks, row by row."""
        assert self.beside is not None
        return torch.cat((self.beside, self._figures.view(-1)))

    def _note(self, slices: int, figures: Tensor, beside: Tensor) -> None:
        if self.beside is None or self.shard.is_whole:
            self.beside = beside
        else:
            # Of each shard its own marks: a NaN may be in one of them alone. The rest is the same.
            marks = self.beside[: sums.NUM_MARKS].maximum(beside[: sums.NUM_MARKS])
            self.beside = torch.cat((marks, beside[sums.NUM_MARKS :]))
        if slices == self.slicing.all:
            self._figures = figures
        elif chunks := self.slicing.chunks(slices):
            self._figures[:, _where(chunks)] = figures

    def _of(self, slices: int) -> Tensor:
        if slices == self.slicing.all:
            return self._figures
        return self._figures[:, _where(self.slicing.chunks(slices))]


def _where(chunks: Sequence[int]) -> slice | list[int]:
    """An index of them: the slices of one owner lie together, most of the time."""
    first, last = chunks[0], chunks[-1]
    return slice(first, last + 1) if last - first + 1 == len(chunks) else list(chunks)


_NOTHING = sums.slicing((), torch.device("cpu"))
NO_MEANS = Means(sums.Shard(_NOTHING, _NOTHING.all, ()), torch.device("cpu"), exact=True)
"""Of a round that evaluates."""

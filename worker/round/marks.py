"""What travels beside a holder's sums of a bucket: their marks, and what is told of the micro-batches in it.

One small float64 tensor, on the device of the sums: ``sums.NUM_MARKS`` marks, and behind them, for each use
of the bucket of which something is told, so many numbers for each micro-batch in the sums of that use, both
ascending: of the head the loss, of a block with a router what that decided (``ModelSpec.num_told``). Owns
this form; nothing here waits for the device. Which micro-batches they are the ledger that goes with it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from oobleckd.worker import sums
from oobleckd.worker.models.routers import NUM_LOSSES

Place = tuple[int, int]
"""A use, and a micro-batch."""


class ToldOfUse(NamedTuple):
    """What was told of a use in a step: ``losses`` of each micro-batch, and over all of them ``integers``,
    such as tokens.
    """

    losses: list[tuple[float, ...]]
    integers: tuple[int, ...]


def places(ledger: Mapping[int, Sequence[int]], widths: Mapping[int, int]) -> list[Place]:
    """Of whom numbers are told, in their order. ``ledger``: use -> micro-batches, ascending; ``widths``: use
    -> how many numbers each of those has.
    """
    return [(use, micro_batch) for use in sorted(ledger) if widths[use] for micro_batch in ledger[use]]


def made(parts: Sequence[sums.Sum], told: Sequence[float | Tensor], *, nan: bool, overflow: bool) -> Tensor:
    """Of the sums of all uses of a bucket; ``nan`` and ``overflow``: there was one in what was inherited.

    ``told``: in the order of ``places``, scalars or one-dimensional, float32 or float64 on a device.
    """
    marks = torch.stack([part.marks for part in parts]).amax(0)
    if nan or overflow:
        marks = marks.maximum(marks.new_tensor((nan, overflow, False)))
    if not told:
        return marks
    lying = [each if isinstance(each, Tensor) else torch.tensor(each, device=marks.device) for each in told]
    return torch.cat((marks, torch.cat([each.reshape(-1) for each in lying]).to(torch.float64)))


def joined(of_holders: Sequence[tuple[Tensor, Sequence[Place]]], widths: Mapping[int, int]) -> Tensor:
    """Of all holders' sums together, in the same form. With each come the places of what it tells."""
    if len(of_holders) == 1:
        return of_holders[0][0]
    marks = torch.stack([tensor[: sums.NUM_MARKS] for tensor, _ in of_holders]).amax(0)
    told: dict[Place, Tensor] = {}
    for tensor, where in of_holders:
        parts = torch.split(tensor[sums.NUM_MARKS :], [widths[use] for use, _ in where])
        told |= zip(where, parts, strict=True)
    return torch.cat((marks, *(told[place] for place in sorted(told))))


def added(told: Tensor, widths: Mapping[int, int], num_micro_batches: int) -> Tensor:
    """Of what is ``told`` of all micro-batches of a step what the host reads: of each use its losses, and
    behind them its integers, which are added up here.
    """
    # Exact below 2**53, in any order; the host would read as many numbers as micro-batches times experts.
    sizes = [num_micro_batches * width for _, width in sorted(widths.items())]
    found = [told[:0]]
    for of_use, (_, width) in zip(torch.split(told, sizes), sorted(widths.items()), strict=True):
        by_micro_batch = of_use.view(num_micro_batches, width)
        found += by_micro_batch[:, :NUM_LOSSES].reshape(-1), by_micro_batch[:, NUM_LOSSES:].sum(0)
    return torch.cat(found)


def read(numbers: Sequence[float], widths: Mapping[int, int], num_micro_batches: int) -> dict[int, ToldOfUse]:
    """What ``added`` means, by use, once it is numbers of the host."""
    rest, found = iter(numbers), {}
    for use, width in sorted(widths.items()):
        num_losses = min(width, NUM_LOSSES)
        losses = [tuple(islice(rest, num_losses)) for _ in range(num_micro_batches)]
        found[use] = ToldOfUse(losses, tuple(map(int, islice(rest, width - num_losses))))
    assert next(rest, None) is None, "figures are of other uses"
    return found

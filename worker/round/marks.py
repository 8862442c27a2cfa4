"""What travels beside a holder's sums of a bucket: their marks, and the losses of the micro-batches in them.

One small float64 tensor, on the device of the sums: ``sums.NUM_MARKS`` marks, and behind them, where a use
of the bucket is the head, a loss for each micro-batch in the sums of that use, ascending. Owns this form;
nothing here waits for the device. Which micro-batches they are the ledger that goes with it says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oobleckd.worker import sums


def made(parts: Sequence[sums.Sum], losses: Sequence[float | Tensor], *, nan: bool, overflow: bool) -> Tensor:
    """Of the sums of all uses of a bucket; ``nan`` and ``overflow``: there was one in what was inherited.

    ``losses``: scalars, float32 where they lie on a device.
    """
    marks = torch.stack([part.marks for part in parts]).amax(0)
    if nan or overflow:
        marks = marks.maximum(marks.new_tensor((nan, overflow, False)))
    if not losses:
        return marks
    lying = [loss if isinstance(loss, Tensor) else torch.tensor(loss, device=marks.device) for loss in losses]
    return torch.cat((marks, torch.stack(lying).to(torch.float64)))


def joined(of_holders: Sequence[tuple[Tensor, Sequence[int]]]) -> Tensor:
    """Of all holders' sums together, in the same form. With each come the micro-batches that its losses are
    of.
    """
    if len(of_holders) == 1:
        return of_holders[0][0]
    marks = torch.stack([tensor[: sums.NUM_MARKS] for tensor, _ in of_holders]).amax(0)
    losses: dict[int, Tensor] = {}
    for tensor, micro_batches in of_holders:
        losses |= zip(micro_batches, tensor[sums.NUM_MARKS :].unbind(), strict=True)
    in_order = [losses[micro_batch] for micro_batch in sorted(losses)]
    return torch.cat((marks, torch.stack(in_order))) if in_order else marks

"""What follows from a total, with its figures read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oobleckd.worker import sums


def finished(
    total: Sequence[Tensor],
    exponents: Sequence[int],
    weight: float,
    *,
    exact: bool = True,
    num_contributions: int = 1,
    marks: Sequence[float] = (0.0, 0.0, 0.0),
) -> tuple[list[Tensor], sums.BucketFigures]:
    """Mean gradients, and figures of the host."""
    device = total[0].device if total else torch.device("cpu")
    slicing = sums.slicing([tuple(tensor.shape) for tensor in total], device)
    grads = [torch.empty(tensor.shape, device=device) for tensor in total]
    figures = sums.finish([total], exponents, weight, grads, slicing.chunk, exact=exact)
    assert figures.shape == (sums.num_rows(exact=exact), len(slicing.chunks(slicing.all)))
    assert figures.dtype == torch.float64
    values = figures.flatten().tolist()
    return grads, sums.decode(marks, values, slicing, exponents, num_contributions, exact=exact)

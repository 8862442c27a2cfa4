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
    shapes = [tuple(tensor.shape) for tensor in total]
    told = torch.tensor(marks, dtype=torch.float64, device=device)
    grads, figures = sums.finish([total], told, exponents, weight, exact=exact)
    assert figures.shape == (sums.num_figures(shapes, device, exact=exact),)
    assert figures.dtype == torch.float64
    return grads, sums.decode(figures.tolist(), shapes, device, exponents, num_contributions, exact=exact)

"""What a layer's forward pass leaves for its backward: a graph, or what a block's graph is made of again.

Owns the two, and that the second time has the bits of the first: the same function of the same input, and
whoever calls seeds it alike (``oobleckd.worker.models.seed_layer``). Does not own when that is (``passes``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from oobleckd.planner.plan import Layout, Recompute
from oobleckd.protocol.job import Job
from oobleckd.worker.models import Call, Layer, Owed
from oobleckd.worker.recompute.products import Products


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """A layer's input, None for the embedding; its output, whose graph it is; and what a decoupled backward
    leaves for W.
    """

    into: Tensor | None
    out: Tensor
    owed: Owed | None


@dataclass(slots=True)
class BlockInput:
    """What is held of a block that is computed again: what it was called with, ``weight`` being that of the
    micro-batch, and ``products`` where these are not to be made again. ``apart``: it was computed for a
    decoupled backward.
    """

    into: Tensor
    call: Call | None
    weight: float
    apart: bool
    products: Products | None

    def again(self, layer: Layer, seed: Callable[[], None]) -> LayerGraph:
        """The block computed again, as it was. Once only: products are given away."""
        seed()
        with torch.enable_grad(), self.products.given() if self.products is not None else nullcontext():
            return LayerGraph(self.into, *_ran(layer, self))


Held = LayerGraph | BlockInput


def computed(
    layer: Layer,
    into: Tensor,
    call: Call | None,
    weight: float,
    *,
    apart: bool = False,
    keeps_products: bool = False,
) -> tuple[Tensor, BlockInput]:
    """The output of a block that is seeded, without a graph, and what to compute it again from."""
    held = BlockInput(into, call, weight, apart, Products(layer.device) if keeps_products else None)
    # With a graph, which is dropped at once: torch may choose another kernel of attention where no gradient
    # is asked for, which would show when the block is computed again with one. (D-recompute-001)
    with torch.enable_grad(), held.products.kept() if held.products is not None else nullcontext():
        out = _ran(layer, held)[0].detach()
    return out, held


def _ran(layer: Layer, held: BlockInput) -> tuple[Tensor, Owed | None]:
    # Both times in the same way: with weights left out of the graph torch may choose another product.
    if held.apart:
        return layer.forward_apart(held.into, None, held.call, held.weight)
    return layer(held.into, None, held.call, held.weight), None


def recompute_of(job: Job, layout: Layout, device: str) -> Recompute:
    """What the blocks of ``device`` compute again: what the job says, or where it leaves that to the planner,
    the layout.
    """
    said = job.schedule.recompute
    return layout.recompute.get(device, "none") if said == "auto" else said

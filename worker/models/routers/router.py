"""The router of one block at work: catches what it decides in each forward pass, and puts its losses in.

Owns how the gradient of a router's losses comes into the backward pass. They are a function of the block's
input, weights and micro-batch alone, as all that a block computes: whoever computes the block, the first time
or again, for itself or for another device, has the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from oobleckd.worker.models.routers.find import RouterPlace
from oobleckd.worker.models.routers.losses import (
    NUM_LOSSES,
    Coefficients,
    load_balancing_loss,
    tokens_by_expert,
    z_loss,
)


class BlockRouter:
    """That of ``block``, a module on its device, at ``place``.

    ``told``: of the last forward pass, float64 (``NUM_LOSSES`` + experts,) on the device: its losses, before
    they are multiplied (0 where they are not asked for), and how many tokens each expert got.
    """

    def __init__(self, block: nn.Module, place: RouterPlace, coefficients: Coefficients) -> None:
        self.place, self.coefficients = place, coefficients
        self.told: Tensor | None = None
        self._caught: tuple[Tensor, Tensor] | None = None
        block.get_submodule(place.name).register_forward_hook(self._catch)

    def with_losses(self, out: Tensor, weight: float) -> Tensor:
        """``out``, what the block has just computed, in whose backward pass the losses have part, with
        ``weight``: how much the micro-batch counts. Its numbers are the same.
        """
        assert self._caught is not None, "the block was computed without its router"
        (logits, chosen), self._caught = self._caught, None
        counts = tokens_by_expert(chosen, self.place.num_experts)
        losses = self._losses(logits.float(), counts)
        of_losses = torch.stack([loss.detach() for loss in losses])
        self.told = torch.cat((of_losses.to(torch.float64), counts.to(torch.float64)))
        asked = [
            loss * coefficient
            for loss, coefficient in zip(losses, self.coefficients, strict=True)
            if coefficient
        ]
        if not asked or not out.requires_grad:
            return out
        # Put in at the block, as Megatron does, and not added to the loss: it is local, so no pipeline, no
        # repair and no cut knows of it. (D-routers-001)
        joined: Tensor = _WithLosses.apply(out, torch.stack(asked).sum(), weight)  # type: ignore[no-untyped-call]
        return joined

    def _catch(self, _module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, chosen = output
        self._caught = logits, chosen

    def _losses(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        none = logits.new_zeros(())
        return (
            load_balancing_loss(logits, counts, self.place.scores) if self.coefficients.aux else none,
            z_loss(logits) if self.coefficients.z else none,
        )


assert len(Coefficients._fields) == NUM_LOSSES


class _WithLosses(torch.autograd.Function):
    """The identity of ``out``, whose backward pass is that of ``loss`` besides, times ``weight``."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = torch.full_like(loss, weight)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return g, ctx.weight, None

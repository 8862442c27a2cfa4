"""The head in chunks of tokens: output projection and loss of so many at a time, so that the logits of a
whole micro-batch are never there.

Owns the loop over chunks, its order, and the gradients, which are made in the forward pass as in torch's
``linear_cross_entropy`` and Liger's kernel: the backward only scales them. What makes logits of hidden states
is the model's own code, soft caps and scales included. Everything is added in float32, chunk after chunk, and
chunks follow from the job and the micro-batch alone: the same bits on every device, and others than those of
the whole loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from oobleckd.worker.models.layer import gradients

_IGNORED = -100  # of labels that nobody asks for


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """What a model of transformers would return, of it what is looked at."""

    loss: Tensor


class ChunkedHead(nn.Module):
    """A head that is called as the whole one. ``tail``: what comes after the last block; ``projection``: the
    model with nothing in place of its body, which makes logits of what it is given. ``size``: tokens of a
    chunk; the last one has the rest.
    """

    def __init__(self, tail: nn.Module, projection: nn.Module, size: int) -> None:
        super().__init__()
        self.tail, self.projection, self.size = tail, projection, size

    def forward(self, *, inputs_embeds: Tensor, labels: Tensor) -> HeadOutput:
        """The mean loss over all tokens that are asked for, each by the one before it: a float32 scalar."""
        hidden: Tensor = self.tail(inputs_embeds=inputs_embeds).last_hidden_state
        targets = f.pad(labels[:, 1:], (0, 1), value=_IGNORED).reshape(-1)
        flat = hidden.reshape(-1, hidden.shape[-1])
        share = 1 / (targets != _IGNORED).sum()
        if not torch.is_grad_enabled():
            return HeadOutput(
                self._added([self._loss(*chunk, share) for chunk in self._chunks(flat, targets)])
            )
        params = list(self.projection.parameters())
        loss: Tensor = _Chunked.apply(self, flat, targets, share, *params)  # type: ignore[no-untyped-call]
        return HeadOutput(loss)

    def losses_and_gradients(
        self, flat: Tensor, targets: Tensor, share: Tensor, params: list[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The loss, and its gradients by ``flat`` (tokens, hidden) and by each of ``params``, in float32."""
        losses: list[Tensor] = []
        of_flat = torch.empty_like(flat)
        of_params = [torch.zeros(param.shape, device=param.device) for param in params]
        for number, (chunk, asked) in enumerate(self._chunks(flat, targets)):
            # What a chunk keeps is gone with it: it is no part of what the layer keeps for its backward.
            with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
                leaf = chunk.detach().requires_grad_()
                loss = self._loss(leaf, asked, share)
            first, *others = gradients(loss, [leaf, *params], None)
            begin = number * self.size
            of_flat[begin : begin + len(first)] = first
            for total, found in zip(of_params, others, strict=True):
                total.add_(found)
            losses.append(loss.detach())
        return self._added(losses), of_flat, of_params

    def _chunks(self, flat: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(torch.split(flat, self.size), torch.split(targets, self.size), strict=True))

    def _loss(self, chunk: Tensor, asked: Tensor, share: Tensor) -> Tensor:
        """The chunk's part of the mean: its sum, times what one token counts."""
        logits: Tensor = self.projection(inputs_embeds=chunk[None]).logits
        summed = f.cross_entropy(logits[0].float(), asked, ignore_index=_IGNORED, reduction="sum")
        return summed * share

    @staticmethod
    def _added(losses: list[Tensor]) -> Tensor:
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total


class _Chunked(torch.autograd.Function):
    """Gradients in the forward pass: by the time of the backward the logits are gone."""

    # Of torch's own function nothing remains where logits are scaled or capped. (D-models-012)

    @staticmethod
    def forward(
        ctx: Any, head: ChunkedHead, flat: Tensor, targets: Tensor, share: Tensor, *params: Tensor
    ) -> Tensor:
        loss, of_flat, of_params = head.losses_and_gradients(flat, targets, share, list(params))
        ctx.save_for_backward(of_flat, *of_params)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        # In place: as large as the projection once more would be the largest tensor of the device.
        of_flat, *of_params = (found.mul_(g) for found in ctx.saved_tensors)
        return None, of_flat, None, None, *of_params


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor

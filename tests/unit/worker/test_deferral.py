"""What a decoupled backward leaves to W: the bits of autograd, whatever a module does with its linear
modules.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oobleckd.worker.models.deferral import Deferral, Owed
from oobleckd.worker.models.layer import gradients, input_gradients


class Twisted(nn.Module):
    """One weight used three times, one whose output is changed in place, one whose output nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.in_place, self.in_vain = nn.Linear(8, 8), Conv1D(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.in_vain(x)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.in_place(x).relu_() * x


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def apart(module: nn.Module, x: Tensor) -> tuple[Tensor, Owed]:
    deferral = Deferral()
    deferral.attach(module, list(module.parameters()))
    deferral.owed = owed = Owed()
    out = module(x)
    deferral.owed = None
    return out, owed


@pytest.mark.parametrize("shape", [(2, 5, 8), (3, 8)])
def test_i_and_w_together_are_autograd(shape: tuple[int, ...]) -> None:
    module, g = Twisted(), some(*shape)
    used = [*module.again.parameters(), *module.in_place.parameters()]
    x = some(*shape).requires_grad_()
    expected = gradients(module(x), [*used, x], g)
    out, owed = apart(module, x)
    found = input_gradients(out, [*module.parameters(), x], g, owed)
    assert torch.equal(found.pop(), expected.pop())
    assert len(owed.products) == 4
    assert not owed.uses
    complete = owed.complete(used, found[: len(used)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(complete, expected, strict=True))


def test_between_i_and_w_no_graph_is_held() -> None:
    module, x = Twisted(), some(2, 5, 8).requires_grad_()
    out, owed = apart(module, x)
    input_gradients(out, [*module.parameters(), x], some(2, 5, 8), owed)
    assert not owed.edges
    assert not any(product.x.requires_grad or product.g.requires_grad for product in owed.products)


def test_an_update_in_place_is_seen() -> None:
    module, x = Conv1D(8, 8), some(2, 5, 8).requires_grad_()
    deferral = Deferral()
    deferral.attach(module, list(module.parameters()))
    with torch.no_grad():
        module.weight.mul_(2.0)
    deferral.owed = Owed()
    assert torch.equal(module(x), Conv1D.forward(module, x))


def test_without_a_gradient_to_ask_for_nothing_is_deferred() -> None:
    assert not apart(Conv1D(8, 8), some(2, 5, 8))[1].uses
    with torch.no_grad():
        assert not apart(Twisted(), some(2, 5, 8).requires_grad_())[1].uses


def test_a_gradient_of_another_shape_is_refused() -> None:
    x = some(2, 8).requires_grad_()
    with pytest.raises(RuntimeError):
        gradients(x * 2, [x], some(3, 8))


def test_an_input_without_part_in_the_output_is_refused() -> None:
    x, other = some(2, 8).requires_grad_(), some(8).requires_grad_()
    with pytest.raises(RuntimeError):
        gradients(x * 2, [x, other], some(2, 8))


def test_a_loss_needs_no_gradient_from_above() -> None:
    x = some(2, 8).requires_grad_()
    assert torch.equal(gradients(x.sum(), [x], None)[0], torch.ones(2, 8))
    assert gradients(x.sum(), [], None) == []

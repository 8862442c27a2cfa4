"""Weight gradients that a backward leaves for later: the I and W of a decoupled backward.

Owns how a linear module computes without asking autograd for its weight's gradient (Qi et al., Zero Bubble
Pipeline Parallelism, 2023, section 2): the weight goes in detached, and a hook on the output keeps what came in
and the gradient that came back. From those two the weight's gradient is one product, the one that autograd
would have made, so the bits are the same. Norms, biases, embeddings and fused experts stay in I. Does not own when W runs (``executor``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as f
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True, slots=True)
class _Product:
    """One use of a weight: its input ``x`` (…, in) and the gradient ``g`` (…, out) of its output, detached."""

    param: int
    x: Tensor
    g: Tensor
    transposed: bool

    def gradient(self) -> Tensor:
        """(out, in), or (in, out) where the module keeps its weight that way."""
        # Autocast made the product with x in the dtype of its output. Its own cast of x is out of reach, and to
        # make one beforehand would show: it casts a leaf once for all modules that take it in.
        x = self.x.to(self.g.dtype).reshape(-1, self.x.shape[-1])
        g = self.g.reshape(-1, self.g.shape[-1])
        return x.t().mm(g) if self.transposed else g.t().mm(x)


@dataclass(slots=True)
class Owed:
    """The weight gradients that one forward and I of a layer left to be computed."""

    products: list[_Product] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """What is held for them: inputs that several modules share count once."""
        held = {t.untyped_storage().data_ptr(): t.nbytes for p in self.products for t in (p.x, p.g)}
        return sum(held.values())

    def complete(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
        """W: the gradients of ``params``, of which I found ``grads``. Frees what was held."""
        found = list(grads)
        for number, whole in self._by_param().items():
            there, grad = found[number], whole.to(params[number].dtype)
            found[number] = grad if there is None else there + grad
        self.products.clear()
        complete = [grad for grad in found if grad is not None]
        assert len(complete) == len(found), "a parameter of the layer took no part in its output"
        return complete

    def _by_param(self) -> dict[int, Tensor]:
        # Several uses add up in the order in which autograd came by them, as it would have done.
        sums: dict[int, Tensor] = {}
        for product in self.products:
            grad = product.gradient()
            sums[product.param] = sums[product.param] + grad if product.param in sums else grad
        return sums


@dataclass(slots=True)
class Deferral:
    """The switch of one layer's linear modules; off, they compute as ever."""

    _owed: Owed | None = None

    @property
    def on(self) -> bool:
        """Whether a forward pass is under way that defers."""
        return self._owed is not None

    def attach(self, layer: nn.Module, params: Sequence[Tensor]) -> None:
        """Put the switch into every linear module of ``layer`` whose weight is one of ``params``, and no other module's."""
        numbers = {id(param): number for number, param in enumerate(params)}
        owners: dict[int, list[nn.Module]] = {}
        for module in layer.modules():
            for param in module.parameters(recurse=False):
                owners.setdefault(id(param), []).append(module)
        for key, modules in owners.items():
            if key in numbers and all(_is_weight_of(module, key) for module in modules):
                for module in modules:
                    module.forward = partial(self._forward, module, numbers[key])

    @contextmanager
    def deferring(self) -> Iterator[Owed]:
        """Within, a forward pass leaves its weight gradients to what this gives."""
        self._owed = Owed()
        try:
            yield self._owed
        finally:
            self._owed = None

    def _forward(self, module: nn.Module, number: int, x: Tensor) -> Tensor:
        owed, transposed = self._owed, isinstance(module, Conv1D)
        if owed is None or not (x.requires_grad and torch.is_grad_enabled()):
            as_ever: Tensor = type(module).forward(module, x)
            return as_ever
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        if transposed:
            assert bias is not None
            y = torch.addmm(bias, x.view(-1, x.size(-1)), weight.detach()).view(
                (*x.shape[:-1], weight.shape[-1])
            )
        else:
            y = f.linear(x, weight.detach(), bias)
        kept = x.detach()  # not x: the graph that it hangs on would live until W

        def keep(g: Tensor) -> None:
            owed.products.append(_Product(number, kept, g.detach(), transposed))

        y.register_hook(keep)  # type: ignore[no-untyped-call]
        return y


def _is_weight_of(module: nn.Module, key: int) -> bool:
    return type(module) in {nn.Linear, Conv1D} and id(module.weight) == key

"""Weight gradients that a backward leaves for later: the I and W of a decoupled backward.

Owns how a linear module computes without asking autograd for its weight's gradient (Qi et al., Zero Bubble
Pipeline Parallelism, 2023, section 2): the weight goes in detached, what came in is kept, and I asks for the
gradient of what came out besides those of its inputs. From those two the weight's gradient is one product,
the one that autograd would have made, so the bits are the same. Norms, biases, embeddings and fused experts
stay in I. Does not own when W runs (``executor``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as f
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True, slots=True)
class _Product:
    """One use of a weight: its input ``x`` (…, in) and the gradient ``g`` (…, out) of its output,
    detached.
    """

    param: int
    x: Tensor
    g: Tensor
    transposed: bool

    def gradient(self) -> Tensor:
        """(out, in), or (in, out) where the module keeps its weight that way."""
        # Autocast made the product with x in the dtype of its output. Its own cast of x is out of reach, and
        # to
        # make one beforehand would show: it casts a leaf once for all modules that take it in.
        x, g = _flat(_in_dtype(self.x, self.g.dtype)), _flat(self.g)
        return x.t().mm(g) if self.transposed else g.t().mm(x)


@dataclass(slots=True)
class Owed:
    """The weight gradients that one forward and I of a layer left to be computed.

    ``uses``: of weights by the forward, in its order: (parameter, input, output, whether the module is
    transposed).
    """

    uses: list[tuple[int, Tensor, GradientEdge, bool]] = field(default_factory=list)
    products: list[_Product] = field(default_factory=list)

    @property
    def edges(self) -> list[GradientEdge]:
        """Of what the gradients are that I must find for W."""
        return [edge for _, _, edge, _ in self.uses]

    def keep(self, grads: Sequence[Tensor | None]) -> None:
        """I found ``grads`` of ``edges``; None where the output depends on none of them."""
        # Autograd comes by the uses from the last to the first, and adds up in that order.
        for (param, x, _, transposed), g in zip(reversed(self.uses), reversed(grads), strict=True):
            if g is not None:
                self.products.append(_Product(param, x, g, transposed))
        self.uses.clear()

    @property
    def num_bytes(self) -> int:
        """What is held for them: inputs that several modules share count once."""
        held = {t.untyped_storage().data_ptr(): t.nbytes for p in self.products for t in (p.x, p.g)}
        return sum(held.values())

    def complete(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
        """W: the gradients of ``params``, of which I found ``grads``. Frees what was held."""
        found = list(grads)
        for number, whole in self._by_param().items():
            there, grad = found[number], _in_dtype(whole, params[number].dtype)
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
    """The switch of one layer's linear modules; off (``owed`` is None), they compute as ever."""

    owed: Owed | None = None

    @property
    def on(self) -> bool:
        """Whether a forward pass is under way that defers."""
        return self.owed is not None

    def attach(self, layer: nn.Module, params: Sequence[Tensor]) -> None:
        """Put the switch into every linear module of ``layer`` whose weight is one of ``params``, and no
        other module's.
        """
        numbers = {id(param): number for number, param in enumerate(params)}
        owners: dict[int, list[nn.Module]] = {}
        for module in layer.modules():
            for param in module.parameters(recurse=False):
                owners.setdefault(id(param), []).append(module)
        for key, modules in owners.items():
            if key in numbers and all(_is_weight_of(module, key) for module in modules):
                for module in modules:
                    module.forward = _Linear(self, module, numbers[key])


class _Linear:
    """The forward of a linear module. What it takes from the module stays the same: an update is made in
    place.
    """

    __slots__ = ("_bias", "_deferral", "_module", "_number", "_transposed", "_weight")

    def __init__(self, deferral: Deferral, module: nn.Module, number: int) -> None:
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        self._deferral, self._module, self._number = deferral, module, number
        self._weight, self._bias, self._transposed = weight.detach(), bias, isinstance(module, Conv1D)

    def __call__(self, x: Tensor) -> Tensor:
        owed, weight, bias = self._deferral.owed, self._weight, self._bias
        if owed is None or not (x.requires_grad and torch.is_grad_enabled()):
            as_ever: Tensor = type(self._module).forward(self._module, x)
            return as_ever
        if self._transposed:
            assert bias is not None
            flat = x.view(-1, x.shape[-1])
            y = torch.addmm(bias, flat, weight)
            self._note(owed, flat, y)
            return y.view((*x.shape[:-1], weight.shape[-1]))
        y = f.linear(x, weight, bias)
        self._note(owed, x, y)
        return y

    def _note(self, owed: Owed, x: Tensor, y: Tensor) -> None:
        # Not x: the graph that it hangs on would live until W.
        assert y.grad_fn is not None
        # A product of what was kept, and not a second call of autograd: two calls take half as long again,
        # torch's own split of a graph a tenth more. (D-schedules-003, D-schedules-015)
        owed.uses.append((self._number, x.detach(), GradientEdge(y.grad_fn, y.output_nr), self._transposed))


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _is_weight_of(module: nn.Module, key: int) -> bool:
    return type(module) in {nn.Linear, Conv1D} and id(module.weight) == key

"""Which parameters of a layer are nothing but the weights and biases of linear products.

Autocast rounds exactly these to bfloat16, each time that they are used; so whoever computes with a rounded
copy in their place has the same bits, and rounds once. Found by looking: the layer is called with parameters
that take no memory, without computing the products, and everything that is done with a parameter is noted.
One of which so much as an attribute is read elsewhere, such as its dtype, is not among them. Does not own the
copies (``oobleckd.worker.state.bucket_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oobleckd.worker.models.experts.grouped import GROUPED_MM, shape_of_experts


@dataclass(frozen=True, slots=True)
class _Product:
    """A function that takes a weight and a bias in ``places``, numbers and names of its arguments.
    ``shape``: of what comes out, given all arguments.
    """

    places: frozenset[int | str]
    shape: Callable[..., tuple[int, ...]]


def _of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[int, ...]:  # noqa: A002, ARG001
    return (*input.shape[:-1], weight.shape[0])


def _of_addmm(input: Tensor, mat1: Tensor, mat2: Tensor) -> tuple[int, ...]:  # noqa: A002, ARG001
    return mat1.shape[0], mat2.shape[1]


# ``nn.Linear`` calls the first, transformers' ``Conv1D`` the second.
_PRODUCTS: dict[Callable[..., Any], _Product] = {
    f.linear: _Product(frozenset({1, 2, "weight", "bias"}), _of_linear),
    torch.addmm: _Product(frozenset({0, 2, "input", "mat2"}), _of_addmm),
}


def product_parameters(layer: nn.Module, call: Callable[[], object]) -> frozenset[str]:
    """Names of the parameters of ``layer``, which is on the CPU, that ``call`` of it uses as weights and
    biases of linear products under autocast, and for nothing else, in training and in an evaluation. None
    where it fails, as it will when it is to compute.
    """
    # Seen, and not known by name or class: what a module of transformers does with its parameters besides
    # changes from version to version. On the CPU, and not on the meta device, for which torch imports its
    # compiler and sympy: 0.6 to 1 s of every process. (D-models-010)
    look = _Look(layer)
    try:
        with torch.no_grad(), torch.random.fork_rng([]), torch.autocast("cpu", torch.bfloat16), look:
            for training in (False, True):
                layer.train(training)
                call()
    except RuntimeError:
        return frozenset()
    return look.found


class _Look(TorchFunctionMode):
    """Notes what is done with the parameters of ``layer``, whichever module or function does it. Products
    are zeros.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._names = {id(param): name for name, param in layer.named_parameters()}
        self._multiplied: set[str] = set()
        self._otherwise: set[str] = set()

    @property
    def found(self) -> frozenset[str]:
        """Names of those that only products took in."""
        return frozenset(self._multiplied - self._otherwise)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ``func``, which may be the read of an attribute."""
        kwargs = kwargs or {}
        rounds = torch.is_autocast_enabled("cpu")  # a model may switch it off for a part of it
        product = _PRODUCTS.get(func) if rounds else None
        for place, value in (*enumerate(args), *kwargs.items()):
            taken = product is not None and place in product.places
            noted = self._multiplied if taken else self._otherwise
            noted.update(self._names[id(tensor)] for tensor in _tensors(value) if id(tensor) in self._names)
        if product is not None:
            return torch.zeros(product.shape(*args, **kwargs), dtype=torch.bfloat16)
        if func is GROUPED_MM:  # which refuses tensors that take no memory
            return shape_of_experts(args[0], args[1]).zero_()
        return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case tuple() | list():
            for each in value:
                yield from _tensors(each)
        case dict():
            yield from _tensors(tuple(value.values()))

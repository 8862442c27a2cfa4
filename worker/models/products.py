"""Which parameters of a layer are nothing but the weights and biases of linear products.

Autocast rounds exactly these to bfloat16, each time that they are used; so whoever computes with a rounded
copy in their place has the same bits, and rounds once. Found by looking: the layer is called on the meta
device, which computes shapes alone, and everything that is done with a parameter is noted. One of which so
much as an attribute is read elsewhere, such as its dtype, is not among them. Does not own the copies
(``oobleckd.worker.state.bucket_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# What takes a weight and a bias, and where; `nn.Linear` calls the first, transformers' `Conv1D` the second.
_PLACES: dict[Callable[..., Any], frozenset[int | str]] = {
    f.linear: frozenset({1, 2, "weight", "bias"}),
    torch.addmm: frozenset({0, 2, "input", "mat2"}),
}


def product_parameters(layer: nn.Module, call: Callable[[], object]) -> frozenset[str]:
    """Names of the parameters of ``layer``, which is on the meta device, that ``call`` of it uses as weights
    and biases of linear products, and for nothing else, in training and in an evaluation. None where it
    fails: numbers are asked for, which the meta device has not, or the layer cannot compute at all.
    """
    # Seen, and not known by name or class: what a module of transformers does with its parameters besides
    # changes from version to version. (D-models-009)
    look = _Look(layer)
    try:
        with torch.no_grad(), look:
            for training in (False, True):
                layer.train(training)
                call()
    except RuntimeError:  # of which NotImplementedError is one
        return frozenset()
    return look.found


class _Look(TorchFunctionMode):
    """Notes what is done with the parameters of ``layer``, whichever module or function does it."""

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
        places = _PLACES.get(func, frozenset())
        for place, value in (*enumerate(args), *kwargs.items()):
            noted = self._multiplied if place in places else self._otherwise
            noted.update(self._names[id(tensor)] for tensor in _tensors(value) if id(tensor) in self._names)
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

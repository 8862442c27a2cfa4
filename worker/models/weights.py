"""Fresh weights: a pure function of seed and name.

They follow the family's own ``_init_weights``, children first, with
the generator seeded anew by the name of every module: the same for any split and on any device (values are
drawn on the CPU). Weights out of a folder are in ``folder``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oobleckd.worker.models.layer import hash63


def fresh(model: PreTrainedModel, root_name: str, names: tuple[str, ...], seed: int) -> dict[str, Tensor]:
    """Values of the parameters ``names``, all inside module ``root_name`` of ``model`` (on meta)."""
    root = model.get_submodule(root_name)
    # Not to_empty: on meta tensors that imports sympy, for half a second.
    tensors = itertools.chain(root.parameters(), root.buffers())
    room: dict[int, Any] = {id(t): _like(t) for t in tensors}
    clone = copy.deepcopy(root, {id(model.config): model.config, **room})
    with torch.random.fork_rng(devices=[]):
        for name, module in _children_first(clone, root_name):
            torch.default_generator.manual_seed(hash63(f"weights:{seed}:{name}"))
            model._init_weights(module)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return {name: clone.get_parameter(name.removeprefix(f"{root_name}.")).detach() for name in names}


def _like(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}")
    yield name, module

"""The results of a block's matrix products and attention, kept so that the rest alone is computed again.

Owns which operations are expensive enough to be kept, and how a second forward pass is given their results in
the order in which the first made them. Below autograd: the second pass has the graph of any other, whatever
else is done with it, a decoupled backward too.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oobleckd.worker.models.layer import generator

_NAMES = (
    "mm", "addmm", "_addmm_activation", "_grouped_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward", "_efficient_attention_forward",
)  # fmt: skip
# Not `bmm`: attention that is no kernel of its own makes its scores by it, which are (sequence, sequence) for
# every head, and what is held would be more than without. (D-recompute-002)
KEPT = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name))


@dataclass(slots=True)
class _Result:
    """What operation ``of`` returned; None: it was written to since, and has to be made again. ``state``: of
    the generator behind it, where it may have drawn.
    """

    of: Any
    value: Any
    state: Tensor | None


class Products:
    """Of one forward pass of one block on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._generator = generator(device)
        self._results: deque[_Result] = deque()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within, the results of what the block computes are kept."""
        with _Keeping(self._generator) as keeping:
            yield
        for result in keeping.results:
            # Autograd has put them into its graph by now, which is not to be held.
            result.value = _detached(result.value)
        self._results = keeping.results

    def given(self) -> AbstractContextManager[object]:
        """Within, they are given away, each once."""
        return _Giving(self._generator, self._results)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [tensor for result in self._results for tensor in _tensors(result.value)]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch loads its compiler, to leave out what nobody compiles: a second of a device's first pass.
        # (D-recompute-006)
        return False


class _Keeping(_Mode):  # type: ignore[no-untyped-call]
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator
        self._by_storage: dict[int, _Result] = {}
        self.results: deque[_Result] = deque()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ``func``."""
        kwargs = kwargs or {}
        for place in _written(func):
            self._is_written(args[place] if isinstance(place, int) else kwargs.get(place))
        value = func(*args, **kwargs)
        if func in KEPT:
            # Who is given the result later draws nothing, and what is drawn behind it must not show that.
            draws = torch.Tag.nondeterministic_seeded in func.tags
            result = _Result(func, value, self._generator.get_state() if draws else None)
            self.results.append(result)
            self._by_storage |= {_storage(tensor): result for tensor in _tensors(value)}
        return value

    def _is_written(self, value: Any) -> None:
        # By its memory: a linear module adds its bias in place to another view of the product, which has a
        # count of versions of its own.
        for tensor in _tensors(value):
            if (result := self._by_storage.pop(_storage(tensor), None)) is not None:
                result.value = result.state = None


class _Giving(_Mode):  # type: ignore[no-untyped-call]
    def __init__(self, generator: torch.Generator, results: deque[_Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator, self._results = generator, results

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ``func``, which computes nothing that is here."""
        if func not in KEPT:
            return func(*args, **(kwargs or {}))
        result = self._results.popleft()
        assert result.of is func, f"{func} where {result.of} was the first time"
        if result.value is None:
            return func(*args, **(kwargs or {}))
        if result.state is not None:
            self._generator.set_state(result.state)
        return result.value


@functools.cache
def _written(func: Any) -> tuple[int | str, ...]:
    """The arguments that ``func`` writes to: their places, or names of those that have none."""
    schema = func._schema  # noqa: SLF001 - there is no other way to ask
    if not schema.is_mutable:
        return ()
    arguments = enumerate(schema.arguments)
    written = ((n, each) for n, each in arguments if each.alias_info and each.alias_info.is_write)
    return tuple(each.name if each.kwarg_only else n for n, each in written)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [each for each in values if isinstance(each, Tensor)]


def _detached(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(each.detach() if isinstance(each, Tensor) else each for each in value)
    return None if value is None else value.detach()

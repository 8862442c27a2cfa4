"""The results of a block's matrix products and attention, kept so that the rest alone is computed again.

Owns which operations are expensive enough to be kept, and how a second forward pass is given their results in
the order in which the first made them. Below autograd: the second pass has the graph of any other, whatever
else is done with it, a decoupled backward too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
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
        made: list[tuple[_Result, list[int]]] = []
        with _StandIn(partial(self._keep, made)):
            yield
        for result, versions in made:
            # Autograd has put them into its graph by now, which is not to be held.
            if _versions(result.value) == versions:
                self._results.append(_Result(result.of, _detached(result.value), result.state))
            else:
                self._results.append(_Result(result.of, None, None))

    def given(self) -> AbstractContextManager[object]:
        """Within, they are given away, each once."""
        return _StandIn(self._give)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [tensor for result in self._results for tensor in _tensors(result.value)]

    def _keep(self, made: list[tuple[_Result, list[int]]], func: Any, compute: Callable[[], Any]) -> Any:
        value = compute()
        # Who is given the result later draws nothing, and what is drawn behind it must not show that.
        draws = torch.Tag.nondeterministic_seeded in func.tags
        state = self._generator.get_state() if draws else None
        made.append((_Result(func, value, state), _versions(value)))
        return value

    def _give(self, func: Any, compute: Callable[[], Any]) -> Any:
        result = self._results.popleft()
        assert result.of is func, f"{func} where {result.of} was the first time"
        if result.value is None:
            return compute()
        if result.state is not None:
            self._generator.set_state(result.state)
        return result.value


class _StandIn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, ``act`` stands in for what is ``KEPT``: of the operation, and what computes it."""

    def __init__(self, act: Callable[[Any, Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._act = act

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ``func``."""
        compute = partial(func, *args, **(kwargs or {}))
        return self._act(func, compute) if func in KEPT else compute()


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [each for each in values if isinstance(each, Tensor)]


def _versions(value: Any) -> list[int]:
    """How often each tensor in it was written to."""
    return [tensor._version for tensor in _tensors(value)]  # noqa: SLF001 - as autograd, which has no other


def _detached(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(each.detach() if isinstance(each, Tensor) else each for each in value)
    return value.detach()

"""The interface of a gradient sum: of one use of one bucket, on a CPU (``chunked``) or a GPU (``whole``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

NUM_MARKS = 3
"""Numbers of ``Sum.marks``."""


class Sum(ABC):
    """By key, in the shapes of the bucket's parameters: float64 integers (exact) or float32, on one device.

    ``guarded`` ones find what changes in their memory besides additions.
    """

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The sums by key; zeros where nothing was added. Looks whether the memory of guarded ones has
        changed: on a CPU raises SumsChanged, on a GPU says so in ``marks``.
        """

    @property
    @abstractmethod
    def flags(self) -> tuple[bool, bool]:
        """Whether NaN or infinity was seen in a term since ``zero_``, and overflow. Where there is NaN,
        overflow need not be seen besides.

        Overflow: ``|g * 2**exponent| >= 2**51 / num_contributions``, where ``num_contributions`` is how many
        there will be in the whole sum over all devices (8, if there will be fewer). The test looks at each
        contribution alone, so it does not depend on the grouping. With such a flag the numbers mean nothing:
        the round is never applied. Float32 is not looked at: what is not finite stays so in the sum, where
        its norm shows it.
        """

    @property
    @abstractmethod
    def marks(self) -> Tensor:
        """Float64 (``NUM_MARKS``,) on the sums' device, 1 or 0, since ``zero_``: NaN and overflow as of
        ``flags``, and whether a look at the memory (``tensors``) has found it changed. Waits for nothing.
        """

    @abstractmethod
    def add(self, grads: Sequence[Tensor], exponents: Sequence[int], num_contributions: int) -> None:
        """Add one micro-batch's gradients: a tensor for each key, float32 or bfloat16 (which is as exact), in
        the sum's shapes and on its device.

        ``exponents``: one for each key; exact sums add ``g * 2**exponent``, rounded. ``num_contributions``:
        how many there will be in the whole sum over all devices, from which the overflow test follows.
        """

    def merge(self, others: Sequence[Tensor]) -> None:
        """Add sums of other contributions, by key and in this sum's form. Looks at the memory as
        ``tensors`` does.
        """
        for into, tensor in zip(self.tensors, others, strict=True):
            into.add_(tensor.to(into.device))
        self._accept()

    @abstractmethod
    def copy(self) -> list[Tensor]:
        """The sums by key, out of place, in the memory of the host. Changes and checks nothing."""

    @abstractmethod
    def zero_(self) -> None:
        """Forget all contributions. Costs nothing: the first one overwrites."""

    @abstractmethod
    def memory(self) -> Tensor | None:
        """A tensor of the memory in which something has been added up, as it is; None where nothing was.

        For faults on demand, which flip a bit of it.
        """

    @abstractmethod
    def _accept(self) -> None:
        """The memory is right as it is now."""

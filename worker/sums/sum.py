"""What the engine knows of the sum of one use of one bucket, wherever it is gathered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class Sum(ABC):
    """By key: float64 integers (exact) or float32. ``guarded`` ones find what changes in their memory besides additions."""

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The sums by key; zeros where nothing was added. Raises SumsChanged."""

    @property
    @abstractmethod
    def flags(self) -> tuple[bool, bool]:
        """Whether NaN or infinity was seen in a term since ``zero_``, and overflow. Where there is NaN, overflow need not be seen besides.

        Overflow: ``|g * 2**exponent| >= 2**51 / num_contributions``, where ``num_contributions`` is how many
        there will be in the whole sum over all devices (8, if there will be fewer). The test looks at each
        contribution alone, so it does not depend on the grouping. With such a flag the numbers mean nothing: the round is never
        applied. Float32 is not looked at: what is not finite stays so in the sum, where its norm shows it.
        """

    @abstractmethod
    def add(self, grads: Sequence[Tensor], exponents: Sequence[int], num_contributions: int) -> None:
        """Add one micro-batch's gradients."""

    def merge(self, others: Sequence[Tensor]) -> None:
        """Add sums of other contributions, by key. Raises SumsChanged."""
        for into, tensor in zip(self.tensors, others, strict=True):
            into.add_(tensor.to(into.device))
        self._accept()

    @abstractmethod
    def copy(self) -> list[Tensor]:
        """The sums by key, out of place and in the memory of the host."""

    @abstractmethod
    def zero_(self) -> None:
        """Forget all contributions. Costs nothing: the first one overwrites."""

    @abstractmethod
    def memory(self) -> Tensor | None:
        """Some of the memory in which something has been added up, as it is; None where nothing was."""

    @abstractmethod
    def _accept(self) -> None:
        """The memory is right as it is now."""

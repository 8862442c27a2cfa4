"""Guards memory that is added to many times: a bit that changes between two additions is found.

Owns a checksum of each region, kept by its differences: what an addition makes of the bits is added to it, so
that nothing has to be read but what the addition reads and writes anyway. The bits are summed as integers
modulo 2**64, and one flipped bit always shows. What an addition itself computes wrong does not
(docs/corruption.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class SumsChanged(RuntimeError):
    """Gradient sums are not what was added up: memory of this device has changed."""

    def __init__(self, what: str = "gradient sums have changed in its memory between two additions") -> None:
        super().__init__(what)


class MeansChanged(SumsChanged):
    """Mean gradients that were given to others are not what was made: memory of this device has changed."""

    def __init__(self) -> None:
        super().__init__("mean gradients have changed in its memory after it had made them")


class Guard:
    """Checksums of ``num_regions`` regions, each a flat tensor of float64 or float32 on ``device``."""

    def __init__(self, num_regions: int, device: torch.device) -> None:
        self._nothing = torch.zeros((), dtype=torch.int64, device=device)
        self._sums = [self._nothing] * num_regions

    def clear(self, number: int) -> None:
        """Region ``number`` is about to be overwritten: its checksum is that of nothing."""
        self._sums[number] = self._nothing

    def reads(self, number: int, part: Tensor) -> None:
        """``part``, a flat piece of the region, is about to be changed: its bits leave the checksum."""
        # All holders get the same wrong sum, so no comparison of replicas would find it. What the addition
        # reads is in the cache anyway. (D-corruption-003)
        self._sums[number] = self._sums[number] - bits_of(part)

    def wrote(self, number: int, part: Tensor) -> None:
        """``part`` of the region has been written: its bits go into the checksum."""
        self._sums[number] = self._sums[number] + bits_of(part)

    def changed(self, regions: Mapping[int, Tensor]) -> Tensor:
        """Whether one of ``regions`` (number -> flat tensor, at least one) was changed between two additions,
        by their checksums: a bool on the device, which nobody has waited for.
        """
        differences = [self._sums[number] - bits_of(region) for number, region in regions.items()]
        return torch.stack(differences).any()


def bits_of(flat: Tensor) -> Tensor:
    """The sum of the bits of a flat tensor of float64 or float32, modulo 2**64: int64 (), on its device."""
    return flat.view(torch.int64 if flat.dtype == torch.float64 else torch.int32).sum(dtype=torch.int64)

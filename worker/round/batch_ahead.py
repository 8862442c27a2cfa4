"""A micro-batch that is drawn before it is asked for, and on its way to a GPU meanwhile.

Owns one drawn micro-batch. On a CPU nothing is drawn ahead: whoever draws is who computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from oobleckd.worker.models.layer import Batch
from oobleckd.worker.runtime.errors import UserError

Draw = Callable[[], Batch]


class BatchAhead:
    """For ``device``. A micro-batch is named by a key, under which it is always drawn alike."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._key: Hashable = None
        self._batch: Batch | None = None

    def take(self, key: Hashable, draw: Draw) -> Batch:
        """The micro-batch ``key`` on the device: the one that was drawn ahead, or what ``draw`` returns."""
        if self._batch is not None and self._key == key:
            batch, self._batch = self._batch, None
            return batch
        return draw().to(self.device)

    def draw(self, key: Hashable, draw: Draw) -> None:
        """Draw ``key`` ahead, where that is of use. What is wrong with it is said to who asks for it."""
        if self.device.type == "cpu" or (self._batch is not None and self._key == key):
            return
        try:
            self._key, self._batch = key, draw().to(self.device)
        except UserError:
            self._batch = None

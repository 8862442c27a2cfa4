"""Cards that this machine does not have: what ``torch.cuda`` would tell of them, as far as
``oobleckd.worker.device.traits`` asks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CUDA = torch.device("cuda", 0)


@dataclass
class Card:
    """A whole H100, unless it is said to be another one, or a slice of one."""

    name: str = "NVIDIA H100 80GB HBM3"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132

    def get_device_properties(self, _device: torch.device, /) -> Card:
        """As ``torch.cuda``'s."""
        return self
